"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichDisplay
from rich.table import Column
from rich.text import Text

PLAIN_INTERVAL_S = 10.0
REFRESH_INTERVAL_S = 0.1

_lock = threading.RLock()
_displays: dict[Console, _Display] = {}


class Progress:
    """What the work reports to; this one stays silent, and is the base of those that show something."""

    def advance(self, n: float = 1, **info: Any) -> None:
        """Say that n more units are done, with values to show, such as `loss=0.71`."""

    def info(self, **values: Any) -> None:
        """Show values beside the progress."""

    def close(self, completed: bool) -> None:
        """Show the last state; `completed` is False when the work was cut short."""


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
        label: What is being done.
        total: How many units there are, or None when unknown.
        unit: What is counted, such as "batches".
        enabled: False shows nothing, for ranks other than the first.
        brief: True leaves nothing behind at the end, for work that the caller sums up itself.
        console: Where to show it instead.
    """
    if console is None:
        console = _standard_error()
    if not enabled:
        reporter = Progress()
    elif not console.is_terminal:
        reporter = _Lines(console, label, total, unit, brief)
    else:
        reporter = _open_bar(console, label, total, unit, brief)
    completed = False
    try:
        yield reporter
        completed = True
    finally:
        reporter.close(completed)


def _open_bar(console: Console, label: str, total: int | None, unit: str, brief: bool) -> _Bar:
    with _lock:
        display = _displays.get(console)
        if display is None:
            display = _Display(console)
            _displays[console] = display
        return _Bar(display, label, total, unit, brief)


@functools.cache
def _standard_error() -> Console:
    return Console(stderr=True)


class _Lines(Progress):
    """Plain lines: one every few seconds, and a last one."""

    def __init__(self, console: Console, label: str, total: int | None, unit: str, brief: bool) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._unit = unit
        self._brief = brief
        self._num_done: float = 0
        self._values: dict[str, Any] = {}
        self._start_s = time.monotonic()
        self._written_s = self._start_s
        self._lock = threading.Lock()

    def advance(self, n: float = 1, **info: Any) -> None:
        with self._lock:
            self._num_done += n
            self._values |= info
            now_s = time.monotonic()
            if now_s - self._written_s < PLAIN_INTERVAL_S:
                return
            self._written_s = now_s
            elapsed_s = now_s - self._start_s
            amount = _format_amount(self._num_done, self._total, self._unit)
            rate = _format_rate(self._num_done / elapsed_s, self._unit)
            parts = [amount, rate]
            if self._total and 0 < self._num_done < self._total:
                remaining_s = elapsed_s / self._num_done * (self._total - self._num_done)
                parts.append(f"{_format_clock(remaining_s)} left")
            self._write(*parts)

    def info(self, **values: Any) -> None:
        with self._lock:
            self._values |= values

    def close(self, completed: bool) -> None:
        if self._brief and completed:
            return
        with self._lock:
            elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
            # What completed needs no "of how many".
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


class _Display:
    """The live display that all bars of one console share, for a terminal can hold only one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_bars = 0
        self._refreshed_s = 0.0
        # Refreshed by those who advance: a refreshing thread would outlive a display that is stopped.
        self.rich = RichDisplay(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=20),
            *(column(Column(no_wrap=True)) for column in (_AmountColumn, _TimeColumn, _ValuesColumn)),
            console=console,
            auto_refresh=False,
        )

    def enter(self) -> None:
        self._num_bars += 1
        if self._num_bars == 1:
            self.rich.start()

    def leave(self, task_id: TaskID, remove: bool) -> None:
        self._num_bars -= 1
        if remove:
            self.rich.update(task_id, visible=False)
        if self._num_bars == 0:
            del _displays[self._console]
            self.rich.stop()
        elif remove:
            self.rich.remove_task(task_id)
        else:
            # Moved above the live bars, which stay few however many have come and gone.
            task = self.task(task_id)
            self.rich.remove_task(task_id)
            self._console.print(self.rich.make_tasks_table([task]))

    def task(self, task_id: TaskID) -> Task:
        return next(task for task in self.rich.tasks if task.id == task_id)

    def refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= REFRESH_INTERVAL_S:
            self._refreshed_s = now_s
            self.rich.refresh()


class _Bar(Progress):
    """One bar of the shared display."""

    def __init__(self, display: _Display, label: str, total: int | None, unit: str, brief: bool) -> None:
        self._display = display
        self._total = total
        self._brief = brief
        self._is_open = True
        self._task_id: TaskID = display.rich.add_task(label, total=total, unit=unit, values={})
        self._values: dict[str, Any] = {}
        display.enter()

    def advance(self, n: float = 1, **info: Any) -> None:
        with _lock:
            if self._is_open:
                self._values |= info
                self._display.rich.update(self._task_id, advance=n, values=dict(self._values))
                self._display.refresh()

    def info(self, **values: Any) -> None:
        self.advance(0, **values)

    def close(self, completed: bool) -> None:
        with _lock:
            self._is_open = False
            rich = self._display.rich
            rich.stop_task(self._task_id)
            if completed and self._total is None:
                # A full bar, rather than one that pulses for ever.
                num_done = self._display.task(self._task_id).completed
                rich.update(self._task_id, total=num_done)
            self._display.leave(self._task_id, remove=self._brief and completed)


class _AmountColumn(ProgressColumn):
    """How much is done."""

    def render(self, task: Task) -> Text:
        total = None if task.total is None else int(task.total)
        return Text(_format_amount(int(task.completed), total, task.fields["unit"]), style="progress.download")


class _TimeColumn(ProgressColumn):
    """The rate, the time since the start and the time left."""

    def render(self, task: Task) -> Text:
        elapsed_s = task.elapsed or 0.0
        text = _format_clock(elapsed_s)
        if task.total and 0 < task.completed < task.total and not task.stop_time:
            remaining_s = elapsed_s / task.completed * (task.total - task.completed)
            text += f" < {_format_clock(remaining_s)}"
        if elapsed_s and task.completed:
            rate = _format_rate(task.completed / elapsed_s, task.fields["unit"])
            text = f"{rate}  {text}"
        return Text(text, style="progress.remaining")


class _ValuesColumn(ProgressColumn):
    """The values given with `advance` and `info`."""

    def render(self, task: Task) -> Text:
        return Text(_format_values(task.fields["values"]), style="cyan")


def _format_amount(num_done: float, total: int | None, unit: str) -> str:
    of_total = "" if total is None else f"/{total:,}"
    return f"{round(num_done):,}{of_total} {unit}".rstrip()


def _format_rate(per_second: float, unit: str) -> str:
    number = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} {unit}/s" if unit else f"{number}/s"


def _format_clock(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _format_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_format_value(value)}" for name, value in values.items())


def _format_value(value: Any) -> str:
    """A number to four digits; formatted only when shown, since reading a device tensor waits for it."""
    if isinstance(value, (str, int)):
        return str(value)
    try:
        return format(value, ".4g")
    except (TypeError, ValueError):
        return str(value)
