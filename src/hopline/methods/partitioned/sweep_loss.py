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
"""(seeds, labels) -> what a training step is given for the loss of all seeds at once."""


def objective_of(job: Job, scale: float, key: int | None, whole_batch: WholeBatch | None = None) -> SweepLoss:
    """The loss of a training step over pieces. scale: of the gradients; key: of the draws."""
    if job.usual_loss:
        return SummedLoss(job, scale)
    return JointLoss(job, scale, whole_batch or (lambda seeds, y: batch_of_seeds(job, seeds, y, key)))


class SweepLoss(ABC):
    """The loss over the pieces of a sweep. `loss_sum` is the loss so far, summed over the seeds."""

    def __init__(self, job: Job, scale: float) -> None:
        self.job, self.scale = job, scale
        dtype = next(p.dtype for p in job.module.parameters())
        self.loss_sum = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=job.device)

    def begin(self, layers: Layers[Any]) -> None:  # noqa: B027 - a loss by piece has nothing to prepare
        """All rows before the last layer can be read."""

    @abstractmethod
    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        """A scalar whose gradient is the share of a piece: its batch, and the outputs at its seeds."""


class SummedLoss(SweepLoss):
    """The usual loss, a mean over the seeds: each piece gives its share."""

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        with patch_outputs(self.job.model, batch, outputs):
            loss = self.job.train_step(self.job.model, batch) * batch.num_seeds
        self.loss_sum += loss.detach()
        return loss * self.scale


class JointLoss(SweepLoss):
    """The loss over all seeds of a sweep. Called once per piece with seeds, in the order of the pieces."""

    def __init__(self, job: Job, scale: float, whole_batch: WholeBatch) -> None:
        super().__init__(job, scale)
        self.whole_batch = whole_batch
        self._given: Iterator[Tensor] = iter(())
        """The gradient of the loss at the outputs of each piece."""

    def begin(self, layers: Layers[Any]) -> None:
        found = [(batch.seeds, batch.y, outputs) for batch, outputs in layers.outputs_at_seeds()]
        if not found:
            return
        seeds, labels, outputs = zip(*found, strict=True)
        known = [y for y in labels if y is not None]
        whole = self.whole_batch(torch.cat(seeds), torch.cat(known) if known else None)
        self._given = iter(self._back(whole, torch.cat(seeds), outputs))

    def _back(self, whole: Batch, seeds: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradient of the loss at the outputs of each piece. seeds: of the pieces, one after the other."""
        # Both hold the same nodes, each once: the k-th smallest of one is the k-th smallest of the other.
        order = seeds.argsort()[whole.seeds.argsort().argsort()]
        found = loss_at_outputs(self.job, whole, torch.cat(outputs)[order], self.scale)
        found.add_to_parameters()
        self.loss_sum += found.loss_sum
        by_piece = torch.empty_like(found.output_gradients)
        by_piece[order] = found.output_gradients
        return by_piece.split([rows.size(0) for rows in outputs])

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * next(self._given)).sum()
