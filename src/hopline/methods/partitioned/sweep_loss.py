"""The loss of a model that computes its outputs piece by piece: a sum over pieces, or one call over all seeds.

The usual loss is a mean over the seeds. Each piece gives its share, and nothing is computed twice (`SummedLoss`).

A loss of the user's own need not be a sum over pieces: class weights, for one, divide by the weights of all rows.
For such a loss (`JointLoss`) a sweep computes its last layer twice. The first time gives the outputs of all seeds,
without gradients. One call of the training step turns them into the loss and its gradient:

    outputs = model at the seeds of each piece        no gradients kept
    loss    = train_step(model, all seeds)            the model answers with `outputs`, a leaf
    g       = d loss / d outputs                      small: a row per seed

The second time goes back from g, piece by piece: with g held constant, sum(outputs * g) has the gradient g at the
outputs.

Two other places use this identity. A sampled batch in micro-batches does so with the whole model, and ranks that each
have a shard gather their outputs for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hopline.core.batch import Batch
from hopline.layerwise.engine import Layers
from hopline.units.loss_at_outputs import batch_of_seeds, loss_at_outputs, patch_outputs

if TYPE_CHECKING:
    from hopline.contract import Job

WholeBatch: TypeAlias = "Callable[[Tensor, Tensor | None], Batch]"
"""(seeds, labels) -> the batch that a training step is called with, for the loss over all seeds."""


def objective_of(job: Job, scale: float, key: int | None, whole_batch: WholeBatch | None = None) -> SweepLoss:
    """The objective of a training step over pieces.

    scale: factor of the gradients. key: of the random draws. whole_batch: makes the batch for a loss of the user's
    own. By default that batch has the seeds, their labels and rows, but no edges.
    """
    if job.usual_loss:
        return SummedLoss(job, scale)
    return JointLoss(job, scale, whole_batch or (lambda seeds, y: batch_of_seeds(job, seeds, y, key)))


class SweepLoss(ABC):
    """The loss over the pieces of a sweep: an `Objective` of the layer-wise engine.

    It belongs to one backward pass. `loss_sum` is the loss of the pieces so far, summed over their seeds.
    """

    def __init__(self, job: Job, scale: float) -> None:
        self.job = job
        self.scale = scale
        dtype = next(p.dtype for p in job.module.parameters())
        self.loss_sum = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=job.device)

    def begin(self, layers: Layers[Any]) -> None:  # noqa: B027 - a loss by piece has nothing to prepare
        """Called once before the first piece, when all rows before the last layer can be read."""

    @abstractmethod
    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        """A scalar whose gradient at `outputs` is that of the loss, times `scale`.

        batch: of the piece, with its seeds. outputs: [num_seeds, ...] of the model at these.
        """


class SummedLoss(SweepLoss):
    """The usual loss, a mean over the seeds. The sum over all seeds is the sum over the pieces."""

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        with patch_outputs(self.job.model, batch, outputs):
            loss = self.job.train_step(self.job.model, batch) * batch.num_seeds
        self.loss_sum += loss.detach()
        return loss * self.scale


class JointLoss(SweepLoss):
    """A loss of the user's own, computed once over all seeds of a sweep, when the backward pass begins.

    Then it is called once per piece that has seeds, in the order of `Layers.outputs_at_seeds`: gradients are matched
    by that order alone.
    """

    def __init__(self, job: Job, scale: float, whole_batch: WholeBatch) -> None:
        super().__init__(job, scale)
        self.whole_batch = whole_batch
        self._output_gradients: Iterator[Tensor] = iter(())
        """Per piece with seeds, in order: [num_seeds, ...], the gradient of the loss at its outputs."""

    def begin(self, layers: Layers[Any]) -> None:
        piece_seeds: list[Tensor] = []
        piece_labels: list[Tensor] = []
        piece_outputs: list[Tensor] = []
        for batch, outputs in layers.outputs_at_seeds():
            piece_seeds.append(batch.seeds)
            piece_outputs.append(outputs)
            if batch.y is not None:
                piece_labels.append(batch.y)
        if not piece_seeds:
            return
        seeds = torch.cat(piece_seeds)
        whole = self.whole_batch(seeds, torch.cat(piece_labels) if piece_labels else None)
        self._output_gradients = iter(self._differentiate(whole, seeds, piece_outputs))

    def _differentiate(self, whole: Batch, seeds: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Per piece: the gradient of the loss at its outputs.

        whole: the batch for the training step, whose seeds may be in another order. seeds: those of all pieces, one
        piece after the other. outputs: by piece.
        """
        # From the order of the pieces to that of `whole`. Both hold the same nodes, each once, so the k-th smallest
        # of one is the k-th smallest of the other.
        sorted_idx = whole.seeds.argsort().argsort()
        order = seeds.argsort()[sorted_idx]
        loss = loss_at_outputs(self.job, whole, torch.cat(outputs)[order], self.scale)
        loss.add_to_parameters()
        self.loss_sum += loss.loss_sum
        by_piece = torch.empty_like(loss.output_gradients)
        by_piece[order] = loss.output_gradients
        return by_piece.split([rows.size(0) for rows in outputs])

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * next(self._output_gradients)).sum()
