"""Spans and counters of all threads: `with span("sample"):`, `count("bytes.h2d", n)`.

Code is traced wherever it runs, and does not know who listens. Without a listener a span or a count does
nothing:

    span, count, tell  (any thread)   ->   every listener of `listen`: Timers, Counters, the report

A span of a GPU lies between two CUDA events. Asking for its duration would synchronise with the GPU, so the
events wait in a queue until the GPU has passed them:

    span(name, device)  ->  queue of `_DeviceSpan`  ->  `_report_oldest`  ->  every listener

Each later span reports up to two of the oldest, and `end_device_spans` reports the rest at the end of an
epoch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One timed stretch of work."""

    name: str
    start_s: float
    """The start by `time.perf_counter`, in seconds. For a GPU's work, the moment at which the host asked
    for it."""
    duration_s: float
    thread: str
    """The name of the thread that did the work, or asked a GPU for it."""


class Listener(Protocol):
    """An object that receives spans and counts.

    It is called on the thread that did the work, by several threads at once, so it must be thread-safe.
    """

    def on_span(self, span: Span) -> None:
        """Receive a span that has ended."""
        ...

    def on_count(self, name: str, amount: float) -> None:
        """Receive an amount to add to a counter."""
        ...


class _DeviceSpan(NamedTuple):
    """A `Span` of a GPU's work that is not reported yet."""

    name: str
    start_s: float
    thread: str
    start: torch.cuda.Event
    """Recorded on the stream before the work."""
    end: torch.cuda.Event
    """Recorded on the stream after the work."""


