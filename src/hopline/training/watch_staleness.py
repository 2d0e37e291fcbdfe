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
    sentence = advice = ""
    if drift > MAX_DRIFT:
        sentence = f"histories are old: rows move by {drift:.0%} of their norm in the {age:.1f} steps that they wait"
        advice = "set a smaller lr= or a larger method.parts_per_batch"
        advice = advice if refreshes else f"set method.refresh_every=1, {advice.removeprefix('set ')}"
    return HistoryState(drift=drift, age=age, sentence=sentence, advice=advice)


class WatchHistory(Callback):
    """Says at the end of a run if its histories were old. Without tables it says nothing."""

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self.found: HistoryState | None = None
        self.drifts, self.age_sum, self.num_rows = list[float](), 0.0, 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        self.found = None
        self.drifts, self.age_sum, self.num_rows = list[float](), 0.0, 0.0

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.age_sum += epoch.counters.get("history.age_sum", 0.0)
        self.num_rows += epoch.counters.get("history.rows", 0.0)
        if "history.drift" in epoch.counters:
            self.drifts.append(epoch.counters["history.drift"])

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not self.drifts:
            return
        refreshes = trainer.work.describe().refreshes
        self.found = state_of(self.drifts, self.age_sum / max(1.0, self.num_rows), refreshes)
        if self.report is not None:
            self.report.log({"event": "history", **asdict(self.found)})
        if self.found.sentence:
            trainer.say(f"{self.found.sentence}: {self.found.advice}")
