"""Triton kernels of a hidden layer on a tree, between two aggregations: linear, ReLU, dropout, children's mean.

What a layer's aggregation leaves, [reduced | own] rows A, becomes h = dropout(relu(A W' + b)), and h what the next
aggregation leaves, in one autograd function. The dropout mask is drawn in the product's epilogue and never stored:
h > 0 says afterwards where a gradient passes. Where A needs no gradient, as in the first layer, the gradient of h is
made inside the kernel that needs it and never written.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.reduce import dropout_numbers
from hopline.ops.gpu.runtime import GOLDEN, first_state, is_interpreted, mix
from hopline.ops.gpu.tree import RowMap, reduce_rows
from hopline.ops.tree_slots import Slots

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 128, 128, 64
SPLITS = 66
"""Ranges of rows whose weight gradients are summed apart: a fixed number, so that the sum is the same every time."""
FEW_ROWS, ROWS_SUMMED = 1024, 256
"""Up to so many rows are summed at once; of more, so many by each program first."""
GRADIENT_ROWS = 32
"""Rows of a program that makes the gradient of h."""


@triton.jit
def _pack_kernel(left, right, out, num, LEFT: tl.constexpr, RIGHT: tl.constexpr, T: tl.constexpr):
    i = tl.program_id(0) * T + tl.arange(0, T)
    row, column = i // (LEFT + RIGHT), i % (LEFT + RIGHT)
    inside, is_left = i < num, column < LEFT
    value = tl.load(left + row * LEFT + column, mask=inside & is_left, other=0)
    other = tl.load(right + row * RIGHT + column - LEFT, mask=inside & (column >= LEFT), other=0)
    tl.store(out + i, tl.where(is_left, value, other).to(out.dtype.element_ty), mask=inside)


def _packed(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """[left | right] in another precision."""
    out = torch.empty(left.size(0), left.size(1) + right.size(1), dtype=dtype, device=left.device)
    num = out.numel()
    _pack_kernel[(triton.cdiv(num, 1024),)](left, right, out, num, left.size(1), right.size(1), 1024)
    return out


@triton.jit
def _kept(states, first_column, threshold, R: tl.constexpr, C: tl.constexpr):
    """[R, C] whether each element is kept: 16 bits a column, four columns a draw, as `reference.keyed_dropout`."""
    group = (first_column // 4 + tl.arange(0, C // 4) + 1).to(tl.uint64)
    raw = mix(states[:, None] + group[None, :] * GOLDEN)
    halves = tl.join(raw.to(tl.uint32), (raw >> 32).to(tl.uint32))
    lanes = tl.join((halves & 0xFFFF).to(tl.int32) >= threshold, (halves >> 16).to(tl.int32) >= threshold)
    return tl.reshape(lanes, (R, C))


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
    grad, h, slots, parents, counts, row, column, inside, num_dst, scale, N: tl.constexpr, MEAN: tl.constexpr
):
    """The gradient before ReLU and dropout, of rows whose own and reduced gradients stand in `grad`."""
    ok = (column < N)[None, :]
    parent = tl.load(parents + row, mask=inside, other=-1).to(tl.int64)
    there = parent >= 0
    total = tl.load(grad + parent[:, None] * (2 * N) + column[None, :], mask=there[:, None] & ok, other=0)
    total = total.to(tl.float32)
    if MEAN:
        total = total / tl.maximum(tl.load(counts + parent, mask=there, other=1), 1).to(tl.float32)[:, None]
    # Rows are in the order of their slots: one beyond the destinations' number belongs to none of them.
    near = inside & (row < num_dst)
    slot = tl.load(slots + row, mask=near, other=num_dst)
    own = slot.to(tl.int64)[:, None] * (2 * N) + N + column[None, :]
    total += tl.load(grad + own, mask=(slot < num_dst)[:, None] & ok, other=0).to(tl.float32)
    value = tl.load(h + row.to(tl.int64)[:, None] * N + column[None, :], mask=inside[:, None] & ok, other=0)
    return tl.where(value > 0, total * scale, 0.0)


@triton.jit(do_not_specialize=["num", "num_dst"])
def _gradient_kernel(
    grad, h, slots, parents, counts, total_rows, out, bias_sums, num, num_dst, scale,
    N: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = row < tl.load(total_rows)
    total = _hidden_gradient(grad, h, slots, parents, counts, row, column, inside, num_dst, scale, N, MEAN)
    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    # Rows beyond the last are written too, as zeros: products run over all of them.
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < num)[:, None] & (column < N)[None, :])
    tl.store(bias_sums + tl.program_id(0) * N + column, tl.sum(total, 0), mask=column < N)


@triton.jit(do_not_specialize=["num_dst", "splits"])
def _weight_kernel(
    a, grad, h, slots, parents, counts, total_rows, sums, bias_sums, num_dst, splits, scale,
    N: tl.constexpr, K: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One range of rows: a tile of the gradients of weight and bias, that of h being made on the way."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    depth = tl.program_id(1) * D + tl.arange(0, D)
    split = tl.program_id(2)
    total = tl.zeros((C, D), tl.float32)
    bias_total = tl.zeros((C,), tl.float32)
    num = tl.load(total_rows)
    rows_per_split = tl.cdiv(tl.cdiv(num, splits), R) * R
    first = split * rows_per_split
    for r in range(first, tl.minimum(first + rows_per_split, num), R):
        row = r + tl.arange(0, R)
        inside = row < num
        made = _hidden_gradient(grad, h, slots, parents, counts, row, column, inside, num_dst, scale, N, MEAN)
        place = a + row.to(tl.int64)[:, None] * K + depth[None, :]
        rows = tl.load(place, mask=inside[:, None] & (depth < K)[None, :], other=0)
        total = _product(tl.trans(made.to(rows.dtype)), rows, total, UPCAST)
        bias_total += tl.sum(made, 0)
    target = sums + (split * N + column).to(tl.int64)[:, None] * K + depth[None, :]
    tl.store(target, total, mask=(column < N)[:, None] & (depth < K)[None, :])
    if tl.program_id(1) == 0:
        tl.store(bias_sums + split * N + column, bias_total, mask=column < N)


@triton.jit(do_not_specialize=["num"])
def _column_sums_kernel(rows, out, num, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for first in range(0, num, R):
        row = first + tl.arange(0, R)
        ok = (row < num)[:, None] & (column < N)[None, :]
        total += tl.load(rows + row[:, None] * N + column[None, :], mask=ok, other=0).to(tl.float32)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["num"])
def _partial_sums_kernel(rows, out, num, N: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The columns of PER rows summed, by each program."""
    column = tl.program_id(1) * C + tl.arange(0, C)
    begin = tl.program_id(0).to(tl.int64) * PER
    total = tl.zeros((R, C), tl.float32)
    for first in range(0, PER, R):
        row = begin + first + tl.arange(0, R)
        ok = (row < num)[:, None] & (column < N)[None, :]
        total += tl.load(rows + row[:, None] * N + column[None, :], mask=ok, other=0).to(tl.float32)
    tl.store(out + tl.program_id(0) * N + column, tl.sum(total, 0), mask=column < N)


