"""Paths of datasets and runs: the same from every working folder, and no name shadows another."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import hopline as hl
from hopline.budget.plan import Budget
from hopline.data.registry import locate
from hopline.run import train as run
from hopline.run.infer import predict
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import InferConfig, RunConfig, load_config
from tests.support.runs import command, fit, method, overrides, small


def test_a_dataset_of_the_data_root_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small().save(tmp_path / "here" / "data" / "mine")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOPLINE_DATA", str(tmp_path / "here" / "data"))
    settings = RunConfig(data="mine", model=ModelSpec(layers=2), method=method(), epochs=1, show=False)
    folder = run.train(settings).folder
    assert folder is not None
    again = run.train(dataclasses.replace(settings, resume=True)).folder
    assert again == folder
    folder = folder.resolve()
    monkeypatch.chdir(tmp_path / "there")
    predict(folder, InferConfig())
    assert (folder / "predictions.csv").exists()
    assert load_config(folder).data == "mine"


def test_paths_that_are_not_utf8_serve_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / os.fsdecode(b"r\xff")
    small().save(here / "small")
    monkeypatch.chdir(here)
    data = here / os.fsdecode(b"d\xff")
    settings = list(overrides())
    commands: list[list[object]] = [
        ["convert", here / "small", data],
        ["verify", data],
        ["train", data, *settings, f"out={here / 'run'}"],
        ["train", data, *settings, f"out={here / 'run'}", "resume=true"],
        ["infer", here / "run", f"folder={here / 'tables'}"],
        ["export", here / "run", here / "weights.pt"],
        ["report", here / "run"],
        ["train", data.name, "epochs=1", "model.layers=2", "method=historical", f"method.folder={here / 'tables'}"],
        ["partition", data, here / "shards", "shards=2"],
        ["train", here / "shards", *settings, f"out={here / 'sharded'}"],
    ]
    for words in commands:
        outcome = command(*map(str, words))
        assert outcome.status == 0, (words, outcome.err)
    assert r"r\udcff" in (here / "run" / "report.html").read_text("utf-8")
    assert hl.open(data).name == "d?"

    (here / "edges.csv").write_text("src,dst\n0,1\n")
    outcome = command("convert", str(here / "edges.csv"), str(here / "other"))
    assert "not in UTF-8" in outcome.err


# ---- a folder with the name of a built-in graph


@pytest.mark.parametrize("name", ["demo", "planted"])
def test_a_dataset_with_the_name_of_a_built_in_graph_is_not_mixed_up_with_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOPLINE_DATA", str(tmp_path / "root"))
    small().save(tmp_path / name)
    for ask in (hl.open, locate):
        with pytest.raises(ValueError, match=rf"'{name}' is a built-in graph.*type \./{name}"):
            ask(name)
    outcome = command("train", name, *overrides())
    assert f"type ./{name} for the dataset" in outcome.err
    assert hl.open(f"./{name}").num_nodes == 400
    small().save(tmp_path / "root" / name)
    monkeypatch.chdir(tmp_path / "root" / name)
    with pytest.raises(ValueError, match=f"type {tmp_path / 'root' / name} for the dataset"):
        hl.open(name)


def test_what_is_no_dataset_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for make in (Path.mkdir, Path.touch):
        path = tmp_path / "demo"
        make(path)
        outcome = command("train", "demo", *overrides(out=tmp_path / make.__name__))
        assert outcome.status == 0, outcome.err
        assert load_config(tmp_path / make.__name__).data == "demo"
        assert hl.open("demo").num_nodes == 60_000
        path.rmdir() if path.is_dir() else path.unlink()


# ---- run folders


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hopline.run.train.time.strftime", lambda form: "now")
    assert [run._new_folder("x").name for _ in range(3)] == ["x-now", "x-now-2", "x-now-3"]


def test_a_run_that_fails_at_once_leaves_no_folder_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small().save(tmp_path / "graph")
    monkeypatch.chdir(tmp_path)
    narrow = RunConfig(data="graph", model=ModelSpec(layers=2), method=method(), budget=Budget.of("1KiB"), show=False)
    with pytest.raises(ValueError, match="budget"):
        run.train(narrow)
    assert not (tmp_path / "runs").exists()


# ---- graphs of few nodes


@pytest.mark.parametrize("num_nodes", [1, 3, 7, 39])
@pytest.mark.parametrize("how", [hl.FullBatch(), hl.Historical()])
def test_a_graph_of_fewer_nodes_than_parts_is_trained_in_fewer(how: hl.extend.Method, num_nodes: int):
    edges = torch.tensor([[0] * num_nodes + [num_nodes - 1], [*range(num_nodes), 0]])  # a hub, and loops
    rows = torch.randn(num_nodes, 8, generator=torch.Generator().manual_seed(0))
    data = hl.from_edges(edges, num_nodes=num_nodes, x=rows, y=torch.arange(num_nodes) % 2)
    data = dataclasses.replace(data, splits={"train": torch.arange(num_nodes)}, num_classes=2)
    outcome = fit(data, how=how, epochs=3)
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_a_number_of_parts_that_was_given_is_followed_or_refused():
    data = small(num_nodes=20, num_edges=60, num_train=5, num_valid=4)
    with pytest.raises(ValueError, match=r"num_parts is 30: .*1 to 20"):
        fit(data, how=hl.Historical(num_parts=30))
    with pytest.raises(ValueError, match=r"num_shards=30 .* 20 nodes"):
        fit(data, how=hl.FullBatch(num_shards=30))


def test_symmetrize_is_followed_where_the_file_says_otherwise(tmp_path: Path):
    """Both by training and by the predictions of the run."""
    edges = np.array([[0, 1, 2, 3], [1, 2, 3, 4]])
    arrays = {"x": np.eye(5, dtype=np.float32), "y": np.array([0, 1, 0, 1, 0])}
    path = tmp_path / "once.npz"
    np.savez(path, edge_index=edges, meta=json.dumps({"edges": "each edge once"}), **arrays)
    options = ("split=0.4,0.3,0.3", "epochs=1", "model.hidden=4", "show=false")
    for typed, num_edges in (((), 8), (("symmetrize=true",), 8), (("symmetrize=false",), 4)):
        out = tmp_path / f"run{len(typed)}{num_edges}"
        assert command("train", f"data={path}", *options, *typed, f"out={out}").status == 0
        assert run.open_data(load_config(out)).num_edges == num_edges
