"""The loss of a training step at outputs that are known."""

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
"""Memory assumed for a loss over all seeds at once, in copies of their outputs: these as they come, joined, in order,
their gradient, and what a loss keeps. Cross entropy with label smoothing takes 5.5. A rule of thumb."""


SEQUENTIAL = "with hl.FullBatch set aggregation=sequential, with other methods leave out budget="


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss of a training step at outputs that are known."""

    loss_sum: Tensor
    """The loss, summed over the seeds."""
    output_gradients: Tensor
    """The gradient of the loss at the outputs."""
    parameter_gradients: Sequence[tuple[nn.Parameter, Tensor]]
    """Parameters that the loss reads by itself, as a penalty does, each with the gradient of the loss."""

    def add_to_parameters(self, share: float = 1.0) -> None:
        """Add these gradients to those that are there."""
        for parameter, gradient in self.parameter_gradients:
            parameter.grad = gradient * share if parameter.grad is None else parameter.grad + gradient * share


def loss_at_outputs(job: Job, batch: Batch, outputs: Tensor, scale: float) -> OutputLoss:
    """The training step's loss where the model has put out these rows for the seeds of a batch.

    scale: of the gradients of the summed loss.
    """
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad(), patch_outputs(job.model, batch, leaf):
        loss = job.train_step(job.model, batch) * batch.num_seeds
    parameters = [p for p in job.module.parameters() if p.requires_grad]
    given, *found = torch.autograd.grad(loss * scale, [leaf, *parameters], allow_unused=True)
    given = torch.zeros_like(leaf) if given is None else given
    reads = [(p, gradient) for p, gradient in zip(parameters, found, strict=True) if gradient is not None]
    return OutputLoss(loss.detach(), given, reads)


@contextmanager
def patch_outputs(model: nn.Module, batch: Batch, outputs: Tensor) -> Iterator[None]:
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


def batch_of_seeds(job: Job, seeds: Tensor, y: Tensor | None, key: int | Tensor | None) -> Batch:
    """What a training step finds of all seeds at once: ids, labels and their rows of all tables, but no edges."""
    rows = {name: SeedRows(table, seeds) for name, table in job.data.tables.items()}
    x, block = rows.pop("x", None), Block(seeds, seeds.numel(), (), key=key)
    everything = torch.arange(seeds.numel(), device=seeds.device)
    return Batch(seeds, (block,), x, y, dict(rows), key, seeds.numel(), everything)


@dataclass(frozen=True, eq=False, repr=False)
class SeedRows(Rows):
    """Rows that are read where the table is when a training step asks for them, and come to where the seeds are."""

    def read(self) -> Tensor:
        near = self.table.tiers(self.ids.device) is not None
        return self.table.read(self.ids if near else self.ids.cpu()).to(self.ids.device)
