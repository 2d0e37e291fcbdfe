"""Random walks: the kernel equals its definition, and steps have the chances of node2vec."""

from __future__ import annotations

import pytest
import torch

from hopline.ops.cpu.walks import random_walk, walk_of
from tests.support.helpers import random_graph

# 0 - 1, 0 - 2, 1 - 2, 0 - 3, 3 - 4; node 5 has no edge.
COLUMNS = [[1, 2, 3], [0, 2], [0, 1], [0, 4], [3], []]
ROWPTR = torch.tensor([0, *(sum(map(len, COLUMNS[: i + 1])) for i in range(6))])
COL = torch.tensor([column for row in COLUMNS for column in row])


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (2.0, 0.5), (0.25, 4.0), (1e9, 1.0), (3.0, 1e6)])
def test_the_kernel_equals_the_definition(p: float, q: float):
    graph = random_graph(40, 150)
    for indptr, indices in ((ROWPTR, COL), (graph.indptr, graph.indices)):
        seeds = torch.arange(indptr.numel() - 1)
        walks = random_walk(indptr, indices, seeds, 6, p, q, 11)
        expected = [walk_of(indptr, indices, seed, seed, 6, p, q, 11) for seed in seeds.tolist()]
        assert walks.tolist() == expected


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_second_steps_have_the_chances_of_node2vec(p: float, q: float):
    walks = random_walk(ROWPTR, COL, torch.full((60_000,), 1), 2, p, q, 3)
    from_1_to_0 = walks[walks[:, 1] == 0]
    weight = torch.tensor([1 / p, 1.0, 1 / q])  # back to 1; to 2, a neighbour of 1; to 3, which is none
    expected = from_1_to_0.size(0) * weight / weight.sum()
    counts = torch.bincount(from_1_to_0[:, 2], minlength=4)[1:]
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.4  # chi-square, 2 degrees of freedom, 1e-4


def test_a_dead_end_is_left_by_the_only_way_and_an_isolated_node_not_at_all():
    walks = random_walk(ROWPTR, COL, torch.tensor([5, 4]), 3, 1e12, 1.0, 0)
    assert walks[0].tolist() == [5, 5, 5, 5]
    assert walks[1, :2].tolist() == [4, 3]
    leaf = random_walk(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([0]), 4, 1e300, 1.0, 0)
    assert leaf.tolist() == [[0, 1, 0, 1, 0]]


@pytest.mark.parametrize("change", ["seed", "negative", "column", "indptr"])
def test_ids_outside_the_graph_are_refused(change: str):
    seeds = torch.tensor([{"seed": 6, "negative": -1}.get(change, 0)])
    columns = torch.full_like(COL, 99) if change == "column" else COL
    indptr = torch.tensor([0, 50]) if change == "indptr" else ROWPTR
    with pytest.raises(ValueError, match="outside the graph"):
        random_walk(indptr, columns, seeds, 2, 1.0, 1.0, 0)
