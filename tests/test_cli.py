"""The command: what each one does, and that every bad input ends in one sentence and status 2."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import hopline as hl
from hopline import cli
from hopline.recipes import RECIPES, find_recipe
from hopline.run import train as run
from hopline.run.settings import load_config
from hopline.util.config import settings_of
from tests.support.runs import assert_refused, command, labels, overrides, records, small, without

COMMANDS = (
    "train",
    "plan",
    "infer",
    "test",
    "export",
    "convert",
    "partition",
    "verify",
    "datasets",
    "report",
    "doctor",
)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A small dataset in a folder."""
    small().save(tmp_path / "graph")
    return tmp_path / "graph"


def alter_array(folder: Path, array: str, place: Any, value: float) -> Path:
    """The folder with values of an array changed, against its manifest."""
    rows = np.load(folder / f"{array}.npy", mmap_mode="r+")
    rows[place] = value
    rows.flush()
    return folder


# ---- what the commands do


def test_train_infer_and_report_run_one_after_the_other(graph: Path, tmp_path: Path):
    out = tmp_path / "run"
    status, text, err = command("train", graph, *overrides(out=out, epochs=2))
    assert (status, err) == (0, "")
    (end,) = records(out, "end")
    assert (end["reason"], end["peak_rss_bytes"] > 1 << 20) == ("all 2 epochs are trained", True)
    assert re.search(rf"^test accuracy +{end['test']['accuracy']:.4f} \(exact", text, flags=re.MULTILINE)
    assert re.search(rf"^run folder +{re.escape(str(out))} ", text, flags=re.MULTILINE)
    assert text.count("seeds/s") == 2

    status, text, err = command("infer", out, "nodes=test")
    num_rows = small().splits["test"].numel()
    metric = f"accuracy: {end['test']['accuracy']:.4f}\n"
    written = f"predictions: {out / 'predictions.csv'} ({num_rows} rows; columns id, class, probability)\n"
    assert (status, text, err) == (0, written + metric, "")
    rows = (out / "predictions.csv").read_text().splitlines()[1:]
    right = np.array([int(row.split(",")[1]) for row in rows]) == labels(small(), "test").numpy()
    assert right.mean() == pytest.approx(end["test"]["accuracy"])
    assert [int(row.split(",")[0]) for row in rows] == small().splits["test"].tolist()

    (out / "report.html").unlink()
    status, text, err = command("report", out)
    assert (status, err) == (0, "")
    assert "<svg" in (out / "report.html").read_text()


def test_convert_and_verify(tmp_path: Path):
    source = tmp_path / "edges.csv"
    folder = tmp_path / "graph"
    source.write_text("src,dst\n0,1\n1,2\n2,0\n")
    status, text, _ = command("convert", source, folder, "symmetrize=true", "num_nodes=4")
    assert status == 0
    assert "4 nodes, 6 symmetric edges" in text
    status, text, err = command("verify", folder)
    assert (status, err) == (0, "")
    assert text.splitlines()[-1] == f"{folder} is intact"


def test_convert_says_which_columns_are_features(tmp_path: Path):
    (tmp_path / "e.tsv").write_text("src\tdst\n0\t1\n")
    (tmp_path / "n.csv").write_text(",id,age,score,label\n1,1,4,0.5,1\n0,0,3,0.1,0\n")
    status, text, err = command("convert", tmp_path / "e.tsv", tmp_path / "graph", f"nodes={tmp_path / 'n.csv'}")
    assert (status, "error" in err) == (0, False)
    assert "n.csv: features (2): age, score; not taken: '' (the index of a table)" in text
    status, text, _ = command(
        "convert", tmp_path / "e.tsv", tmp_path / "two", f"nodes={tmp_path / 'n.csv'}", "columns.features=age"
    )
    assert "n.csv: features (1): age; not taken: '' (the index of a table), score" in text


