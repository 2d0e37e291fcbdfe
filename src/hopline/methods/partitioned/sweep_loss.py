"""The loss of a model that computes its outputs piece by piece: a sum over pieces, or one call over all seeds.

A *piece* is a set of nodes that the layer-wise engine computes together: a part, or a micro-batch. The backward pass
of the engine goes over all pieces, from the last layer to the first. It begins at the outputs of the last layer, and
asks the loss for the gradient at the outputs of each piece.

The loss of a task that is a mean over examples (`Task.is_mean`) is a sum over pieces. Each piece gives its share, and
the last layer is computed once (`SummedLoss`).

A loss of the user's own need not be a sum over pieces: a contrast between two nodes, for one, is not.
For such a loss (`JointLoss`) the last layer is computed twice at every piece. The first time gives the outputs of all
seeds, without gradients. One call of the training step turns them into the loss and its gradient:

    outputs = model at the seeds of each piece        no gradients kept
    loss    = train_step(model, all seeds)            the model answers with `outputs`, a leaf
    g       = d loss / d outputs                      small: a row per example

The second time computes the outputs with autograd, piece by piece, and starts the backward pass from
sum(outputs * g). Since g is a constant, the gradient of this sum at the outputs is g, the same as that of the loss.

Two other modules use the same sum. `hopline.budget.guard` computes a sampled batch in micro-batches, and runs the
whole model twice. `hopline.methods.full_batch.work` has ranks with a shard each, and gathers the outputs of all ranks.
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
"""(nodes of the examples, their labels) -> the batch that a training step is called with, for the loss over all."""


def make_sweep_loss(job: Job, scale: float, key: int | None, whole_batch: WholeBatch | None = None) -> SweepLoss:
    """The loss of a training step over pieces, as an `Objective` of the layer-wise engine.

    scale: the factor of the gradients. With 1 they are those of the loss summed over the examples, with
        1 / (examples of the step) those of the mean.
    key: that of the step's random draws, for the default batch of a loss of the user's own.
    whole_batch: makes the batch for a loss of the user's own. By default that batch has the seeds, their labels and
        rows, but no edges.
    """
    if job.task.is_mean:
        return SummedLoss(job, scale)
    return JointLoss(job, scale, whole_batch or (lambda nodes, y: batch_of_seeds(job, nodes, y, key)))


class SweepLoss(ABC):
    """The loss over the pieces of a backward pass: an `Objective` of the layer-wise engine.

    It belongs to one backward pass. `loss_sum` is a scalar on the job's device: the loss summed over the examples,
    without `scale`. It is complete after the last piece.
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
        """A scalar whose gradient at `outputs` is that of the summed loss, times `scale`.

        batch: the examples of the piece. outputs: [num_examples, ...], the model's outputs at them.
        """


class SummedLoss(SweepLoss):
    """The loss of a mean task, as a sum over pieces.

    The task returns a mean over the examples of its batch. Times their weight it is a sum, and the sums of all
    pieces add up. The caller's `scale` divides by the weight of all examples.
    """

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        with patch_outputs(self.job.model, batch, outputs):
            loss = self.job.task.loss(self.job.model, batch) * self.job.weight_of(batch)
        self.loss_sum += loss.detach()
        return loss * self.scale


class JointLoss(SweepLoss):
    """A loss of the user's own, computed once over the seeds of all pieces, when the backward pass begins.

    `begin` computes the loss, so `loss_sum` is complete after it. The engine then calls the object once per piece that
    has seeds, in the order of `Layers.outputs_at_seeds`. Each call takes the next gradient: that order alone matches
    gradients and pieces.
    """

    def __init__(self, job: Job, scale: float, whole_batch: WholeBatch) -> None:
        super().__init__(job, scale)
        self.whole_batch = whole_batch
        self._output_gradients: Iterator[Tensor] = iter(())
        """Per piece with seeds, in order: [num_examples, ...], the scaled gradient of the loss at its outputs."""

    def begin(self, layers: Layers[Any]) -> None:
        piece_nodes: list[Tensor] = []
        piece_labels: list[Tensor] = []
        piece_outputs: list[Tensor] = []
        for batch, outputs in layers.outputs_at_seeds():
            piece_nodes.append(batch.example_ids)
            piece_outputs.append(outputs)
            if batch.y is not None:
                piece_labels.append(batch.y)
        if not piece_nodes:
            return
        nodes = torch.cat(piece_nodes)
        whole = self.whole_batch(nodes, torch.cat(piece_labels) if piece_labels else None)
        self._output_gradients = iter(self._differentiate(whole, nodes, piece_outputs))

    def _differentiate(self, whole: Batch, nodes: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Per piece: the gradient of the summed loss at its outputs, times `scale`.

        Also adds the loss to `loss_sum`, and the gradients at parameters that the loss reads directly to their `.grad`.

        whole: the batch for the training step, whose examples may be in another order. nodes: those of the examples of
        all pieces, one piece after the other. outputs: by piece.
        """
        # order[i]: the position in `nodes` of the i-th example of `whole`. Both hold the same examples, so the k-th
        # smallest of one is the k-th smallest of the other. The argsort of an argsort gives each example's k. Those of
        # one node are in the order of their numbers in both, which a stable sort keeps.
        sorted_idx = whole.example_ids.argsort(stable=True).argsort()
        order = nodes.argsort(stable=True)[sorted_idx]
        loss = loss_at_outputs(self.job, whole, torch.cat(outputs)[order], self.scale)
        # A weight penalty, for example, reads parameters directly. No piece's backward pass reaches these gradients.
        loss.add_to_parameters()
        self.loss_sum += loss.loss_sum
        by_piece = torch.empty_like(loss.output_gradients)
        by_piece[order] = loss.output_gradients
        return by_piece.split([rows.size(0) for rows in outputs])

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        # `loss_at_outputs` has applied `scale` to the gradients.
        return (outputs * next(self._output_gradients)).sum()
