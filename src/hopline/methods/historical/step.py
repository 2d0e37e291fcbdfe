"""One batch of historical training as a unit: forward, backward, and the push after the optimizer's step.

The backward pass minimises this sum, divided by `total`, the step's seeds as `HistoricalUnit.total` counts them:

    mean loss over the batch's seeds * number of seeds
    + lipschitz * number of seeds * how far noise moves the layers      with `lipschitz`
    + compensation_loss                                                 with `compensate`

`halo.spreads` measures how far noise moves each layer (`layerwise.engine.Recorder`); the mean over layers counts.
The loss that is reported is the first term alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.contract import Unit
from hopline.methods.historical.batches import HistoricalBatch
from hopline.methods.historical.compensation import compensation_loss
from hopline.tables.history import report_ages
from hopline.units.batch_unit import autocast
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork


@dataclass(eq=False)
class HistoricalUnit(Unit):
    """One batch of this rank. Its rows are pushed in `commit`, after the optimizer's step."""

    work: HistoricalWork
    hist_batch: HistoricalBatch | None
    """The batch of this rank.

    An epoch is a sequence of turns, and each rank trains at most one batch per turn. None: no batch at this turn.
    """
    total: float | None = None
    """The number of examples that the batches of all ranks at this turn count as.

    With `compensate`, each batch counts as an equal share of all examples (`HistoricalWork.units`). Otherwise, it is
    the number of examples in the batches. None: the Trainer sums `size` over the ranks.
    """
    row_gradients: dict[int, Tensor] = field(default_factory=dict)
    """By layer: gradients of the summed loss at the batch's own rows, to be pushed. Empty without compensation."""

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0 if self.hist_batch is None else self.hist_batch.batch.num_examples

    @property
    def weight(self) -> float:
        """What the batch counts in the mean of a step: with compensation an equal share of all examples' weight."""
        if self.hist_batch is None:
            return 0
        compensates = self.work.method.compensate
        return self.work.mean_weight if compensates else self.work.job.weight_of(self.hist_batch.batch)

    @property
    def total_size(self) -> float | None:
        return self.total

    @property
    def has_gradient(self) -> bool:
        """Whether a batch adds to the gradient, by its seeds or by compensation. Asked only where there is a batch."""
        return self.size > 0 or self.work.method.compensate

    def forward_backward(self, total: float) -> Tensor:
        work = self.work
        job = work.job
        hist_batch = self.hist_batch
        if hist_batch is None or not self.has_gradient:
            self._forward_only()
            return torch.zeros((), device=job.device)
        weight = job.weight_of(hist_batch.batch)
        self.report_ages(hist_batch)

        with autocast(job), trace.span("forward", job.device):
            if self.size:
                loss = job.task.loss(job.model, hist_batch.batch)
            else:
                # A batch without seeds learns from compensation alone, which needs the batch's rows and their
                # autograd graph. So the model runs. The sum is no loss: `weight` is 0, and it is multiplied by that.
                loss = job.model(hist_batch.batch).sum()
            objective = loss * weight
            spreads = hist_batch.halo.spreads
            if spreads:
                objective = objective + work.method.lipschitz * weight * torch.stack(spreads).mean()
            if work.method.compensate:
                objective = objective + compensation_loss(work.partitioned, hist_batch)
        with trace.span("backward", job.device):
            (objective / total).backward()

        # The backward pass was divided by `total`. The tables hold gradients of the summed loss, so the division
        # is undone.
        if work.method.compensate:
            self.row_gradients = {l: h.grad * total for l, h in hist_batch.halo.rows.items() if h.grad is not None}
        return loss.detach() * weight

    def report_ages(self, hist_batch: HistoricalBatch) -> None:
        """Report the ages of the rows that a batch is about to pull."""
        ages = hist_batch.row_reader.ages(hist_batch.halo.positions)
        report_ages(ages)
        self.work.drift.observe_ages(ages)

    def push_only(self) -> None:
        self._forward_only()
        self.commit()

    def _forward_only(self) -> None:
        """Run the model without gradients, so that `halo` records the rows. `work.model` is `job.model`."""
        if self.hist_batch is not None:
            with torch.no_grad(), autocast(self.work.job):
                self.work.model(self.hist_batch.batch)

    def commit(self) -> None:
        self.work.commit(self.hist_batch, self.row_gradients)
