"""The Numba kernel of the tree layout against the reference, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from hopline.ops import reference
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.tree_slots import Slots
from tests.equivalence.test_1_kernels import random_csr, random_key
from tests.support.helpers import randint


@pytest.mark.parametrize("seed", range(30))
def test_trees_are_those_of_the_reference(seed: int):
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    seeds = randint(0, indptr.numel() - 1, draw.choice([1, 5, 40]), seed=seed)
    fanouts = tuple(draw.choice([1, 2, 7, 40]) for _ in range(draw.choice([1, 2])))
    slots = Slots(seeds.numel(), fanouts, draw.choice([0, 9]))
    for replace in (False, True):
        arguments = (indptr, indices, seeds, slots, random_key(draw), replace, True)
        for ours, theirs in zip(cpu_sampling.sample_tree(*arguments), reference.sample_tree(*arguments), strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


def test_a_damaged_graph_is_refused():
    indptr = torch.tensor([0, 2, 5])
    indices = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="hopline verify"):
        cpu_sampling.sample_tree(indptr, indices, torch.tensor([1]), Slots(1, (2,)), 0)
    with pytest.raises(ValueError, match="outside"):
        cpu_sampling.sample_tree(indptr, indices, torch.tensor([2]), Slots(1, (2,)), 0)
