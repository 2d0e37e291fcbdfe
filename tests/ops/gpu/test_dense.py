"""The fused hidden layer on trees against plain torch operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hopline.ops import random, reference
from hopline.ops.gpu import dense as gpu_dense
from hopline.ops.gpu import tree as gpu_tree
from hopline.ops.tree_slots import Slots
from tests.ops.gpu.test_tree import csr, on_device
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randn

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)


@parametrize_kernel(
    [("mean", 0.0, (32, 16), False), ("mean", 0.5, (20, 24), True), ("sum", 0.3, (20, 24), True)],
    how=["mean", "sum"],
    p=[0.0, 0.3, 0.5],
    shape=[(32, 16), (20, 24)],
    needs_input=[False, True],
)
def test_outputs_and_gradients_are_those_of_plain_operations(
    how: str, p: float, shape: tuple[int, int], needs_input: bool
):
    n, k = shape
    slots = Slots(8, (3, 5))
    hop = 0
    nodes, counts, _ = gpu_tree.sample_tree(*on_device(*csr(), torch.arange(8)), slots, 3)  # with empty slots
    num = slots.up_to(1)
    key = torch.tensor([random.derive_key(3, 1)]).to(DEVICE)
    inner = gpu_tree.dense_rows(nodes[:num], slots.parents(DEVICE))
    present_slots = inner.slots[: int(inner.total)].long()
    grads = []
    outs = []
    for ours in (True, False):
        dtype = torch.bfloat16 if ours else torch.float32
        by_slot = randn(num, k).bfloat16().to(DEVICE).to(dtype)
        a = torch.full_like(by_slot, 1e4)  # rows beyond the last must not matter
        a[: present_slots.numel()] = by_slot[present_slots]
        a = (a if ours else by_slot).requires_grad_(needs_input)
        left = randn(n, k - 6, seed=1).bfloat16().float().to(DEVICE).requires_grad_()
        right = randn(n, 6, seed=4).bfloat16().float().to(DEVICE).requires_grad_()
        bias = randn(n, seed=2).bfloat16().float().to(DEVICE).requires_grad_()
        if ours:
            out = gpu_dense.hidden_then_reduce(a, left, right, bias, slots, hop, nodes, counts, inner, how, p, key)
        else:
            h = torch.relu(a @ torch.cat([left, right], dim=1).t() + bias)
            h = reference.keyed_dropout(h, p, int(key), slots.ids(DEVICE)[:num]) if p else h
            out = gpu_tree.reduce_tree(h, slots, hop, nodes, counts, how, own=True)
        (out.float() * randn(*out.shape, seed=5).bfloat16().float().to(DEVICE)).sum().backward()
        outs.append(out.detach().float())
        if ours and a.grad is not None:
            assert not a.grad[present_slots.numel() :].any()
            a.grad = torch.zeros_like(a).index_copy(0, present_slots, a.grad[: present_slots.numel()])
        elif a.grad is not None:
            a.grad[nodes[:num] < 0] = 0
        grads.append([t.grad.float() for t in (left, right, bias, a) if t.grad is not None])
    assert len(grads[0]) == 3 + needs_input
    for ours, plain in zip([outs[0], *grads[0]], [outs[1], *grads[1]], strict=True):
        assert ((ours - plain).norm() / plain.norm()).item() < 1e-2
    assert torch.equal(outs[0] == 0, outs[1] == 0)  # the same elements are dropped


def test_rows_of_empty_slots_get_no_gradient_where_rows_stand_by_slot():
    slots = Slots(2, (3,))
    nodes = torch.tensor([0, 1, 5, -1, -1, 6, 7, -1], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    a = randn(8, 16).bfloat16().to(DEVICE).requires_grad_()
    left, right = randn(2, 16, 8, seed=1).float().to(DEVICE)
    bias = torch.full((16,), 9.0, device=DEVICE)
    by_slot = gpu_tree.rows_by_slot(nodes, slots.parents(DEVICE))
    out = gpu_dense.hidden_then_reduce(a, left, right, bias, slots, 0, nodes, counts, by_slot, "sum", 0.0, None)
    out.float().sum().backward()
    assert a.grad is not None
    assert a.grad.abs().sum(1).bool().tolist() == (nodes >= 0).tolist()


def test_a_linear_layer_of_two_weights_is_torchs():
    values = [randn(9, 10), randn(5, 6, seed=1), randn(5, 4, seed=2), randn(5, seed=3)]
    grads = []
    outs = []
    for fused in (True, False):
        a, left, right, bias = (v.bfloat16().float().to(DEVICE).requires_grad_() for v in values)
        if fused:
            out = gpu_dense.two_part_linear(a.bfloat16(), left, right, bias).float()
        else:
            out = torch.nn.functional.linear(a, torch.cat([left, right], dim=1), bias)
        (out * randn(*out.shape, seed=5).bfloat16().float().to(DEVICE)).sum().backward()
        outs.append(out.detach())
        grads.append([t.grad for t in (a, left, right, bias)])
    for ours, plain in zip([outs[0], *grads[0]], [outs[1], *grads[1]], strict=True):
        assert ours is not None
        assert plain is not None
        assert ((ours - plain).norm() / plain.norm()).item() < 1e-2


@parametrize_kernel([(3, False), (1025, True), (1025, False)], num=[3, 1024, 1025, 5000], reads_rows=[False, True])
def test_a_linear_layer_of_two_weights_in_float32_is_torchs(num: int, reads_rows: bool):
    values = [randn(num, 12), randn(6, 8, seed=1), randn(6, 4, seed=2), randn(6, seed=3)]
    upstream = randn(num, 6, seed=5)
    a, left, right, bias = (v.requires_grad_(i > 0 or not reads_rows) for i, v in enumerate(values))
    plain = torch.nn.functional.linear(a, torch.cat([left, right], dim=1), bias)
    expected = [plain, *torch.autograd.grad(plain, [v for v in values if v.requires_grad], upstream)]
    tensors = [v.detach().float().to(DEVICE).requires_grad_(v.requires_grad) for v in values]
    out = gpu_dense.two_part_linear(*tensors)
    results = [out, *torch.autograd.grad(out, [v for v in tensors if v.requires_grad], upstream.float().to(DEVICE))]
    for ours, exact in zip(results, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ((ours.cpu().double() - exact).norm() / exact.norm()).item() < 1e-6


def test_nan_in_a_row_reaches_the_output_as_in_torch():
    slots = Slots(8, (3, 5))
    hop = 0
    nodes, counts, _ = gpu_tree.sample_tree(*on_device(*csr(), torch.arange(8)), slots, 3)
    num = slots.up_to(1)
    key = torch.tensor([random.derive_key(3, 1)]).to(DEVICE)
    inner = gpu_tree.dense_rows(nodes[:num], slots.parents(DEVICE))
    a = randn(num, 16).bfloat16().to(DEVICE)
    a[0, 3] = float("nan")  # the row of the first seed, which is its own row in the output
    weight = randn(16, 16, seed=1).float().to(DEVICE)
    bias = randn(16, seed=2).float().to(DEVICE)
    out = gpu_dense.hidden_then_reduce(
        a, weight[:, :10], weight[:, 10:], bias, slots, hop, nodes, counts, inner, "mean", 0.0, key
    )
    assert out[0, 16:].isnan().all()
    assert not out[1:, 16:].isnan().any()