def test_partition_and_verify(graph: Path, tmp_path: Path):
    settings = ("shards=3", "how=range")
    folder = tmp_path / "shards"
    status, text, _ = command("partition", graph, folder, *settings)
    assert status == 0
    assert "in 3 parts, how=range" in text
    assert f"written to {folder}" in text
    status, text, err = command("verify", folder)
    assert (status, err) == (0, "")
    assert "3 shards of one cut" in text
    assert text.splitlines()[-1] == f"{folder} is intact"
    assert_refused(command("partition", graph, folder, *settings), f"{folder} is not empty", "overwrite=true")
    assert_refused(command("train", folder, "model.hidden=4", "devices=2"), "(devices=3)")
    assert command("partition", graph, folder, "shards=2", "how=labels", "overwrite=true").status == 0
    assert hl.shards.open_shard(folder, 1).num_shards == 2
    assert_refused(command("train", folder, "symmetrize=true"), "is in shards already")
    assert_refused(command("verify", folder / "shard-0"), "give the folder above it")


def test_a_plan_shows_every_method_and_auto_takes_one_that_fits(graph: Path, tmp_path: Path):
    status, text, err = command("plan", graph, *overrides(budget="1GiB"))
    assert (status, err) == (0, "")
    for name in ("sampled", "historical", "full_batch"):
        assert f"{name} plan: host " in text
    assert "recommended: method=" in text
    out = tmp_path / "run"
    auto = [f"out={out}", "model.layers=2", "model.hidden=8", "budget=1GiB", "method=auto"]
    status, text, err = command("train", graph, *auto, "epochs=1")
    assert (status, err) == (0, "")
    chosen = text.split("method=")[1].split(":")[0]
    assert type(run.load_config(out).method).__name__.lower() == chosen.replace("_", "")
    assert "plan: host " in text
    # What was chosen stays chosen when the run goes on.
    status, text, err = command("train", graph, *auto, "epochs=2", "resume=true")
    assert (status, err) == (0, "")
    assert "an epoch takes about" not in text


def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not(graph: Path, tmp_path: Path):
    out = tmp_path / "run"
    status, _, err = command("train", graph, *overrides(out=out, budget="1KiB", **{"budget.over_budget": "refuse"}))
    assert status == 2
    assert "does not fit 1 KiB on the host" in err
    assert not out.exists()
    status, _, err = command("plan", graph, *overrides(budget="1KiB"))
    assert (status, err.count("\n")) == (2, 1)
    assert "no method fits this budget" in err


def test_training_on_shards_is_training_on_the_dataset(graph: Path, tmp_path: Path):
    assert command("partition", graph, tmp_path / "shards", "shards=2", "how=random").status == 0
    for name, data, devices in (("whole", graph, 1), ("cut", tmp_path / "shards", 2)):
        settings = overrides(out=tmp_path / name, devices=devices, timeout_s=60, method__batch_size=20 // devices)
        outcome = command("train", data, *settings)
        assert outcome.status == 0, outcome.err
    whole, cut = (records(tmp_path / name, "epoch") for name in ("whole", "cut"))
    assert [e["loss"] for e in cut] == pytest.approx([e["loss"] for e in whole], abs=1e-5)
    scores = []
    for name, folder in (("whole", ()), ("cut", (f"folder={tmp_path / 'hidden'}",))):
        file = tmp_path / f"{name}.npy"
        # One process, all shards.
        outcome = command("infer", tmp_path / name, "write=scores", "nodes=test", f"out={file}", *folder)
        assert outcome.status == 0, outcome.err
        scores.append(np.load(file))
        outcome = command("export", tmp_path / name, tmp_path / f"{name}.pt")
        assert outcome.status == 0, outcome.err
    weights = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "cut")]
    assert weights[0].keys() == weights[1].keys()
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)


def test_datasets_lists_what_is_built_in_and_what_is_under_the_data_root(graph: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOPLINE_DATA", str(graph.parent))
    status, text, err = command("datasets")
    assert (status, err) == (0, "")
    assert "demo" in text
    assert "graph" in text
    assert "ogbn-products" in text


def test_doctor_looks_at_the_machine():
    status, text, err = command("doctor")
    assert (status, err) == (0, "")
    assert "numba" in text
    assert "BAD" not in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), RECIPES["demo"]()),
        (("epochs=3", "seed=4"), dataclasses.replace(RECIPES["demo"](), epochs=3, seed=4)),
        (("cora", "lr=1"), dataclasses.replace(RECIPES["cora"](), lr=1.0)),
        (("gas-gcn-cora", "seed=2"), dataclasses.replace(find_recipe("gas-gcn-cora")(), seed=2)),
        (("planted",), run.RunConfig(data="planted")),
    ],
)
def test_train_takes_a_recipe_or_a_dataset_and_overrides(
    arguments: tuple[str, ...], expected: run.RunConfig, monkeypatch: pytest.MonkeyPatch
):
    configs: list[run.RunConfig] = []

    def train(config: run.RunConfig) -> hl.Run:
        configs.append(config)
        return hl.Run(metric="accuracy")

    monkeypatch.setattr(run, "train", train)
    assert command("train", *arguments).status == 0
    assert configs == [expected]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_plainly():
    assert_refused(command("train", "demo", "device=cuda"), "device='cuda' is not here", "set device=cpu")
    assert_refused(command("train", "demo", "device=cuda", "devices=2"), "no GPU that torch can use", "set device=cpu")


