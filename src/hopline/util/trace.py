"""Spans and counters: `with span("sample"):`, `count("bytes.h2d", n)`; no-ops unless someone listens."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One timed stretch of work."""

    name: str
    """What was done."""
    start_s: float
    """When it began, by `time.perf_counter`."""
    duration_s: float
    """How long it took."""
    thread: str
    """The name of the thread that did it."""


class Listener(Protocol):
    """What receives spans and counts; called on the thread that did the work, so it must be thread-safe."""

    def on_span(self, span: Span) -> None:
        """Take a span that has just ended."""
        ...

    def on_count(self, name: str, amount: float) -> None:
        """Take an amount to add to a counter."""
        ...


class _DeviceSpan(NamedTuple):
    """A span of a GPU's work whose duration was not asked yet."""

    name: str
    start_s: float
    thread: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class _Trace:
    """Who listens, and spans of GPUs that are not reported yet. `_trace` is the one object of the process.

    This module owns it: work is traced wherever it is done, in any thread, and knows nothing of who listens. Listeners
    are added and removed by `listen` alone. With the last of them the spans of GPUs go, which are of no use to others.
    """

    def __init__(self) -> None:
        # A tuple that is replaced, never changed: readers on other threads need no lock.
        self.listeners: tuple[Listener, ...] = ()
        self.pending: deque[_DeviceSpan] = deque()
        """The oldest first; its methods are atomic."""
        self._lock = threading.Lock()

    def add(self, listener: Listener) -> None:
        with self._lock:
            self.listeners = (*self.listeners, listener)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            # By identity: two listeners may be equal. Of one that listens twice, the first is removed.
            index = next(i for i, other in enumerate(self.listeners) if other is listener)
            self.listeners = self.listeners[:index] + self.listeners[index + 1 :]
            if not self.listeners:
                self.pending.clear()


_trace = _Trace()


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send the spans and counts of all threads to a listener for as long as the context lasts."""
    _trace.add(listener)
    try:
        yield
    finally:
        _trace.remove(listener)


class _Silent:
    """The span nobody listens to."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class _SpanTimer:
    """A span that is reported when it ends, also when it ends in an error."""

    __slots__ = ("name", "start_s")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        tell(self.name, self.start_s, time.perf_counter() - self.start_s)


_SILENT = _Silent()


def tell(name: str, start_s: float, duration_s: float) -> None:
    """Report a stretch of work that somebody else has timed, in the name of this thread."""
    thread = threading.current_thread().name
    span = Span(name=name, start_s=start_s, duration_s=duration_s, thread=thread)
    for listener in _trace.listeners:
        listener.on_span(span)


class _DeviceSpanTimer:
    """A span of a GPU's work, between two events on its stream; how long it was is asked later, all at once."""

    __slots__ = ("name", "start", "start_s")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()
        self.start = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def __exit__(self, *error: object) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        thread = threading.current_thread().name
        _trace.pending.append(
            _DeviceSpan(name=self.name, start_s=self.start_s, thread=thread, start=self.start, end=end)
        )
        for _ in range(2):  # while the GPU has work to do, so that less is left to ask when it has none
            _report_oldest()


