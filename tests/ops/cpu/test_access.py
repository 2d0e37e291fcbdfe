"""`add_to_sources`: each source gets the sum over its out-edges, for any number of threads."""

from __future__ import annotations

import pytest
import torch

from hopline.ops.cpu.partition import add_to_sources
from tests.support.helpers import randint, random_graph, torch_threads


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
