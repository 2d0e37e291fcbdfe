"""Partitioning by streaming, counts of cut edges and halos, and sums over out-edges, against loops and sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.ops.cpu import partition as cpu_partition
from hopline.ops.cpu.partition import _even_out, _pack, add_to_sources, cut_edges, stream_parts, undirected
from tests.support.helpers import graph_of, randint, random_graph, torch_threads


def community_graph(num_nodes: int = 2000, size: int = 100, num_edges: int = 12_000) -> Graph:
    """A graph with nine of ten edges inside communities, whose nodes have scattered ids."""
    src = randint(0, num_nodes, num_edges)
    dst = src // size * size + randint(0, size, num_edges, seed=1)
    dst[: num_edges // 10] = randint(0, num_nodes, num_edges // 10, seed=2)
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(num_nodes))
    return graph_of(shuffled[src], shuffled[dst], num_nodes)


def partition_by_streaming(
    graph: Graph, num_parts: int, slack: float = 0.1, key: int = 0, passes: int = 20
) -> np.ndarray:
    return stream_parts(graph.indptr.numpy(), graph.indices.numpy(), num_parts, slack, key, passes, lambda _: None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_undirected_has_every_edge_both_ways_once_and_no_loops(dtype: torch.dtype) -> None:
    graph = random_graph(dtype=dtype, loops=True)
    starts, neighbors = undirected(graph.indptr.numpy(), graph.indices.numpy(), np.dtype(np.int64))
    src, dst = graph.edge_index().tolist()
    expected: list[set[int]] = [set() for _ in range(graph.num_nodes)]
    for u, v in zip(src, dst, strict=True):
        if u != v:
            expected[u].add(v)
            expected[v].add(u)
    assert [neighbors[a:b].tolist() for a, b in itertools.pairwise(starts)] == [sorted(e) for e in expected]
    assert neighbors.shape[0] == starts[-1]


def test_undirected_keeps_the_only_neighbour_of_a_node() -> None:
    graph = graph_of(torch.tensor([0, 0, 3]), torch.tensor([1, 1, 3]), 4)  # 2 has none, and 3 only itself
    starts, neighbors = undirected(graph.indptr.numpy(), graph.indices.numpy(), np.dtype(np.int64))
    assert starts.tolist() == [0, 1, 2, 2, 2]
    assert neighbors.tolist() == [1, 0]


def test_undirected_does_not_depend_on_the_threads() -> None:
    graph = random_graph(20_000, 600_000)
    with torch_threads(1):
        one = undirected(graph.indptr.numpy(), graph.indices.numpy(), np.dtype(np.int32))
    with torch_threads(4):
        four = undirected(graph.indptr.numpy(), graph.indices.numpy(), np.dtype(np.int32))
    assert all(a.dtype == np.int32 and np.array_equal(a, b) for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("num_parts", [2, 7, 20, 33])
@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_streamed_parts_have_the_sizes_asked_for(num_parts: int, slack: float) -> None:
    sizes = np.bincount(partition_by_streaming(community_graph(), num_parts, slack), minlength=num_parts)
    mean = 2000 / num_parts
    assert sizes.min() >= max(1, int(mean * (1 - slack)))
    assert sizes.max() <= max(np.ceil(mean), mean * (1 + slack))


@pytest.mark.parametrize("both_ways", [False, True])
def test_streaming_finds_communities(both_ways: bool) -> None:
    graph = community_graph()
    if both_ways:
        src, dst = graph.edge_index()
        graph = graph_of(torch.cat([src, dst]), torch.cat([dst, src]), graph.num_nodes)
    parts = partition_by_streaming(graph, 20)
    assert cut_edges(graph.indptr.numpy(), graph.indices.numpy(), parts) < 0.2 * graph.num_edges


def test_streaming_depends_on_the_key_alone() -> None:
    graph = community_graph()
    assert np.array_equal(partition_by_streaming(graph, 20, key=3), partition_by_streaming(graph, 20, key=3))
    assert not np.array_equal(partition_by_streaming(graph, 20, key=3), partition_by_streaming(graph, 20, key=4))


@pytest.mark.parametrize("num_nodes", [1, 5, 40])
def test_streaming_works_without_edges_and_with_a_part_per_node(num_nodes: int) -> None:
    none = graph_of(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), num_nodes)
    star = graph_of(torch.arange(num_nodes), torch.zeros(num_nodes, dtype=torch.int64), num_nodes)
    for graph in (none, star):
        assert np.bincount(partition_by_streaming(graph, num_nodes), minlength=num_nodes).tolist() == [1] * num_nodes
        sizes = np.bincount(partition_by_streaming(graph, (num_nodes + 1) // 2), minlength=(num_nodes + 1) // 2)
        assert 1 <= sizes.min() <= sizes.max() <= 2


def test_every_range_of_nodes_is_reported() -> None:
    heard: list[int] = []
    graph = community_graph()
    stream_parts(graph.indptr.numpy(), graph.indices.numpy(), 4, 0.1, 0, 3, heard.append)
    assert 3 <= len(heard) <= 6
    assert set(heard) == {2000}


def test_a_cluster_that_fits_nowhere_is_split() -> None:
    indptr = np.zeros(9, dtype=np.int64)
    indices = np.empty(0, dtype=np.int32)
    order = np.arange(8, dtype=np.int32)
    ptr = np.array([0, 3, 6, 8])
    parts = np.full(8, -1, dtype=np.int32)
    sizes = np.zeros(2, dtype=np.int32)
    _pack(indptr, indices, order, ptr, np.arange(3), 4, parts, sizes)
    assert sizes.tolist() == [4, 4]
    assert parts.tolist()[:6] == [0, 0, 0, 1, 1, 1]


def test_light_parts_get_nodes_of_heavy_ones() -> None:
    parts = np.array([0, 0, 0, 0, 0, 1, 1, 1], dtype=np.int32)
    sizes = np.array([5, 3, 0], dtype=np.int32)
    _even_out(np.arange(8, dtype=np.int32), parts, sizes, 2)
    assert sizes.tolist() == [3, 3, 2]
    assert parts.tolist() == [2, 2, 0, 0, 0, 1, 1, 1]


def graph_and_parts(num_nodes: int, num_edges: int, num_parts: int, dtype: torch.dtype) -> tuple[np.ndarray, ...]:
    graph = random_graph(num_nodes, num_edges, dtype=dtype, loops=True)
    part_of = randint(0, num_parts, num_nodes).int()
    part_of[:num_parts] = torch.arange(num_parts)
    partition = Partition(part_of, num_parts)
    tensors = (graph.indptr, graph.indices, part_of, partition.order, partition.ptr)
    return tuple(tensor.numpy() for tensor in tensors)


def edges(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return indices, np.repeat(np.arange(indptr.shape[0] - 1), np.diff(indptr))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_nodes", "num_edges", "threads"), [(50, 300, 1), (3000, 1_200_000, 4)])
def test_counts_are_those_of_a_loop(num_nodes: int, num_edges: int, threads: int, dtype: torch.dtype) -> None:
    indptr, indices, part_of, order, ptr = graph_and_parts(num_nodes, num_edges, 6, dtype)
    src, dst = edges(indptr, indices)
    expected = np.zeros((6, 6), dtype=np.int64)
    np.add.at(expected, (part_of[dst], part_of[src]), 1)
    with torch_threads(threads):
        assert np.array_equal(cpu_partition.edge_counts(indptr, indices, part_of, order, ptr), expected)
        assert cpu_partition.cut_edges(indptr, indices, part_of) == expected.sum() - np.trace(expected)


@pytest.mark.parametrize(("num_nodes", "num_edges", "threads"), [(50, 120, 1), (30_000, 1_200_000, 4)])
def test_halos_are_the_distinct_sources_outside(num_nodes: int, num_edges: int, threads: int) -> None:
    indptr, indices, part_of, order, ptr = graph_and_parts(num_nodes, num_edges, 5, torch.int32)
    src, dst = edges(indptr, indices)
    with torch_threads(threads):
        halo_sizes = cpu_partition.halo_sizes(indptr, indices, part_of, order, ptr)
    for part, size in enumerate(halo_sizes):
        inside = part_of == part
        assert size == np.unique(src[inside[dst] & ~inside[src]]).size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_source_gets_the_sum_over_its_out_edges(dtype: torch.dtype) -> None:
    graph = random_graph(dtype=dtype, loops=True)
    values = randint(-5, 1 << 40, graph.num_nodes)
    values[7] = 0
    src, dst = graph.edge_index()
    expected = torch.zeros(graph.num_nodes, dtype=torch.int64).index_add_(0, src, values[dst])
    assert torch.equal(add_to_sources(graph.indptr, graph.indices, values), expected)


def test_threads_that_add_to_one_place_lose_nothing() -> None:
    num_edges = 3_000_000
    indptr = torch.arange(0, num_edges + 1, 3)
    indices = randint(0, 4, num_edges).int()  # all edges begin in four nodes
    ones = torch.ones(indptr.numel() - 1, dtype=torch.int64)
    with torch_threads(4):
        sums = add_to_sources(indptr, indices, ones)
    assert torch.equal(sums[:4], torch.bincount(indices))


def test_a_graph_without_edges_adds_nothing() -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert add_to_sources(torch.zeros(4, dtype=torch.int64), none, torch.ones(3, dtype=torch.int64)).tolist() == [0] * 3


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_edge_that_leads_nowhere_is_refused(bad: int) -> None:
    indptr = torch.tensor([0, 1, 2, 2])
    indices = torch.tensor([1, bad])
    with pytest.raises(ValueError, match="hopline verify"):
        add_to_sources(indptr, indices, torch.ones(3, dtype=torch.int64))