def test_the_tables_of_historical_runs_are_one_line_of_the_help():
    text = command("train", "--help").out
    assert "gas-MODEL-DATASET" in text
    assert "gas-gcn-cora" not in text
    assert_refused(command("train", "gas-pna-reddit"), "'gas-pna-reddit'", "gas-gcn-reddit")


def test_settings_of_every_level_can_be_overridden(graph: Path, tmp_path: Path):
    more = {"model": "gcn", "method.fanouts": "10,10", "schedule": "step", "schedule.every": 1, "out": tmp_path / "run"}
    assert command("train", graph, *overrides(epochs=2, **more)).status == 0
    config = run.load_config(tmp_path / "run")
    assert (config.model.name, config.method.fanouts, config.schedule.every) == ("gcn", (10, 10), 1)
    first, second = records(tmp_path / "run", "epoch")
    assert second["lr"] == first["lr"] / 2


@pytest.mark.parametrize(
    ("name", "key"),
    [("train", "method.fanouts"), ("infer", "weights"), ("convert", "columns.src"), ("partition", "how")],
)
def test_keys_lists_every_setting_on_a_line_of_its_own(name: str, key: str):
    status, text, err = command(name, "--keys")
    assert (status, err) == (0, "")
    assert [line for line in text.splitlines() if re.match(rf"  {re.escape(key)}=\S+ +\w", line)]
    assert command(name, "anything", "--keys") == (status, text, err)


def test_keys_of_a_group_are_described_in_full():
    status, text, err = command("train", "--keys", "model")
    assert (status, err) == (0, "")
    assert "  model.act=relu\n      Activation after each hidden layer. ('relu' or 'elu')\n" in text
    assert "method." not in text
    for group in ("method", "historical", "method=historical"):
        status, text, err = command("train", "--keys", group)
        assert "method.lag=0" in text
        assert ("method.fanouts" in text) == (group == "method")
    assert_refused(command("train", "--keys", "modle"), "there is no group 'modle'", "Did you mean 'model'?")
    assert_refused(command("doctor", "--keys"), "hopline doctor has no settings")


def test_keys_fit_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    for name, settings in cli.SETTINGS.items():
        groups = {setting.group for setting in settings_of(settings)}
        for group in ([], *([group] for group in groups)):
            cli._print_keys(name, before=[], groups=group)
            assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [(), ("--help",), ("train", "--help")])
def test_help_is_shown(arguments: tuple[str, ...]):
    status, text, err = command(*arguments)
    assert (status, err) == (0, "")
    assert "Usage" in text
    assert all(name in text for name in COMMANDS if len(arguments) < 2)


