"""Progress of long work on standard error: a bar on a terminal, a line every ten seconds elsewhere.

    with progress("convert", total=num_edges, unit="edges") as shown:
        shown.advance(1000, loss=0.7)

rich draws the bars. It has no lines for a file, and a terminal holds one of its displays at a time; so all bars
of a console share one, from the first bar to the last. Any thread may advance any bar.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichDisplay
from rich.table import Column
from rich.text import Text

PLAIN_INTERVAL_S = 10.0
"""Least seconds from one plain line to the next, where there is no terminal."""
REFRESH_INTERVAL_S = 0.1
"""Least seconds from one drawing of the bars to the next."""

_lock = threading.RLock()
"""Held while `_displays`, a display or one of its bars is read or changed."""
_displays: dict[Console, _Display] = {}
"""The display of each console that shows a bar at the moment."""


class Progress:
    """The object that work reports its progress to. This base class shows nothing."""

    def advance(self, n: float = 1, **info: Any) -> None:
        """Report that n more units are done, with values to show, such as `loss=0.71`."""

    def info(self, **values: Any) -> None:
        """Report values to show next to the progress."""
        self.advance(0, **values)

    def close(self, completed: bool) -> None:
        """Show the final state. completed: False if an error or an interruption ended the work."""


@contextmanager
def progress(
    label: str,
    total: int | None,
    unit: str = "",
    *,
    enabled: bool = True,
    brief: bool = False,
    console: Console | None = None,
) -> Iterator[Progress]:
    """Show the progress of the body of a `with` statement on standard error.

    Args:
        label: Name of the work.
        total: Number of units; None if it is not known.
        unit: Name of the units, such as "batches".
        enabled: False shows nothing, for ranks other than the first.
        brief: True removes the bar, or leaves out the last line, when the work completes. For work that the
            caller sums up itself.
        console: Console to use in place of standard error.
    """
    if console is None:
        console = _standard_error()
    if not enabled:
        reporter = Progress()
    elif not console.is_terminal:
        reporter = _Lines(console, label, total, unit, brief)
    else:
        reporter = _Bar(console, label, total, unit, brief)
    completed = False
    try:
        yield reporter
        completed = True
    finally:
        reporter.close(completed)


@functools.cache
def _standard_error() -> Console:
    """The console of standard error. One object, because displays are found by console."""
    return Console(stderr=True)


class _Lines(Progress):
    """Progress as plain lines: one every `PLAIN_INTERVAL_S`, and a last one. Any thread may call."""

    def __init__(self, console: Console, label: str, total: int | None, unit: str, brief: bool) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._unit = unit
        self._brief = brief
        self._num_done: float = 0
        self._values: dict[str, Any] = {}
        self._start_s = time.monotonic()
        self._last_line_s = self._start_s  # so the first line comes after an interval too
        self._lock = threading.Lock()

    def advance(self, n: float = 1, **info: Any) -> None:
        with self._lock:
            self._num_done += n
            self._values |= info
            now_s = time.monotonic()
            if now_s - self._last_line_s < PLAIN_INTERVAL_S:
                return
            self._last_line_s = now_s
            elapsed_s = now_s - self._start_s
            amount = _format_amount(self._num_done, self._total, self._unit)
            rate = _format_rate(self._num_done / elapsed_s, self._unit)
            parts = [amount, rate]
            if self._total and 0 < self._num_done < self._total:
                remaining_s = elapsed_s / self._num_done * (self._total - self._num_done)
                parts.append(f"{_format_clock(remaining_s)} left")
            self._write(*parts)

    def close(self, completed: bool) -> None:
        if self._brief and completed:
            return
        with self._lock:
            elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
            # Completed work needs no total: all of it is done.
            amount = _format_amount(self._num_done, None if completed else self._total, self._unit)
            stopped = "" if completed else "stopped at "
            parts = [f"{stopped}{amount} in {elapsed_s:.1f} s"]
            if self._num_done:
                parts.append(_format_rate(self._num_done / elapsed_s, self._unit))
            self._write(*parts)

    def _write(self, *parts: str) -> None:
        texts = list(parts)
        if self._values:
            texts.append(_format_values(self._values))
        # One write per line, so that lines of several processes do not mix.
        self._console.file.write(f"{self._label}: {', '.join(texts)}\n")
        self._console.file.flush()


class _Display(RichDisplay):
    """The bars of one console. Callers hold `_lock`."""

    def __init__(self, console: Console) -> None:
        # No automatic refresh: rich's own thread would outlive a stopped display. Transient: a bar that ends is
        # printed above those that go on, so that the live part of the screen stays small.
        columns = (TextColumn("{task.description}", markup=False, style="bold"), BarColumn(bar_width=20))
        status = _StatusColumn(Column(no_wrap=True))
        super().__init__(*columns, status, console=console, auto_refresh=False, transient=True)
        self._drawn_s = 0.0

    def draw(self) -> None:
        """Draw the bars, unless they were drawn less than `REFRESH_INTERVAL_S` ago."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= REFRESH_INTERVAL_S:
            self._drawn_s = now_s
            self.refresh()


