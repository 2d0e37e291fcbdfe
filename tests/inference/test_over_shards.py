"""Inference by one process over a folder of shards equals inference over the whole graph.

`AllShards` opens one shard at a time. Chunks, sparse features, stacked tables and a resumed folder give the same rows.
"""

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
from hopline.inference.over_shards import ShardChunks, exact_rows
from hopline.shards.all_shards import AllShards
from hopline.shards.write import cut
from hopline.tables.stacked import StackedTable
from tests.inference.test_distributed import ModelWithoutLayers
from tests.shards.test_write import rich
from tests.support.helpers import mlp

ALL_IDS = torch.arange(60)


@pytest.fixture(scope="module")
def whole() -> hl.Dataset:
    """The whole dataset: 60 nodes with several tables."""
    return rich()


@pytest.fixture(scope="module")
def shards(whole: hl.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset in three random shards."""
    folder = tmp_path_factory.mktemp("cut") / "shards"
    cut(whole, make_partition(whole.graph, 3, "random", seed=1), folder)
    return folder


def model_of(kind: str) -> hl.nn.GNN:
    """Two layers of a kind of conv; "gcn" also has an encoder, initial residuals and jumping knowledge."""
    torch.manual_seed(2)
    options: dict[str, Any] = {}
    if kind == "gcn":
        options = {
            "encoder": torch.nn.Linear(4, 4),
            "initial_residual": 0.1,
            "jk": "cat",
            "head": torch.nn.Linear(8, 5),
        }
    make_conv = {
        "sage": lambda: SAGEConv(4, 4),
        "gcn": lambda: GCNConv(4, 4),
        "gat": lambda: GATConv(4, 4),
        "gine": lambda: GINEConv(mlp(4, 6, 4), edge_dim=2),
    }[kind]
    return hl.nn.GNN([make_conv(), make_conv()], **options).double()


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gine"])
def test_rows_of_all_nodes_and_of_some_equal_those_of_the_whole_graph(kind: str, whole: hl.Dataset, shards: Path):
    model = model_of(kind)
    data = AllShards(shards)
    expected = hl.infer.exact(model, whole)
    for read in (
        exact_rows(model, data),
        exact_rows(model, data, chunk_edges=30),
        exact_rows(model, data, chunk_bytes=20000),
    ):
        torch.testing.assert_close(read(ALL_IDS), expected, rtol=1e-10, atol=1e-12)

    some_ids = torch.tensor([41, 3, 3, 17])
    torch.testing.assert_close(exact_rows(model, data, some_ids)(some_ids), expected[some_ids], rtol=1e-10, atol=1e-12)

    in_floats = exact_rows(model.float(), data)(ALL_IDS)
    torch.testing.assert_close(in_floats, expected.float(), rtol=1e-5, atol=1e-5)


def test_rows_are_computed_only_where_they_are_needed(whole: hl.Dataset, shards: Path, monkeypatch: Any):
    model = model_of("sage")
    num_computed = 0
    compute_layer = model.layer

    def count_rows(l: int, state: Any, block: Any) -> Any:
        nonlocal num_computed
        num_computed += block.num_dst
        return compute_layer(l, state, block)

    monkeypatch.setattr(model, "layer", count_rows)
    ids = torch.tensor([5])
    exact_rows(model, AllShards(shards), ids)
    sources = whole.graph.indices[whole.graph.indptr[5] : whole.graph.indptr[6]].long()

    assert num_computed == torch.cat([ids, sources]).unique().numel() + 1


def test_probing_opens_a_shard_and_takes_nodes_of_it(shards: Path):
    data = AllShards(shards)
    work = ShardChunks(model_of("sage"), data, 1, layerwise_chunks.CPU, 1 << 22, None)
    data._opened = None
    probed = work.probe_nodes(ALL_IDS)
    assert data._opened is not None
    first, stop = data.ptr[data._opened.rank : data._opened.rank + 2].tolist()

    assert ((probed >= first) & (probed < stop)).all()
    assert probed.numel() > 1


def test_sparse_features_are_read_as_they_are_stored(whole: hl.Dataset, shards: Path):
    data = AllShards(shards)
    data.rows = StackedTable([data.shard(rank).tables["words"] for rank in range(3)])
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(7, 4, aggr="max"), GCNConv(4, 5)]).double()
    expected = hl.infer.exact(model, replace(whole, tables={"x": whole.tables["words"]}))
    torch.testing.assert_close(exact_rows(model, data)(ALL_IDS), expected, rtol=1e-10, atol=1e-12)


def test_inference_resumes_from_its_folder(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = model_of("gcn")
    data = AllShards(shards)
    expected = exact_rows(model, data, chunk_edges=30)(ALL_IDS)
    monkeypatch.setattr(resumable, "SAVE_S", 0.0)
    mark_chunk = resumable.LayerFiles.mark_chunk

    def fail_after_two_chunks(self: resumable.LayerFiles) -> None:
        mark_chunk(self)
        if (self.layer, self.chunks) == (1, 2):
            raise RuntimeError("the power is gone")

    monkeypatch.setattr(resumable.LayerFiles, "mark_chunk", fail_after_two_chunks)
    with pytest.raises(RuntimeError, match="the power is gone"):
        exact_rows(model, data, chunk_edges=30, folder=tmp_path)

    monkeypatch.setattr(resumable.LayerFiles, "mark_chunk", mark_chunk)
    assert torch.equal(exact_rows(model, data, chunk_edges=30, folder=tmp_path)(ALL_IDS), expected)
    with pytest.raises(ValueError, match=r"another inference \(other model\)"):
        exact_rows(model_of("sage"), data, chunk_edges=30, folder=tmp_path)


def test_all_shards_has_the_sizes_and_splits_of_the_whole_dataset(whole: hl.Dataset, shards: Path):
    data = AllShards(shards, split=1)
    assert (data.num_nodes, data.num_edges, data.num_features) == (60, whole.num_edges, 4)
    assert (data.num_outputs, data.metric) == (5, "accuracy")
    assert all(torch.equal(data.splits[name], ids) for name, ids in whole.all_splits[1].items())
    assert "3 shards" in repr(data)
    with pytest.raises(ValueError, match=r"whole graph: .*devices=3"):
        _ = data.graph


def test_what_cannot_be_inferred_is_refused_with_a_message(shards: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"no layers.*hl\.nn\.GNN"):
        exact_rows(ModelWithoutLayers(), AllShards(shards))
    with pytest.raises(ValueError, match="no nodes to infer"):
        exact_rows(model_of("sage"), AllShards(shards), ALL_IDS[:0])

    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    shutil.rmtree(broken / "shard-1")
    with pytest.raises(ValueError, match=r"no shard 1 in .*is missing"):
        AllShards(broken)

    other = rich()
    cut(other, make_partition(other.graph, 3, "range"), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "shard-1", broken / "shard-1")

    with pytest.raises(ValueError, match="of another cut"):
        AllShards(broken)
