"""`Report`: writes what a run does into its folder.

    config.json     settings, command, versions and machine, when the run begins
    metrics.jsonl   one record per line: epochs, evaluations, ..., while it runs
    run.log         lines with the time of day, while it runs
    trace.json      spans of all threads as a Chrome trace, when it closes
    report.html     the page, made from the files above when it closes

A run may be killed at any time. So each line is written at once and its file closed, and whole files are
replaced in one step. A resumed run continues metrics.jsonl and run.log.
"""

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
from hopline.report.settings import FORMAT
from hopline.util.config import to_dict
from hopline.util.files import replacing

if TYPE_CHECKING:
    from hopline.util.trace import Span

MAX_SPANS = 200_000
"""Most spans of a trace, which are kept in memory until the report closes."""
FILES = ("config.json", "metrics.jsonl", "run.log", "trace.json", "report.html")
PACKAGES = ("hopline", "torch", "torch-geometric", "numba", "numpy")


class Report:
    """Writes what a run does into its folder.

    A report listens to `util.trace` (`on_span`, `on_count`). All methods but `close` and `discard` may be
    called by any thread. As a context manager it closes itself, with the error if there is one.

    Args:
        folder: The run folder. It is created if it does not exist.
        config: The settings, as `to_dict` returns them.
        changed: Keys of the settings that differ from their defaults, such as "method.fanouts".
        inputs: The form of the training data (`data.inputs.Inputs`), for predictions. None: not known.
        contents: Checksums of the training data by array. None: not known.
        resume: Continue the records of the run that is in the folder. Else they are removed.
        is_kept: Says which records of that run stay.
        max_spans: Most spans of the trace. Further ones are only counted.

    Raises:
        ValueError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        changed: Sequence[str] = (),
        inputs: Mapping[str, Any] | None = None,
        contents: Mapping[str, str] | None = None,
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
            self._start_files(describe(config, changed, inputs, contents), resume, is_kept)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(
                f"Cannot write the run folder '{folder}' ({reason}): choose another with out=FOLDER."
            ) from error

    def on_span(self, span: Span) -> None:
        """Add a span to the trace."""
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
        """Append a record to metrics.jsonl.

        "elapsed_s", the seconds since the start of the run, is added.
        """
        line = json.dumps(_plain({"elapsed_s": round(self._elapsed_s(), 3), **record}), allow_nan=False)
        self._append("metrics.jsonl", line)

    def log_once(self, record: Mapping[str, Any]) -> None:
        """Log a record in place of one of the same event, which an earlier process of the run has written."""
        self.keep(lambda other: other.get("event") != record["event"])
        self.log(record)

    def keep(self, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Write metrics.jsonl anew, with the records that could be read and that `is_kept` accepts."""
        path = self.folder / "metrics.jsonl"
        with self._lock:
            records = [record for record in report_html.read_records(path) if is_kept(record)]
            write_text(path, "".join(json.dumps(record) + "\n" for record in records))

    def note(self, text: str) -> None:
        """Append a line with the time of day to run.log."""
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        self._append("run.log", f"{now} {text}")

    def close(self, status: str = "ok") -> None:
        """Write the last record, the trace and the page. Calls after the first do nothing.

        status: "ok", or why the run did not end in good order.
        """
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
        """Remove the files of a report, and the folders that it created.

        For a run that failed before its first step.
        """
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder with other files stays
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
        """Seconds since the start of the run, those of earlier processes included."""
        return self._earlier_s + time.perf_counter() - self._start_s

    def _append(self, name: str, line: str) -> None:
        # Opened for each line: a run that is killed leaves whole lines, and no file stays open.
        with self._lock, open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")

    def _start_files(
        self, description: Mapping[str, Any], resume: bool, is_kept: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Write config.json, whose contents are the description, and begin or continue the other files."""
        records = report_html.read_records(self.folder / "metrics.jsonl") if resume else []
        self._earlier_s = max((record.get("elapsed_s") or 0.0 for record in records), default=0.0)
        # Records of the end of the run are dropped: it continues. The file is written again in any case. Else the next
        # line would be appended to half a line of a killed run.
        of_end = ("end", "close", "explain", "history")
        self.keep(lambda record: resume and record.get("event") not in of_end and is_kept(record))
        if not resume:
            write_text(self.folder / "run.log", "")
            for stale in ("trace.json", "report.html"):
                (self.folder / stale).unlink(missing_ok=True)
        write_text(self.folder / "config.json", json.dumps(_plain(description), indent=2) + "\n")


def has_run(folder: Path) -> bool:
    """Whether a folder holds the records of a run."""
    return (folder / "metrics.jsonl").exists()


def is_complete(folder: Path) -> bool:
    """Whether a run folder holds the report of a run that ended without an error or a signal."""
    records = report_html.read_records(folder / "metrics.jsonl")
    return any(record.get("event") == "close" and record.get("status") == "ok" for record in records)


def describe(
    config: Mapping[str, Any],
    changed: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
    contents: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the contents of config.json: the settings, and what else a reader needs to repeat the run."""
    return {
        "format": FORMAT,
        "config": config,
        "changed": changed,
        "inputs": inputs,
        "contents": contents,
        "command": [_without_folders(argument) for argument in sys.argv],
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of `PACKAGES`.

    None for a package that is not installed, but runs from its source.
    """
    versions_by_name: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        versions_by_name[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[package] = importlib.metadata.version(package)
    return versions_by_name


def _without_folders(argument: str) -> str:
    """Reduce absolute paths in an argument to their last part. The rest tells about a machine, not a run."""
    key, equals, value = argument.rpartition("=")
    parts: list[str] = []
    for part in value.split(","):
        is_absolute = PurePosixPath(part).is_absolute() or PureWindowsPath(part).is_absolute()
        # PureWindowsPath splits at slashes of both kinds.
        parts.append(PureWindowsPath(part).name if is_absolute else part)
    return key + equals + ",".join(parts)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: lists for tensors, None for numbers that are not finite."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(to_dict(value))
    to_list = getattr(value, "tolist", None)  # tensors and arrays of any dimension have it
    return _plain(to_list()) if callable(to_list) else str(value)


def chrome_trace(spans: Sequence[Span], start_s: float) -> dict[str, Any]:
    """Return spans as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

    start_s: The time 0 of the trace, by the clock of the spans.
    """
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


def write_html(folder: Path) -> Path:
    """Write the page of a run into its folder, and return its path."""
    path = folder / "report.html"
    write_text(path, report_html.render(folder))
    return path


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in one step: readers see the old contents or the new ones."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # the name of a file may be no UTF-8