class _Trace:
    """The listeners of the process, and spans of GPUs that are not reported yet.

    This module owns the one object, `_trace`. `listen` alone adds and removes listeners. Any thread may
    read `listeners` and change `pending`.
    """

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        """A tuple that is replaced, never changed, so that readers on other threads need no lock."""
        self.pending: deque[_DeviceSpan] = deque()
        """Spans of GPUs, the oldest first. No lock, because the methods of a deque are atomic."""
        self._lock = threading.Lock()
        """Held while `listeners` is replaced: two threads may add or remove at the same time."""

    def add(self, listener: Listener) -> None:
        with self._lock:
            self.listeners = (*self.listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener.

        With the last one, pending spans go too: the next listener must not get them.
        """
        with self._lock:
            # By identity, because two listeners may be equal. Of a listener that was added twice, one entry
            # goes.
            index = next(i for i, other in enumerate(self.listeners) if other is listener)
            self.listeners = self.listeners[:index] + self.listeners[index + 1 :]
            if not self.listeners:
                self.pending.clear()

    def report(self, span: Span) -> None:
        for listener in self.listeners:
            listener.on_span(span)


_trace = _Trace()


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send the spans and counts of all threads to a listener while the context lasts."""
    _trace.add(listener)
    try:
        yield
    finally:
        _trace.remove(listener)


_SILENT = nullcontext()
"""A span without a listener: a context that does nothing. One object for all of them, since steps open many."""


class _SpanTimer:
    """A span of the host's work. It is reported when it ends, also by an error."""

    __slots__ = ("name", "start_s")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        tell(self.name, self.start_s, time.perf_counter() - self.start_s)


def tell(name: str, start_s: float, duration_s: float) -> None:
    """Report a span that the caller has timed, under the name of the calling thread."""
    _trace.report(Span(name, start_s, duration_s, threading.current_thread().name))


class _DeviceSpanTimer:
    """A span of a GPU's work, between two events on the current stream. Its duration is asked for later."""

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
        _trace.pending.append(
            _DeviceSpan(self.name, self.start_s, threading.current_thread().name, start=self.start, end=end)
        )
        # Old spans are reported now, while the GPU is busy: it may be idle during `end_device_spans`. Two
        # are reported for each new one, so that the queue shrinks.
        for _ in range(2):
            _report_oldest()


def span(name: str, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Time the body of a `with` statement under a name, if there is a listener.

    device: the device whose work is timed; None for the host. A span of a GPU is reported later, at the
    latest by `end_device_spans`, so that the host does not synchronise here.
    """
    if not _trace.listeners:
        return _SILENT
    if device is None or device.type != "cuda":
        return _SpanTimer(name)
    # While a CUDA graph is captured nothing runs, and an event that was captured cannot be asked for its
    # time.
    return _SILENT if torch.cuda.is_current_stream_capturing() else _DeviceSpanTimer(name)


def end_device_spans() -> None:
    """Report the spans of GPUs that have ended.

    The call waits for the GPU's work that this thread asked for, and not for that of other threads.
    """
    this_thread = threading.current_thread().name
    for _ in range(len(_trace.pending)):  # each once: other threads may add spans meanwhile
        _report_oldest(wait_for_thread=this_thread)


def _report_oldest(wait_for_thread: str | None = None) -> None:
    """Report the oldest pending span if it has ended, else put it back.

    wait_for_thread: the name of a thread. If the span is of that thread, the call waits for its end.
    """
    pending = _trace.pending
    try:
        oldest = pending.popleft()
    except IndexError:
        return
    if oldest.thread == wait_for_thread:
        oldest.end.synchronize()
    elif not oldest.end.query():
        if wait_for_thread is None:
            # In its place, so that spans are reported in order: the next call asks again.
            pending.appendleft(oldest)
        else:
            # At the end, so that the next call reaches the spans of the waiting thread.
            pending.append(oldest)
        return
    duration_s = oldest.start.elapsed_time(oldest.end) / 1e3
    _trace.report(Span(oldest.name, oldest.start_s, duration_s, oldest.thread))


def count(name: str, amount: float) -> None:
    """Add an amount to a named counter, if there is a listener."""
    for listener in _trace.listeners:
        listener.on_count(name, amount)


@dataclass(frozen=True, kw_only=True)
class RegionStatistics:
    """The time of one region per epoch. The first epoch, which warms up, is kept apart."""

    name: str
    calls: int
    """Number of times that the region was entered, over all epochs."""
    first_epoch_s: float
    mean_s: float
    """Mean seconds per later epoch; nan if there is none."""
    std_s: float
    """Sample standard deviation of the later epochs, in seconds; nan with fewer than two."""


class _SumsByEpoch:
    """Amounts summed by name, epoch by epoch. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: defaultdict[str, float] = defaultdict(float)
        """The epoch that is not closed yet."""
        self._closed: list[dict[str, float]] = []
        """Earlier epochs, in order."""

    def next_epoch(self) -> None:
        """Close the epoch. What comes from now on belongs to the next one."""
        with self._lock:
            self._closed.append(dict(self._open))
            self._open.clear()

    def last_epoch(self) -> dict[str, float]:
        """Return the sums of the epoch that was closed last, by name."""
        with self._lock:
            return dict(self._closed[-1]) if self._closed else {}

    def this_epoch(self) -> dict[str, float]:
        """Return the sums so far of the epoch that is not closed yet, by name."""
        with self._lock:
            return dict(self._open)


class Timers(_SumsByEpoch):
    """Times named regions over epochs. As a listener, it collects every span under its name.

    Any thread may call.

    Example:
        >>> timers = hl.extend.Timers()
        >>> with timers.region("load"):
        ...     numbers = list(range(1000))
        >>> timers.next_epoch()
        >>> timers.slowest()
        'load'
    """

    def __init__(self) -> None:
        super().__init__()
        self._open_calls: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        """Calls in the epochs that are closed."""

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
        with self._lock:
            self._calls.update(self._open_calls)
            self._open_calls.clear()
        super().next_epoch()

    def slowest(self, among: Collection[str] | None = None) -> str | None:
        """Return the region that took longest in the epoch that was closed last; None if none was timed.

        among: regions to choose from; None for all.
        """
        seconds = {name: s for name, s in self.last_epoch().items() if among is None or name in among}
        return max(seconds, key=seconds.__getitem__, default=None)

    def statistics(self) -> list[RegionStatistics]:
        """Return the seconds per epoch of each region, in the order of first use."""
        with self._lock:
            # A caller who never closes an epoch has one epoch.
            epochs = list(self._closed) or [dict(self._open)]
            calls = Counter(self._calls if self._closed else self._open_calls)
        names = dict.fromkeys(itertools.chain.from_iterable(epochs))  # each once, in the order of first use
        found = []
        for name in names:
            first_s, *later_s = [epoch.get(name, 0.0) for epoch in epochs]
            region = RegionStatistics(
                name=name,
                calls=calls[name],
                first_epoch_s=first_s,
                mean_s=statistics.fmean(later_s) if later_s else math.nan,
                std_s=statistics.stdev(later_s) if len(later_s) > 1 else math.nan,
            )
            found.append(region)
        return found

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
            self._open[name] += seconds
            self._open_calls[name] += 1


class Counters(_SumsByEpoch):
    """A listener that adds up counters, per epoch and overall. Any thread may call.

    Example:
        >>> from hopline.util.trace import listen
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> counters = hl.extend.Counters()
        >>> with listen(counters):
        ...     batches = list(hl.Sampled(fanouts=(2,)).loader(data, torch.arange(4)))
        >>> counters.totals()["edges.sampled"]
        4.0
    """

    def on_span(self, span: Span) -> None:
        """Ignore spans."""

    def on_count(self, name: str, amount: float) -> None:
        """Add an amount to a counter."""
        with self._lock:
            self._open[name] += amount

    def totals(self) -> dict[str, float]:
        """Return each counter's total over all epochs, the one that is not closed included."""
        with self._lock:
            epochs = [*self._closed, dict(self._open)]
        names = dict.fromkeys(itertools.chain.from_iterable(epochs))
        return {name: sum(epoch.get(name, 0) for epoch in epochs) for name in names}
