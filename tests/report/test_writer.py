"""The files of a run folder: settings, records, trace and page."""

import html
import json
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.report import writer as module
from hopline.report.page import render
from hopline.report.writer import Report, write_html
from hopline.util.trace import Span, count, listen, span


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_config_holds_settings_versions_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/hopline", "train", "out=/home/me/runs/a", "data=b/c", "/x/y,C:\\z\\w,k"]
    )
    folder = tmp_path / "new" / "run"
    Report(folder, {"epochs": 3, "out": Path("a"), "clip": math.inf})
    stored = json.loads((folder / "config.json").read_text())
    assert stored["config"] == {"epochs": 3, "out": "a", "clip": None}
    assert stored["command"] == ["hopline", "train", "out=a", "data=b/c", "y,w,k"]
    assert stored["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stored["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(stored["versions"]) == {"python", *module.PACKAGES}
    assert stored["cpu_count"] == os.cpu_count()


def test_records_are_plain_numbers_and_stamped(tmp_path: Path):
    report = Report(tmp_path, {})
    report.log({"loss": torch.tensor(0.5), "bad": math.nan, "deep": {"far": [math.inf, np.float32(2)]}})
    report.log({"ids": torch.arange(2), "path": Path("x"), "flag": True, "none": None})
    first, second = records(tmp_path)
    assert 0 <= first.pop("elapsed_s") <= second.pop("elapsed_s")
    assert first == {"loss": 0.5, "bad": None, "deep": {"far": [None, 2.0]}}
    assert second == {"ids": [0, 1], "path": "x", "flag": True, "none": None}


def test_each_record_is_on_disk_at_once(tmp_path: Path):
    report = Report(tmp_path, {})
    for number in range(3):
        report.log({"n": number})
        assert records(tmp_path)[-1]["n"] == number


def test_notes_carry_the_time(tmp_path: Path):
    Report(tmp_path, {}).note("hello")
    (line,) = (tmp_path / "run.log").read_text().splitlines()
    day, clock, words = line.split(" ")
    assert (day.count("-"), clock.count(":"), words) == (2, 2, "hello")


def test_the_trace_has_one_row_per_thread_in_microseconds(tmp_path: Path):
    with Report(tmp_path, {}) as report, listen(report):
        with span("outer"):
            pass
        report.on_span(Span("exact", report._start_s + 0.5, 0.25, "gather-0"))
        count("rows", 2)
        count("rows", 3)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert set(names) == {threading.current_thread().name, "gather-0"}
    assert len(set(names.values())) == 2
    assert spans["exact"]["tid"] == names["gather-0"]
    assert (spans["exact"]["ts"], spans["exact"]["dur"]) == (pytest.approx(5e5), pytest.approx(2.5e5))
    assert spans["outer"]["dur"] > 0
    assert records(tmp_path)[-1]["counters"] == {"rows": 5}


def test_spans_are_bounded_and_the_dropped_counted(tmp_path: Path):
    with Report(tmp_path, {}, max_spans=10) as report, listen(report):
        for _ in range(25):
            with span("s"):
                pass
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 10
    assert trace["otherData"] == {"num_dropped_spans": 15}
    assert "leaves out 15 spans" in (tmp_path / "report.html").read_text()


def fail(folder: Path, error: BaseException) -> None:
    with Report(folder, {}) as report:
        report.log({"event": "epoch", "epoch": 1, "loss": 0.5})
        raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no\n<memory>"), "failed: RuntimeError: no <memory>"),
        (KeyboardInterrupt(), "interrupted"),
        (KeyboardInterrupt("SIGINT"), "interrupted: SIGINT"),
    ],
)
def test_a_failure_is_noted_and_everything_written(tmp_path: Path, error: BaseException, status: str):
    with pytest.raises(type(error)):
        fail(tmp_path, error)
    assert (tmp_path / "run.log").read_text().endswith(f" {status}\n")
    assert records(tmp_path)[-1]["status"] == status
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    state, _, problem = status.partition(": ")
    page = (tmp_path / "report.html").read_text()
    assert f">{state}</span>" in page
    assert (f'<p class="notice failed">{html.escape(problem)}</p>' in page) == bool(problem)


def test_close_works_once(tmp_path: Path):
    with Report(tmp_path, {}) as report:
        report.close()
        report.close()
    assert [r["event"] for r in records(tmp_path)] == ["close"]


def test_a_new_run_in_an_old_folder_starts_afresh(tmp_path: Path):
    with Report(tmp_path, {}) as old:
        old.log({"n": 1})
        old.note("old")
    Report(tmp_path, {}).log({"n": 2})
    assert [r["n"] for r in records(tmp_path)] == [2]
    assert (tmp_path / "run.log").read_text() == ""
    assert not (tmp_path / "report.html").exists()


def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path: Path):
    first = Report(tmp_path, {})
    first.log({"n": 1})
    first.note("first")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"n": 2, "elapsed_s": 500}\n{"n": 3, "ela')
    second = Report(tmp_path, {}, resume=True)
    second.log({"n": 4})
    assert [r["n"] for r in records(tmp_path)] == [1, 2, 4]
    assert records(tmp_path)[-1]["elapsed_s"] >= 500
    assert "first" in (tmp_path / "run.log").read_text()


def test_a_resumed_run_is_not_over(tmp_path: Path):
    with Report(tmp_path, {}) as first:
        first.log({"event": "epoch", "epoch": 1})
        first.log({"event": "end"})
    Report(tmp_path, {}, resume=True)
    assert [r["event"] for r in records(tmp_path)] == ["epoch"]


def test_a_resumed_run_has_one_start_and_the_time_of_the_run_before(tmp_path: Path):
    first = Report(tmp_path, {})
    first.log_once({"event": "start", "num_ranks": 1})
    first.log({"event": "epoch", "epoch": 1})
    first.log({"event": "close", "elapsed_s": 500.0})
    second = Report(tmp_path, {}, resume=True)
    assert [r["event"] for r in records(tmp_path)] == ["start", "epoch"], "kept until there is another"
    second.log_once({"event": "start", "num_ranks": 2})
    logged = records(tmp_path)
    assert [r["event"] for r in logged] == ["epoch", "start"]
    assert logged[-1]["num_ranks"] == 2
    assert logged[-1]["elapsed_s"] >= 500, "an interrupted epoch has taken time too"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder '.*file/run' .*out=FOLDER"):
        Report(tmp_path / "file" / "run", {})


def test_the_page_is_rebuilt_from_the_files_alone(tmp_path: Path):
    with Report(tmp_path, {"name": "mine"}) as report:
        report.log({"event": "epoch", "epoch": 1, "loss": 0.5})
    page = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    (tmp_path / "trace.json").unlink()
    assert write_html(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text() == page == render(tmp_path)
    assert "<b>0.5</b>" in page, "the loss"


def test_a_full_disk_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Report(tmp_path, {}).close()
    before = (tmp_path / "report.html").read_text()

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="full"):
        write_html(tmp_path)
    assert (tmp_path / "report.html").read_text() == before
    assert sorted(os.listdir(tmp_path)) == names


def test_threads_write_whole_lines(tmp_path: Path):
    with Report(tmp_path, {}) as report, listen(report), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: (report.log({"n": n}), count("c", 1)), range(100)))
    assert sorted(r["n"] for r in records(tmp_path)[:-1]) == list(range(100))
    assert records(tmp_path)[-1]["counters"] == {"c": 100}