def _column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows.sum(0), which torch takes its time for."""
    if rows.size(0) > FEW_ROWS:
        programs = triton.cdiv(rows.size(0), ROWS_SUMMED)
        some = torch.empty(programs, rows.size(1), dtype=torch.float32, device=rows.device)
        grid = (programs, triton.cdiv(rows.size(1), 128))
        _partial_sums_kernel[grid](rows, some, rows.size(0), rows.size(1), ROWS_SUMMED, 32, 128)
        rows = some
    out = torch.empty(rows.size(1), dtype=dtype, device=rows.device)
    grid = (triton.cdiv(rows.size(1), 16),)
    _column_sums_kernel[grid](rows, out, rows.size(0), rows.size(1), 128, 16)
    return out


@triton.jit(do_not_specialize=["splits"])
def _sum_kernel(sums, left, right, num, splits, LEFT: tl.constexpr, RIGHT: tl.constexpr, T: tl.constexpr):
    """[splits, num] summed, its columns given to the two weights they belong to."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    total = tl.zeros((T,), tl.float32)
    place = sums + i
    for _ in range(splits):
        total += tl.load(place, mask=i < num, other=0).to(tl.float32)
        place += num
    row, column = i // (LEFT + RIGHT), i % (LEFT + RIGHT)
    is_left = column < LEFT
    tl.store(left + row * LEFT + column, total.to(left.dtype.element_ty), mask=(i < num) & is_left)
    of_right = right + row * RIGHT + column - LEFT
    tl.store(of_right, total.to(right.dtype.element_ty), mask=(i < num) & (column >= LEFT))


