"""Counts of cut edges and halo sizes of a partition, against loops and sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hopline.core.partition import Partition
from hopline.ops.cpu import partition as cpu_partition
from tests.support.helpers import randint, random_graph, torch_threads


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
    groups = [[0], [1, 3], [4, 2, 0], [], [0, 1, 2, 3, 4]]
    flat = np.array([p for g in groups for p in g])
    ends = np.cumsum([0, *map(len, groups)])
    with torch_threads(threads):
        halo_sizes = cpu_partition.halo_sizes(indptr, indices, part_of, order, ptr, flat, ends)
    for group, size in zip(groups, halo_sizes, strict=True):
        inside = np.isin(part_of, group)
        assert size == np.unique(src[inside[dst] & ~inside[src]]).size
