"""Exact inference with its cache equals inference without one to the bit, and stale entries are never read.

The first inference at some nodes stores their list. The second stores blocks, and sums of features that
need no weight. Later ones read both. A change of edges, features or nodes must lead to new blocks and sums; a
change of weights must not. The oracle is `infer_without_cache`: the same arrays in a new `Graph` object,
which has no cache yet.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, SAGEConv

import hopline as hl
from hopline import infer
from hopline.inference import cache, layerwise_chunks
from tests.support.helpers import GNN_OPTIONS, gnn_of
from tests.support.runs import small

CONVS = {
    "mean": lambda: [SAGEConv(8, 8), SAGEConv(8, 4)],
    "max": lambda: [SAGEConv(8, 8, aggr="max"), SAGEConv(8, 4)],
    "no root": lambda: [SAGEConv(8, 8, root_weight=False), SAGEConv(8, 4)],
    "projected": lambda: [SAGEConv(8, 8, project=True), SAGEConv(8, 4)],
    "gin": lambda: [GINConv(torch.nn.Linear(8, 8)), SAGEConv(8, 4)],
    "graph": lambda: [GraphConv(8, 8), GraphConv(8, 4)],
    "gcn, wider": lambda: [GCNConv(8, 16), GCNConv(16, 4)],
    "gcn, improved": lambda: [GCNConv(8, 16, improved=True), GCNConv(16, 4)],
    "gcn, narrower": lambda: [GCNConv(8, 1), GCNConv(1, 4)],
    "gat": lambda: [GATConv(8, 8), GATConv(8, 4)],
}
HAVE_CACHED_SUMS = {"mean", "max", "no root", "gin", "graph", "gcn, wider", "gcn, improved"}
"""Models whose first conv aggregates the features before it applies weights, so that the sums can be cached."""


def infer_without_cache(model: hl.nn.GNN, data: hl.Dataset, ids: Tensor, **options: Any) -> Tensor:
    """The oracle: exact inference on a new graph object, whose cache is empty."""
    return infer.exact(model, with_new_graph(data), ids.clone(), **options)


def with_new_graph(data: hl.Dataset) -> hl.Dataset:
    """The dataset with the same arrays in a new `Graph` object, which has no cache."""
    return replace(data, graph=replace(data.graph))


def cache_of(data: hl.Dataset) -> cache.InferenceCache:
    """The cache of the last inference on the graph of a dataset."""
    inference_cache = data.graph.get_cached(cache.LAST_INFERENCE, dict).get("cache")
    assert inference_cache is not None
    return inference_cache


@pytest.mark.parametrize("chunk_edges", [None, 500])
@pytest.mark.parametrize("name", [*CONVS])
def test_outputs_are_equal_to_the_bit_with_and_without_the_cache(name: str, chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    models = [hl.nn.GNN(CONVS[name]()) for _ in range(4)]
    expected = [infer_without_cache(model, data, ids, chunk_edges=chunk_edges) for model in models]
    for model, rows in zip(models, expected, strict=True):
        assert torch.equal(infer.exact(model, data, ids, chunk_edges=chunk_edges), rows)

    inference_cache = cache_of(data)
    assert inference_cache.num_uses == 4
    assert bool(inference_cache.sums) == (name in HAVE_CACHED_SUMS)
    assert inference_cache.blocks


@pytest.mark.parametrize("name", [*GNN_OPTIONS])
def test_outputs_of_every_gnn_option_are_equal_to_the_bit_with_the_cache(name: str):
    model = gnn_of(name).float()
    data = small(num_features=6)
    ids = torch.tensor([3, 5, 90])
    expected = infer_without_cache(model, data, ids)
    for _ in range(3):
        assert torch.equal(infer.exact(model, data, ids), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_models_that_aggregate_differently_share_no_cached_sums(weighted: bool):
    data = small()
    ids = torch.tensor([3, 5, 90])
    if weighted:
        weight = torch.rand(data.num_edges)
        data = replace(data, graph=hl.Graph(data.graph.indptr, data.graph.indices, {"weight": weight}))
    convs = [*CONVS.values(), lambda: [SAGEConv(8, 8, aggr="sum"), SAGEConv(8, 4)], CONVS["graph"]]
    models = [hl.nn.GNN(make()) for make in convs]
    expected = [infer_without_cache(model, data, ids) for model in models]
    for model, rows in zip(models, expected, strict=True):
        for _ in range(3):
            assert torch.equal(infer.exact(model, data, ids), rows)


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_blocks_are_built_in_the_first_two_inferences_and_never_again(
    chunk_edges: int | None, monkeypatch: pytest.MonkeyPatch
):
    data = small()
    block_sizes = []
    full_block = layerwise_chunks.full_block

    def block(sampler: Any, nodes: Tensor) -> hl.extend.Block:
        block_sizes.append(nodes.numel())
        return full_block(sampler, nodes)

    monkeypatch.setattr(layerwise_chunks, "full_block", block)
    ids = torch.tensor([3, 5])
    counts = []
    for _ in range(4):  # blocks are stored from the second inference on
        infer.exact(hl.nn.GNN(CONVS["mean"]()), data, ids, chunk_edges=chunk_edges)
        counts.append(len(block_sizes))
    assert counts[0] > 0
    assert counts[1:] == [2 * counts[0]] * 3

    deeper = hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 8), SAGEConv(8, 4)])
    for model, other_ids in ((deeper, ids), (deeper, ids.add_(1)), (deeper, torch.tensor([7]))):
        block_sizes.clear()
        expected = infer_without_cache(model, data, other_ids, chunk_edges=chunk_edges)
        assert torch.equal(infer.exact(model, data, other_ids, chunk_edges=chunk_edges), expected)
        assert block_sizes


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_changed_features_are_read_again(chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    rows = data.x.read(torch.arange(400)).clone()
    table = data.tables["x"] = hl.extend.TensorTable(rows)

    def agrees_with_no_cache() -> bool:
        """Whether three inferences, of which the later ones read the cache, equal the oracle."""
        outputs = [infer.exact(model, data, ids, chunk_edges=chunk_edges) for _ in range(3)]
        expected = infer_without_cache(model, data, ids, chunk_edges=chunk_edges)
        return all(torch.equal(output, expected) for output in outputs)

    before = infer.exact(model, data, ids)
    assert agrees_with_no_cache()

    for change in (
        lambda: rows.mul_(2),
        lambda: table.write(torch.arange(400), torch.randn(400, 8)),
        lambda: data.tables.update(x=hl.extend.TensorTable(torch.randn(400, 8))),
        lambda: data.tables.update(x=hl.extend.SparseTable.from_dense(torch.randn(400, 8).relu())),
    ):
        for _ in range(2):  # the second inference stores what could be stale
            infer.exact(model, data, ids, chunk_edges=chunk_edges)
        change()
        now = infer.exact(model, data, ids, chunk_edges=chunk_edges)
        assert not torch.equal(now, before)
        assert agrees_with_no_cache()
        before = now


class RandomTable(hl.tables.Table):
    """A table whose rows are drawn anew at every read. It has no version that would tell of a change."""

    shape = (400, 8)
    dtype = torch.float32

    def read(self, ids: Tensor) -> Tensor:
        return torch.randn(ids.numel(), 8)


def test_sums_over_a_table_without_a_version_are_not_cached_but_blocks_are():
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    data.tables["x"] = RandomTable()
    outputs = [infer.exact(model, data, ids) for _ in range(3)]

    assert not torch.equal(outputs[1], outputs[2])
    assert cache_of(data).blocks
    assert not cache_of(data).sums


def test_blocks_and_sums_beyond_the_limit_of_the_cache_are_computed_again(monkeypatch: pytest.MonkeyPatch):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    expected = infer_without_cache(model, data, ids, chunk_edges=150)
    default_limit_bytes = cache.max_cache_bytes(torch.device("cpu"))
    assert default_limit_bytes > 1 << 20

    cached_bytes = []
    for limit_bytes in (0, 5_000, 8_000, default_limit_bytes):
        monkeypatch.setattr(cache, "max_cache_bytes", lambda device, limit_bytes=limit_bytes: limit_bytes)
        data = with_new_graph(data)
        for _ in range(3):
            assert torch.equal(infer.exact(model, data, ids, chunk_edges=150), expected)
        inference_cache = cache_of(data)
        assert 0 <= inference_cache.free_bytes <= limit_bytes
        cached_bytes.append(limit_bytes - inference_cache.free_bytes)
    assert cached_bytes[0] == 0 < cached_bytes[1] < cached_bytes[2] < cached_bytes[3]


def test_the_cache_is_freed_with_its_graph():
    data = small()
    model = hl.nn.GNN(CONVS["mean"]())
    for _ in range(2):
        infer.exact(model, data, data.splits["valid"])
    inference_cache = weakref.ref(cache_of(data))
    del data
    gc.collect()
    assert inference_cache() is None


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_changed_edges_drop_the_cache_and_each_graph_has_its_own(chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    other = with_new_graph(data)
    for _ in range(3):
        infer.exact(model, data, ids, chunk_edges=chunk_edges)
        infer.exact(model, other, ids, chunk_edges=chunk_edges)
    assert cache_of(data).num_uses == cache_of(other).num_uses == 3

    cache_before = cache_of(data)
    data.graph.indices.copy_((data.graph.indices + 1) % 400)
    expected = infer_without_cache(model, data, ids, chunk_edges=chunk_edges)

    assert torch.equal(infer.exact(model, data, ids, chunk_edges=chunk_edges), expected)
    assert cache_of(data) is not cache_before


def test_concurrent_inferences_are_equal_to_the_bit():
    data = small()
    ids = torch.tensor([3, 5, 90, 17])
    models = [hl.nn.GNN(CONVS["mean"]()) for _ in range(24)]
    expected = [infer_without_cache(model, data, ids, chunk_edges=100) for model in models]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda model: infer.exact(model, data, ids, chunk_edges=100), models))
    assert all(torch.equal(ours, rows) for ours, rows in zip(outputs, expected, strict=True))


def test_bytes_of_a_chunk_that_two_threads_store_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "max_cache_bytes", lambda device: 1 << 30)
    data = small()
    ids = torch.tensor([3, 5, 90, 17])
    model = hl.nn.GNN(CONVS["mean"]())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: infer.exact(model, data, ids, chunk_edges=100), range(24)))
    inference_cache = cache_of(data)
    cached_tensors = [
        tensor for block in inference_cache.blocks.values() for tensor in block.tensors() if tensor is not None
    ]
    cached_tensors += [rows for rows, _ in inference_cache.sums.values()]

    assert cached_tensors
    assert inference_cache.free_bytes == (1 << 30) - sum(tensor.nbytes for tensor in cached_tensors)
