"""The evidence of a run, in a folder: settings, metrics as JSON lines, a Chrome trace and an HTML page."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hopline.report import page as report_html
from hopline.util import config as spec
from hopline.util.files import replacing

if TYPE_CHECKING:
    from hopline.util.trace import Span

MAX_SPANS = 200_000
FILES = ("config.json", "metrics.jsonl", "run.log", "trace.json", "report.html")
PACKAGES = ("hopline", "torch", "torch-geometric", "numba", "numpy")


class Report:
    """Writes what a run does into its folder; a trace listener, and a context manager that closes it.

    Args:
        folder: The run folder, created if need be.
        config: The settings, as `spec.to_dict` returns them.
        changed: Keys of those that differ from their defaults, dotted. None: not known.
        resume: Go on with the records of the run that is in the folder, rather than start afresh.
        is_kept: Which of them to go on with.
        max_spans: How many spans the trace may hold; those beyond are only counted.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        changed: Sequence[str] | None = None,
        resume: bool = False,
        is_kept: Callable[[Mapping[str, Any]], bool] = lambda record: True,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._start_s = time.perf_counter()
        self._earlier_s = 0.0
        self._spans: list[Span] = []
        self._max_spans = max_spans
        self._num_dropped = 0
        self._counters: dict[str, float] = {}
        self._is_closed = False
        self._new_folders = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._start_files(describe(config, changed), resume, is_kept)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(
                f"Cannot write the run folder '{folder}' ({reason}): choose another with out=FOLDER."
            ) from error

    def on_span(self, span: Span) -> None:
        """Keep a span for the trace."""
        with self._lock:
            if len(self._spans) < self._max_spans:
                self._spans.append(span)
            else:
                self._num_dropped += 1

    def on_count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl, stamped with the seconds since the start."""
        line = json.dumps(_plain({"elapsed_s": round(self._elapsed_s(), 3), **record}), allow_nan=False)
        self._append("metrics.jsonl", line)

    def log_once(self, record: Mapping[str, Any]) -> None:
        """Log a record in place of the one of the same event that an earlier process of a resumed run has left."""
        stamped = _plain({"elapsed_s": round(self._elapsed_s(), 3), **record})
        path = self.folder / "metrics.jsonl"
        with self._lock:
            others = [other for other in report_html.read_records(path) if other.get("event") != record["event"]]
            write_text(path, "".join(json.dumps(line) + "\n" for line in [*others, stamped]))

    def note(self, text: str) -> None:
        """Append a line with the time of day to run.log."""
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        self._append("run.log", f"{now} {text}")

    def close(self, status: str = "ok") -> None:
        """Write the trace and the page; once, however often it is called."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            spans = list(self._spans)
            num_dropped = self._num_dropped
            counters = dict(self._counters)
        self.log(
            {
                "event": "close",
                "status": status,
                "counters": counters,
                "num_spans": len(spans),
                "num_dropped_spans": num_dropped,
            }
        )
        trace = chrome_trace(spans, self._start_s) | {"otherData": {"num_dropped_spans": num_dropped}}
        write_text(self.folder / "trace.json", json.dumps(trace))
        write_html(self.folder)

    def discard(self) -> None:
        """Remove the folder, of a run that failed before its first step; what was there before stays."""
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody has put something there
            for path in self._new_folders:
                path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "ok"
        if kind is not None:
            status = "interrupted" if issubclass(kind, KeyboardInterrupt) else f"failed: {kind.__name__}"
            reason = " ".join(str(error).split())
            if reason:
                status += f": {reason}"
            self.note(status)
        self.close(status)

    def _elapsed_s(self) -> float:
        return self._earlier_s + time.perf_counter() - self._start_s

    def _append(self, name: str, line: str) -> None:
        # Opened for each line: a run that is killed leaves whole lines, and no file stays open.
        with self._lock, open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _start_files(
        self, description: Mapping[str, Any], resume: bool, is_kept: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        metrics = self.folder / "metrics.jsonl"
        records = report_html.read_records(metrics) if resume else []
        self._earlier_s = max((float(record.get("elapsed_s") or 0) for record in records), default=0.0)
        # The run is not over any more.
        records = [record for record in records if record.get("event") not in ("end", "close", "explain", "history")]
        records = [record for record in records if is_kept(record)]
        # Written again from what could be read, so that half a line of a killed run does not spoil the next.
        write_text(metrics, "".join(json.dumps(record) + "\n" for record in records))
        if not resume:
            write_text(self.folder / "run.log", "")
            for stale in ("trace.json", "report.html"):
                (self.folder / stale).unlink(missing_ok=True)
        write_text(self.folder / "config.json", json.dumps(_plain(description), indent=2) + "\n")


def is_complete(folder: Path) -> bool:
    """Whether a run folder has the report of a run that ended of itself."""
    records = report_html.read_records(folder / "metrics.jsonl")
    return any(record.get("event") == "close" and record.get("status") == "ok" for record in records)


def describe(config: Mapping[str, Any], changed: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the settings with what else a reader needs to repeat the run."""
    return {
        "format": 2,
        "config": config,
        "changed": changed,
        "command": [_without_folders(argument) for argument in sys.argv],
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a run's numbers; None for one run from its source."""
    versions_by_name: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        versions_by_name[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[package] = importlib.metadata.version(package)
    return versions_by_name


def _without_folders(argument: str) -> str:
    """Reduce absolute paths, which tell about a machine and not about a run, to their last part."""
    key, equals, value = argument.rpartition("=")
    parts: list[str] = []
    for part in value.split(","):
        is_absolute = PurePosixPath(part).is_absolute() or PureWindowsPath(part).is_absolute()
        parts.append(PureWindowsPath(part).name if is_absolute else part)
    return key + equals + ",".join(parts)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers out of tensors, null for what is not finite."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(spec.to_dict(value))
    to_list = getattr(value, "tolist", None)  # of tensors and arrays, of any dimension
    return _plain(to_list()) if callable(to_list) else str(value)


def chrome_trace(spans: Sequence[Span], start_s: float) -> dict[str, Any]:
    """Return spans as a Chrome trace, which chrome://tracing and ui.perfetto.dev open."""
    thread_names = dict.fromkeys(span.thread for span in spans)
    threads = {name: tid for tid, name in enumerate(thread_names, start=1)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": 1,
            "tid": threads[span.thread],
            "ts": round((span.start_s - start_s) * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
        }
        for span in spans
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def render_html(folder: Path) -> str:
    """Return the page of a run, built from the files in its folder alone."""
    return report_html.render(Path(folder))


def write_html(folder: Path) -> Path:
    """Write the page of a run into its folder again, and return where it is."""
    path = Path(folder) / "report.html"
    write_text(path, render_html(folder))
    return path


def write_text(path: Path, text: str) -> None:
    """Put a text in place of a file in one step."""
    with replacing(path) as file:
        file.write(text.encode())
