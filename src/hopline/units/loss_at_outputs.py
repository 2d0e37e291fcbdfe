"""A user's own loss over all seeds at once, at outputs that were computed before.

The outputs were computed in micro-batches or part by part. A loss of the user's own may not be a sum over
seeds, so it must see all outputs together. The user's training step calls model(batch) itself. Here this
call returns the outputs that were computed before:

    outputs (no gradient)  ->  leaf  ->  train_step, with model(batch) = leaf  ->  loss L
                                                                                   gradients of L at leaf, and at
                                                                                   parameters that L reads directly

The caller then starts the backward pass of the model, micro-batch by micro-batch or part by part, with the
gradient at the leaf. A caller that computed its outputs without autograd computes them a second time for
this, with autograd:

    budget.guard                      runs the whole model twice
    methods.partitioned.sweep_loss    runs the last layer twice
    methods.full_batch.work           runs the model once, with autograd

Memory holds the outputs of all seeds, several times (`LOSS_COPIES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Rows

if TYPE_CHECKING:
    from hopline.contract import Job


LOSS_COPIES = 8
"""Memory assumed for a loss over all seeds at once, in copies of the outputs.

It covers up to three copies of the outputs (by part, joined, and in the order of the batch's seeds), their
gradient, and tensors that a loss keeps for its backward pass. Cross entropy with label smoothing takes
5.5 copies.
"""

ADVICE = "with hl.FullBatch set aggregation=sequential, with other methods leave out budget="
"""End of the error message of `patch_outputs`, with settings to try instead."""


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss of a training step at given outputs, with its gradients."""

    loss_sum: Tensor
    """[] on the outputs' device: the mean loss times the number of examples, without a gradient."""
    output_gradients: Tensor
    """[num_examples, num_outputs]: the gradient at the outputs, scaled as `loss_at_outputs` was told."""
    parameter_gradients: Sequence[tuple[nn.Parameter, Tensor]]
    """Parameters that the loss reads directly, as a weight penalty does, each with its scaled gradient."""

    def add_to_parameters(self, share: float = 1.0) -> None:
        """Add `parameter_gradients`, times `share`, to the gradients of the parameters.

        share: 1 / (number of ranks) where every rank computes the whole loss. Their gradients are summed
            over the ranks afterwards.
        """
        for parameter, gradient in self.parameter_gradients:
            parameter.grad = gradient * share if parameter.grad is None else parameter.grad + gradient * share


def loss_at_outputs(job: Job, batch: Batch, outputs: Tensor, scale: float) -> OutputLoss:
    """The loss of the job's training step if the model's output for the batch is `outputs`.

    The loss that the training step returns counts as a mean over the examples. Times their number it is the
    summed loss.

    scale: the factor of all gradients. With 1 they are those of the summed loss, with 1 / num_examples
        those of the mean.
    """
    # A leaf, so that the backward pass ends at the outputs. `job.model` is what a training step calls. It
    # shares its parameters with `job.module`, the user's own.
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad(), patch_outputs(job.model, batch, leaf):
        loss = job.task.loss(job.model, batch) * job.weight_of(batch)
    parameters = [p for p in job.module.parameters() if p.requires_grad]
    output_gradients, *gradients = torch.autograd.grad(loss * scale, [leaf, *parameters], allow_unused=True)
    if output_gradients is None:
        output_gradients = torch.zeros_like(leaf)
    parameter_gradients = [
        (parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    ]
    return OutputLoss(loss.detach(), output_gradients, parameter_gradients)


@contextmanager
def patch_outputs(model: nn.Module, batch: Batch, outputs: Tensor) -> Iterator[None]:
    """Make model(batch) return `outputs`, and restore the model at the end.

    The model is otherwise itself, so a training step may read its parameters. A call with anything else
    than `batch` raises a ValueError.
    """

    def forward(argument: Any = None, *others: Any, **named: Any) -> Tensor:
        if argument is not batch or others or named:
            raise ValueError(
                "train_step called the model with something else than its batch, and here the outputs are computed "
                f"part by part before the loss: call model(batch) with the batch as it came, or {ADVICE}"
            )
        return outputs

    earlier_patch = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if earlier_patch is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = earlier_patch


def batch_of_seeds(job: Job, nodes: Tensor, y: Tensor | None, key: int | Tensor | None) -> Batch:
    """The batch of all seeds at once for a training step: ids, labels and rows of all tables, no edges.

    nodes: [num_examples] int64, those of the examples. y: their labels. key: of the step's random draws, as in
    `Batch`.
    """
    seeds, output_idx = job.examples.distinct(nodes)
    rows = {name: SeedRows(table, seeds) for name, table in job.data.tables.items()}
    x = rows.pop("x", None)
    block = Block(seeds, seeds.numel(), parts=(), key=key)
    return Batch(
        seeds,
        (block,),
        x,
        y=y,
        tables=dict(rows),
        key=key,
        total_seeds=nodes.numel(),
        output_idx=torch.arange(seeds.numel(), device=seeds.device) if output_idx is None else output_idx,
    )


@dataclass(frozen=True, eq=False, repr=False)
class SeedRows(Rows):
    """The rows of seeds. They are read, and moved to the seeds' device, if a training step asks for them."""

    def read(self) -> Tensor:
        return self.read_on(self.ids.device)
