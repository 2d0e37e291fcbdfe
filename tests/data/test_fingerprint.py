"""Checksums of datasets and models: results of other data or of another model are never reused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv

import hopline as hl
from hopline import infer
from hopline.core.graph import Graph
from hopline.core.partition import make_partition
from hopline.data import fingerprint
from hopline.data.fingerprint import contents_of
from hopline.inference.over_shards import exact_rows as exact_on_shards
from hopline.shards import write as cut
from hopline.shards.all_shards import AllShards
from hopline.shards.shard import shard_name
from hopline.shards.verify import verify_shards
from hopline.tables import CachedTable, SparseTable, TensorTable
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.runs import fit, method, small

DATA = dataset_of(random_graph(60, 300, loops=True, weight=True), randn(60, 5).float())


def replace_edges(data: hl.Dataset, **changes: Tensor) -> hl.Dataset:
    """The dataset with some edge arrays, or `indices`, replaced."""
    graph = data.graph
    edge = {name: changes.get(name, array) for name, array in graph.edge.items()}
    return dataclasses.replace(data, graph=Graph(graph.indptr, changes.get("indices", graph.indices), edge))


def change_features(data: hl.Dataset) -> hl.Dataset:
    """The dataset with one number of its features changed by 1e-3."""
    rows = data.x.read(torch.arange(data.num_nodes)).clone()
    rows[-1, -1] += 1e-3
    return dataclasses.replace(data, tables={"x": TensorTable(rows)})


CHANGES: dict[str, tuple[str, Callable[[hl.Dataset], hl.Dataset]]] = {
    "features": ("table 'x'", change_features),
    "edges": ("edges", lambda data: replace_edges(data, indices=data.graph.indices.flip(0))),
    "weights": ("edge array 'weight'", lambda data: replace_edges(data, weight=data.graph.edge["weight"] * 2)),
    "labels": ("labels", lambda data: dataclasses.replace(data, y=2 - data.labels)),
}
"""By what is changed: the name of the array, and the change, which leaves names and sizes as they are."""


def save_and_open(data: hl.Dataset, folder: Path) -> hl.Dataset:
    """The dataset, saved to a folder and opened from it."""
    data.save(folder)
    return hl.open(folder)


# ---- of data


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_changes_the_checksum_of_its_array_alone(name: str):
    array, change = CHANGES[name]
    before = contents_of(DATA)
    after = contents_of(change(DATA))
    assert [key for key in before if before[key] != after[key]] == [array]


def test_a_folder_has_the_checksums_of_what_was_saved_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sparse = SparseTable(torch.arange(61), torch.zeros(60, dtype=torch.int64), torch.rand(60), 4)
    data = dataclasses.replace(DATA, tables={**DATA.tables, "s": sparse})
    expected = contents_of(data)
    opened = save_and_open(data, tmp_path / "graph")

    def reads(rows: Any) -> int:
        raise AssertionError("an array was read")

    monkeypatch.setattr(fingerprint, "checksum", reads)
    assert contents_of(opened) == expected
    assert list(expected) == ["edges", "edge array 'weight'", "table 'x'", "table 's'", "labels"]


def test_arrays_are_read_once_and_again_when_they_were_changed(monkeypatch: pytest.MonkeyPatch):
    rows = randn(60, 5)
    real = fingerprint.checksum
    read = list[int]()
    data = dataclasses.replace(DATA, tables={"x": TensorTable(rows)})
    first = contents_of(data)
    monkeypatch.setattr(fingerprint, "checksum", lambda rows: (read.append(1), real(rows))[1])
    assert contents_of(data) == first
    assert not read
    rows[3] += 1
    assert contents_of(data)["table 'x'"] != first["table 'x'"]
    assert len(read) == 1


def test_an_array_made_in_inference_mode_is_read_each_time():
    with torch.inference_mode():
        rows = randn(60, 5)
    data = dataclasses.replace(DATA, tables={"x": TensorTable(rows)})
    first = contents_of(data)
    with torch.inference_mode():
        rows[3] += 1
    assert contents_of(data)["table 'x'"] != first["table 'x'"]


def test_a_table_without_one_tensor_has_the_checksum_of_its_rows():
    rows = randn(60, 5)
    cached = CachedTable(TensorTable(rows), torch.arange(4))
    assert cached.storage() is None
    ours, plain = (contents_of(dataclasses.replace(DATA, tables={"x": t})) for t in (cached, TensorTable(rows)))
    assert ours == plain


# ---- inference in a folder


@pytest.mark.parametrize("name", CHANGES)
def test_inference_is_not_resumed_with_other_data(name: str, tmp_path: Path):
    model = hl.nn.GNN([GCNConv(5, 4), GCNConv(4, 3)])
    expected = infer.exact(model, DATA, folder=tmp_path / "rows")
    assert torch.equal(infer.exact(model, DATA, folder=tmp_path / "rows"), expected)
    array, change = CHANGES[name]
    with pytest.raises(ValueError, match=f"another inference .other {array}"):
        infer.exact(model, change(DATA), folder=tmp_path / "rows")


def test_inference_is_not_resumed_with_another_model(tmp_path: Path):
    model = hl.nn.GNN([SAGEConv(5, 4), SAGEConv(4, 3)])
    infer.exact(model, DATA, folder=tmp_path / "rows")
    for change in ({"act": "elu"}, {"residual": True}, {"convs": [SAGEConv(5, 4, aggr="max"), SAGEConv(4, 3)]}):
        options: dict[str, Any] = {"convs": [SAGEConv(5, 4), SAGEConv(4, 3)], **change}
        other = hl.nn.GNN(**options)
        other.load_state_dict(model.state_dict())
        with pytest.raises(ValueError, match=r"another inference \(other model\)"):
            infer.exact(other, DATA, folder=tmp_path / "rows")
    with pytest.raises(ValueError, match=r"another inference \(other weights\)"):
        infer.exact(model.double(), DATA, folder=tmp_path / "rows")  # another precision


def write_shards(data: hl.Dataset, folder: Path) -> Path:
    """Cut a dataset into two shards."""
    cut.cut(data, make_partition(data.graph, 2, "range"), folder)
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_shards_of_other_data_are_of_another_cut(name: str, tmp_path: Path):
    one = write_shards(DATA, tmp_path / "one")
    other = write_shards(CHANGES[name][1](DATA), tmp_path / "other")
    model = hl.nn.GNN([GCNConv(5, 4), GCNConv(4, 3)])
    exact_on_shards(model, AllShards(one), folder=tmp_path / "rows")
    with pytest.raises(ValueError, match="other cut of the dataset"):
        exact_on_shards(model, AllShards(other), folder=tmp_path / "rows")
    (one / shard_name(1)).rename(tmp_path / "gone")
    (other / shard_name(1)).rename(one / shard_name(1))
    with pytest.raises(ValueError, match="of another cut"):
        verify_shards(one)


# ---- going on with a run


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_is_not_resumed_with_other_data(name: str, tmp_path: Path):
    data = small()
    weight = torch.ones(data.num_edges)
    data = dataclasses.replace(data, graph=Graph(data.graph.indptr, data.graph.indices, {"weight": weight}))
    data = dataclasses.replace(data, y=data.labels.clamp(max=2))
    fit(data, out=tmp_path / "run")
    array, change = CHANGES[name]
    with pytest.raises(ValueError, match=f"other data: {array}"):
        fit(change(data), out=tmp_path / "run", resume=True, epochs=3)
    assert fit(data, out=tmp_path / "run", resume=True, epochs=3).epochs == 3


def test_a_run_of_a_module_that_counts_its_calls_is_resumed(tmp_path: Path):
    class Counting(hl.nn.GNN):
        calls = 0

        def encode(self, *args: Any) -> Any:
            self.calls += 1
            return super().encode(*args)

    data = small()

    def model() -> hl.nn.GNN:
        return Counting([SAGEConv(8, 4), SAGEConv(4, 4)])

    fit(data, model(), method(), out=tmp_path / "run")
    assert fit(data, model(), method(), out=tmp_path / "run", resume=True, epochs=3).epochs == 3
