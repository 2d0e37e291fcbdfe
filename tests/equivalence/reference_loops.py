"""Training loops in plain torch and PyG: what hopline's methods are compared with.

Nothing here imports hopline. In every step a loop computes the outputs of all nodes over the whole graph, takes those
of the step's seeds, and does what any PyG script does with them. What hopline computes in parts must come to the same.

    data      torch_geometric.data.Data: x, y, edge_index, and edge_weight or edge_attr where there is one
    batches   the seeds of each batch, in the order in which hopline had them
    loss      (model, outputs of the seeds, labels of the seeds) -> scalar; may read the model's parameters
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

Data: TypeAlias = Any
"""A torch_geometric.data.Data, whose attributes are typed as optional."""
Loss: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
AfterStep: TypeAlias = Callable[[int, nn.Module, Optimizer], None]
"""(steps so far, model, optimizer): what a callback changes after a step."""


class Layers(nn.Module):
    """PyG convs with ReLU between them; parameters are named as those of `hl.nn.GNN`."""

    def __init__(self, convs: Iterable[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor, **edge: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, **edge).relu()
        return self.convs[-1](x, edge_index, **edge)


def edge_arguments(data: Data) -> dict[str, Tensor]:
    """The edge arrays that a conv is called with."""
    return {name: data[name] for name in ("edge_weight", "edge_attr") if name in data}


def whole_graph(model: nn.Module, data: Data, batch: Tensor) -> Tensor:
    """The outputs of all nodes, whichever are in the batch."""
    return model(data.x, data.edge_index, **edge_arguments(data))


@dataclass
class Trained:
    """The record of a loop: losses, learning rates, scores and the best weights."""

    losses: list[float] = field(default_factory=list)
    """Of each step, before its update."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each epoch, at its end."""
    scores: list[float] = field(default_factory=list)
    """Of each epoch: higher is better."""
    best_epoch: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    data: Data,
    epochs: Sequence[Sequence[Tensor]],
    *,
    optimizer: Optimizer,
    loss: Loss,
    accumulate: int = 1,
    clip_norm: float | None = None,
    schedule: LRScheduler | None = None,
    validate: Callable[[nn.Module], float] | None = None,
    patience: float = math.inf,
    after_step: AfterStep | None = None,
    outputs: Callable[[nn.Module, Data, Tensor], Tensor] = whole_graph,
    commit: Callable[[], None] | None = None,
    penalty: Callable[[nn.Module, Tensor], Tensor] | None = None,
    examples: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Trained:
    """Train; a step is `accumulate` batches of an epoch, of which the last may be fewer and smaller.

    epochs: by epoch and batch, the ids of nodes; those of them in `data.train_mask` are its seeds.
    schedule: of the rate, by epochs; a plateau is one of the scores.
    validate: the score of an epoch; without, the score is minus the epoch's mean loss.
    patience: epochs without a better score before training stops.
    outputs, commit: how the outputs of all nodes come about, and what is written after a step (`History`).
    examples: batch -> (nodes, labels) of its terms of the loss, in place of its training nodes with their labels.
    penalty: (model, batch) -> what is added to the loss that is differentiated, and not to the one that is reported.
    """

    def training_nodes(batch: Tensor) -> tuple[Tensor, Tensor]:
        seeds = batch[data.train_mask[batch]]
        return seeds, data.y[seeds]

    examples_of = examples or training_nodes
    model.train()
    trained = Trained()
    for epoch, batches in enumerate(epochs, start=1):
        epoch_loss = 0.0
        epoch_seeds = 0
        for first in range(0, len(batches), accumulate):
            step = [(batch, *examples_of(batch)) for batch in batches[first : first + accumulate]]
            num_seeds = sum(seeds.numel() for _, seeds, _ in step)
            step_loss = 0.0
            model.zero_grad()
            for batch, seeds, labels in step:
                out = outputs(model, data, batch)[seeds]
                if not seeds.numel():
                    continue
                share = loss(model, out, labels) * seeds.numel() / num_seeds
                extra = 0.0 if penalty is None else penalty(model, batch) * seeds.numel() / num_seeds
                (share + extra).backward()
                step_loss += share.item()
            if clip_norm is not None:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(parameters, clip_norm)
            optimizer.step()
            if commit is not None:
                commit()
            trained.losses.append(step_loss)
            epoch_loss = epoch_loss + step_loss * num_seeds
            epoch_seeds = epoch_seeds + num_seeds
            if after_step is not None:
                after_step(len(trained.losses), model, optimizer)
        trained.rates.append(optimizer.param_groups[0]["lr"])
        score = -epoch_loss / epoch_seeds if validate is None else validate(model)
        if score > max(trained.scores, default=-math.inf):
            trained.best_epoch = epoch
            trained.best_weights = copy.deepcopy(model.state_dict())
        trained.scores.append(score)
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(score)
        elif schedule is not None:
            schedule.step()
        if epoch - trained.best_epoch >= patience:
            break
    return trained