def _summed(sums: Tensor, widths: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    left, right = (torch.empty(sums.size(1), w, dtype=dtype, device=sums.device) for w in widths)
    num = sums.size(1) * sum(widths)
    block = 1024 if is_interpreted() else 128
    _sum_kernel[(triton.cdiv(num, block),)](sums, left, right, num, sums.size(0), *widths, block)
    return left, right


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        left: Tensor,
        right: Tensor,
        bias: Tensor,
        slots: Slots,
        hop: int,
        nodes: Tensor,
        counts: Tensor,
        rows: RowMap,
        how: str,
        p: float,
        key: Tensor | None,
    ) -> Tensor:
        w, (threshold, scale) = _packed(left, right, a.dtype), dropout_numbers(p)
        n, k = w.shape
        h = torch.empty(a.size(0), n, dtype=a.dtype, device=a.device)
        ids, drops = slots.ids(a.device), key is not None and p > 0
        grid = (triton.cdiv(a.size(0), BLOCK_ROWS) * triton.cdiv(n, BLOCK_COLUMNS),)
        _hidden_kernel[grid](
            a, w, bias, h, ids, rows.slots, key if drops else ids, rows.total, threshold, scale,
            n, k, drops, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH, is_interpreted(), num_warps=8, num_stages=3,
        )  # fmt: skip
        ctx.plan = (slots, hop, how, scale if drops else 1.0, (left.size(1), right.size(1)), left.dtype)
        ctx.save_for_backward(a, w, h, counts, rows.slots, rows.parents, rows.total)
        return reduce_rows(h, slots, hop, nodes, how, None, True, a.dtype, table=False, dense_in=rows.row_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        slots, hop, how, scale, widths, dtype = ctx.plan
        a, w, h, counts, *rows, total = ctx.saved_tensors
        grad, num, (n, k) = grad.contiguous(), a.size(0), w.shape
        given, num_dst, mean = (*rows, counts, total), slots.up_to(hop), how == "mean"
        if ctx.needs_input_grad[0]:
            made, programs = torch.empty_like(h), triton.cdiv(num, GRADIENT_ROWS)
            bias_sums = torch.empty(programs, n, dtype=torch.float32, device=a.device)
            grid = (programs, triton.cdiv(n, 128))
            _gradient_kernel[grid](grad, h, *given, made, bias_sums, num, num_dst, scale, n, mean, GRADIENT_ROWS, 128)
            of_weights = _summed((made.t() @ a)[None], widths, dtype)
            return made @ w, *of_weights, _column_sums(bias_sums, dtype), *[None] * 8
        sums = torch.empty(SPLITS, n, k, dtype=torch.float32, device=a.device)
        bias_sums = torch.empty(SPLITS, n, dtype=torch.float32, device=a.device)
        _weight_kernel[(triton.cdiv(n, 64), triton.cdiv(k, 256), SPLITS)](
            a, grad, h, *given, sums, bias_sums, num_dst, SPLITS, scale,
            n, k, mean, 64, 64, min(256, max(16, triton.next_power_of_2(k))), is_interpreted(), num_warps=4,
        )  # fmt: skip
        return None, *_summed(sums, widths, dtype), _column_sums(bias_sums, dtype), *[None] * 8


class _TwoPartLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
        w = _packed(left, right, a.dtype)
        ctx.save_for_backward(a, w)
        ctx.widths, ctx.dtype = (left.size(1), right.size(1)), left.dtype
        return torch.addmm(bias.to(a.dtype), a, w.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        a, w = ctx.saved_tensors
        grad = grad.contiguous()
        of_weights = _summed((grad.t() @ a)[None], ctx.widths, ctx.dtype)
        of_rows = grad @ w if ctx.needs_input_grad[0] else None
        return of_rows, *of_weights, _column_sums(grad, ctx.dtype)


def two_part_linear(a: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    """a [left | right]' + bias in the precision of `a`, with few kernels around the products."""
    out = _TwoPartLinear.apply(a, left, right, bias)
    assert isinstance(out, Tensor)
    return out


def hidden_then_reduce(
    a: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor,
    slots: Slots,
    hop: int,
    nodes: Tensor,
    counts: Tensor,
    rows: RowMap,
    how: str,
    p: float,
    key: Tensor | None,
) -> Tensor:
    """[reduced | own] rows of dropout(relu(a [left | right]' + b)), for the slots up to `hop`; sum or mean.

    a: rows for the slots up to hop + 1, which `rows` says the places of.
    """
    out = _Hidden.apply(a, left, right, bias, slots, hop, nodes, counts, rows, how, p, key)
    assert isinstance(out, Tensor)
    return out
