"""Predicted and measured bytes of the steps of a run, epoch by epoch.

The guard notes each step, batch, split, cut and out of memory. At the end of an epoch the trainer takes the
`Record`, which goes into the report. The names of its fields are keys of report files, so they stay as they
are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hopline.util import trace


@dataclass
class Record:
    """The budget's record of one epoch. In it, "pieces" are micro-batches."""

    promised_bytes: float = 0.0
    """The largest predicted peak of a step that ran."""
    peak_bytes: int = 0
    """The largest measured peak of a step."""
    before: list[float] = field(default_factory=list)
    """One entry per batch: the predicted peak of the whole batch."""
    after: list[int] = field(default_factory=list)
    """One entry per batch: the largest peak of its micro-batches, measured or, without a measurement,
    expected."""
    over: int = 0
    """The number of steps or micro-batches that took more than the limit."""
    split: int = 0
    """The number of batches that ran in micro-batches."""
    pieces: int = 0
    """The number of micro-batches of all batches that were split."""
    resampled: int = 0
    """The number of samples that were drawn in place of one that did not fit."""
    cut: int = 0
    """The number of batches from which edges were cut."""
    edges_cut: int = 0
    """The number of edges that were cut from batches."""
    oom: int = 0
    """The number of times that a step ran out of memory."""


COUNTERS = {
    "over": "budget.steps_over",
    "split": "budget.batches_split",
    "pieces": "budget.pieces",
    "resampled": "budget.resampled",
    "cut": "budget.batches_cut",
    "edges_cut": "budget.edges_cut",
    "oom": "budget.out_of_memory",
}
"""The counter of `trace` for each count of a record."""


class Ledger:
    """The record of the current epoch, and the largest bytes of all epochs.

    The guard owns it. Only the thread that runs the steps writes it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.promised_bytes = 0.0
        """The largest predicted peak of a step that ran, over all epochs."""
        self.peak_bytes = 0
        """The largest measured peak of a step, over all epochs."""
        self._record = Record()

    def take(self) -> dict[str, Any]:
        """The record since the last call, with the limit. A new record begins."""
        record, self._record = self._record, Record()
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def note_peak(self, promised_bytes: float, peak_bytes: int) -> None:
        """Note the predicted and the measured peak of a step or micro-batch that ran."""
        for total in (self, self._record):
            total.promised_bytes = max(total.promised_bytes, promised_bytes)
            total.peak_bytes = max(total.peak_bytes, peak_bytes)
        if peak_bytes > self.limit_bytes:
            self.note(over=1)

    def note_batch(self, before_bytes: float, after_bytes: int) -> None:
        """Note a batch that ran: the predicted peak of all of it, and the largest peak of its
        micro-batches."""
        self._record.before.append(before_bytes)
        self._record.after.append(after_bytes)

    def note(self, **counts: int) -> None:
        """Add to counts of the record by their names, and to the counters of `trace`."""
        for name, count in counts.items():
            setattr(self._record, name, getattr(self._record, name) + count)
            trace.count(COUNTERS[name], count)