def span(name: str, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Time the body of a `with` statement under a name, if anyone listens.

    device: whose work is timed. A GPU's spans are reported by `end_device_spans`, so that nothing waits for it here.
    """
    if not _trace.listeners:
        return _SILENT
    if device is None or device.type != "cuda":
        return _SpanTimer(name)
    # Of what is being recorded nothing runs yet, and its events could never be asked.
    return _SILENT if torch.cuda.is_current_stream_capturing() else _DeviceSpanTimer(name)


def end_device_spans() -> None:
    """Report the spans of GPUs that have ended; waits for the work that this thread asked for, and for no other's."""
    this_thread = threading.current_thread().name
    for _ in range(len(_trace.pending)):  # others may add to it meanwhile
        _report_oldest(wait_for_thread=this_thread)


def _report_oldest(wait_for_thread: str | None = None) -> None:
    """Report the span of a GPU that began first, if it has ended; waits for it if it is of that thread."""
    pending = _trace.pending
    try:
        oldest = pending.popleft()
    except IndexError:
        return
    if oldest.thread == wait_for_thread:
        oldest.end.synchronize()
    elif not oldest.end.query():
        if wait_for_thread is None:
            pending.appendleft(oldest)  # the next call asks for it again
        else:
            pending.append(oldest)  # behind the others, for which somebody waits
        return
    duration_s = oldest.start.elapsed_time(oldest.end) / 1e3
    span = Span(name=oldest.name, start_s=oldest.start_s, duration_s=duration_s, thread=oldest.thread)
    for listener in _trace.listeners:
        listener.on_span(span)


def count(name: str, amount: float) -> None:
    """Add an amount to a named counter, if anyone listens."""
    for listener in _trace.listeners:
        listener.on_count(name, amount)


@dataclass(frozen=True, kw_only=True)
class RegionStatistics:
    """How long one region took per epoch, with the first epoch, which warms up, set apart."""

    name: str
    """The region."""
    calls: int
    """How often it was entered, over all epochs."""
    first_epoch_s: float
    """Seconds in the first epoch."""
    mean_s: float
    """Mean seconds per later epoch; nan when there is none."""
    std_s: float
    """Sample standard deviation over the later epochs; nan with fewer than two."""


class _RegionTime(NamedTuple):
    """The time of one region in one epoch."""

    seconds: float
    calls: int


class Timers:
    """Named regions timed over epochs; also a listener that collects every span.

    Example:
        >>> timers = hl.extend.Timers()
        >>> with timers.region("load"):
        ...     numbers = list(range(1000))
        >>> timers.next_epoch()
        >>> timers.slowest()
        'load'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _RegionTime] = {}
        self._closed: list[dict[str, _RegionTime]] = []

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time the body of a `with` statement under a name."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start_s)

    def on_span(self, span: Span) -> None:
        """Add a span to the region of its name."""
        self._add(span.name, span.duration_s)

    def on_count(self, name: str, amount: float) -> None:
        """Ignore counters."""

    def next_epoch(self) -> None:
        """Close the epoch: what is timed from now on belongs to the next."""
        with self._lock:
            self._closed.append(self._open)
            self._open = {}

    def last_epoch(self) -> dict[str, float]:
        """Return the seconds of each region in the epoch last closed."""
        with self._lock:
            epoch = self._closed[-1] if self._closed else {}
        return {name: region.seconds for name, region in epoch.items()}

    def this_epoch(self) -> dict[str, float]:
        """Return the seconds of each region so far in the epoch that is not closed yet."""
        with self._lock:
            return {name: region.seconds for name, region in self._open.items()}

    def slowest(self, among: Collection[str] | None = None) -> str | None:
        """Return the region that took most of the epoch last closed, or None when none was timed."""
        seconds = {name: s for name, s in self.last_epoch().items() if among is None or name in among}
        return max(seconds, key=seconds.__getitem__, default=None)

    def statistics(self) -> list[RegionStatistics]:
        """Return the seconds per epoch of each region, in the order they first ran."""
        with self._lock:
            # Someone who never closes an epoch means one epoch.
            epochs = list(self._closed) or [dict(self._open)]
        names = dict.fromkeys(itertools.chain.from_iterable(epochs))  # each once, in the order of first use
        unused = _RegionTime(seconds=0.0, calls=0)
        return [_region_statistics(name, [epoch.get(name, unused) for epoch in epochs]) for name in names]

    def table(self) -> str:
        """Return the statistics as a plain-text table, mean ± standard deviation."""
        rows = [("region", "calls", "first epoch", "later epochs")]
        for region in self.statistics():
            later = "-" if math.isnan(region.mean_s) else f"{region.mean_s:.4f} s"
            spread = "" if math.isnan(region.std_s) else f" ± {region.std_s:.4f}"
            rows.append((region.name, str(region.calls), f"{region.first_epoch_s:.4f} s", later + spread))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _add(self, name: str, seconds: float) -> None:
        with self._lock:
            before = self._open.get(name, _RegionTime(seconds=0.0, calls=0))
            self._open[name] = _RegionTime(seconds=before.seconds + seconds, calls=before.calls + 1)


def _region_statistics(name: str, epochs: list[_RegionTime]) -> RegionStatistics:
    later_s = [epoch.seconds for epoch in epochs[1:]]
    return RegionStatistics(
        name=name,
        calls=sum(epoch.calls for epoch in epochs),
        first_epoch_s=epochs[0].seconds,
        mean_s=statistics.fmean(later_s) if later_s else math.nan,
        std_s=statistics.stdev(later_s) if len(later_s) > 1 else math.nan,
    )


class Counters:
    """A listener that adds up counters, per epoch and overall.

    Example:
        >>> from hopline.util.trace import listen
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> counters = hl.extend.Counters()
        >>> with listen(counters):
        ...     batches = list(hl.Sampled(fanouts=(2,)).loader(data, torch.arange(4)))
        >>> counters.totals()["edges.sampled"]
        4.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: defaultdict[str, float] = defaultdict(float)
        self._closed: list[dict[str, float]] = []

    def on_span(self, span: Span) -> None:
        """Ignore spans."""

    def on_count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        with self._lock:
            self._open[name] += amount

    def next_epoch(self) -> None:
        """Close the epoch: what is counted from now on belongs to the next."""
        with self._lock:
            self._closed.append(dict(self._open))
            self._open.clear()

    def last_epoch(self) -> dict[str, float]:
        """Return each counter's total in the epoch last closed."""
        with self._lock:
            return dict(self._closed[-1]) if self._closed else {}

    def totals(self) -> dict[str, float]:
        """Return each counter's total over all epochs, with the one still open."""
        with self._lock:
            epochs = [*self._closed, dict(self._open)]
        names = dict.fromkeys(itertools.chain.from_iterable(epochs))
        return {name: sum(epoch.get(name, 0) for epoch in epochs) for name in names}
