"""Triton kernels of a hidden layer on a tree, between two aggregations: linear, ReLU, dropout, children's mean.

What a layer's aggregation leaves, [reduced | own] rows A, becomes h = dropout(relu(A W' + b)), and h what the next
aggregation leaves, in one autograd function. The dropout mask is drawn in the product's epilogue and never stored:
h > 0 says afterwards where a gradient passes. Where A needs no gradient, as in the first layer, the gradient of h is
made inside the kernel that needs it and never written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu_core import GOLDEN, first_state, is_interpreted, mix
from hopline.ops.gpu_tree import Dense
from hopline.ops.gpu_tree_reduce import reduce_rows
from hopline.ops.slots import Slots

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 128, 128, 64
SPLITS = 66
"""Ranges of rows whose weight gradients are summed apart: a fixed number, so that the sum is the same every time."""


@triton.jit
def _kept(states, first_column, threshold, R: tl.constexpr, C: tl.constexpr):
    """[R, C] whether each element is kept: 16 bits a column, four columns a draw, as `reference.keyed_dropout`."""
    group = (first_column // 4 + tl.arange(0, C // 4) + 1).to(tl.uint64)
    raw = mix(states[:, None] + group[None, :] * GOLDEN)
    lane = (tl.arange(0, 4) * 16).to(tl.uint64)
    bits = ((raw[:, :, None] >> lane[None, None, :]) & 0xFFFF).to(tl.int32)
    return tl.reshape(bits, (R, C)) >= threshold


@triton.jit
def _product(left, right, total, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter multiplies the bits of bfloat16
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        product = tl.dot(left, right, total)
    return product


@triton.jit
def _hidden_kernel(
    a, weight, bias, out, ids, slots, key, total_rows, threshold, scale,
    N: tl.constexpr, K: tl.constexpr, DROP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    num = tl.load(total_rows)
    tiles: tl.constexpr = (N + C - 1) // C
    if tl.program_id(0) // tiles * R >= num:
        return
    row = tl.program_id(0) // tiles * R + tl.arange(0, R)
    first_column = tl.program_id(0) % tiles * C
    column = first_column + tl.arange(0, C)
    inside = row < num
    total = tl.zeros((R, C), tl.float32)
    left = a + row.to(tl.int64)[:, None] * K + tl.arange(0, D)[None, :]
    right = weight + column[None, :] * K + tl.arange(0, D)[:, None]
    for k in range(0, K, D):
        depth = k + tl.arange(0, D) < K
        rows = tl.load(left + k, mask=inside[:, None] & depth[None, :], other=0)
        columns = tl.load(right + k, mask=depth[:, None] & (column < N)[None, :], other=0)
        total = _product(rows, columns, total, UPCAST)
    total += tl.load(bias + column, mask=column < N, other=0).to(tl.float32)[None, :]
    total = tl.maximum(total, 0.0)
    if DROP:
        slot = tl.load(slots + row, mask=inside, other=0)
        states = first_state(tl.load(key), tl.load(ids + slot, mask=inside, other=0))
        total = tl.where(_kept(states, first_column, threshold, R, C), total * scale, 0.0)
    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def _hidden_gradient(
    grad, h, slots, nodes, parents, counts, row, column, inside, num_dst, scale, N: tl.constexpr, MEAN: tl.constexpr
):
    """The gradient before ReLU and dropout, of rows whose own and reduced gradients stand in `grad`."""
    ok = (column < N)[None, :]
    slot = tl.load(slots + row, mask=inside, other=0)
    parent = tl.load(parents + slot, mask=inside, other=-1).to(tl.int64)
    there = (parent >= 0) & (tl.load(nodes + slot, mask=inside, other=-1) >= 0)
    total = tl.load(grad + parent[:, None] * (2 * N) + column[None, :], mask=there[:, None] & ok, other=0)
    total = total.to(tl.float32)
    if MEAN:
        total = total / tl.maximum(tl.load(counts + parent, mask=there, other=1), 1).to(tl.float32)[:, None]
    own = slot.to(tl.int64)[:, None] * (2 * N) + N + column[None, :]
    total += tl.load(grad + own, mask=(inside & (slot < num_dst))[:, None] & ok, other=0).to(tl.float32)
    value = tl.load(h + row.to(tl.int64)[:, None] * N + column[None, :], mask=inside[:, None] & ok, other=0)
    return tl.where(value > 0, total * scale, 0.0)


@triton.jit(do_not_specialize=["num", "num_dst"])
def _gradient_kernel(
    grad, h, slots, nodes, parents, counts, total_rows, out, num, num_dst, scale,
    N: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = row < tl.load(total_rows)
    total = _hidden_gradient(grad, h, slots, nodes, parents, counts, row, column, inside, num_dst, scale, N, MEAN)
    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    # Rows beyond the last are written too, as zeros: products run over all of them.
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < num)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["num_dst", "splits"])
def _weight_kernel(
    a, grad, h, slots, nodes, parents, counts, total_rows, sums, bias_sums, num_dst, splits, scale,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One range of rows: the gradients of weight and bias, that of h being made on the way."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    split = tl.program_id(1)
    depth = tl.arange(0, KP)
    total = tl.zeros((C, KP), tl.float32)
    bias_total = tl.zeros((C,), tl.float32)
    num = tl.load(total_rows)
    rows_per_split = tl.cdiv(tl.cdiv(num, splits), R) * R
    first = split * rows_per_split
    for r in range(first, tl.minimum(first + rows_per_split, num), R):
        row = r + tl.arange(0, R)
        inside = (row < num) & (row < first + rows_per_split)
        made = _hidden_gradient(grad, h, slots, nodes, parents, counts, row, column, inside, num_dst, scale, N, MEAN)
        rows = tl.load(
            a + row.to(tl.int64)[:, None] * K + depth[None, :], mask=inside[:, None] & (depth < K)[None, :], other=0
        )
        total = _product(tl.trans(made.to(rows.dtype)), rows, total, UPCAST)
        bias_total += tl.sum(made, 0)
    target = sums + (split * N + column).to(tl.int64)[:, None] * K + depth[None, :]
    tl.store(target, total, mask=(column < N)[:, None] & (depth < K)[None, :])
    tl.store(bias_sums + split * N + column, bias_total, mask=column < N)


def dropout_numbers(p: float) -> tuple[int, float]:
    """(threshold, scale): a column is kept where its 16 bits reach the threshold."""
    threshold = round(p * 65536)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor,
        slots: Slots,
        hop: int,
        nodes: Tensor,
        counts: Tensor,
        dense: Dense,
        how: str,
        p: float,
        key: Tensor | None,
    ) -> Tensor:
        n, k = weight.shape
        w, (threshold, scale) = weight.to(a.dtype), dropout_numbers(p)
        h = torch.empty(a.size(0), n, dtype=a.dtype, device=a.device)
        ids, drops = slots.ids(a.device), key is not None and p > 0
        grid = (triton.cdiv(a.size(0), BLOCK_ROWS) * triton.cdiv(n, BLOCK_COLUMNS),)
        _hidden_kernel[grid](
            a, w, bias, h, ids, dense.slots, key if drops else ids, dense.total, threshold, scale,
            n, k, drops, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH, is_interpreted(), num_warps=8, num_stages=3,
        )  # fmt: skip
        ctx.plan = (slots, hop, how, scale if drops else 1.0, weight.dtype)
        ctx.save_for_backward(a, w, h, nodes, counts, dense.slots, dense.total)
        return reduce_rows(h, slots, hop, nodes, how, None, True, a.dtype, table=False, dense_in=dense.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        slots, hop, how, scale, dtype = ctx.plan
        a, w, h, nodes, counts, dense_slots, total = ctx.saved_tensors
        grad, num, (n, k) = grad.contiguous(), a.size(0), w.shape
        edges = (dense_slots, nodes, slots.parents(a.device), counts, total)
        num_dst, mean = slots.up_to(hop), how == "mean"
        if ctx.needs_input_grad[0]:
            made = torch.empty_like(h)
            grid = (triton.cdiv(num, 16), triton.cdiv(n, 128))
            _gradient_kernel[grid](grad, h, *edges, made, num, num_dst, scale, n, mean, 16, 128)
            grad_weight = (made.t() @ a).to(dtype)
            return made @ w, grad_weight, made.sum(0, dtype=torch.float32).to(dtype), *[None] * 8
        sums = torch.empty(SPLITS, n, k, dtype=torch.float32, device=a.device)
        bias_sums = torch.empty(SPLITS, n, dtype=torch.float32, device=a.device)
        _weight_kernel[(triton.cdiv(n, 64), SPLITS)](
            a, grad, h, *edges, sums, bias_sums, num_dst, SPLITS, scale,
            n, k, max(16, triton.next_power_of_2(k)), mean, 64, 64, is_interpreted(), num_warps=4,
        )  # fmt: skip
        return None, sums.sum(0).to(dtype), bias_sums.sum(0).to(dtype), *[None] * 8


def hidden_then_reduce(
    a: Tensor,
    weight: Tensor,
    bias: Tensor,
    slots: Slots,
    hop: int,
    nodes: Tensor,
    counts: Tensor,
    dense: Dense,
    how: str,
    p: float,
    key: Tensor | None,
) -> Tensor:
    """[reduced | own] rows of dropout(relu(a W' + b)), `a` having a dense row per slot up to hop + 1; sum or mean."""
    out = _Hidden.apply(a, weight, bias, slots, hop, nodes, counts, dense, how, p, key)
    assert isinstance(out, Tensor)
    return out
