"""One process over all shards: the numbers of the whole graph, whatever is kept where."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GINEConv, SAGEConv

import hopline as hl
from hopline.core.partition import make_partition
from hopline.inference import layerwise_chunks, resumable
from hopline.inference.over_shards import AllShards, ShardChunks, StackedTable, exact_rows
from hopline.shards.write import cut
from hopline.tables import SparseTable, TensorTable
from tests.helpers import mlp, randn
from tests.inference.test_distributed import Alone
from tests.shards.test_write import rich

EVERYTHING = torch.arange(60)


@pytest.fixture(scope="module")
def whole() -> hl.Dataset:
    return rich()


@pytest.fixture(scope="module")
def shards(whole: hl.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "shards"
    cut(whole, make_partition(whole.graph, 3, "random", seed=1), folder)
    return folder


def model_of(kind: str) -> hl.nn.GNN:
    torch.manual_seed(2)
    options: dict[str, Any] = {}
    if kind == "gcn":
        options = {
            "encoder": torch.nn.Linear(4, 4),
            "initial_residual": 0.1,
            "jk": "cat",
            "head": torch.nn.Linear(8, 5),
        }
    made = {
        "sage": lambda: SAGEConv(4, 4),
        "gcn": lambda: GCNConv(4, 4),
        "gat": lambda: GATConv(4, 4),
        "gine": lambda: GINEConv(mlp(4, 6, 4), edge_dim=2),
    }[kind]
    return hl.nn.GNN([made(), made()], **options).double()


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gine"])
def test_all_nodes_and_some_are_those_of_the_whole_graph(kind: str, whole: hl.Dataset, shards: Path):
    model = model_of(kind)
    data = AllShards(shards)
    expected = hl.infer.exact(model, whole)
    for read in (
        exact_rows(model, data),
        exact_rows(model, data, chunk_edges=30),
        exact_rows(model, data, chunk_bytes=20000),
    ):
        torch.testing.assert_close(read(EVERYTHING), expected, rtol=1e-10, atol=1e-12)
    some = torch.tensor([41, 3, 3, 17])
    torch.testing.assert_close(exact_rows(model, data, some)(some), expected[some], rtol=1e-10, atol=1e-12)
    in_floats = exact_rows(model.float(), data)(EVERYTHING)
    torch.testing.assert_close(in_floats, expected.float(), rtol=1e-5, atol=1e-5)


def test_rows_are_computed_only_where_they_are_needed(whole: hl.Dataset, shards: Path, monkeypatch: Any):
    model = model_of("sage")
    seen = 0
    plain = model.layer

    def counting(l: int, state: Any, block: Any) -> Any:
        nonlocal seen
        seen += block.num_dst
        return plain(l, state, block)

    monkeypatch.setattr(model, "layer", counting)
    some = torch.tensor([5])
    exact_rows(model, AllShards(shards), some)
    sources = whole.graph.indices[whole.graph.indptr[5] : whole.graph.indptr[6]].long()
    assert seen == torch.cat([some, sources]).unique().numel() + 1


def test_a_shard_is_open_before_it_is_measured_what_a_few_nodes_take(shards: Path):
    data = AllShards(shards)
    work = ShardChunks(model_of("sage"), data, 1, layerwise_chunks.CPU, 1 << 22, None)
    data._opened = None
    few = work.probe_nodes(EVERYTHING)
    assert data._opened is not None
    first, stop = data.ptr[data._opened.rank : data._opened.rank + 2].tolist()
    assert ((few >= first) & (few < stop)).all()
    assert few.numel() > 1


def test_sparse_features_are_read_as_they_are_stored(whole: hl.Dataset, shards: Path):
    data = AllShards(shards)
    data.rows = StackedTable([data.shard(rank).tables["words"] for rank in range(3)])
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(7, 4, aggr="max"), GCNConv(4, 5)]).double()
    expected = hl.infer.exact(model, replace(whole, tables={"x": whole.tables["words"]}))
    torch.testing.assert_close(exact_rows(model, data)(EVERYTHING), expected, rtol=1e-10, atol=1e-12)


def test_stacked_tables_are_read_as_one():
    rows = torch.where(randn(9, 3) > 0, randn(9, 3), 0)
    ids = torch.tensor([8, 0, 4, 3, 3])
    mixed = StackedTable([SparseTable.from_dense(rows[:4]), TensorTable(rows[4:])])
    assert (mixed.shape, mixed.dtype) == ((9, 3), torch.float64)
    assert torch.equal(mixed.read(ids), rows[ids])
    assert mixed.read_csr(ids) is None
    sparse = StackedTable([SparseTable.from_dense(some) for some in rows.split([2, 0, 7])])
    for some in (ids, ids[:0]):
        found = sparse.read_csr(some)
        assert found is not None
        assert torch.equal(SparseTable(*found, 3).read(torch.arange(some.numel())), rows[some])


def test_a_folder_goes_on_where_it_was_left(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = model_of("gcn")
    data = AllShards(shards)
    expected = exact_rows(model, data, chunk_edges=30)(EVERYTHING)
    monkeypatch.setattr(resumable, "SAVE_S", 0.0)
    plain = resumable.LayerFiles.chunk_done

    def failing(self: resumable.LayerFiles) -> None:
        plain(self)
        if (self.layer, self.chunks) == (1, 2):
            raise RuntimeError("the power is gone")

    monkeypatch.setattr(resumable.LayerFiles, "chunk_done", failing)
    with pytest.raises(RuntimeError, match="the power is gone"):
        exact_rows(model, data, chunk_edges=30, folder=tmp_path)
    monkeypatch.setattr(resumable.LayerFiles, "chunk_done", plain)
    assert torch.equal(exact_rows(model, data, chunk_edges=30, folder=tmp_path)(EVERYTHING), expected)
    with pytest.raises(ValueError, match=r"another inference \(other model\): remove it, or choose another"):
        exact_rows(model_of("sage"), data, chunk_edges=30, folder=tmp_path)


def test_what_is_known_of_the_whole(whole: hl.Dataset, shards: Path):
    data = AllShards(shards, split=1)
    assert (data.num_nodes, data.num_edges, data.num_features) == (60, whole.num_edges, 4)
    assert (data.num_outputs, data.metric) == (5, "accuracy")
    assert all(torch.equal(data.splits[name], ids) for name, ids in whole.all_splits[1].items())
    assert "3 shards" in repr(data)
    with pytest.raises(ValueError, match=r"needs the whole graph: .*devices=3"):
        _ = data.graph


def test_what_cannot_be_done_is_named(shards: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no layers.*hl.nn.GNN"):
        exact_rows(Alone(), AllShards(shards))
    with pytest.raises(ValueError, match="there are no nodes to infer at"):
        exact_rows(model_of("sage"), AllShards(shards), EVERYTHING[:0])
    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    shutil.rmtree(broken / "shard-1")
    with pytest.raises(ValueError, match=r"there is no shard 1 in .*: it is missing: copy it there"):
        AllShards(broken)
    other = rich()
    cut(other, make_partition(other.graph, 3, "range"), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "shard-1", broken / "shard-1")
    with pytest.raises(ValueError, match=r"shards 0 and 1 in .* are of different cuts: cut the dataset again"):
        AllShards(broken)
