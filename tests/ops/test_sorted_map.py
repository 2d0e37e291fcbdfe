"""The id map that sorts, against the hash map of the CPU."""

from __future__ import annotations

import pytest
import torch

from hopline.ops.cpu.sampling import IdMap
from hopline.ops.reference import SortedIdMap
from tests.support.helpers import randint


def test_equals_the_map_of_the_cpu_over_several_batches() -> None:
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
def test_what_is_not_a_node_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        SortedIdMap(50, torch.device("cpu")).add(torch.tensor([3, bad]))
