"""The page of a run, rebuilt from files that are whole, damaged or missing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hopline.report_html import read_records, read_run, render

CONFIG = {"name": "cora-gcn", "method": {"kind": "sampled", "fanouts": [10, 5]}, "note": "<script>x</script>"}


def epoch(number: int, **changes: Any) -> dict[str, Any]:
    record = {
        "event": "epoch",
        "epoch": number,
        "loss": 1 / number,
        "lr": 0.01,
        "seconds": 2.0,
        "seeds_per_s": 50.0,
    }
    stages = {"sample": 0.5 * number, "gather": 1.0}
    return record | {"slowest_stage": "gather", "stages": stages, "counters": {"bytes.h2d": 2048}} | changes


def evaluation(number: int, split: str, value: float) -> dict[str, Any]:
    return {
        "event": "evaluate",
        "epoch": number,
        "split": split,
        "metrics": {"accuracy": value},
        "seconds": 0.1,
    }


END = {
    "event": "end",
    "best_epoch": 2,
    "reason": "no better for 5 epochs",
    "test": {"accuracy": 0.8125},
    "valid": {"accuracy": 0.79},
    "peak_rss_bytes": 3 * 2**29,
    "stages": [{"name": "sample", "calls": 7, "first_epoch_s": 0.5, "mean_s": 1.25, "std_s": 0.353}],
}
CLOSE = {
    "event": "close",
    "status": "ok",
    "counters": {"bytes.h2d": 6144, "cache.hits": 12},
    "num_dropped_spans": 0,
}
WHOLE = [r for n in (1, 2, 3) for r in (epoch(n), evaluation(n, "valid", 0.6 + n / 100))] + [END, CLOSE]


def write(folder: Path, records: list[dict[str, Any]], tail: str = "") -> Path:
    about = {"config": CONFIG, "versions": {"torch": "2.8", "numba": None}, "command": ["hopline", "train"]}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


def text(page: str) -> str:
    """What a reader sees, with single spaces."""
    body = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_a_finished_run_shows_results_times_counters_and_settings(tmp_path: Path):
    page = render(write(tmp_path, WHOLE))
    seen = text(page)
    assert "cora-gcn finished" in seen
    assert "ended: no better for 5 epochs" in seen
    assert "0.79 best valid accuracy (epoch 2)" in seen
    assert "0.8125 test accuracy" in seen
    assert "1.5 GiB peak host memory" in seen
    assert "gather slowest stage" in seen
    assert "sample 7 0.5 1.25 0.353" in seen
    assert "bytes.h2d 6 KiB 2 KiB" in seen
    assert "cache.hits 12 –" in seen
    assert "method.fanouts 10, 5" in seen
    assert "numba none" in seen
    assert re.findall(r"<figcaption>([^<]+)", page) == [
        "Loss",
        "Metrics",
        "Learning rate",
        "Seeds per second",
        "Seconds by stage",
    ]
    assert "loss, epoch 2: 0.5" in page
    assert 'class="notice"' not in page


def test_the_page_is_escaped_and_needs_no_network(tmp_path: Path):
    page = render(write(tmp_path, [*WHOLE, epoch(4, slowest_stage="<i>x</i>", stages={"<b>": 1.0})]))
    assert "<script" not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<i>x" not in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)


def test_a_killed_run_is_shown_as_far_as_it_got(tmp_path: Path):
    records = [epoch(1), evaluation(1, "valid", 0.5), epoch(2), evaluation(2, "valid", 0.4), epoch(3)]
    seen = text(render(write(tmp_path, records, tail='{"event": "epoch", "epo')))
    assert "not finished" in seen
    assert "it was killed" in seen
    assert "1 line(s) of metrics.jsonl could not be read" in seen
    assert "0.5 best valid accuracy (epoch 1)" in seen
    assert "3 epochs" in seen
    assert "sample – 0.5 1.25 0.3536" in seen, "stage statistics come from the epochs"
    assert "bytes.h2d 6 KiB 2 KiB" in seen, "and so do totals"


def test_one_epoch_says_that_there_is_no_mean(tmp_path: Path):
    seen = text(render(write(tmp_path, [epoch(1), CLOSE])))
    assert "Only one epoch was completed" in seen
    assert "sample – 0.5 – –" in seen


def test_no_metrics_at_all(tmp_path: Path):
    write(tmp_path, [])
    (tmp_path / "metrics.jsonl").unlink()
    page = render(tmp_path)
    assert "No epoch has been completed" in page
    assert "<svg" not in page


def test_a_failed_run_says_why(tmp_path: Path):
    close = CLOSE | {"status": "failed: RuntimeError: out of <memory>", "num_dropped_spans": 1234}
    page = render(write(tmp_path, [epoch(1), epoch(2), close]))
    assert '<span class="status failed">failed: RuntimeError: out of &lt;memory&gt;</span>' in page
    assert "leaves out 1,234 spans" in page


def test_values_that_are_null_are_left_out_of_curves(tmp_path: Path):
    page = render(write(tmp_path, [epoch(1), epoch(2, loss=None, stages=None), epoch(3), CLOSE]))
    assert "loss, epoch 1: 1" in page
    assert "loss, epoch 2" not in page


def test_a_resumed_run_counts_each_epoch_once_and_the_last_record_holds(tmp_path: Path):
    run = read_run(write(tmp_path, [epoch(1), epoch(2, loss=9.0), epoch(2, loss=0.25), epoch(3)]))
    assert [r["epoch"] for r in run.epochs] == [1, 2, 3]
    assert run.epochs[1]["loss"] == 0.25


def test_lines_that_are_not_records_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n\xff\xfe\n{"a": 2}\n{"a"')
    assert read_records(path) == [{"a": 1}, {"a": 2}]
    assert read_records(tmp_path / "absent") == []


@pytest.mark.parametrize("content", ["{", "[]", '{"config": 3}', "{}", ""])
def test_a_damaged_config_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json' is damaged"):
        render(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"config\.json' is missing: give the folder of a run"):
        render(tmp_path)
