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

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from hopline.core.batch import Batch
from hopline.units.loss_on_pieces import answering, loss_at

if TYPE_CHECKING:
    from hopline.contract import Job
    from hopline.methods.partitioned.sweep import P, Swept

Objective: TypeAlias = "Callable[[Batch, Tensor], Tensor]"
"""(a piece's batch, the outputs of its seeds) -> a scalar whose gradient is the piece's share."""


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


# ---- a batch of all seeds
