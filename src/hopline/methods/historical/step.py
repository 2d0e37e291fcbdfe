"""One batch of historical training: what it learns, and what it writes afterwards."""

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
    """One batch: its rows are pushed in `commit`, after the optimizer's step."""

    work: HistoricalWork
    hist_batch: HistoricalBatch | None
    """None where the other ranks have a batch at this turn and this one has not."""
    total: float | None = None
    """Seeds that the batches of all ranks at this turn stand for; by default those that are in them."""
    row_gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0 if self.hist_batch is None else self.hist_batch.batch.num_seeds

    @property
    def total_size(self) -> float | None:
        return self.total

    @property
    def has_gradient(self) -> bool:
        """Whether there are seeds, or others' messages."""
        return self.size > 0 or self.work.method.compensate

    def forward_backward(self, total: float) -> Tensor:
        work, job, hist_batch = self.work, self.work.job, self.hist_batch
        if hist_batch is None or not self.has_gradient:
            self._forward_only()
            return torch.zeros((), device=job.device)
        ages = hist_batch.row_reader.ages(hist_batch.halo.positions)
        report_ages(ages)
        self.work.drift.observe_ages(ages)
        with autocast(job), trace.span("forward", job.device):
            # A batch without seeds learns from others' messages only.
            loss = job.train_step(job.model, hist_batch.batch) if self.size else job.model(hist_batch.batch).sum()
            objective = loss * self.size
            if spreads := hist_batch.halo.spreads:
                objective = objective + work.method.lipschitz * self.size * torch.stack(spreads).mean()
            if work.method.compensate:
                objective = objective + compensation_loss(work, hist_batch)
        with trace.span("backward", job.device):
            (objective / total).backward()
        if work.method.compensate:
            self.row_gradients = {l: h.grad * total for l, h in hist_batch.halo.rows.items() if h.grad is not None}
        return loss.detach() * self.size

    def push_only(self) -> None:
        """Bring the tables up to date without learning anything."""
        self._forward_only()
        self.commit()

    def _forward_only(self) -> None:
        if self.hist_batch is not None:
            with torch.no_grad(), autocast(self.work.job):
                self.work.model(self.hist_batch.batch)

    def commit(self) -> None:
        self.work.commit(self.hist_batch, self.row_gradients)
