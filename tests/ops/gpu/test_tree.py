"""Triton kernels of the tree layout against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hopline.ops import random, reference
from hopline.ops.gpu import tree as gpu_tree
from hopline.ops.tree_slots import Slots
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)


def csr(dtype: torch.dtype = torch.int32, max_degree: int = 300) -> tuple[Tensor, Tensor]:
    degrees = torch.cat([torch.tensor([0, 1, 2, 5, 15, 16, max_degree, 0]), randint(0, 40, 50)])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, randint(0, degrees.numel(), int(indptr[-1])).to(dtype)


def on_device(indptr: Tensor, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return indptr.to(DEVICE), indices.to(DEVICE), seeds.to(DEVICE)


@parametrize_kernel(
    [(False, torch.int64), (True, torch.int32), (False, torch.int32)],
    replace=[False, True],
    dtype=[torch.int32, torch.int64],
)
def test_trees_are_those_of_the_reference(replace: bool, dtype: torch.dtype):
    indptr, indices = csr(dtype, max_degree=1_000_000)
    seeds = torch.cat([torch.arange(20), torch.tensor([-1, 6])])
    slots = Slots(22, (5, 3), 7)
    key = random.derive_key(5, 2)
    expected = reference.sample_tree(indptr, indices, seeds, slots, key, replace, with_edges=True)
    ours = gpu_tree.sample_tree(*on_device(indptr, indices, seeds), slots, key, replace, with_edges=True)
    for our_tensor, expected_tensor in zip(ours, expected, strict=True):
        assert our_tensor is not None
        assert expected_tensor is not None
        assert our_tensor.dtype == expected_tensor.dtype
        assert torch.equal(our_tensor.cpu(), expected_tensor)


@parametrize_kernel([(1, 3), (50, 0), (1024, 1), (3000, 2)], num_seeds=[1, 50, 1024, 3000], seed=[0, 1, 2, 3])
def test_an_epoch_has_the_order_of_the_host(num_seeds: int, seed: int):
    key = random.derive_key(seed, 4)
    state, ahead = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    draws = gpu_tree.start_epoch(state, ahead, num_seeds, key, seed, 12 * seed)
    assert state.tolist() == ahead.tolist() == [key, seed, 12 * seed]
    assert torch.equal(draws.argsort(stable=True).cpu(), random.permutation(key, num_seeds))


def test_a_step_has_the_seeds_and_keys_of_the_host():
    order = torch.randperm(50)
    epoch_key = random.derive_key(1, 4)
    state = torch.tensor([epoch_key, 3, 30]).to(DEVICE)
    for step, position in ((3, 30), (4, 42)):
        seeds, keys = gpu_tree.next_step(state, order.to(DEVICE), 6, 6, 12)
        expected = torch.full((6,), -1)
        share = order[position + 6 : position + 12]
        expected[: share.numel()] = share
        assert torch.equal(seeds.cpu(), expected)
        key = random.derive_key(epoch_key, step)
        assert int(keys[0]) == key
        for place in (-1, 0, 1, 5, random.NUM_PURPOSES - 2):
            assert int(random.purpose_key(keys, place)) == random.purpose_key(key, place)
    assert state.tolist() == [epoch_key, 5, 54]
