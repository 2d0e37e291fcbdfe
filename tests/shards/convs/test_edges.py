"""Edges of a shard: chunks, self-loops and GCN's norm are those of PyG on the whole graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as plain_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

from hopline.core.partition import make_partition
from hopline.shards.convs.edges import ConvEdges, gather_sources, gather_sources_together, gcn_norm, loop_attributes
from hopline.shards.layout import shard_layouts, virtual_layout
from hopline.shards.transports import LocalTransport
from tests.support.helpers import randn, random_graph

GRAPH = random_graph(30, 150, weight=True, attr=2, loops=True)
PARTITION = make_partition(GRAPH, 3, "random", seed=1)
LAYOUT = virtual_layout(GRAPH, PARTITION)


def global_ends(edges: ConvEdges) -> Tensor:
    """[2, num_edges] int64: global ids of sources and destinations, part after part."""
    src = [LAYOUT.own_ids[part.src_idx.long() + edges.layout.own_range(k)[0]] for k, part in enumerate(edges.parts)]
    return torch.stack([torch.cat(src), LAYOUT.own_ids[edges.destinations()]])


def sort_edges(edge_index: Tensor, *values: Tensor) -> list[Tensor]:
    """Edges, and values of edges, sorted by source and destination. Only for graphs without double edges."""
    order = torch.argsort(edge_index[0] * 1000 + edge_index[1], stable=True)
    return [edge_index[:, order], *(v[order] for v in values)]


@pytest.mark.parametrize("max_edges", [1, 7, 50, 10_000])
def test_chunks_are_all_edges_in_order(max_edges: int) -> None:
    edges = ConvEdges.of(LAYOUT)
    src = []
    dst = []
    positions = []
    for k in range(3):
        for chunk in edges.chunks(k, max_edges):
            assert 1 <= chunk.num_edges <= max_edges
            assert int(chunk.dst.min()) == 0
            assert int(chunk.dst.max()) == chunk.num_dst - 1  # no destination too many
            src.append(LAYOUT.own_ids[chunk.src + LAYOUT.own_range(k)[0]])
            dst.append(LAYOUT.own_ids[chunk.dst + chunk.dst_rows.start])
            positions.append(torch.arange(chunk.edges.start, chunk.edges.stop))
    assert torch.equal(torch.stack([torch.cat(src), torch.cat(dst)]), GRAPH.edge_index()[:, LAYOUT.edge_ids])
    assert torch.equal(torch.cat(positions), torch.arange(GRAPH.num_edges))


def test_a_shard_of_its_own_has_loops_in_its_first_part() -> None:
    for layout in shard_layouts(GRAPH, PARTITION):
        edges_with_loops = ConvEdges.of(layout).with_loops()
        src, dst = edges_with_loops.parts[0].edge_index
        assert int((src == dst).sum()) == layout.num_own
        assert all(
            int(p.num_edges) == int(o.num_edges)
            for p, o in zip(edges_with_loops.parts[1:], layout.parts[1:], strict=True)
        )
        assert torch.equal(
            edges_with_loops.degrees, torch.stack([p.indptr.diff() for p in edges_with_loops.parts]).sum(0)
        )


@pytest.mark.parametrize("fill", ["mean", "max", 0.5, torch.tensor([1.0, 2.0])], ids=str)
def test_loops_and_their_rows_are_those_of_pyg(fill: object) -> None:
    edges = ConvEdges.of(LAYOUT)
    edges_with_loops = edges.with_loops()
    attr = GRAPH.edge["attr"]
    own_attr = attr[LAYOUT.edge_ids]
    values = edges_with_loops.rows_with_loops(own_attr, loop_attributes(edges, own_attr, fill))
    plain = add_self_loops(*remove_self_loops(GRAPH.edge_index(), attr), fill_value=fill, num_nodes=30)  # type: ignore[arg-type]
    ours = global_ends(edges_with_loops)
    assert torch.equal(sort_edges(ours)[0], sort_edges(plain[0])[0])
    is_loop = ours[0] == ours[1]
    was_loop = plain[0][0] == plain[0][1]
    torch.testing.assert_close(
        sort_edges(ours[:, is_loop], values[is_loop])[1], sort_edges(plain[0][:, was_loop], plain[1][was_loop])[1]
    )
    assert torch.equal(values[~is_loop].sort(0).values, plain[1][~was_loop].sort(0).values)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("add_loops", [False, True])
@pytest.mark.parametrize("improved", [False, True])
def test_the_norm_and_its_gradient_are_those_of_pyg(weighted: bool, add_loops: bool, improved: bool) -> None:
    weight = GRAPH.edge["weight"].clone().requires_grad_() if weighted else None
    normed: Any = plain_norm(GRAPH.edge_index(), weight, 30, improved, add_loops, dtype=torch.float64)
    edge_index, expected = normed
    edges = ConvEdges.of(LAYOUT)
    own_weight = None if weight is None else weight.detach()[LAYOUT.edge_ids].requires_grad_()
    edges_with_loops = edges.with_loops() if add_loops else None
    ours = gcn_norm(edges, edges_with_loops, LocalTransport(LAYOUT), own_weight, improved, torch.float64)
    # Summed over edges between the same nodes, since some are double.
    pairs = torch.zeros(30, 30, dtype=torch.float64)
    by_pair = pairs.index_put(tuple(global_ends(edges_with_loops or edges)), ours, accumulate=True)
    plain = pairs.index_put((edge_index[0], edge_index[1]), expected, accumulate=True)
    torch.testing.assert_close(by_pair, plain, rtol=1e-10, atol=1e-12)
    if weight is not None and own_weight is not None:
        (by_pair * randn(30, 30)).sum().backward()
        (plain * randn(30, 30)).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(own_weight.grad, weight.grad[LAYOUT.edge_ids], rtol=1e-10, atol=1e-12)


def test_all_edges_at_once_are_in_the_order_of_the_graph() -> None:
    for edges in (ConvEdges.of(LAYOUT), ConvEdges.of(LAYOUT).with_loops()):
        chunk, order = edges.whole
        assert torch.equal(edges.destinations()[order], chunk.dst)
        rows = LAYOUT.own_ids[chunk.src]
        for node in (0, 2, 15):
            place = int(PARTITION.position[node])
            neighbours = GRAPH.indices[GRAPH.indptr[node] : GRAPH.indptr[node + 1]]
            if edges.origins is not None:
                neighbours = torch.cat([neighbours[neighbours != node], torch.tensor([node])])
            assert rows[chunk.dst == place].tolist() == neighbours.tolist()


@pytest.mark.parametrize("other", [torch.float64, torch.float32])
def test_several_tensors_travel_together_where_they_can(other: torch.dtype) -> None:
    calls = []
    transport = LocalTransport(LAYOUT)
    x = randn(30, 2, 3).requires_grad_()
    y = randn(30, dtype=other).requires_grad_()
    real = transport.fetch_all
    transport.fetch_all = lambda rows, kind: (calls.append(kind), real(rows, kind))[1]
    gathered = gather_sources_together([x, y], transport, None, "forward")
    assert torch.equal(gathered[0], x)
    assert torch.equal(gathered[1], y)
    assert len(calls) == (1 if other == torch.float64 else 2)
    (gathered[0].sum() + 2 * gathered[1].sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]
    assert torch.equal(y.grad, 2 * torch.ones_like(y))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [None, 0, 1])
def test_rows_are_gathered_and_their_gradients_summed(depth: int | None) -> None:
    x = randn(30, 2).requires_grad_()
    rows = gather_sources(x, LocalTransport(LAYOUT), depth, "forward")
    assert torch.equal(rows, x)
    (rows * randn(30, 2, seed=1)).sum().backward()
    assert torch.equal(x.grad, randn(30, 2, seed=1))  # type: ignore[arg-type]