def test_a_model_of_the_current_folder_can_be_named(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = "from hopline.run.models import make_model\nimport dataclasses\n\n"
    module += "def make(spec, data):\n    return make_model(dataclasses.replace(spec, name='mlp'), data)\n"
    (tmp_path / "my_models_of_a_test.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    outcome = command("train", graph, *overrides(model="my_models_of_a_test:make", out=tmp_path / "run"))
    assert outcome.status == 0, outcome.err


def test_settings_with_values_of_two_kinds_are_read_and_stored(graph: Path, tmp_path: Path):
    settings = overrides(split="0.5,0.2,0.3", evaluate="async", epochs=1, out=tmp_path / "run")
    settings = [*settings, "budget=1GiB", "budget.over_budget=cut_by_degree"]
    outcome = command("train", graph, *settings)
    assert outcome.status == 0, outcome.err
    config = load_config(tmp_path / "run")
    assert (config.split, config.evaluate) == ((0.5, 0.2, 0.3), "async")
    assert config.budget == hl.Budget(device="1GiB", over_budget="cut_by_degree")
    assert command("train", graph, *settings, "resume=true").status == 0


# ---- bad input: one sentence, status 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), ["no command 'trian'", "'train'"]),
        (("train", "--epochs"), ["No such option: --epochs"]),
        (("train", "demo", "epoch=3"), ["Did you mean 'epochs'?"]),
        (("train", "demo", "fanouts=3,3"), ["Did you mean 'method.fanouts'?"]),
        (("train", "demo", "epochs=many"), ["epochs=many", "an integer"]),
        (("train", "demo", "model=gat", "model.heads=8"), ["model.conv.heads"]),
        (("train", "demo", "split=0.6"), ["split=0.6 ", "3 numbers"]),
        (("train", "demo", "split=0.6,0.4,0.2"), ["0.6,0.4,0.2", "more than 1"]),
        (("train", "demo", "split=-1"), ["set split=0", "split=0.6,0.2,0.2"]),
        (("train", "demo", "evaluate=later"), ["evaluate=later", "'blocking' or 'async'"]),
        (("train", "demo", "budget=1GiB", "budget.over_budget=cut_by_dgree"), ["Did you mean 'cut_by_degree'?"]),
        (("convert", "demo", "out", "split=1"), ["split=1", "3 numbers"]),
        (("train", "demo", "method.fanouts=0,1"), ["fan-out", "-1"]),
        (("train", "demo", "method=sample"), ["method=sample "]),
        (("train", "demmo"), ["no dataset 'demmo'", "Did you mean 'demo'?"]),
        (("train", "no/such/folder"), ["no dataset folder no/such/folder"]),
        (("train", "missing.npz"), ["no file missing.npz"]),
        (("infer",), ["Missing argument 'RUN'"]),
        (("infer", "no/run"), ["no/run is not a run folder"]),
        (("infer", "no/run", "write=some"), ["write=some", "'classes' or 'probabilities'"]),
        (("report", "no/run"), ["no/run is not a run folder"]),
        (("verify", "no/folder"), ["no dataset folder no/folder"]),
        (("convert", "edges.csv"), ["hopline convert edges.csv FOLDER"]),
        (("convert", "no_edges.csv", "out"), ["no_edges.csv"]),
        (("partition", "demo", "shards=2"), ["hopline partition demo FOLDER"]),
        (("partition", "demo", "out"), ["hopline partition demo out shards=4"]),
        (("partition", "demo", "out", "--shard", "2"), ["type shard=VALUE"]),
        (("partition", "demo", "out", "--shards"), ["type shards=VALUE"]),
        (("partition", "demo", "out", "shards=2", "how=meits"), ["how=meits", "metis"]),
        (("datasets", "data_root=x"), ["data_root=x", "HOPLINE_DATA"]),
    ],
    ids=" ".join,
)
def test_what_is_mistyped_or_missing_is_named(
    arguments: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert_refused(command(*arguments), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("train", "graph", "method.fanouts=3"), "fanouts=(3,)"),
        (("train", "graph", "precision=fp16"), "Did you mean 'bf16'?"),
        (("train", "graph", "model.name=sage2"), "Did you mean 'sage'?"),
        (("train", "graph", "symmetrize=false"), "symmetrize"),
        (("train", "graph", "split=3"), "split 3"),
        (("train", "graph", "out=file.txt"), "file.txt is a file"),
        (("infer", "run", "nodes=valid2"), "valid2"),
        (("infer", "run", "hops=2"), "hops="),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_data_or_the_run_is_named(
    arguments: tuple[str, ...], word: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    if arguments[0] == "infer":
        assert command("train", graph, *overrides(out="run")).status == 0
    before = sorted(tmp_path.iterdir())
    assert_refused(command(*arguments, *(["model.layers=2"] if arguments[0] == "train" else [])), word)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("variable", ["HOME=/nonexistent", "TMPDIR=/nonexistent", "COLUMNS=x"])
def test_an_environment_that_a_run_does_not_need_may_be_wrong(
    variable: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(*variable.split("="))
    outcome = command("train", graph, *overrides(out=tmp_path / "run"))
    assert outcome.status == 0, outcome.err


def test_features_that_are_not_numbers_are_named(graph: Path, tmp_path: Path):
    alter_array(graph, "table.x", (slice(None), 2), np.nan)
    assert_refused(command("verify", graph), "table.x.npy is damaged")
    outcome = command("train", graph, *overrides(out=tmp_path / "run"))
    assert_refused(outcome, "nan in epoch 1", "hopline verify")


@pytest.mark.parametrize("label", [99, -1])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_label_out_of_range_is_named(graph: Path, tmp_path: Path, split: str, label: int):
    node = int(small().splits[split][5])
    alter_array(graph, "y", node, label)
    outcome = command("train", graph, *overrides(out=tmp_path / "run"))
    assert_refused(outcome, f"node {node} of split '{split}' has label {label}", "0 to 3")


def test_a_split_out_of_range_is_named(graph: Path, tmp_path: Path):
    alter_array(graph, "split.0.valid", 0, 4000)
    assert_refused(command("train", graph, *overrides(out=tmp_path / "run")), "Split 'valid' holds 4000")


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_dataset_without_seeds_is_refused(tmp_path: Path, how: str):
    data = without(small(), "train")
    if how == "empty":
        data.splits["train"] = data.splits["valid"][:0]
    data.save(tmp_path / "graph")
    for arguments in (("train", *overrides()), ("plan", *overrides()), ("train", "method=auto")):
        outcome = command(arguments[0], tmp_path / "graph", *arguments[1:], f"out={tmp_path / 'run'}")
        assert_refused(outcome, "split=0.6,0.2,0.2")


def test_a_full_disk_while_predicting_is_named(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert command("train", graph, *overrides(out=tmp_path / "run")).status == 0

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hopline.util.files.os.fsync", full)
    outcome = command("infer", tmp_path / "run", f"out={tmp_path / 'p.csv'}")
    assert_refused(outcome, f"cannot write {tmp_path / 'p.csv'} (No space left on device)")
    assert not list(tmp_path.glob("p.csv*"))


def test_a_full_disk_while_training_is_named(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from hopline.report.writer import Report

    plain = Report._append

    def full(self: Report, name: str, line: str) -> None:
        if "evaluate" in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / name))
        plain(self, name, line)

    monkeypatch.setattr(Report, "_append", full)
    outcome = command("train", graph, *overrides(out=tmp_path / "run"))
    assert_refused(outcome, "metrics.jsonl: No space left on device", "the free space")


def test_an_error_of_the_library_itself_has_another_status(monkeypatch: pytest.MonkeyPatch):
    def broken(config: run.RunConfig) -> hl.Run:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(run, "train", broken)
    status, _, err = command("train")
    assert (status, err) == (1, "error: ZeroDivisionError: ours (run again with --debug for the traceback)\n")


def test_an_interruption_has_its_own_status(monkeypatch: pytest.MonkeyPatch):
    def interrupted(config: run.RunConfig) -> hl.Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    status, _, err = command("train")
    assert status == 130
    assert err == "interrupted\n"


# ---- as a process


def test_as_a_process_it_fails_in_words_shows_tracebacks_and_can_be_interrupted(tmp_path: Path, graph: Path):
    python = [sys.executable, "-m", "hopline", "train", str(graph)]
    debug = subprocess.run([*python, "epoch=3", "--debug"], capture_output=True, text=True, check=False)
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert "Unknown key 'epoch'" in debug.stderr

    endless = [*python, *overrides(out=tmp_path / "run", epochs=10**6, **{"method.workers": 2})]
    process = subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "last.pt").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.endswith("interrupted by SIGINT. To resume, type the same command with resume=true\n")
    assert not any(child.is_running() for child in children)
    assert records(tmp_path / "run", "end")[0]["reason"].startswith("Interrupted: SIGINT")
    assert records(tmp_path / "run", "close")[0]["status"].startswith("interrupted: SIGINT")


@pytest.mark.parametrize("path", ["edges.csv", "./edges.csv"])
def test_a_list_of_edges_leads_to_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    monkeypatch.chdir(tmp_path)
    Path("edges.csv").write_text("src,dst\n0,1\n")
    assert_refused(command("train", path), "hopline convert edges.csv FOLDER")