class History:
    """Historical embeddings (GNNAutoScale), as `outputs` and `commit` of `train`.

    After every hidden layer, rows of nodes outside the batch are replaced by those that were stored when they were in
    one; these are constants. At first the exact rows are stored.
    """

    def __init__(self, model: nn.Module, data: Data) -> None:
        self.stored: list[Tensor] = []
        self.written: list[tuple[int, Tensor, Tensor]] = []
        with torch.no_grad():
            rows: Tensor = data.x
            for conv in self._convs(model)[:-1]:
                rows = conv(rows, data.edge_index, **edge_arguments(data)).relu()
                self.stored.append(rows)

    @staticmethod
    def _convs(model: nn.Module) -> Any:
        return model.convs

    def outputs(self, model: nn.Module, data: Data, batch: Tensor) -> Tensor:
        """Outputs of all nodes, with historical rows outside the batch. New rows are recorded, not written yet."""
        convs = self._convs(model)
        edge = edge_arguments(data)
        is_in_batch = torch.zeros(data.x.size(0), 1, dtype=torch.bool)
        is_in_batch[batch] = True
        h: Tensor = data.x
        for l, conv in enumerate(convs[:-1]):
            h = conv(h, data.edge_index, **edge).relu()
            self.written.append((l, batch, h.detach()[batch]))
            h = torch.where(is_in_batch, h, self.stored[l])
        return convs[-1](h, data.edge_index, **edge)

    def commit(self) -> None:
        """Write the rows of all batches since the last commit."""
        for l, batch, rows in self.written:
            self.stored[l] = self.stored[l].index_copy(0, batch, rows)
        self.written.clear()


# ---- losses, each as a script would write it


def cross_entropy(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def label_smoothing(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smoothing=0.1)


def class_weights(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Divided by the weights of the seeds, not by their number."""
    return F.cross_entropy(out, y, weight=torch.tensor([0.2, 1.0, 3.0], dtype=out.dtype))


def with_parameters(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, and a penalty on all parameters."""
    return F.cross_entropy(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())


def multi_label(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy over several labels of a node."""
    return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))


def binary(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of a single output."""
    return F.binary_cross_entropy_with_logits(out.squeeze(-1), y.to(out.dtype))


# ---- schedules


class PlateauAfterWarmUp(ReduceLROnPlateau):
    """A linear warm-up and then `ReduceLROnPlateau`, which `SequentialLR` does not accept."""

    def __init__(self, optimizer: Optimizer, warmup: int, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.warm_up = warm_up(optimizer, warmup)
        self.epochs_left = warmup

    def step(self, metrics: Any, epoch: int | None = None) -> None:
        if self.epochs_left:
            self.epochs_left -= 1
            self.warm_up.step()
        else:
            super().step(metrics)


def warm_up(optimizer: Optimizer, epochs: int) -> LinearLR:
    """A rate that rises linearly over some epochs."""
    return LinearLR(optimizer, 1 / (epochs + 1), total_iters=epochs)


def make_schedule(name: str, optimizer: Optimizer, epochs: int, warmup: int, floor: float) -> LRScheduler:
    """Torch's schedule over so many epochs, of which the first few are a warm-up."""
    if name == "plateau":
        options: dict[str, Any] = {"mode": "max", "factor": 0.5, "patience": 0, "threshold": 0.0, "min_lr": floor}
        if warmup:
            return PlateauAfterWarmUp(optimizer, warmup, **options)
        return ReduceLROnPlateau(optimizer, **options)
    schedules = {
        "constant": lambda: ConstantLR(optimizer, factor=1.0),
        "cosine": lambda: CosineAnnealingLR(optimizer, epochs - warmup, eta_min=floor),
        "step": lambda: StepLR(optimizer, 2, gamma=0.5),
    }
    if not warmup:
        return schedules[name]()
    return SequentialLR(optimizer, [warm_up(optimizer, warmup), schedules[name]()], milestones=[warmup])


# ---- evaluation


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, mask: Tensor) -> float:
    """The share of nodes of a mask whose largest output is their label, in evaluation mode."""
    model.eval()
    out = whole_graph(model, data, mask)
    model.train()
    return (out[mask].argmax(-1) == data.y[mask]).double().mean().item()