class _Bar(Progress):
    """Progress as one bar of the shared display. Any thread may call; calls after `close` do nothing."""

    def __init__(self, console: Console, label: str, total: int | None, unit: str, brief: bool) -> None:
        self._brief = brief
        self._values: dict[str, Any] = {}
        with _lock:
            if console not in _displays:
                _displays[console] = _Display(console)
                _displays[console].start()
            self._display = _displays[console]
            self._task_id = self._display.add_task(label, total=total, unit=unit, values=self._values)

    def advance(self, n: float = 1, **info: Any) -> None:
        with _lock:
            if self._task_id in self._display.task_ids:
                self._values |= info
                self._display.update(self._task_id, advance=n)
                self._display.draw()

    def close(self, completed: bool) -> None:
        with _lock:
            self._display.stop_task(self._task_id)
            task = next(task for task in self._display.tasks if task.id == self._task_id)
            if completed and task.total is None:  # a bar without a total pulses, with one it is full
                self._display.update(self._task_id, total=task.completed)
            self._display.remove_task(self._task_id)
            if not self._display.tasks:
                self._display.stop()
                del _displays[self._display.console]
            if not (self._brief and completed):
                self._display.console.print(self._display.make_tasks_table([task]))


class _StatusColumn(ProgressColumn):
    """The column of units done, the rate, the time since the start, the estimated time left, and values."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        elapsed_s = task.elapsed or 0.0
        total = None if task.total is None else int(task.total)
        text = Text(_format_amount(int(task.completed), total, unit), style="progress.download")
        if elapsed_s and task.completed:
            text.append(f"  {_format_rate(task.completed / elapsed_s, unit)}", style="progress.remaining")
        clock = _format_clock(elapsed_s)
        if task.total and 0 < task.completed < task.total and not task.stop_time:
            clock += f" < {_format_clock(elapsed_s / task.completed * (task.total - task.completed))}"
        text.append(f"  {clock}", style="progress.remaining")
        return text.append(f"  {_format_values(task.fields['values'])}", style="cyan")


def _format_amount(num_done: float, total: int | None, unit: str) -> str:
    of_total = "" if total is None else f"/{total:,}"
    return f"{round(num_done):,}{of_total} {unit}".rstrip()


def _format_rate(per_second: float, unit: str) -> str:
    number = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} {unit}/s" if unit else f"{number}/s"


def _format_clock(duration_s: float) -> str:
    """A duration such as "2:05", or "1:02:05" from an hour."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _format_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_format_value(value)}" for name, value in values.items())


def _format_value(value: Any) -> str:
    """A value for people, numbers with four digits.

    Values are formatted when they are shown, not when they are reported: reading a tensor of a GPU
    synchronises.
    """
    if isinstance(value, (str, int)):
        return str(value)
    try:
        return format(value, ".4g")
    except (TypeError, ValueError):
        return str(value)
