"""The reference implementations against brute force in Python."""

from __future__ import annotations

import pytest
import torch

from hopline.ops import random, reference
from hopline.ops.cpu.sampling import IdMap
from hopline.ops.reference import SortedIdMap
from tests.support.helpers import graph_of, neighbors_of, randint, randn, random_graph

MASK = (1 << 64) - 1


def draws(key: int, node: int, count: int) -> list[int]:
    return [v & MASK for v in random.draw(key, torch.tensor(node), torch.arange(count)).tolist()]


def fisher_yates(degree: int, fanout: int, key: int, node: int) -> list[int]:
    """Fisher-Yates on a whole list."""
    order = list(range(degree))
    for j, raw in enumerate(draws(key, node, min(degree, fanout))):
        target = j + ((raw * (degree - j)) >> 64)
        order[j], order[target] = order[target], order[j]
    return order[: min(degree, fanout)]


@pytest.mark.parametrize("fanout", [1, 2, 5, 300])
@pytest.mark.parametrize("key", [0, -7, 2**62 + 11])
def test_sample_is_a_fisher_yates_shuffle_cut_short(fanout: int, key: int) -> None:
    graph = random_graph()
    nodes = torch.tensor([0, 3, 49, 48, 3, 20])
    sample = reference.sample_neighbors(graph.indptr, graph.indices, nodes, fanout, key)
    for i, node in enumerate(nodes.tolist()):
        neighbors = neighbors_of(graph, node)
        picks = fisher_yates(len(neighbors), fanout, key, node)
        edge_range = slice(int(sample.indptr[i]), int(sample.indptr[i + 1]))
        assert sample.ids[edge_range].tolist() == [neighbors[p] for p in picks]
        assert sample.edge_ids[edge_range].tolist() == [int(graph.indptr[node]) + p for p in picks]


def test_sample_with_replacement_is_one_bounded_draw_after_the_other() -> None:
    graph = random_graph()
    nodes = torch.tensor([0, 49, 5])
    ours = reference.sample_neighbors(graph.indptr, graph.indices, nodes, 8, 5, replace=True)
    assert ours.indptr.tolist() == [0, 8, 8, 16]
    for i, node in ((0, 0), (2, 5)):
        neighbors = neighbors_of(graph, node)
        expected = [neighbors[(raw * len(neighbors)) >> 64] for raw in draws(5, node, 8)]
        assert ours.ids[int(ours.indptr[i]) : int(ours.indptr[i + 1])].tolist() == expected


def test_row_positions_lists_every_entry_row_after_row() -> None:
    graph = random_graph()
    nodes = torch.tensor([4, 0, 49, 4])
    indptr, positions = reference.row_entries(graph.indptr, nodes)
    rows = [range(int(graph.indptr[v]), int(graph.indptr[v + 1])) for v in nodes.tolist()]
    assert positions.tolist() == [p for row in rows for p in row]
    assert indptr.diff().tolist() == [len(row) for row in rows]


def test_relabel_numbers_seeds_first_then_by_first_occurrence() -> None:
    ids, idx = reference.relabel(torch.tensor([9, 2]), torch.tensor([5, 2, 7, 5, 9], dtype=torch.int32))
    assert ids.tolist() == [9, 2, 5, 7]
    assert idx.tolist() == [2, 1, 3, 2, 0]


def test_group_edges_is_a_stable_grouping() -> None:
    keys = torch.tensor([2, 0, 2, 1, 0])
    indptr, order = reference.group_by_key(keys, 4)
    assert indptr.tolist() == [0, 2, 3, 5, 5]
    assert order.tolist() == [1, 4, 3, 0, 2]


def test_self_loops_are_found_in_order() -> None:
    graph = graph_of(torch.tensor([0, 1, 1, 2, 1]), torch.tensor([1, 1, 0, 2, 1]), 3)
    loops = reference.self_loops(graph.indptr, graph.indices)
    dst = graph.edge_index()[1]
    assert loops.tolist() == [e for e in range(5) if int(graph.indices[e]) == int(dst[e])]
    assert loops.numel() == 3


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce_is_a_loop_over_edges(reduce: str, weighted: bool) -> None:
    rows = randn(6, 3)
    src_idx = randint(0, 6, 9)
    indptr = torch.tensor([0, 4, 4, 9])
    weight = randn(9, seed=3) if weighted else None
    ours = reference.reduce_edges(rows, indptr, src_idx, reduce, weight)
    for d in range(3):
        messages = [
            rows[int(src_idx[e])] * (1.0 if weight is None else weight[e])
            for e in range(int(indptr[d]), int(indptr[d + 1]))
        ]
        expected = torch.zeros(3, dtype=torch.float64)
        if messages:
            stacked = torch.stack(messages)
            expected = {"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.amax(0)}[reduce]
        torch.testing.assert_close(ours[d], expected)


def test_keyed_dropout_takes_sixteen_bits_a_column() -> None:
    x = randn(5, 7)
    ids = torch.tensor([3, 0, 3, 2**40, 9])
    p = 0.3
    ours = reference.keyed_dropout(x, p, 12, ids)
    threshold = round(p * 65536)
    for i, node in enumerate(ids.tolist()):
        raws = draws(12, node, 2)
        for c in range(7):
            keep = (raws[c // 4] >> (16 * (c % 4))) & 0xFFFF >= threshold
            expected = float(x[i, c]) * 65536 / (65536 - threshold) if keep else 0.0
            assert float(ours[i, c]) == pytest.approx(expected, rel=1e-15)


def test_a_map_that_sorts_equals_the_map_of_the_cpu_over_several_batches() -> None:
    ours = SortedIdMap(50, torch.device("cpu"))
    expected = IdMap(50)
    for batch in range(3):
        for hop in range(3):
            nodes = randint(0, 50, 20, seed=10 * batch + hop)
            assert torch.equal(ours.add(nodes), expected.add(nodes))
            assert ours.size == expected.size
            assert torch.equal(ours.ids(), expected.ids())
        ours.clear()
        expected.clear()
        assert ours.size == ours.ids().numel() == 0


@pytest.mark.parametrize("bad", [-1, 50])
def test_a_map_that_sorts_refuses_what_is_not_a_node(bad: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        SortedIdMap(50, torch.device("cpu")).add(torch.tensor([3, bad]))
