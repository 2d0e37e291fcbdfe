"""One batch of historical training: what it learns, and what it writes afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.contract import Unit
from hopline.methods.historical.batches import HistoricalBatch
from hopline.methods.historical.compensation import missing_messages
from hopline.tables.history import report_ages
from hopline.units.batch_unit import autocast
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork


@dataclass(eq=False)
class HistoricalUnit(Unit):
    """One batch: its rows are pushed in `commit`, after the optimizer's step."""

    work: HistoricalWork
    made: HistoricalBatch | None
    """None where the other ranks have a batch at this turn and this one has not."""
    total: float | None = None
    """Seeds that the batches of all ranks at this turn stand for; by default those that are in them."""
    pushed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0 if self.made is None else self.made.batch.num_seeds

    @property
    def total_size(self) -> float | None:
        return self.total

    @property
    def learns(self) -> bool:
        """Whether there are seeds, or others' messages."""
        return self.size > 0 or self.work.method.compensate

    def forward_backward(self, total: float) -> Tensor:
        work, job, made = self.work, self.work.job, self.made
        if made is None or not self.learns:
            self._forward_only()
            return torch.zeros((), device=job.device)
        ages = made.stored.ages(made.halo.positions)
        report_ages(ages)
        self.work.drift.saw(ages)
        with autocast(job), trace.span("forward", job.device):
            # A batch without seeds learns from others' messages only.
            loss = job.train_step(job.model, made.batch) if self.size else job.model(made.batch).sum()
            objective = loss * self.size
            if spreads := made.halo.spreads:
                objective = objective + work.method.lipschitz * self.size * torch.stack(spreads).mean()
            if work.method.compensate:
                objective = objective + missing_messages(work, made)
        with trace.span("backward", job.device):
            (objective / total).backward()
        if work.method.compensate:
            self.pushed = {l: h.grad * total for l, h in made.halo.rows.items() if h.grad is not None}
        return loss.detach() * self.size

    def push_only(self) -> None:
        """Bring the tables up to date without learning anything."""
        self._forward_only()
        self.commit()

    def _forward_only(self) -> None:
        if self.made is not None:
            with torch.no_grad(), autocast(self.work.job):
                self.work.model(self.made.batch)

    def commit(self) -> None:
        self.work.commit(self.made, self.pushed)
