"""The keyed order of the synthetic graphs' nodes, and the sources of their edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hopline.ops.cpu import synthetic as cpu_synthetic
from hopline.ops.random import draw, uniform


@pytest.mark.parametrize("num_nodes", [2, 3, 100, 1023, 1025])
def test_ranks_are_a_permutation_and_nodes_its_inverse(num_nodes: int) -> None:
    half = np.uint64(max(1, -(-(num_nodes - 1).bit_length() // 2)))
    ranks = np.empty(num_nodes, dtype=np.int64)
    cpu_synthetic.fill_ranks(0, np.uint64(99), half, num_nodes, ranks)
    assert sorted(ranks.tolist()) == list(range(num_nodes))
    back = [cpu_synthetic.node_at(r, np.uint64(99), half, num_nodes) for r in ranks.tolist()]
    assert back == list(range(num_nodes))


def test_another_key_gives_another_order() -> None:
    orders = np.empty((2, 1000), dtype=np.int64)
    for order, key in zip(orders, (1, 2), strict=True):
        cpu_synthetic.fill_ranks(0, np.uint64(key), np.uint64(5), 1000, order)
    assert (orders[0] != orders[1]).mean() > 0.9


def test_any_range_of_nodes_has_the_ranks_of_the_whole() -> None:
    whole = np.empty(1000, dtype=np.int64)
    some = np.empty(100, dtype=np.int64)
    cpu_synthetic.fill_ranks(0, np.uint64(7), np.uint64(5), 1000, whole)
    cpu_synthetic.fill_ranks(250, np.uint64(7), np.uint64(5), 1000, some)
    assert some.tolist() == whole[250:350].tolist()


@pytest.mark.parametrize("homophily", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("num_nodes", "num_classes"), [(4, 2), (1025, 7)])
def test_sources_are_drawn_by_the_square_of_a_uniform_number(
    homophily: float, num_nodes: int, num_classes: int
) -> None:
    half = np.uint64(6)
    ranks = np.empty(num_nodes, dtype=np.int64)
    cpu_synthetic.fill_ranks(0, np.uint64(3), half, num_nodes, ranks)
    node_at = {rank: node for node, rank in enumerate(ranks.tolist())}
    degrees = np.arange(num_nodes) % 4
    degrees[1] = 5000  # a hub, between nodes without edges
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    ours = np.empty(indptr[-1], dtype=np.int64)
    args = (np.uint64(3), np.uint64(11), half, num_nodes, num_classes, homophily, ours)
    cpu_synthetic.fill_sources(0, ranks, indptr, *args)

    dst = torch.repeat_interleave(torch.arange(num_nodes), torch.from_numpy(degrees))
    number = torch.arange(indptr[-1]) - torch.from_numpy(indptr)[dst]
    upper_bits = (draw(11, dst, 2 * number + offset) >> 11 for offset in (0, 1))
    coin, u = (uniform(raw, 53).tolist() for raw in upper_bits)
    expected = []
    for e, own_rank in enumerate(ranks[dst].tolist()):
        members = range(own_rank % num_classes, num_nodes, num_classes)
        choices = members if coin[e] < homophily else range(num_nodes)
        rank = choices[int(len(choices) * u[e] * u[e])]
        if rank == own_rank:
            rank += num_classes if rank + num_classes < num_nodes else -num_classes
        expected.append(node_at[rank])
    assert ours.tolist() == expected
