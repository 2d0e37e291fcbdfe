"""A run from its settings, what is read of one, and conversion."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
import torch_geometric.nn

import hopline as hl
from hopline.run import commands
from hopline.run import train as run
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import ConvertConfig, ExportConfig, RunConfig
from tests.support.runs import command, fit, labels, predictions, small, without

# ---- settings


@pytest.mark.parametrize("features", ["normalized", "standardized"])
def test_features_are_scaled_where_a_run_opens_its_data(config: RunConfig, features: Any):
    changed = dataclasses.replace(config, features=features)
    unscaled, ours = (run.open_data(c).x.read(torch.arange(400)) for c in (config, changed))
    expected = getattr(small(), features)().x.read(torch.arange(400))
    torch.testing.assert_close(ours, expected)
    assert not torch.equal(ours, unscaled)
    folder = run.train(changed).folder
    assert folder is not None
    assert predictions(folder).shape == (400,)


def test_settings_come_back_from_the_run_folder(config: RunConfig):
    schedule = hl.Schedule(name="cosine", warmup=1)
    changed = dataclasses.replace(config, clip_norm=1.5, patience=3, schedule=schedule, precision="bf16")
    run.train(changed)
    assert changed.out is not None
    assert run.load_config(changed.out) == changed


def test_without_out_the_run_folder_is_named_after_the_data(config: RunConfig, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    folder = run.train(dataclasses.replace(config, out=None)).folder
    assert folder is not None
    assert folder.parent == Path("runs")
    assert folder.name.startswith("planted-")
    assert (tmp_path / folder / "report.html").exists()


# ---- a split of one's own


@pytest.fixture
def unsplit_config(config: RunConfig, tmp_path: Path) -> RunConfig:
    """A run with split= on a graph without splits, in which some nodes have no label."""
    data = without(small(), "train", "valid", "test")
    data.labels[::9] = -1
    data.save(tmp_path / "graph")
    return dataclasses.replace(config, split=(0.5, 0.2, 0.3))


def test_a_run_draws_its_split_and_predicts_the_same_nodes(unsplit_config: RunConfig, tmp_path: Path):
    outcome = run.train(unsplit_config)
    data = hl.random_split(hl.open(tmp_path / "graph"), (0.5, 0.2, 0.3))
    assert outcome.folder is not None
    is_right = predictions(outcome.folder, nodes="test") == labels(data, "test").numpy()
    assert is_right.mean() == pytest.approx(outcome.test)
    other_seed = run.open_data(dataclasses.replace(unsplit_config, seed=5))
    assert torch.equal(other_seed.splits["train"], data.splits["train"])
    assert commands.export(outcome.folder, tmp_path / "weights.pt", ExportConfig())[0].exists()


def test_a_run_is_resumed_on_its_own_split_alone(unsplit_config: RunConfig, tmp_path: Path):
    whole = run.train(dataclasses.replace(unsplit_config, epochs=3, out=tmp_path / "whole"))
    run.train(unsplit_config)
    longer = dataclasses.replace(unsplit_config, epochs=3, resume=True)
    with pytest.raises(ValueError, match=r"training nodes .*178 .*195"):
        run.train(dataclasses.replace(longer, split=(0.55, 0.2, 0.25)))
    assert [epoch.loss for epoch in run.train(longer).history] == [epoch.loss for epoch in whole.history]


def test_a_run_with_a_drawn_split_predicts_a_graph_without_labels(unsplit_config: RunConfig, tmp_path: Path):
    folder = run.train(unsplit_config).folder
    assert folder is not None
    dataclasses.replace(without(small(), "train", "valid", "test"), y=None).save(tmp_path / "new")
    assert predictions(folder, data=str(tmp_path / "new")).shape == (400,)
    with pytest.raises(ValueError, match="has no labels"):
        predictions(folder, data=str(tmp_path / "new"), nodes="test")
    assert command("partition", tmp_path / "graph", tmp_path / "shards", "shards=2", "how=range").status == 0
    everywhere = predictions(folder, data=str(tmp_path / "shards"))
    np.testing.assert_array_equal(everywhere, predictions(folder))
    with pytest.raises(ValueError, match=r"nodes=test .*data="):
        predictions(folder, data=str(tmp_path / "shards"), nodes="test")


def test_shards_are_split_before_they_are_cut(unsplit_config: RunConfig, tmp_path: Path):
    assert command("partition", tmp_path / "graph", tmp_path / "shards", "shards=1", "how=range").status == 0
    cut = dataclasses.replace(unsplit_config, data=str(tmp_path / "shards"))
    with pytest.raises(ValueError, match=r"in shards already.*hopline convert DATASET FOLDER split="):
        run.train(cut)
    with pytest.raises(ValueError, match=r"no training nodes: .*split="):
        run.train(dataclasses.replace(cut, split=0))
    with pytest.raises(ValueError, match=r"in shards.*drawn before"):
        hl.random_split(hl.shards.open(tmp_path / "shards"))


# ---- what is read of a run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{x", "config.json is damaged"),
        ("\xff\xfe", "config.json"),
        ("{}", "config.json is damaged"),
        ("[1]", "config.json is damaged"),
        ('{"format": 3, "config": 3, "changed": []}', "config.json is damaged"),
        ('{"format": 3, "config": {"epochs": "many"}, "changed": []}', "epochs=many is not valid"),
    ],
)
def test_damaged_settings_are_named(run_folder: Path, text: str, message: str):
    (run_folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        predictions(run_folder)


def test_a_run_of_the_library_is_not_one_of_the_command(tmp_path: Path):
    fit(small(), out=tmp_path)
    with pytest.raises(ValueError, match=r"hl\.Trainer in Python.*hl\.load\(.*model=model\)\.predict"):
        predictions(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        predictions(tmp_path)


def test_missing_weights_are_named(run_folder: Path):
    (run_folder / "best.pt").unlink()
    with pytest.raises(ValueError, match=r"no weights at .*best\.pt"):
        predictions(run_folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "is damaged"),
        (lambda path: torch.save(torch.nn.Linear(2, 2).state_dict(), path), "weights of this model: .*Missing key"),
        (lambda path: torch.save([1, 2], path), "weights of this model"),
    ],
    ids=["cut", "empty", "a module", "another model", "a list"],
)
def test_weights_that_do_not_fit_are_named(run_folder: Path, damage: Callable[[Path], object], message: str):
    damage(run_folder / "best.pt")
    for read in (predictions, lambda folder: commands.export(folder, folder / "weights.pt", ExportConfig())):
        with pytest.raises(ValueError, match=r"best\.pt is damaged .best\.pt\.sha256"):
            read(run_folder)
    assert not (run_folder / "weights.pt").exists()
    (run_folder / "best.pt.sha256").unlink()
    with pytest.raises(ValueError, match=rf"best\.pt\.sha256 .* weights={run_folder / 'best.pt'}"):
        predictions(run_folder)
    with pytest.raises(ValueError, match=rf"best\.pt .*{message}"):
        predictions(run_folder, weights=run_folder / "best.pt")


# ---- conversion


def test_a_dataset_is_replaced_only_when_that_is_asked_for(tmp_path: Path):
    edges = tmp_path / "edges.csv"
    edges.write_text("src,dst\n0,1\n1,2\n")
    commands.convert(str(edges), tmp_path / "out", ConvertConfig())
    with pytest.raises(ValueError, match=r"holds a dataset: .*overwrite=true"):
        commands.convert(str(edges), tmp_path / "out", ConvertConfig())
    replaced = commands.convert(str(edges), tmp_path / "out", ConvertConfig(overwrite=True, symmetrize=True))
    assert replaced.num_edges == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,9999999999999\n", "Node ids go up to 9999999999999 for only 1 edges: .*ids=map.*num_nodes="),
        ("", "There are no edges"),
    ],
)
def test_an_edge_list_whose_ids_are_no_numbers_of_nodes_is_refused(tmp_path: Path, rows: str, message: str):
    edges = tmp_path / "edges.csv"
    edges.write_text(f"src,dst\n{rows}")
    with pytest.raises(ValueError, match=message):
        commands.convert(str(edges), tmp_path / "out", ConvertConfig())
    assert [p.name for p in tmp_path.iterdir()] == ["edges.csv"]


@pytest.mark.parametrize("name", ["edges.csv", "graph.npz", "edges.npy", "edges.parquet"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name}: check the path"):
        commands.convert(str(tmp_path / name), tmp_path / "out", ConvertConfig())


@pytest.mark.parametrize("source", ["edges.csv", "graph.npz", "folder"])
def test_a_conversion_stores_a_split_and_is_called_as_its_folder(tmp_path: Path, source: str):
    edges = np.stack([np.arange(8), (np.arange(8) + 3) % 8])
    y = np.array([0, 1, -1, 1, 0, 1, 0, 1])
    np.savez(tmp_path / "graph.npz", edge_index=edges, x=np.eye(8, dtype=np.float32), y=y)
    (tmp_path / "edges.csv").write_text("src,dst\n" + "\n".join(f"{a},{b}" for a, b in edges.T))
    (tmp_path / "nodes.csv").write_text(
        "f,label\n" + "\n".join(f"{i / 2},{c if c >= 0 else ''}" for i, c in enumerate(y))
    )
    hl.from_edges(edges, y=y, folder=tmp_path / "folder")
    nodes = tmp_path / "nodes.csv" if source == "edges.csv" else None
    settings = ConvertConfig(nodes=nodes, split=(0.6, 0.2, 0.2))
    data = commands.convert(str(tmp_path / source), tmp_path / "mine", settings)
    expected = hl.random_split(hl.from_edges(edges, y=y))
    assert {k: v.tolist() for k, v in data.splits.items()} == {k: v.tolist() for k, v in expected.splits.items()}
    assert (data.name, data.meta["split"]) == ("mine", expected.meta["split"])
    again = commands.convert(str(tmp_path / "mine"), tmp_path / "mine", ConvertConfig(overwrite=True, split=(1, 0, 0)))
    assert {k: v.tolist() for k, v in again.splits.items()} == {"train": [0, 1, 3, 4, 5, 6, 7]}


# ---- going on, and weights in and out


def test_without_out_resume_takes_the_newest_folder_of_the_same_settings(
    config: RunConfig, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    anywhere = dataclasses.replace(config, out=None)
    first = run.train(anywhere).folder
    other = run.train(dataclasses.replace(anywhere, seed=3, out=Path("runs") / "graph-29990101-000000")).folder
    longer = run.train(dataclasses.replace(anywhere, epochs=3, resume=True))
    assert longer.folder == first != other
    assert longer.epochs == 3
    new = run.train(dataclasses.replace(anywhere, lr=0.5, resume=True))
    assert new.folder not in (first, other)


def test_exported_weights_begin_another_run_and_load_into_pyg(config: RunConfig, run_folder: Path, tmp_path: Path):
    file, _ = commands.export(run_folder, tmp_path / "out" / "weights.pt", ExportConfig())
    exported = torch.load(file, weights_only=True)
    best = torch.load(run_folder / "best.pt", weights_only=True)
    assert exported.keys() == best.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in best.items())
    data = hl.open(config.data)
    stock = torch_geometric.nn.GraphSAGE(data.num_features, 8, 2, data.num_classes)
    stock.load_state_dict(exported)  # PyG's names
    started = run.train(dataclasses.replace(config, out=tmp_path / "second", weights=file, lr=1e-12, epochs=1))
    assert started.valid == pytest.approx(best_valid(run_folder), abs=1e-9)


def best_valid(folder: Path) -> float:
    """The best validation metric of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max(r["metrics"]["accuracy"] for r in records if r["event"] == "evaluate" and r["split"] == "valid")


def test_weights_to_begin_with_that_do_not_fit_are_named(config: RunConfig, run_folder: Path, tmp_path: Path):
    wider = dataclasses.replace(
        config, model=ModelSpec(hidden=9, layers=2), weights=run_folder / "best.pt", out=tmp_path / "w"
    )
    with pytest.raises(ValueError, match="weights of this model"):
        run.train(wider)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_an_export_onto_a_full_disk_leaves_the_old_file_or_none(
    run_folder: Path, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(weights: Any, file: IO[bytes]) -> None:
        file.write(b"half")
        raise error

    kept, _ = commands.export(run_folder, tmp_path / "out" / "kept.pt", ExportConfig())
    before = kept.read_bytes()
    monkeypatch.setattr(torch, "save", full)
    for file in (kept, tmp_path / "out" / "new.pt"):
        with pytest.raises(ValueError, match=f"cannot write .*{file.name}"):
            commands.export(run_folder, file, ExportConfig())
    assert kept.read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["kept.json", "kept.pt"]
