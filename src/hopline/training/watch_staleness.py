"""A callback that says how far rows of historical training move while they wait, and when they are old."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hopline.report.writer import Report
from hopline.training.callbacks import Callback, EpochEnd, Run

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

MAX_DRIFT = 0.5
"""Drift from which a run says that its histories are old. Chosen between 0.29, the most that
tables of few steps had, and 0.63, the least of tables of 16 steps; it does not predict accuracy (docs/history.md)."""


@dataclass(frozen=True, kw_only=True)
class HistoryState:
    """What the tables of a run were like."""

    drift: float
    """How far rows moved while they waited in the tables, relative to their norm: the mean of the later half."""
    age: float
    """Steps since the rows that batches read were written: the mean."""
    sentence: str
    """What is wrong, in at most 100 characters; empty where nothing is."""
    advice: str
    """What to type."""


def state_of(drifts: list[float], age: float, refreshes: bool) -> HistoryState:
    """Judge a run. drifts: as measured, in order. refreshes: whether tables are filled exactly every epoch already."""
    # The weights that a run begins with move fast in every run.
    drift = statistics.fmean(drifts[len(drifts) // 2 :])
    is_old = drift > MAX_DRIFT
    if not is_old:
        return HistoryState(drift=drift, age=age, sentence="", advice="")
    remedies = "a smaller lr= or a larger method.parts_per_batch"
    if not refreshes:
        remedies = f"method.refresh_every=1, {remedies}"
    return HistoryState(
        drift=drift,
        age=age,
        sentence=f"histories are old: rows move by {drift:.0%} of their norm in the {age:.1f} steps that they wait",
        advice=f"set {remedies}",
    )


class WatchHistory(Callback):
    """Says at the end of a run if its histories were old. Without tables it says nothing."""

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self._reset()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._reset()

    def _reset(self) -> None:
        self.history_state: HistoryState | None = None
        self.drifts: list[float] = []
        self.age_sum = 0.0
        self.num_rows = 0.0

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.age_sum += epoch.counters.get("history.age_sum", 0.0)
        self.num_rows += epoch.counters.get("history.rows", 0.0)
        if "history.drift" in epoch.counters:
            self.drifts.append(epoch.counters["history.drift"])

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not self.drifts:
            return
        mean_age = self.age_sum / max(1.0, self.num_rows)
        refreshes = trainer.work.describe().refreshes
        self.history_state = state_of(self.drifts, mean_age, refreshes)
        if self.report is not None:
            self.report.log({"event": "history", **asdict(self.history_state)})
        if self.history_state.sentence:
            trainer.say(f"{self.history_state.sentence}: {self.history_state.advice}")
