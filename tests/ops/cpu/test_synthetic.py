"""The keyed order of the synthetic graphs' nodes, and the degrees that go with it."""

from __future__ import annotations

import numpy as np
import pytest

from hopline.ops.cpu import synthetic as cpu_synthetic


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
