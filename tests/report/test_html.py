"""The page of a run, rebuilt from files that are whole, damaged or missing."""

import itertools
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hopline.methods.historical.settings import Historical
from hopline.report.page import read_records, read_run, render
from hopline.report.settings import changed_keys
from hopline.report.writer import Report
from hopline.run.settings import RunConfig
from hopline.util.config import to_dict
from tests.support.runs import assert_refused, command

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
    record |= {"slowest_stage": "gather", "stages": stages, "counters": {"bytes.h2d": 2048}} | changes
    return {"work": record["stages"]} | record


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
    stored = {"format": 3, "config": CONFIG, "changed": []}
    stored |= {"versions": {"torch": "2.8", "numba": None}, "command": ["hopline", "train"]}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


def text(page: str) -> str:
    """What a reader sees, with single spaces."""
    body = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_a_finished_run_shows_results_times_counters_and_settings(tmp_path: Path):
    page = render(write(tmp_path, WHOLE))
    shown_text = text(page)
    assert "cora-gcn finished" in shown_text
    assert "ended: no better for 5 epochs" in shown_text
    assert "0.7900 best valid accuracy (epoch 2)" in shown_text
    assert "0.8125 test accuracy" in shown_text
    assert "1.5 GiB peak host memory" in shown_text
    assert "2 s median time per epoch" in shown_text
    assert "sample 500 ms 1.25 s 354 ms" in shown_text, "first epoch, mean and deviation of the later ones"
    assert "sample 7 500 ms 1.25 s 353 ms" in shown_text, "and the times of all stages, with calls"
    assert "bytes.h2d 6 KiB 2 KiB" in shown_text
    assert "cache.hits 12 –" in shown_text
    assert "method.fanouts 10,5" in shown_text
    assert "numba none" in shown_text
    assert re.findall(r"<figcaption>([^<]+)", page) == ["Loss", "Metrics", "Work by stage, in s"]
    assert "0.01 learning rate" in shown_text, "a constant is a tile, not a chart"
    assert "loss, epoch 2: 0.5" in page
    assert 'class="notice"' not in page


START = {
    "event": "start",
    "dataset": "papers",
    "num_nodes": 111_059_956,
    "num_edges": 1_615_685_872,
    "num_features": 128,
    "num_classes": 172,
    "num_seeds": 1_207_179,
    "model": "GNN",
    "layers": ["SAGEConv", "SAGEConv", "GATConv"],
    "num_parameters": 20_624,
    "method": {"kind": "sampled", "fanouts": [15, 10], "batch_size": 1024, "replace": False},
    "device": "cuda:0 (NVIDIA H200)",
    "num_ranks": 4,
}
PIPELINE = {
    "event": "explain",
    "shares": {"sample": 0.25, "forward": 0.75},
    "serial_s": 4.0,
    "bound": 0.8,
    "achieved": 0.9,
    "seconds": 3.6,
    "num_batches": 20,
    "workers": 2,
    "bottleneck": "forward",
    "sentence": "bottleneck: forward, 75% of the work",
}


def test_dataset_model_and_training_are_told(tmp_path: Path):
    shown_text = text(render(write(tmp_path, [START, *WHOLE])))
    facts = shown_text[shown_text.index("Data and model") :]
    assert "dataset papers num_nodes 111,059,956 num_edges 1,615,685,872 num_features 128 num_classes 172" in facts
    assert "layers SAGEConv,SAGEConv,GATConv num_parameters 20,624 method.kind sampled method.fanouts 15,10" in facts
    assert "device cuda:0 (NVIDIA H200) num_ranks 4" in facts


def test_the_parts_of_the_run_add_up_to_its_total(tmp_path: Path):
    stages = {"forward": 1.0, "checkpoint": 0.25, "evaluate.checkpoint": 0.5}
    records = [epoch(1, stages=stages), evaluation(1, "valid", 0.5), epoch(2, stages=stages)]
    page = render(write(tmp_path, [*records, CLOSE | {"elapsed_s": 6.0}]))
    shown_text = text(page)
    assert "6 s total time" in shown_text
    parts = "training 3.5 s 58% evaluation 100 ms 1.7% checkpoints 1.5 s 25% everything else 900 ms 15% total 6 s"
    assert parts in shown_text


