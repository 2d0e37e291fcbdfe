"""A loss of the user's own, computed over all seeds at once where the model goes over them in pieces.

A loss need not be a sum over pieces: class weights, for one, divide by the weights of all rows. So a sweep computes its
last layer twice. The first time, without gradients, gives the outputs of all seeds, from which one call of the training
step makes the loss and its gradient at them:

    outputs = model at the seeds of each piece        no gradients kept
    loss    = train_step(model, all seeds)            the model answers with `outputs`, a leaf
    given   = d loss / d outputs                      small: a row per seed

The second time goes back from `given`, piece by piece: sum(outputs * given) has the gradient `given` at the outputs.
The usual loss is a mean over the seeds, so that each piece gives its share and nothing is computed twice. A sampled
batch in pieces does the same with the whole model, and ranks that each have a shard tell each other their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hopline.core.batch import Batch, Block, Part, Rows

if TYPE_CHECKING:
    from hopline.contract import Job
    from hopline.methods.partitioned.sweep import P, Swept

Objective: TypeAlias = "Callable[[Batch, Tensor], Tensor]"
"""(a piece's batch, the outputs of its seeds) -> a scalar whose gradient is the piece's share."""

LOSS_COPIES = 8
"""Memory assumed for a loss over all seeds at once, in copies of their outputs: these as they come, joined, in order,
their gradient, and what a loss keeps. Cross entropy with label smoothing takes 5.5. A rule of thumb."""

SEQUENTIAL = "with hl.FullBatch set aggregation=sequential, with other methods leave out budget="


class LossByPiece:
    """The usual loss, a mean over the seeds: each piece gives its share."""

    def __init__(self, job: Job, scale: float, summed: Tensor) -> None:
        self.job, self.scale, self.summed = job, scale, summed

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        with answering(self.job.model, batch, outputs):
            loss = self.job.train_step(self.job.model, batch) * batch.num_seeds
        self.summed += loss.detach()
        return loss * self.scale


class LossAtOnce:
    """The loss over all seeds of a sweep. Called once per piece with seeds, in the order of the pieces."""

    def __init__(
        self,
        over: Swept[P],
        scale: float,
        summed: Tensor,
        outputs_of: Callable[[Swept[P], P, Batch], Tensor],
    ) -> None:
        """outputs_of: the last layer at the seeds of a piece, without gradients."""
        self.summed = summed
        outputs, batches = [], []
        for piece in over.pieces(over.work.model.num_layers - 1):
            batch = piece.batch
            if batch.num_seeds:
                outputs.append(outputs_of(over, piece, batch))
                batches.append((batch.seeds, batch.y))
            over.went_back(over.work.model.num_layers - 1, piece)
        self.given: Iterator[Tensor] = iter(())
        if batches:
            seeds, labels = zip(*batches, strict=True)
            known = [y for y in labels if y is not None]
            whole = over.loss_batch(torch.cat(seeds), torch.cat(known) if known else None)
            self.given = iter(self._back(over.work.job, whole, torch.cat(seeds), outputs, scale))

    def _back(self, job: Job, whole: Batch, seeds: Tensor, outputs: list[Tensor], scale: float) -> tuple[Tensor, ...]:
        """The gradient of the loss at the outputs of each piece. seeds: of the pieces, one after the other."""
        # Both hold the same nodes, each once: the k-th smallest of one is the k-th smallest of the other.
        order = seeds.argsort()[whole.seeds.argsort().argsort()]
        found = loss_at(job, whole, torch.cat(outputs)[order], scale)
        found.add_to_parameters()
        self.summed += found.summed
        by_piece = torch.empty_like(found.given)
        by_piece[order] = found.given
        return by_piece.split([rows.size(0) for rows in outputs])

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * next(self.given)).sum()


@dataclass(frozen=True, eq=False)
class LossAt:
    """The loss of a training step at outputs that are known."""

    summed: Tensor
    """The loss, summed over the seeds."""
    given: Tensor
    """The gradient of the loss at the outputs."""
    of_parameters: Sequence[tuple[nn.Parameter, Tensor]]
    """Parameters that the loss reads by itself, as a penalty does, each with the gradient of the loss."""

    def add_to_parameters(self, share: float = 1.0) -> None:
        """Add these gradients to those that are there."""
        for parameter, gradient in self.of_parameters:
            parameter.grad = gradient * share if parameter.grad is None else parameter.grad + gradient * share


def loss_at(job: Job, batch: Batch, outputs: Tensor, scale: float) -> LossAt:
    """The training step's loss where the model has put out these rows for the seeds of a batch.

    scale: of the gradients of the summed loss.
    """
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad(), answering(job.model, batch, leaf):
        loss = job.train_step(job.model, batch) * batch.num_seeds
    parameters = [p for p in job.module.parameters() if p.requires_grad]
    given, *found = torch.autograd.grad(loss * scale, [leaf, *parameters], allow_unused=True)
    given = torch.zeros_like(leaf) if given is None else given
    reads = [(p, gradient) for p, gradient in zip(parameters, found, strict=True) if gradient is not None]
    return LossAt(loss.detach(), given, reads)


@contextmanager
def answering(model: nn.Module, batch: Batch, outputs: Tensor) -> Iterator[None]:
    """Within, the model answers with outputs that were computed already; in all else it is the model itself."""

    def forward(given: Any = None, *others: Any, **named: Any) -> Tensor:
        if given is not batch or others or named:
            raise ValueError(
                "train_step called the model with something else than its batch, and here the outputs are computed "
                f"part by part before the loss: call model(batch) with the batch as it came, or {SEQUENTIAL}"
            )
        return outputs

    before = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before


# ---- a batch of all seeds


def batch_of_seeds(job: Job, seeds: Tensor, y: Tensor | None, key: int | Tensor | None) -> Batch:
    """What a training step finds of all seeds at once: ids, labels and their rows of all tables, but no edges."""
    rows = {name: SeedRows(table, seeds) for name, table in job.data.tables.items()}
    x, block = rows.pop("x", None), SeedBlock(seeds, seeds.numel(), (), key=key)
    everything = torch.arange(seeds.numel(), device=seeds.device)
    return Batch(seeds, (block,), x, y, dict(rows), key, seeds.numel(), everything)


@dataclass(frozen=True, eq=False, repr=False)
class SeedRows(Rows):
    """Rows that are read where the table is when a training step asks for them, and come to where the seeds are."""

    def read(self) -> Tensor:
        near = self.table.tiers(self.ids.device) is not None
        return self.table.read(self.ids if near else self.ids.cpu()).to(self.ids.device)


@dataclass(frozen=True, eq=False, repr=False)
class SeedBlock(Block):
    """Seeds whose outputs are known: there are no edges to compute them from."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_dst:,} nodes)"

    @property
    def part(self) -> Part:
        raise ValueError(
            "train_step asked for the edges of its batch, and here the outputs are computed part by part before the "
            f"loss: use the batch's seeds, labels and tables, or {SEQUENTIAL}"
        )

    @property
    def num_edges(self) -> int:
        return self.part.num_edges
