"""The callback that warns if the historical embeddings of a run are too stale.

Each epoch counts two things (`EpochEnd.counters`): the drift, how far embeddings have moved between two
writes relative to their norm, and the age of the embeddings that batches read. At the end of a run, a large
drift becomes a line with advice.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hopline.report.writer import Report
from hopline.training.callbacks import Callback, EpochEnd, Run
from hopline.util.config import CHANGES_TRAINING

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

MAX_DRIFT = 0.5
"""Drift above which a run says that its histories are old. The most measured with embeddings a few steps
old was 0.29, and the least with embeddings 16 steps old was 0.63. The drift does not predict accuracy
(docs/history.md)."""


@dataclass(frozen=True, kw_only=True)
class HistoryState:
    """How stale the historical embeddings of a run were."""

    drift: float
    """How far embeddings moved while they waited in the tables, relative to their norm. Mean over the later
    half of the run."""
    age: float
    """Mean age of the embeddings that batches read: steps since they were written."""
    sentence: str
    """What is wrong, in at most 100 characters. Empty if nothing is."""
    advice: str
    """What to type. Empty if nothing is wrong."""


def state_of(drifts: list[float], age: float, refreshes: bool) -> HistoryState:
    """Judge the staleness of a run.

    drifts: one per epoch that measured it, in order. age: the mean age, in steps. refreshes: whether tables
    are already filled exactly in every epoch.
    """
    # The later half alone: at the beginning of every run weights move fast, and embeddings with them.
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
        advice=f"set {remedies} {CHANGES_TRAINING}",
    )


class WatchHistory(Callback):
    """Says at the end of a run if its historical embeddings were too stale.

    Does nothing for methods without them.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self._reset()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._reset()

    def _reset(self) -> None:
        self.history_state: HistoryState | None = None
        """The verdict. None before the end of a run."""
        self.drifts: list[float] = []
        self.age_sum = 0.0
        """Sum of the ages of all rows that batches read, in steps."""
        self.num_rows = 0.0
        """Number of rows that batches read."""

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