def test_the_time_of_an_epoch_that_was_killed_and_resumed_counts(tmp_path: Path):
    """Its seconds hold those before the kill, which no stamp counts."""
    shown_text = text(render(write(tmp_path, [epoch(1), epoch(2, seconds=7.0), CLOSE | {"elapsed_s": 3.0}])))
    assert "9 s total time" in shown_text
    assert "training 9 s 100% evaluation 0 s 0% checkpoints 0 s 0% everything else 0 s 0% total 9 s" in shown_text


@pytest.mark.parametrize("config", [{"evaluate": "async"}, {"train": {"evaluate": "async"}}])
def test_asynchronous_evaluations_are_no_part_of_the_total(tmp_path: Path, config: dict[str, Any]):
    records = [epoch(1), evaluation(1, "valid", 0.5), epoch(2), evaluation(2, "test", 0.5), CLOSE | {"elapsed_s": 5.0}]
    write(tmp_path, records)
    (tmp_path / "config.json").write_text(json.dumps({"format": 3, "config": config, "changed": []}))
    shown_text = text(render(tmp_path))
    assert "evaluation 100 ms 2.0%" in shown_text
    assert "at the same time" in shown_text


def test_the_bottleneck_is_that_of_the_sentence_and_is_said_once(tmp_path: Path):
    page = render(write(tmp_path, [epoch(1, stages={"forward": 3.0}), epoch(2, stages={"sample": 9.0}), PIPELINE]))
    shown_text = text(page)
    assert "forward bottleneck" in shown_text
    assert "slowest" not in shown_text
    assert page.count(PIPELINE["sentence"]) == 1
    assert page.count("<h2>Pipeline</h2>") == 1
    assert "Stage times" not in shown_text


def test_a_constant_is_drawn_only_next_to_a_curve(tmp_path: Path):
    records = [epoch(n, loss=0.5, lr=0.1 / n, seeds_per_s=7.0) for n in (1, 2, 3)]
    tested = evaluation(3, "test", 0.7)
    page = render(write(tmp_path, [*records, *(evaluation(n, "valid", 0.6) for n in (1, 2)), tested]))
    assert re.findall(r"<figcaption>([^<]+)", page) == ["Learning rate", "Work by stage, in s"]
    assert "0.5 loss 7 seeds per second" in text(page), "the learning rate has a chart"
    page = render(write(tmp_path, [*records, *(evaluation(n, "valid", n / 10) for n in (1, 2)), tested]))
    assert "test accuracy, epoch 3: 0.7" in page


def test_work_is_shown_in_place_of_times_that_hold_waiting(tmp_path: Path):
    work = {"forward": 3.0, "sample": 1.0}
    spans = {"sample": 40.0, "wait": 8.0, "forward": 3.0}
    page = render(write(tmp_path, [*(epoch(n, stages=spans, work=work) for n in (1, 2, 3)), PIPELINE]))
    shown_text = text(page)
    assert "Work by stage, in s" in page
    assert "sample, epoch 2: 1<" in page
    assert "all stages, epoch 2: 4<" in page
    assert "sample 1 s 1 s 0 s 25%" in shown_text
    assert "forward bottleneck 3 s 3 s 0 s 75%" in shown_text, "the stage of the tile"
    assert "all stages, one after the other 4 s 100%" in shown_text
    assert "40 s" not in page
    assert "</i>wait" not in page
    assert "include waiting" not in shown_text


def test_a_stage_has_one_colour_in_the_chart_and_in_the_table(tmp_path: Path):
    stages = {f"stage{i}": 1.0 + i for i in range(15)}
    page = render(write(tmp_path, [epoch(1, stages=stages), epoch(2, stages=dict(reversed(stages.items())))]))
    colours: dict[str, set[str]] = {}
    for colour, name in re.findall(r'(--c\d+)\)"(?:></i>|><title>)(stage\d+)', page):
        colours.setdefault(name, set()).add(colour)
    assert [len(of_stage) for of_stage in colours.values()] == [1] * 15
    assert len(set.union(*colours.values())) == 15


def test_no_time_is_written_with_an_exponent_or_many_zeros(tmp_path: Path):
    stages = {"forward": 0.3, "move": 3.848e-05, "wait": 0.0004688}
    page = text(render(write(tmp_path, [epoch(n, stages=stages, seconds=0.31) for n in (1, 2, 3)])))
    assert "move 38.5 µs 38.5 µs 0 s" in page
    assert "wait 469 µs 469 µs 0 s" in page
    assert not re.search(r"\d[eE]-\d|0\.000", page)


