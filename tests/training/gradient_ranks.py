"""Ranks that combine gradients in other ways than the sum, and the same training in plain torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.world import RankSpec, World
from hopline.units.job import make_job
from tests.support.ranks import KillRank
from tests.support.runs import in_float64, small
from tests.training.own_ranks import METHODS

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
LocalSGD = importlib.import_module("local_sgd").LocalSGD
TopK = importlib.import_module("compressed_gradients").TopK


def summed(parameters: Sequence[nn.Parameter], world: World) -> None:
    world.sum_gradients(parameters)


def nothing(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Ranks do not combine gradients."""


class NotPlain(hl.extend.Gradients):
    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("here")}


WAYS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "function": lambda: summed,
    "nothing": lambda: nothing,
    "not plain": NotPlain,
    "local 1": lambda: LocalSGD(every=1),
    "local 3": lambda: LocalSGD(every=3),
    "top all": lambda: TopK(share=1.0),
    "top few": lambda: TopK(share=0.1),
}


def new_model() -> hl.nn.GNN:
    torch.manual_seed(3)
    return hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 4)]).double()


class WeightsByEpoch(hl.Callback):
    """Records the weights after each epoch."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.numbers += flat(trainer.model.parameters()).tolist()

    def state(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


def train(world: World, way: str, method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses, metrics and weights of a run of a few steps."""
    model = new_model()
    kill = changes.pop("kill", None)
    settings = {"epochs": 2, "show": False, "optimizer": "sgd", "lr": 0.1, "resume": "out" in changes} | changes
    weights = WeightsByEpoch()
    callbacks = [weights, *([] if kill is None else [KillRank(*kill)])]
    trainer = hl.Trainer(
        model, in_float64(small()), METHODS[method], gradients=WAYS[way](), world=world, callbacks=callbacks, **settings
    )
    run = trainer.fit()
    return {
        "losses": [epoch.loss for epoch in run.history],
        "metrics": [evaluation.metrics for evaluation in run.evaluations],
        "weights": weights.numbers,
    }


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


# ---- the same in plain torch, both ranks in one process

Combine = Callable[[list[hl.nn.GNN]], None]


def plain(
    before: Combine, after: Combine, after_epoch: Combine, method: str = "share", clip_norm: float | None = None
) -> dict[str, Any]:
    """Two models, each trained on its rank's units by torch's SGD. The functions stand for exchanges of ranks."""
    data = in_float64(small())
    models = [new_model(), new_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    works = [
        METHODS[method].bind(make_job(model, data, world=World(RankSpec(rank=rank, size=2))))
        for rank, model in enumerate(models)
    ]
    losses: list[float] = []
    weights: list[float] = []
    for epoch in (1, 2):
        loss_sum = 0.0
        num_seeds = 0
        for units in zip(*(work.units(epoch) for work in works), strict=True):
            batches: list[hl.Batch] = [unit.batch for unit in units]  # type: ignore[attr-defined]
            total = sum(batch.num_seeds for batch in batches)
            for model, batch in zip(models, batches, strict=True):
                model.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum")
                (loss / total).backward()
                loss_sum += float(loss.detach())
                num_seeds += batch.num_seeds
            before(models)
            for model, optimizer in zip(models, optimizers, strict=True):
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
            after(models)
        after_epoch(models)
        losses.append(loss_sum / num_seeds)
        assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
        weights += flat(models[0].parameters()).tolist()
    return {"losses": losses, "weights": weights}


def idle(models: list[hl.nn.GNN]) -> None:
    """The ranks exchange nothing."""


@torch.no_grad()
def average(models: list[hl.nn.GNN]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(list(same)).mean(dim=0)
        for parameter in same:
            parameter.copy_(mean)


def twice(models: list[hl.nn.GNN]) -> None:
    for model in models:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2


class AverageEvery:
    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0

    def __call__(self, models: list[hl.nn.GNN]) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            average(models)


class LargestWithFeedback:
    """Sums each model's largest entries by absolute value; the others are added to the next step's."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.waiting = [torch.zeros(0, dtype=torch.float64)] * 2

    def __call__(self, models: list[hl.nn.GNN]) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for rank, model in enumerate(models):
            gradient = flat(p.grad for p in model.parameters())
            gradient += self.waiting[rank] if self.waiting[rank].numel() else 0
            smallest = gradient.abs().sort(descending=True).values[int(self.share * gradient.numel()) - 1]
            is_sent = gradient.abs() >= smallest
            total = total + gradient * is_sent
            self.waiting[rank] = gradient * ~is_sent
        for model in models:
            start = 0
            for parameter in model.parameters():
                parameter.grad = total[start : start + parameter.numel()].view_as(parameter).clone()
                start += parameter.numel()
