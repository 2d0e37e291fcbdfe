"""What was promised and what was measured of the steps of a run, per epoch. The report reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hopline.util import trace


@dataclass
class Record:
    """What became of the batches of an epoch."""

    promised_bytes: float = 0.0
    """The largest promise made for a step that ran."""
    peak_bytes: int = 0
    """The most that a step took."""
    before: list[float] = field(default_factory=list)
    """For each batch what it would have taken whole."""
    after: list[int] = field(default_factory=list)
    """For each batch what the largest of its pieces took; where it was not measured, what it was expected to."""
    over: int = 0
    """Pieces that took more than the limit."""
    split: int = 0
    """Batches that went in pieces."""
    pieces: int = 0
    """Pieces of these batches."""
    resampled: int = 0
    """Samples drawn anew."""
    cut: int = 0
    """Batches with fewer edges than were drawn."""
    edges_cut: int = 0
    """Edges that these batches lost."""
    oom: int = 0
    """Times that memory ran out, and the batch went on in smaller pieces."""


class Ledger:
    """The record of the epoch so far, and the largest bytes of all epochs. The thread that runs the steps writes it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.promised_bytes = 0.0
        """The largest promise made for a step that ran."""
        self.peak_bytes = 0
        """The most that a step took."""
        self._record = Record()

    def take(self) -> dict[str, Any]:
        """The record since the last call."""
        record, self._record = self._record, Record()
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def note_peak(self, promised_bytes: float, peak_bytes: int) -> None:
        """A step or a piece of one ran: what was promised, and what it took."""
        for total in (self, self._record):
            total.promised_bytes = max(total.promised_bytes, promised_bytes)
            total.peak_bytes = max(total.peak_bytes, peak_bytes)
        if peak_bytes > self.limit_bytes:
            self._record.over += 1
            trace.count("budget.steps_over", 1)

    def note_batch(self, before_bytes: float, after_bytes: int) -> None:
        """A batch ran: what it would have taken whole, and what the largest of its pieces took."""
        self._record.before.append(before_bytes)
        self._record.after.append(after_bytes)

    def note_split(self, num_micro_batches: int) -> None:
        """A batch goes in pieces."""
        self._record.split += 1
        self._record.pieces += num_micro_batches
        trace.count("budget.batches_split", 1)
        trace.count("budget.pieces", num_micro_batches)

    def note_resampled(self) -> None:
        """A batch was drawn anew."""
        self._record.resampled += 1
        trace.count("budget.resampled", 1)

    def note_cut(self, num_edges: int) -> None:
        """A batch goes on without some of its edges."""
        self._record.cut += 1
        self._record.edges_cut += num_edges
        trace.count("budget.batches_cut", 1)
        trace.count("budget.edges_cut", num_edges)

    def note_out_of_memory(self) -> None:
        """Memory ran out in a step."""
        self._record.oom += 1
        trace.count("budget.out_of_memory", 1)