def test_settings_that_were_changed_come_first(tmp_path: Path):
    write(tmp_path, WHOLE)
    config = RunConfig(lr=0.25, method=Historical(num_parts=70))
    stored = {"format": 3, "config": to_dict(config), "changed": changed_keys(config)}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    page = render(tmp_path)
    changed, unchanged = page[page.index("Changed settings") :].split("<details>")
    assert "lr 0.25 method.kind historical method.num_parts 70" in text(changed)
    assert "weight_decay 0.0" in text(unchanged)
    assert "num_parts" not in unchanged


def test_the_page_is_escaped_and_needs_no_network(tmp_path: Path):
    page = render(write(tmp_path, [*WHOLE, epoch(4, slowest_stage="<i>x</i>", stages={"<b>": 1.0})]))
    assert "<script" not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<i>x" not in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)


def test_a_killed_run_is_shown_as_far_as_it_got(tmp_path: Path):
    records = [epoch(1), evaluation(1, "valid", 0.5), epoch(2), evaluation(2, "valid", 0.4), epoch(3)]
    shown_text = text(render(write(tmp_path, records, tail='{"event": "epoch", "epo')))
    assert "not finished" in shown_text
    assert "it was killed" in shown_text
    assert "1 line(s) of metrics.jsonl" in shown_text
    assert "0.5000 best valid accuracy (epoch 1)" in shown_text
    assert "3 epochs" in shown_text
    assert "sample 500 ms 1.25 s 354 ms" in shown_text
    assert "bytes.h2d 6 KiB 2 KiB" in shown_text, "and so do totals"


def test_one_epoch_says_that_there_is_no_mean(tmp_path: Path):
    page = render(write(tmp_path, [epoch(1), CLOSE]))
    shown_text = text(page)
    assert "Only one epoch" in shown_text
    assert "1 loss 0.01 learning rate 50 seeds per second 1 epoch " in shown_text
    assert "sample 500 ms – – gather 1 s – –" in shown_text
    assert "<svg" not in page


def test_a_run_without_metrics_has_a_page(tmp_path: Path):
    write(tmp_path, [])
    (tmp_path / "metrics.jsonl").unlink()
    page = render(tmp_path)
    assert "No epoch" in page
    assert "<svg" not in page


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


PLAN = {"event": "plan", "totals": [{"place": "host", "promised_bytes": 9}], "items": []}


def test_damaged_records_give_a_page_or_name_the_file(tmp_path: Path):
    draw = random.Random(0)
    records = [*WHOLE, PLAN, {"event": "budget", "epoch": 1, "steps": 3}]
    content = "".join(json.dumps(record) + "\n" for record in records)
    wrong = ("null", "[]", "{}", '"x"', "-1", "1e999", "1" * 400, "[[[", "true", "\u2028", "\x00")
    refusals: list[str] = []
    for number in range(100):
        start = draw.randrange(len(content))
        damaged = content[:start] + draw.choice(wrong) + content[start + draw.choice((0, 1, 9, 200)) :]
        write(tmp_path, [], tail=damaged)
        try:
            assert render(tmp_path).endswith("</html>\n")
        except ValueError as error:
            refusals.append(str(error))
        if number % 10 == 0:  # a run that is resumed reads the same lines
            Report(tmp_path, {}, resume=True, is_kept=lambda record: record.get("epoch") != 9)
    assert len(refusals) < 50
    assert all("metrics.jsonl" in text for text in refusals)


def test_a_value_of_any_type_is_a_page_or_a_named_file(tmp_path: Path):
    refusals: list[str] = []
    for record in (*WHOLE[:2], END, CLOSE, PLAN):
        for key, value in itertools.product(record, (None, "x", 10**400, [3])):
            try:
                render(write(tmp_path, [epoch(1), record | {key: value}, epoch(2)]))
            except ValueError as error:
                refusals.append(str(error))
    assert refusals
    host = [{"place": "host"}]
    for lacking in ({"totals": [{"promised_bytes": 9}]}, {"totals": host}, {"items": host}):
        with pytest.raises(ValueError, match=r"metrics\.jsonl"):
            render(write(tmp_path, [epoch(1), PLAN | lacking, epoch(2)]))
    assert all("metrics.jsonl" in text for text in refusals)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, name: str):
    write(tmp_path, WHOLE)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is a folder: give a file"):
        render(tmp_path)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)  # to open it would wait for ever
    assert_refused(command("report", tmp_path), f"{name} is a pipe or a device: give a file")


@pytest.mark.parametrize("content", ["{", "[]", '{"config": 3}', "{}", ""])
def test_a_damaged_config_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        render(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a run folder"):
        render(tmp_path)
