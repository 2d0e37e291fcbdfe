"""A finished run on other data: right, or refused by name.

Every case below changes the data in one way. Where the change does not matter, the scores must be those of plain PyG
on the features as the training data would have had them. Else the run refuses the data, and says what to type.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.run import train as run
from hopline.run.infer import evaluate, predict
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import EvaluateConfig, InferConfig, RunConfig
from tests.support.helpers import twin
from tests.support.runs import assert_refused, command, sage

NUM_NODES = 90
CLASSES = ("cat", "dog", "fish")
Row = dict[str, Any]


def node_rows() -> list[Row]:
    """Nodes with two numbers, a bool and a class that the numbers tell."""
    draw = random.Random(3)
    rows = []
    for i in range(NUM_NODES):
        kind = i % 3
        row = {"id": f"n{i}", "size": draw.gauss(100 + 60 * kind, 20), "age": draw.gauss(-kind, 0.5)}
        rows.append(row | {"is_new": draw.random() < 0.2 + 0.3 * kind, "label": CLASSES[kind]})
    return rows


def edge_rows() -> list[Row]:
    draw = random.Random(4)
    return [
        {"src": f"n{i}", "dst": f"n{draw.randrange(NUM_NODES)}", "weight": draw.uniform(0.5, 2)}
        for i in range(NUM_NODES)
        for _ in range(3)
    ]


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def dataset(folder: Path, nodes: list[Row], edges: list[Row] | None = None, **options: Any) -> hl.Dataset:
    """A dataset from two CSV files, as a user would convert it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"ids": "map", "symmetrize": True, "columns": hl.Columns(edge=("weight",))} | options
    edge_file = write(folder / "edges.csv", edges or edge_rows())
    return hl.from_csv(edge_file, write(folder / "nodes.csv", nodes), **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with standardised features and edge weights, of `hopline train`."""
    folder = tmp_path_factory.mktemp("trained")
    dataset(folder, node_rows(), split_shares=(0.5, 0.2, 0.3)).save(folder / "data")
    config = RunConfig(
        data=str(folder / "data"),
        features="standardized",
        model=ModelSpec(name="gcn", hidden=8, layers=2),
        method=hl.Sampled(fanouts=(-1, -1), workers=0),
        epochs=8,
        lr=0.05,
        out=folder / "run",
        show=False,
    )
    run.train(config)
    return folder / "run"


def plain_scores(trained: Path, nodes: list[Row], edges: list[Row]) -> dict[str, torch.Tensor]:
    """By id: scores of plain PyG, with features as the training data had them."""
    training = torch.tensor([[row["size"], row["age"], float(row["is_new"])] for row in node_rows()])
    x = torch.tensor([[float(row["size"]), float(row["age"]), float(row["is_new"])] for row in nodes])
    x = (x - training.mean(0)) / training.std(0)
    number = {row["id"]: i for i, row in enumerate(nodes)}
    ends = torch.tensor([[number[row["src"]], number[row["dst"]]] for row in edges]).view(-1, 2).T
    weight = torch.tensor([float(row["weight"]) for row in edges])
    loop = ends[0] == ends[1]
    edge_index = torch.cat([ends, ends.flip(0)[:, ~loop]], 1)
    model = hl.load(trained).model.eval()
    with torch.no_grad():
        out = model(x, edge_index, torch.cat([weight, weight[~loop]]))
    return {row["id"]: out[i] for i, row in enumerate(nodes)}


def changed(change: Callable[[Row], Row]) -> list[Row]:
    return [change(row) for row in node_rows()]


def without(*names: str) -> list[Row]:
    return changed(lambda row: {name: value for name, value in row.items() if name not in names})


def reordered(*names: str) -> list[Row]:
    return changed(lambda row: {name: row[name] for name in names})


def grown() -> list[Row]:
    """The same nodes, and ten new ones."""
    new = [{"id": f"m{i}", "size": 90.0 + i, "age": 0.1 * i, "is_new": bool(i % 2), "label": "cat"} for i in range(10)]
    return [*node_rows(), *new]


NEW_EDGES = [*edge_rows(), *({"src": f"m{i}", "dst": f"n{i}", "weight": 1.0} for i in range(10))]
ONE_NODE = [node_rows()[0]]
LOOP = [{"src": "n0", "dst": "n0", "weight": 1.0}]

RIGHT: dict[str, tuple[list[Row], list[Row]]] = {
    "the same": (node_rows(), edge_rows()),
    "columns in another order": (reordered("id", "is_new", "label", "age", "size"), edge_rows()),
    "a label first": (reordered("label", "age", "size", "is_new", "id"), edge_rows()),
    "an extra column": (changed(lambda row: {**row, "height": 3.0}), edge_rows()),
    "an extra column first": (changed(lambda row: {"height": 3.0, **row}), edge_rows()),
    "no labels": (without("label"), edge_rows()),
    "some labels": (changed(lambda row: row | {"label": row["label"] if row["id"] < "n3" else ""}), edge_rows()),
    "one class": (changed(lambda row: row | {"label": "fish"}), edge_rows()),
    "another first class": (changed(lambda row: row | {"label": "ant" if row["id"] == "n0" else "dog"}), edge_rows()),
    "whole numbers": (changed(lambda row: row | {"size": round(row["size"])}), edge_rows()),
    "rows in another order": (node_rows()[::-1], edge_rows()),
    "edges in another order": (node_rows(), edge_rows()[::-1]),
    "other ids": (
        changed(lambda row: row | {"id": f"x-{row['id']}"}),
        [row | {"src": f"x-{row['src']}", "dst": f"x-{row['dst']}"} for row in edge_rows()],
    ),
    "grown": (grown(), NEW_EDGES),
    "other values": (changed(lambda row: row | {"size": 5 * row["size"] + 7}), edge_rows()),
    "one node": (ONE_NODE, LOOP),
    "a constant column": (changed(lambda row: row | {"age": 2.5}), edge_rows()),
}


@pytest.mark.parametrize("case", RIGHT)
def test_new_data_get_the_scores_of_plain_pyg(trained: Path, tmp_path: Path, case: str):
    nodes, edges = RIGHT[case]
    expected = plain_scores(trained, nodes, edges)
    ours = hl.load(trained).predict(dataset(tmp_path, nodes, edges), write="scores")
    assert list(ours) == ["id", "score cat", "score dog", "score fish"]
    assert sorted(ours["id"]) == sorted(expected)
    scores = np.stack([ours[f"score {name}"] for name in CLASSES], 1)
    np.testing.assert_allclose(scores, torch.stack([expected[name] for name in ours["id"]]), rtol=1e-4, atol=1e-5)


def directed(tmp_path: Path) -> hl.Dataset:
    return dataset(tmp_path, node_rows(), symmetrize=False)


def unweighted(tmp_path: Path) -> hl.Dataset:
    return dataset(tmp_path, node_rows(), columns=hl.Columns())


def standardized(tmp_path: Path) -> hl.Dataset:
    return dataset(tmp_path, changed(lambda row: row | {"size": 3 * row["size"]})).standardized()


REFUSED: dict[str, tuple[Callable[[Path], hl.Dataset], str]] = {
    "a column missing": (lambda path: dataset(path, without("age")), r"age(.|\n)*the run:  size \(number\), age"),
    "a column renamed": (
        lambda path: dataset(path, changed(lambda row: {("years" if k == "age" else k): v for k, v in row.items()})),
        r"for example age: convert it with(.|\n)*years \(number\)",
    ),
    "a bool as a number": (
        lambda path: dataset(path, changed(lambda row: row | {"is_new": float(row["is_new"])})),
        r"write true and false in is_new(.|\n)*is_new \(bool\)(.|\n)*is_new \(number\)",
    ),
    "no features": (lambda path: dataset(path, without("size", "age", "is_new")), r"has 0 features"),
    "standardised by its own numbers": (standardized, r"give the dataset as it was before standardized\(\)"),
    "one way": (directed, r"go one way.*symmetrize=true"),
    "without weights": (unweighted, r"no edge array 'weight'.*columns.edge=weight"),
    "another width without names": (
        lambda path: hl.from_edges(torch.tensor([[0, 1], [1, 0]]), x=torch.ones(2, 4), edge={"weight": torch.ones(2)}),
        r"has 4 features, and the run was trained on 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_do_not_fit_are_refused_by_name(trained: Path, tmp_path: Path, case: str):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        hl.load(trained).predict(make(tmp_path))


def test_data_without_names_are_read_by_position_and_that_is_said(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    named = dataset(tmp_path, node_rows())
    bare = dataclasses.replace(named, meta={})
    with caplog.at_level(logging.WARNING, "hopline"):
        ours = hl.load(trained).predict(bare, write="scores")
    assert "they are read as size, age, is_new" in caplog.text
    np.testing.assert_array_equal(ours["score cat"], hl.load(trained).predict(named, write="scores")["score cat"])


def test_what_is_left_out_is_named(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = dataset(tmp_path, changed(lambda row: {**row, "height": 3.0}))
    with caplog.at_level(logging.WARNING, "hopline"):
        hl.load(trained).predict(data)
    assert "left out: height" in caplog.text


EDGE_ARRAYS: dict[str, tuple[torch.nn.Module, list[str], list[str]]] = {
    "gcn": (hl.nn.GNN([GCNConv(3, 3)]), ["weight"], ["uses edge weights", "does not use 'attr', 'distance'"]),
    "sage": (hl.nn.GNN([SAGEConv(3, 3)]), [], ["does not use 'weight', 'attr', 'distance'"]),
    "gat": (
        hl.nn.GNN([GATConv(3, 3, edge_dim=2)]),
        ["attr"],
        ["uses edge features", "does not use 'weight', 'distance'"],
    ),
    "gat without edge features": (hl.nn.GNN([GATConv(3, 3)]), [], ["does not use 'weight', 'attr', 'distance'"]),
    "a module": (GCNConv(3, 3), ["weight"], ["uses edge weights", "does not use 'attr', 'distance'"]),
}


@pytest.mark.parametrize("case", EDGE_ARRAYS)
def test_a_run_says_which_edge_arrays_it_uses_and_asks_for_no_others(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, used, lines = EDGE_ARRAYS[case]
    arrays = {"weight": torch.rand(4), "attr": torch.rand(4, 2), "distance": torch.rand(4)}
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    options: dict[str, Any] = {"x": torch.rand(4, 3), "y": torch.tensor([0, 1, 2, 0]), "splits": {"train": [0, 1]}}
    data = hl.from_edges(edge_index, edge=arrays, **options)
    hl.Trainer(model, data, hl.Sampled(fanouts=(2,)), epochs=1, out=tmp_path).fit()
    printed = capsys.readouterr().out
    assert [line in printed for line in lines] == [True] * len(lines)
    assert ("data.without_edge_arrays()" in printed) == bool(used)
    saved = hl.load(tmp_path, model=model)
    assert list(saved.inputs.edge) == used
    fewer = hl.from_edges(edge_index, edge={name: arrays[name] for name in used}, **options)
    np.testing.assert_array_equal(saved.predict(fewer)["probability"], saved.predict(data)["probability"])


def test_edge_arrays_that_are_left_out_change_nothing(trained: Path, tmp_path: Path):
    data = str(trained.parent / "data")
    typed = [data, "model=gcn", "model.layers=1", "epochs=1", "edge_arrays=none", f"out={tmp_path / 'run'}"]
    assert "uses edge weights" not in command("train", *typed).out
    saved = hl.load(tmp_path / "run")
    given = hl.open(data)
    rows = given.x.read(torch.arange(NUM_NODES))
    expected = saved.model.eval()(rows, given.graph.edge_index()).softmax(1).max(1).values.detach()
    for other in (given, given.without_edge_arrays(), None):
        np.testing.assert_allclose(saved.predict(other)["probability"], expected, rtol=1e-5)


def test_shards_of_a_standardised_run_give_what_the_dataset_gives(trained: Path, tmp_path: Path):
    hl.shards.cut(hl.open(trained.parent / "data"), tmp_path / "shards", 2)
    expected = predict(trained, InferConfig(out=tmp_path / "whole.csv"))
    alone = predict(trained, InferConfig(data=str(tmp_path / "shards"), out=tmp_path / "alone.csv"))
    predict(trained, InferConfig(data=str(tmp_path / "shards"), devices=2, out=tmp_path / "ranks.csv"))
    assert expected is not None
    assert alone is not None
    assert alone.metrics == expected.metrics is not None
    whole, *others = (
        np.genfromtxt(tmp_path / f"{name}.csv", str, delimiter=",") for name in ("whole", "alone", "ranks")
    )
    for other in others:
        assert np.array_equal(other[:, :2], whole[:, :2]), "ids and classes"
        np.testing.assert_allclose(other[1:, 2].astype(float), whole[1:, 2].astype(float), rtol=1e-5)


def test_the_training_data_are_known_again(tmp_path: Path):
    """Gone, changed under the same path, or as they were."""
    data = dataset(tmp_path, node_rows(), split_shares=(0.5, 0.2, 0.3))
    data.save(tmp_path / "data")
    typed = ["model.layers=1", "epochs=1", "features=standardized", f"out={tmp_path / 'run'}"]
    assert command("train", tmp_path / "data", *typed).status == 0
    for name in ("infer", "test"):
        assert "not those that the run was trained on" not in command(name, tmp_path / "run").out

    changes = {
        "table 'x'": changed(lambda row: row | {"size": row["size"] + 1}),
        "labels": changed(lambda row: row | {"label": "cat" if row["id"] == "n1" else row["label"]}),
    }
    for what, nodes in changes.items():
        shutil.rmtree(tmp_path / "data")
        dataset(tmp_path, nodes, split_shares=(0.5, 0.2, 0.3)).save(tmp_path / "data")
        for name in ("infer", "test"):
            printed = command(name, tmp_path / "run").out
            assert f"which had other {what}: give data=" in printed
    shutil.rmtree(tmp_path / "data")
    for name in ("infer", "test"):
        assert_refused(command(name, tmp_path / "run"), "training data", "give data=")


def test_nodes_that_are_not_there_are_named(trained: Path, tmp_path: Path):
    (tmp_path / "ids.txt").write_text("n1\nn999\n")
    assert_refused(command("infer", trained, f"nodes={tmp_path / 'ids.txt'}"), "ids.txt", "n999", "data=")
    with pytest.raises(ValueError, match=r"mask must be \[90\].*not \[7\]"):
        hl.load(trained).predict(nodes=torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_files_without_labels_are_data_to_predict(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
):
    nodes = without("label") if kind == "missing" else changed(lambda row: row | {"label": ""})
    with caplog.at_level(logging.WARNING, "hopline"):
        data = dataset(tmp_path, nodes)
    (message,) = caplog.messages
    assert "nodes get no labels" in message
    assert not any(f"columns.label={name}" in message for name in ("size", "age", "is_new"))
    assert data.y is None
    assert len(hl.load(trained).predict(data)["class"]) == NUM_NODES
    with pytest.raises(ValueError, match="has no labels"):
        data.train_ids  # noqa: B018


# ---- the metric


def test_classes_are_compared_by_name(trained: Path, tmp_path: Path):
    saved = hl.load(trained)
    expected = saved.evaluate(split="all")
    assert expected["accuracy"] > 0.6
    # "ant" comes first, so every number of a class differs from the run's.
    nodes = changed(lambda row: row | {"label": "" if row["id"] == "n0" else row["label"]})
    data = dataset(tmp_path / "a", nodes)
    renumbered = dataclasses.replace(
        data, y=torch.where(data.labels < 0, -1, 2 - data.labels), meta=data.meta | {"classes": CLASSES[::-1]}
    )
    assert saved.evaluate(renumbered, "all") == saved.evaluate(data, "all")
    strange = dataset(tmp_path / "b", changed(lambda row: row | {"label": f"{row['label']}s"}))
    with pytest.raises(ValueError, match=r"cats, dogs, fishs: .*cat"):
        saved.evaluate(strange, "all")
    with pytest.raises(ValueError, match=r"has no labels"):
        saved.evaluate(dataset(tmp_path / "c", without("label")), "all")
    with pytest.raises(ValueError, match="classes of the run have names"):
        saved.evaluate(dataclasses.replace(data, meta={}), "all")


def test_the_test_of_the_run_is_the_test_of_the_command(trained: Path):
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (test,) = [record["metrics"] for record in records if record.get("split") == "test"]
    assert evaluate(trained, EvaluateConfig()) == pytest.approx(test)
    assert hl.load(trained).evaluate() == pytest.approx(test)
    printed = command("test", trained)
    assert f"test accuracy: {test['accuracy']:.4f}" in printed.out


# ---- files


def test_files_hold_ids_names_and_probabilities(trained: Path, tmp_path: Path):
    import pyarrow.parquet as parquet

    dataset(tmp_path / "new", node_rows()).save(tmp_path / "data")
    columns = hl.load(trained).predict(str(tmp_path / "data"))
    assert set(columns["class"]) <= set(CLASSES)
    settings: dict[str, Any] = {"data": str(tmp_path / "data")}
    written = predict(trained, InferConfig(out=tmp_path / "p.csv", **settings))
    assert written is not None
    assert (written.columns, written.num_rows) == (["id", "class", "probability"], NUM_NODES)
    assert written.metrics == pytest.approx(hl.load(trained).evaluate(str(tmp_path / "data"), "all"))
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == columns["id"].tolist()
    assert [row["class"] for row in rows] == columns["class"].tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], columns["probability"], rtol=1e-6)
    predict(trained, InferConfig(out=tmp_path / "p.parquet", write="probabilities", **settings))
    table = parquet.read_table(tmp_path / "p.parquet").to_pydict()
    assert list(table) == ["id", "probability cat", "probability dog", "probability fish"]
    np.testing.assert_allclose(np.sum([table[name] for name in list(table)[1:]], 0), 1, rtol=1e-5)
    best = np.max([table[name] for name in list(table)[1:]], 0)
    np.testing.assert_allclose(best, columns["probability"], rtol=1e-6)
    predict(trained, InferConfig(out=tmp_path / "p.npy", **settings))
    assert np.array(CLASSES)[np.load(tmp_path / "p.npy")].tolist() == columns["class"].tolist()


def test_nodes_come_from_a_file_of_the_users_ids(trained: Path, tmp_path: Path):
    dataset(tmp_path / "new", node_rows()).save(tmp_path / "data")
    every = hl.load(trained).predict(str(tmp_path / "data"))
    class_of = dict(zip(every["id"], every["class"], strict=True))
    (tmp_path / "ids.csv").write_text("id\nn40\nn3\nn77\n")
    predict(trained, InferConfig(data=str(tmp_path / "data"), nodes=str(tmp_path / "ids.csv"), out=tmp_path / "p.csv"))
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = [(row["id"], row["class"]) for row in csv.DictReader(file)]
    assert rows == [(name, class_of[name]) for name in ("n40", "n3", "n77")]
    (tmp_path / "ids.txt").write_text("n40\nn3\nn77\n")  # a line is an id, the first one too
    (tmp_path / "bare.csv").write_text("n40\nn3\n")
    predict(trained, InferConfig(data=str(tmp_path / "data"), nodes=str(tmp_path / "ids.txt"), out=tmp_path / "q.csv"))
    assert (tmp_path / "q.csv").read_text() == (tmp_path / "p.csv").read_text()
    with pytest.raises(ValueError, match="no column 'id', only n40"):
        predict(trained, InferConfig(data=str(tmp_path / "data"), nodes=str(tmp_path / "bare.csv")))
    np.save(tmp_path / "mask.npy", np.arange(NUM_NODES) < 3)
    with pytest.raises(ValueError, match=r"mask\.npy .*numpy\.flatnonzero\(mask\)"):
        predict(trained, InferConfig(data=str(tmp_path / "data"), nodes=str(tmp_path / "mask.npy")))
    (tmp_path / "ids.csv").write_text("id\nn40\nzz\n")
    with pytest.raises(ValueError, match=r"ids\.csv, row 1: node zz"):
        predict(trained, InferConfig(data=str(tmp_path / "data"), nodes=str(tmp_path / "ids.csv")))
    with pytest.raises(ValueError, match=r"nodes=nowhere .*all, train, valid or test"):
        predict(trained, InferConfig(nodes="nowhere"))


def test_embeddings_are_the_rows_of_the_last_hidden_layer(trained: Path):
    saved = hl.load(trained)
    rows: dict[int, torch.Tensor] = {}
    data = saved.fit()

    def keep(layer: int, ids: torch.Tensor, chunk: torch.Tensor) -> None:
        rows.setdefault(layer, torch.zeros(NUM_NODES, chunk.size(1)))[ids] = chunk

    hl.infer.exact(saved.model, data, keep=keep)
    ours = saved.predict(write="embeddings")
    np.testing.assert_array_equal(np.stack(list(ours.values())[1:], 1), rows[0].numpy())


def test_exported_weights_have_the_names_of_columns_and_classes_beside_them(trained: Path, tmp_path: Path):
    from safetensors.torch import load_file

    for file in (tmp_path / "a.pt", tmp_path / "b.safetensors"):
        assert command("export", trained, file).status == 0
        weights = torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
        best = torch.load(trained / "best.pt", weights_only=True)
        assert weights.keys() == best.keys()
        assert all(torch.equal(weights[name], best[name]) for name in best)
        described = json.loads(file.with_suffix(".json").read_text())
        assert (described["classes"], [name for name, _, _ in described["columns"]]) == (
            list(CLASSES),
            ["size", "age", "is_new"],
        )
    best_scores = hl.load(trained).predict(write="scores")["score cat"]
    exported_scores = hl.load(trained, weights=tmp_path / "b.safetensors").predict(write="scores")["score cat"]
    np.testing.assert_array_equal(exported_scores, best_scores)
    assert_refused(command("export", trained, tmp_path / "c.onnx"), "c.onnx must end in .pt or .safetensors")


def test_embeddings_of_nodes_are_not_given_to_others(tmp_path: Path):
    data = dataset(tmp_path / "a", node_rows(), split_shares=(0.5, 0.2, 0.3))
    data.save(tmp_path / "data")
    config = RunConfig(
        data=str(tmp_path / "data"),
        features="one_hot",
        model=ModelSpec(name="gcn", hidden=8, layers=2, linear=True),
        epochs=1,
        out=tmp_path / "run",
        show=False,
    )
    run.train(config)
    saved = hl.load(tmp_path / "run")
    assert len(saved.predict(data)["id"]) == NUM_NODES
    with pytest.raises(ValueError, match="give the nodes of the training data"):
        saved.predict(dataset(tmp_path / "b", node_rows()[::-1]))
    with pytest.raises(ValueError, match="embedding for each of its 90 nodes"):
        saved.predict(dataset(tmp_path / "c", grown(), NEW_EDGES))


def test_a_drawn_split_is_the_same_for_every_way_to_ask(tmp_path: Path):
    dataset(tmp_path / "a", node_rows(), split_shares=(0.3, 0.3, 0.4)).save(tmp_path / "data")
    model = ModelSpec(name="gcn", hidden=8, layers=2)
    settings: dict[str, Any] = {"epochs": 1, "out": tmp_path / "run", "show": False, "split": (0.6, 0.2, 0.2)}
    finished = run.train(RunConfig(data=str(tmp_path / "data"), model=model, **settings))
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved")
    written = predict(tmp_path / "run", InferConfig(data=moved, nodes="test", out=tmp_path / "p.csv"))
    assert written is not None
    assert written.metrics == {"accuracy": pytest.approx(finished.test)}
    assert evaluate(tmp_path / "run", EvaluateConfig(data=moved)) == {"accuracy": pytest.approx(finished.test)}
    assert len(hl.load(tmp_path / "run").predict(moved, "test")["id"]) == written.num_rows
    # The dataset itself, whose own split has other nodes than those that the run was not trained on.
    assert hl.load(tmp_path / "run").evaluate(hl.open(moved)) == {"accuracy": pytest.approx(finished.test)}


def test_nodes_without_any_edge_need_no_edge_arrays(trained: Path, tmp_path: Path):
    saved = hl.load(trained)
    (tmp_path / "edges.csv").write_text("src,dst,weight\n")
    nodes = write(tmp_path / "nodes.csv", node_rows()[:1])
    alone = hl.from_csv(tmp_path / "edges.csv", nodes, ids="map", symmetrize=True, columns={"edge": "weight"})
    loop = [{"src": "n0", "dst": "n0", "weight": 1.0}]
    with_loop = dataset(tmp_path / "loop", node_rows()[:1], loop)
    # GCN adds a loop of weight 1 where there is none.
    ours = saved.predict(alone, write="scores")
    expected = saved.predict(with_loop, write="scores")
    assert list(ours["id"]) == ["n0"]
    for name in list(expected)[1:]:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5)


def test_nodes_are_given_as_lists_arrays_and_masks(trained: Path):
    saved = hl.load(trained)
    expected = saved.predict(nodes=torch.tensor([3, 1]))["id"].tolist()
    assert (
        saved.predict(nodes=[3, 1])["id"].tolist() == saved.predict(nodes=np.array([3, 1]))["id"].tolist() == expected
    )
    assert saved.predict(nodes=torch.arange(NUM_NODES) < 2)["id"].tolist() == saved.predict(nodes=[0, 1])["id"].tolist()
    with pytest.raises(ValueError, match=r"write .*classes, probabilities, scores, embeddings"):
        saved.predict(write="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hl\.from_pyg\(data\)"):
        saved.predict(saved.fit().to_pyg())  # type: ignore[arg-type]


# ---- runs of Python


def test_a_run_of_python_asks_for_its_model_and_predicts_the_same(tmp_path: Path):
    data = dataset(tmp_path, node_rows(), split_shares=(0.5, 0.2, 0.3)).standardized()
    model = sage(data)
    hl.Trainer(model, data, hl.Sampled(fanouts=(5, 5)), epochs=2, show=False, out=tmp_path / "run").fit()
    with pytest.raises(ValueError, match=r"hl\.load\(folder, model=model\)"):
        hl.load(tmp_path / "run")
    saved = hl.load(tmp_path / "run", model=sage(data))
    raw = dataset(tmp_path, node_rows())
    expected = twin(model).eval()(data.x.read(torch.arange(NUM_NODES)), data.graph.edge_index())
    for given in (raw, data):
        ours = saved.predict(given, write="scores")
        scores = np.stack([ours[f"score {name}"] for name in CLASSES], 1)
        np.testing.assert_allclose(scores, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"hl\.Trainer in Python: give predict"):
        saved.predict()
    with pytest.raises(ValueError, match="weights of this model"):
        hl.load(tmp_path / "run", model=sage(data, hidden=5))
