"""What inference keeps for the next time changes no bit, and is used only where nothing but the weights has changed."""

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
from tests.helpers import GNN_OPTIONS, gnn_of
from tests.runs import small

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
REDUCED = {"mean", "max", "no root", "gin", "graph", "gcn, wider", "gcn, improved"}


def made_anew(model: hl.nn.GNN, data: hl.Dataset, ids: Tensor, **options: Any) -> Tensor:
    """On a graph that nobody has asked before."""
    return infer.exact(model, afresh(data), ids.clone(), **options)


def afresh(data: hl.Dataset) -> hl.Dataset:
    """The same arrays, in a graph with which nothing is kept."""
    return replace(data, graph=replace(data.graph))


def kept_with(data: hl.Dataset) -> cache.InferenceCache:
    kept = cache.LastInference.on(data.graph).cache
    assert kept is not None
    return kept


@pytest.mark.parametrize("chunk_edges", [None, 500])
@pytest.mark.parametrize("name", [*CONVS])
def test_no_bit_depends_on_what_was_kept(name: str, chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    models = [hl.nn.GNN(CONVS[name]()) for _ in range(4)]
    expected = [made_anew(model, data, ids, chunk_edges=chunk_edges) for model in models]
    for model, rows in zip(models, expected, strict=True):
        assert torch.equal(infer.exact(model, data, ids, chunk_edges=chunk_edges), rows)
    known = kept_with(data)
    assert known.num_uses == 4
    assert bool(known.sums) == (name in REDUCED)
    assert known.blocks


@pytest.mark.parametrize("name", [*GNN_OPTIONS])
def test_every_kind_of_model(name: str):
    model = gnn_of(name).float()
    data = small(num_features=6)
    ids = torch.tensor([3, 5, 90])
    expected = made_anew(model, data, ids)
    for _ in range(3):
        assert torch.equal(infer.exact(model, data, ids), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_models_that_sum_in_another_way_share_nothing(weighted: bool):
    data = small()
    ids = torch.tensor([3, 5, 90])
    if weighted:
        weight = torch.rand(data.num_edges)
        data = replace(data, graph=hl.Graph(data.graph.indptr, data.graph.indices, {"weight": weight}))
    convs = [*CONVS.values(), lambda: [SAGEConv(8, 8, aggr="sum"), SAGEConv(8, 4)], CONVS["graph"]]
    models = [hl.nn.GNN(make()) for make in convs]
    expected = [made_anew(model, data, ids) for model in models]
    for model, rows in zip(models, expected, strict=True):
        for _ in range(3):
            assert torch.equal(infer.exact(model, data, ids), rows)


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_blocks_and_sums_are_made_twice_and_never_again(chunk_edges: int | None, monkeypatch: pytest.MonkeyPatch):
    data = small()
    made = []
    plain = layerwise_chunks.full_block

    def block(sampler: Any, nodes: Tensor) -> hl.extend.Block:
        made.append(nodes.numel())
        return plain(sampler, nodes)

    monkeypatch.setattr(layerwise_chunks, "full_block", block)
    ids = torch.tensor([3, 5])
    counts = []
    for _ in range(4):  # what is asked for once leaves nothing
        infer.exact(hl.nn.GNN(CONVS["mean"]()), data, ids, chunk_edges=chunk_edges)
        counts.append(len(made))
    assert counts[0] > 0
    assert counts[1:] == [2 * counts[0]] * 3
    deeper = hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 8), SAGEConv(8, 4)])
    for model, other in ((deeper, ids), (deeper, ids.add_(1)), (deeper, torch.tensor([7]))):
        made.clear()
        expected = made_anew(model, data, other, chunk_edges=chunk_edges)
        assert torch.equal(infer.exact(model, data, other, chunk_edges=chunk_edges), expected)
        assert made


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_features_that_changed_are_read_again(chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    rows = data.x.read(torch.arange(400)).clone()
    table = data.tables["x"] = hl.extend.TensorTable(rows)

    def agrees() -> bool:
        found = [infer.exact(model, data, ids, chunk_edges=chunk_edges) for _ in range(3)]
        expected = made_anew(model, data, ids, chunk_edges=chunk_edges)
        return all(torch.equal(one, expected) for one in found)

    before = infer.exact(model, data, ids)
    assert agrees()
    for change in (
        lambda: rows.mul_(2),
        lambda: table.write(torch.arange(400), torch.randn(400, 8)),
        lambda: data.tables.update(x=hl.extend.TensorTable(torch.randn(400, 8))),
        lambda: data.tables.update(x=hl.extend.SparseTable.from_dense(torch.randn(400, 8).relu())),
    ):
        for _ in range(2):  # what is asked for once leaves nothing that could be stale
            infer.exact(model, data, ids, chunk_edges=chunk_edges)
        change()
        now = infer.exact(model, data, ids, chunk_edges=chunk_edges)
        assert not torch.equal(now, before)
        assert agrees()
        before = now


class Drawn(hl.tables.Table):
    """Rows that somebody makes up, other ones every time."""

    shape = (400, 8)
    dtype = torch.float32

    def read(self, ids: Tensor) -> Tensor:
        return torch.randn(ids.numel(), 8)


def test_of_a_table_that_tells_of_no_change_only_blocks_are_kept():
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    data.tables["x"] = Drawn()
    found = [infer.exact(model, data, ids) for _ in range(3)]
    assert not torch.equal(found[1], found[2])
    assert kept_with(data).blocks
    assert not kept_with(data).sums


def test_what_has_no_room_is_made_again(monkeypatch: pytest.MonkeyPatch):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    expected = made_anew(model, data, ids, chunk_edges=150)
    full = cache.max_cache_bytes(torch.device("cpu"))
    assert full > 1 << 20
    taken = []
    for room in (0, 5_000, 8_000, full):
        monkeypatch.setattr(cache, "max_cache_bytes", lambda device, room=room: room)
        data = afresh(data)
        for _ in range(3):
            assert torch.equal(infer.exact(model, data, ids, chunk_edges=150), expected)
        known = kept_with(data)
        assert 0 <= known.free_bytes <= room
        taken.append(room - known.free_bytes)
    assert taken[0] == 0 < taken[1] < taken[2] < taken[3]


def test_what_was_kept_goes_with_the_graph():
    data = small()
    model = hl.nn.GNN(CONVS["mean"]())
    for _ in range(2):
        infer.exact(model, data, data.splits["valid"])
    known = weakref.ref(kept_with(data))
    del data
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("chunk_edges", [None, 150])
def test_a_graph_whose_edges_change_keeps_nothing_and_another_one_has_its_own(chunk_edges: int | None):
    data = small()
    ids = torch.tensor([3, 5, 90])
    model = hl.nn.GNN(CONVS["mean"]())
    other = afresh(data)
    for _ in range(3):
        infer.exact(model, data, ids, chunk_edges=chunk_edges)
        infer.exact(model, other, ids, chunk_edges=chunk_edges)
    assert kept_with(data).num_uses == kept_with(other).num_uses == 3
    known = kept_with(data)
    data.graph.indices.copy_((data.graph.indices + 1) % 400)
    expected = made_anew(model, data, ids, chunk_edges=chunk_edges)
    assert torch.equal(infer.exact(model, data, ids, chunk_edges=chunk_edges), expected)
    assert kept_with(data) is not known


def test_threads_that_infer_at_once_change_no_bit():
    data = small()
    ids = torch.tensor([3, 5, 90, 17])
    models = [hl.nn.GNN(CONVS["mean"]()) for _ in range(24)]
    expected = [made_anew(model, data, ids, chunk_edges=100) for model in models]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda model: infer.exact(model, data, ids, chunk_edges=100), models))
    assert all(torch.equal(one, rows) for one, rows in zip(found, expected, strict=True))


def test_bytes_of_a_chunk_that_two_threads_store_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "max_cache_bytes", lambda device: 1 << 30)
    data = small()
    ids = torch.tensor([3, 5, 90, 17])
    model = hl.nn.GNN(CONVS["mean"]())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: infer.exact(model, data, ids, chunk_edges=100), range(24)))
    known = kept_with(data)
    stored = [tensor for block in known.blocks.values() for tensor in block.tensors() if tensor is not None]
    stored += [rows for rows, _ in known.sums.values()]
    assert stored
    assert known.free_bytes == (1 << 30) - sum(tensor.nbytes for tensor in stored)
