"""Triton kernels of the tree layout against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hopline.ops import random, reference
from hopline.ops.gather_tiers import new_counts
from hopline.ops.gpu import tree as gpu_tree
from hopline.ops.tree_slots import Slots
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

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


def reduce_in_torch(x: Tensor, slots: Slots, hop: int, nodes: Tensor, how: str, weight: Tensor | None) -> Tensor:
    num_dst = slots.up_to(hop)
    num_src = slots.up_to(hop + 1)
    parents = slots.parents(nodes.device)[:num_src]
    edge = ((nodes[:num_src] >= 0) & (parents >= 0)).nonzero().view(-1)
    dst = parents[edge].long()
    indptr = torch.cat([dst.new_zeros(1), torch.bincount(dst, minlength=num_dst).cumsum(0)])
    order = torch.argsort(dst, stable=True)
    return reference.reduce_edges(x, indptr, edge[order], how, None if weight is None else weight[edge[order]])


@parametrize_kernel(
    [
        ("sum", True, 32),
        ("sum", False, 7),
        ("mean", True, 7),
        ("max", False, 7),
        ("max", True, 32),
        ("weighted sum", True, 1),
        ("weighted sum", False, 7),
        ("weighted max", True, 7),
        ("weighted max", False, 32),
    ],
    how=["sum", "mean", "max", "weighted sum", "weighted mean", "weighted max"],
    own=[False, True],
    width=[1, 7, 32],
)
def test_reduced_rows_and_gradients_are_those_of_torch(how: str, own: bool, width: int):
    indptr, indices = csr()
    slots = Slots(6, (3, 2))
    hop = 1
    nodes, counts, _ = gpu_tree.sample_tree(*on_device(indptr, indices, torch.arange(6)), slots, 3)
    weight = None
    if how.startswith("weighted"):
        how = how.removeprefix("weighted ")
        weight = randn(slots.up_to(2)).to(DEVICE)
        weight[::4] = 0  # more ties
    values = randn(slots.up_to(2), width)
    values[values.abs() < 0.4] = 0  # ties, some of them of zeros
    grads = []
    outs = []
    for ours in (True, False):
        x = values.clone().to(DEVICE).requires_grad_()
        if ours:
            out = gpu_tree.reduce_tree(x, slots, hop, nodes, counts, how, weight, own)
        else:
            out = reduce_in_torch(x, slots, hop, nodes, how, weight)
            is_present = (nodes[: slots.up_to(hop)] >= 0)[:, None]
            out = torch.cat([out, torch.where(is_present, x[: slots.up_to(hop)], 0)], dim=1) if own else out
        (out * randn(*out.shape, seed=9).to(DEVICE)).sum().backward()
        assert x.grad is not None
        outs.append(out.detach())
        grads.append(torch.where((nodes >= 0)[:, None], x.grad, 0))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@parametrize_kernel(
    [(True, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float64)],
    tiered=[False, True],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
)
def test_a_table_is_read_straight_into_the_reduction(dtype: torch.dtype, tiered: bool):
    indptr, indices = csr()
    slots = Slots(6, (3, 2))
    hop = 1
    nodes, _, _ = gpu_tree.sample_tree(*on_device(indptr, indices, torch.arange(6)), slots, 3)
    table = randn(58, 10).to(dtype).to(DEVICE)
    place = torch.full((58,), -1, dtype=torch.int32, device=DEVICE)
    hot = torch.arange(0, 58, 3, device=DEVICE)
    place[hot] = torch.arange(hot.numel(), dtype=torch.int32, device=DEVICE)
    hits = new_counts(DEVICE)
    tiers = (table, place, hits) if tiered else None
    x = table[hot] if tiered else table
    out = gpu_tree.reduce_rows(x, slots, hop, nodes, "mean", None, True, dtype, True, tiers)
    rows = torch.where((nodes >= 0)[:, None], table[nodes.long().clamp(min=0)], 0)
    exact = rows.to(torch.promote_types(dtype, torch.float32))
    expected = torch.cat([reduce_in_torch(exact, slots, hop, nodes, "mean", None), exact[: slots.up_to(hop)]], dim=1)
    torch.testing.assert_close(out, expected.to(dtype))
    if tiered:
        read = torch.cat([nodes[: slots.up_to(hop)], nodes[slots.num_seeds :]])
        read = read[read >= 0].long()
        num_hits = int((place[read] >= 0).sum())
        assert hits.sum(0).tolist() == [num_hits, read.numel() - num_hits, 0]


def test_dense_rows_are_those_of_the_present_slots():
    slots = Slots(6, (3, 2))
    hop = 1
    nodes, _, _ = gpu_tree.sample_tree(*on_device(*csr(), torch.arange(6)), slots, 3)
    inner = gpu_tree.dense_rows(nodes[: slots.up_to(hop)], slots.parents(DEVICE))
    assert inner.slots[: int(inner.total)].tolist() == (nodes[: slots.up_to(hop)] >= 0).nonzero().view(-1).tolist()
    table = randn(58, 10).to(DEVICE)
    plain = (table, slots, hop, nodes, "mean", None, True, table.dtype, True)
    by_slot = gpu_tree.reduce_rows(*plain)
    ours = gpu_tree.reduce_rows(*plain, dense_out=inner.row_of_slot)
    present_slots = inner.slots[: int(inner.total)].long()
    assert torch.equal(ours[: present_slots.numel()], by_slot[present_slots])

    below = (slots, 0, nodes, "sum", None, True, table.dtype, False)
    expected = gpu_tree.reduce_rows(by_slot, *below)
    assert torch.equal(gpu_tree.reduce_rows(ours, *below, dense_in=inner.row_of_slot), expected)
