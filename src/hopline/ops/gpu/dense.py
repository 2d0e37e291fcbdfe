"""Triton kernels of a hidden layer in the tree layout: linear, ReLU, dropout, the next aggregation.

In the tree layout every seed and every possible draw of a batch has a number of its own, its *slot*. The
neighbours drawn for a slot are its children (`ops/tree_slots.py` has an example).

One autograd function goes from one layer's aggregated rows to the next layer's:

    A [rows, K]           the output of a layer's aggregation: (reduced | own) rows
      |  h = dropout(relu(A W^T + b))          W = [left | right], [N, K]
    h [rows, N]
      |  left half: sum or mean of h over the children of each slot; right half: the slot's own h
    out [num_dst, 2 * N]  the input of the next layer's linear

Fusing saves memory traffic twice. The dropout mask is drawn in the epilogue of the product and never
stored: in backward no gradient passes where h is 0. If A needs no gradient, as in the first layer, the
gradient of h is computed inside the kernel of the weight gradient and never written.

Memory layout
    a, h             row-major in half precision; row r belongs to slot `slots[r]` (see `tree.RowMap`)
    total_rows       [1] int32 in device memory: the number of rows in use. Later rows are meaningless
    slots, parents   int32: each row's slot, and the slot of its parent, -1 if it has none
    counts           int32: the number of children drawn for each slot
    grad             [num_dst, 2 * N]: the gradient of `out`

Gradient. The row r of h, at slot s with parent p, is read twice: by its parent's aggregation, and as the own
row of s:

    grad_h[r] = grad[p, :N] (/ counts[p] for a mean)  +  grad[s, N:] if s is a destination
    grad_z[r] = 0 where h[r] is 0, else scale * grad_h[r]          (z = A W^T + b, scale of the dropout)
    grad_W    = grad_z^T A          grad_b = sum of grad_z over rows          grad_A = grad_z W

h is never negative. Where it is NaN, the gradient passes, as in torch.

A slot has one parent, so grad_h is a gather and needs no atomics. The kernels sum in float32. They check no
indices: those of a tree follow from its shape. Nothing in this file synchronises with the device.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import GOLDEN, first_state, is_interpreted, mix
from hopline.ops.gpu.tree import RowMap, reduce_rows
from hopline.ops.random import dropout_numbers
from hopline.ops.tree_slots import Slots

BLOCK_ROWS = 128
"""Rows of h per program of `_hidden_kernel`."""
BLOCK_COLUMNS = 128
"""Columns of h per program of `_hidden_kernel`."""
BLOCK_DEPTH = 64
"""Terms of the product that a program of `_hidden_kernel` adds up per step."""
SPLITS = 66
"""Row ranges whose weight gradients are summed separately by `_weight_kernel`, and then added up.

The number is fixed, so that the order of summation is the same every time. Its value is a rule of thumb.
"""
FEW_ROWS = 1024
"""Most rows that `_column_sums` sums by one kernel. More rows take two kernels."""
ROWS_SUMMED = 256
"""Rows per program of `_partial_sums_kernel`, which runs first if there are more than FEW_ROWS."""
GRADIENT_ROWS = 32
"""Rows per program of `_gradient_kernel`."""


@triton.jit
def _pack_kernel(left, right, out, num, LEFT: tl.constexpr, RIGHT: tl.constexpr, T: tl.constexpr):
    """out = [left | right], converted to the dtype of `out`. A program writes T of its `num` numbers."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    row = i // (LEFT + RIGHT)
    column = i % (LEFT + RIGHT)
    is_element = i < num
    is_left = column < LEFT
    left_value = tl.load(left + row * LEFT + column, mask=is_element & is_left, other=0)
    right_value = tl.load(right + row * RIGHT + column - LEFT, mask=is_element & (column >= LEFT), other=0)
    tl.store(out + i, tl.where(is_left, left_value, right_value).to(out.dtype.element_ty), mask=is_element)


def _pack_weights(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, LEFT + RIGHT] of `dtype`: [left | right], concatenated and converted by one kernel."""
    out = torch.empty(left.size(0), left.size(1) + right.size(1), dtype=dtype, device=left.device)
    num = out.numel()
    # The kernel knows no strides. A weight may be a view, for example of another module's.
    left = left.contiguous()
    right = right.contiguous()
    _pack_kernel[(triton.cdiv(num, 1024),)](left, right, out, num, left.size(1), right.size(1), 1024)
    return out


@triton.jit
def _is_kept(states, first_column, threshold, R: tl.constexpr, C: tl.constexpr):
    """[R, C]: whether dropout keeps each element. Draws as `reference.keyed_dropout` does.

    A draw of 64 bits serves four columns with 16 bits each. Each `tl.join` adds a last dimension of size 2,
    first for the two halves of a draw, then for the two quarters of each half:

        [R, C / 4] draws  ->  [R, C / 4, 2] halves  ->  [R, C / 4, 2, 2] quarters  ->  [R, C]

    The reshape puts the four quarters, lowest first, into four neighbouring columns.
    """
    # Draw j is mix(state + (j + 1) * GOLDEN), as `ops/random.py` defines it. Columns 4 j .. 4 j + 3 share it.
    group = (first_column // 4 + tl.arange(0, C // 4) + 1).to(tl.uint64)
    raw = mix(states[:, None] + group[None, :] * GOLDEN)
    halves = tl.join(raw.to(tl.uint32), (raw >> 32).to(tl.uint32))
    is_kept = tl.join((halves & 0xFFFF).to(tl.int32) >= threshold, (halves >> 16).to(tl.int32) >= threshold)
    return tl.reshape(is_kept, (R, C))


@triton.jit
def _add_product(left, right, total, UPCAST: tl.constexpr):
    """total + left @ right in float32. UPCAST: whether the interpreter runs it."""
    if UPCAST:  # the interpreter would multiply the bit patterns of bfloat16, not its values
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
    """h = dropout(relu(a weight^T + bias)), written to `out`: [rows, N].

    A program owns R rows x C columns of h and adds up D terms of the product per step. Tiles of the same
    rows are neighbours in the grid. Dropout is keyed by the id of a row's slot.
    """
    # The host does not know the number of rows in use, so it launches programs for all rows of `a`. Those
    # beyond the rows in use end at once.
    num_rows = tl.load(total_rows)
    column_tiles: tl.constexpr = (N + C - 1) // C
    first_row = tl.program_id(0) // column_tiles * R
    if first_row >= num_rows:
        return
    row = first_row + tl.arange(0, R)
    first_column = tl.program_id(0) % column_tiles * C
    column = first_column + tl.arange(0, C)
    is_row = row < num_rows

    total = tl.zeros((R, C), tl.float32)
    a_pointers = a + row.to(tl.int64)[:, None] * K + tl.arange(0, D)[None, :]
    weight_pointers = weight + column[None, :] * K + tl.arange(0, D)[:, None]
    for k in range(0, K, D):
        is_depth = k + tl.arange(0, D) < K
        a_tile = tl.load(a_pointers + k, mask=is_row[:, None] & is_depth[None, :], other=0)
        weight_tile = tl.load(weight_pointers + k, mask=is_depth[:, None] & (column < N)[None, :], other=0)
        total = _add_product(a_tile, weight_tile, total, UPCAST)

    total += tl.load(bias + column, mask=column < N, other=0).to(tl.float32)[None, :]
    # ReLU by a comparison: `tl.maximum` would turn NaN into 0, and torch keeps it.
    total = tl.where(total < 0, 0.0, total)
    if DROP:
        slot = tl.load(slots + row, mask=is_row, other=0)
        states = first_state(tl.load(key), tl.load(ids + slot, mask=is_row, other=0))
        total = tl.where(_is_kept(states, first_column, threshold, R, C), total * scale, 0.0)

    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & (column < N)[None, :])


@triton.jit
def _load_hidden_gradient(
    grad, h, slots, parents, counts, row, column, is_row, num_dst, scale, N: tl.constexpr, MEAN: tl.constexpr
):
    """[rows, columns] float32: grad_z, the gradient before ReLU and dropout; see the head of this file."""
    is_column = (column < N)[None, :]
    parent = tl.load(parents + row, mask=is_row, other=-1).to(tl.int64)
    has_parent = parent >= 0
    mask = has_parent[:, None] & is_column
    gradient = tl.load(grad + parent[:, None] * (2 * N) + column[None, :], mask=mask, other=0)
    gradient = gradient.to(tl.float32)
    if MEAN:
        count = tl.maximum(tl.load(counts + parent, mask=has_parent, other=1), 1)
        gradient = gradient / count.to(tl.float32)[:, None]

    # Each row has a slot of its own, and rows are in the order of their slots, so slots[r] >= r. Destinations
    # are the slots below num_dst. So a row from num_dst on is not a destination's, and its slot is not read.
    may_be_dst = is_row & (row < num_dst)
    slot = tl.load(slots + row, mask=may_be_dst, other=num_dst)
    own_offset = slot.to(tl.int64)[:, None] * (2 * N) + N + column[None, :]
    gradient += tl.load(grad + own_offset, mask=(slot < num_dst)[:, None] & is_column, other=0).to(tl.float32)

    hidden = tl.load(h + row.to(tl.int64)[:, None] * N + column[None, :], mask=is_row[:, None] & is_column, other=0)
    # Zero where ReLU or dropout gave zero; h is never negative. At NaN the gradient passes, as in torch.
    return tl.where(hidden <= 0, 0.0, gradient * scale)


@triton.jit(do_not_specialize=["num", "num_dst"])
def _gradient_kernel(
    grad, h, slots, parents, counts, total_rows, out, bias_sums, num, num_dst, scale,
    N: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write grad_z to `out`, [num, N], and its sums over each program's rows to bias_sums, [programs, N]."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    is_row = row < tl.load(total_rows)
    grad_z = _load_hidden_gradient(grad, h, slots, parents, counts, row, column, is_row, num_dst, scale, N, MEAN)
    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    # Rows beyond the last one in use get zeros: torch's products of the caller run over all `num` rows.
    tl.store(target, grad_z.to(out.dtype.element_ty), mask=(row < num)[:, None] & (column < N)[None, :])
    tl.store(bias_sums + tl.program_id(0) * N + column, tl.sum(grad_z, 0), mask=column < N)


@triton.jit(do_not_specialize=["num_dst", "splits"])
def _weight_kernel(
    a, grad, h, slots, parents, counts, total_rows, sums, bias_sums, num_dst, splits, scale,
    N: tl.constexpr, K: tl.constexpr, MEAN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias from one range of rows. grad_z is computed, and never written.

    Program (c, d, s) owns C columns of z x D columns of `a`, and row range s. It writes its tile of
    sums[s], [N, K]. Programs with d = 0 also write bias_sums[s], [N]. Other kernels add up the ranges:
    `_sum_splits` and `_column_sums`.
    """
    column = tl.program_id(0) * C + tl.arange(0, C)
    depth = tl.program_id(1) * D + tl.arange(0, D)
    split = tl.program_id(2)
    num_rows = tl.load(total_rows)
    rows_per_split = tl.cdiv(tl.cdiv(num_rows, splits), R) * R
    first = split * rows_per_split

    total = tl.zeros((C, D), tl.float32)
    bias_total = tl.zeros((C,), tl.float32)
    for r in range(first, tl.minimum(first + rows_per_split, num_rows), R):
        row = r + tl.arange(0, R)
        is_row = row < num_rows
        grad_z = _load_hidden_gradient(grad, h, slots, parents, counts, row, column, is_row, num_dst, scale, N, MEAN)
        pointers = a + row.to(tl.int64)[:, None] * K + depth[None, :]
        a_rows = tl.load(pointers, mask=is_row[:, None] & (depth < K)[None, :], other=0)
        total = _add_product(tl.trans(grad_z.to(a_rows.dtype)), a_rows, total, UPCAST)
        bias_total += tl.sum(grad_z, 0)

    target = sums + (split * N + column).to(tl.int64)[:, None] * K + depth[None, :]
    tl.store(target, total, mask=(column < N)[:, None] & (depth < K)[None, :])
    if tl.program_id(1) == 0:
        tl.store(bias_sums + split * N + column, bias_total, mask=column < N)


@triton.jit(do_not_specialize=["num"])
def _column_sums_kernel(rows, out, num, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """out = the sums of all columns of rows, [num, N]. A program owns C columns and takes R rows per step."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for first in range(0, num, R):
        row = first + tl.arange(0, R)
        mask = (row < num)[:, None] & (column < N)[None, :]
        total += tl.load(rows + row[:, None] * N + column[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["num"])
def _partial_sums_kernel(rows, out, num, N: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """out[p] = the column sums of rows p * PER .. (p + 1) * PER - 1. Program (p, c) owns C columns of it."""
    column = tl.program_id(1) * C + tl.arange(0, C)
    first_row = tl.program_id(0).to(tl.int64) * PER
    total = tl.zeros((R, C), tl.float32)
    for step in range(0, PER, R):
        row = first_row + step + tl.arange(0, R)
        mask = (row < num)[:, None] & (column < N)[None, :]
        total += tl.load(rows + row[:, None] * N + column[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(out + tl.program_id(0) * N + column, tl.sum(total, 0), mask=column < N)


def _column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] of `dtype`: rows.sum(0) in float32 and in a fixed order. Replaces torch's sum, which takes longer."""
    if rows.size(0) > FEW_ROWS:
        programs = triton.cdiv(rows.size(0), ROWS_SUMMED)
        partial_sums = torch.empty(programs, rows.size(1), dtype=torch.float32, device=rows.device)
        grid = (programs, triton.cdiv(rows.size(1), 128))
        _partial_sums_kernel[grid](rows, partial_sums, rows.size(0), rows.size(1), ROWS_SUMMED, 32, 128)
        rows = partial_sums
    out = torch.empty(rows.size(1), dtype=dtype, device=rows.device)
    grid = (triton.cdiv(rows.size(1), 16),)
    _column_sums_kernel[grid](rows, out, rows.size(0), rows.size(1), 128, 16)
    return out


@triton.jit(do_not_specialize=["splits"])
def _sum_kernel(sums, left, right, num, splits, LEFT: tl.constexpr, RIGHT: tl.constexpr, T: tl.constexpr):
    """Add up sums, [splits, num], and write the matrix of `num` numbers as its left and its right part.

    The matrix has LEFT + RIGHT columns. Ranges are added in order, so the result is the same every time.
    """
    i = tl.program_id(0) * T + tl.arange(0, T)
    total = tl.zeros((T,), tl.float32)
    pointers = sums + i
    for _ in range(splits):
        total += tl.load(pointers, mask=i < num, other=0).to(tl.float32)
        pointers += num

    row = i // (LEFT + RIGHT)
    column = i % (LEFT + RIGHT)
    is_left = column < LEFT
    tl.store(left + row * LEFT + column, total.to(left.dtype.element_ty), mask=(i < num) & is_left)
    right_pointers = right + row * RIGHT + column - LEFT
    tl.store(right_pointers, total.to(right.dtype.element_ty), mask=(i < num) & (column >= LEFT))


def _sum_splits(sums: Tensor, widths: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(gradient of left, gradient of right): `sums`, [splits, N, K], added up over splits, in two ranges of columns.

    widths: the columns of left and of right, together K.
    """
    left, right = (torch.empty(sums.size(1), w, dtype=dtype, device=sums.device) for w in widths)
    num = sums.size(1) * sum(widths)
    # The interpreter's time depends on the number of programs, not on their size.
    block = 1024 if is_interpreted() else 128
    _sum_kernel[(triton.cdiv(num, block),)](sums, left, right, num, sums.size(0), *widths, block)
    return left, right


class _Hidden(torch.autograd.Function):
    """`hidden_then_reduce`. Saves a, the packed weight and h. Backward is not differentiable again."""

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
        w = _pack_weights(left, right, a.dtype)
        threshold, scale = dropout_numbers(p)
        n, k = w.shape
        h = torch.empty(a.size(0), n, dtype=a.dtype, device=a.device)
        ids = slots.ids(a.device)
        drops = key is not None and p > 0
        # A kernel needs an address for every argument. Without dropout it does not read the key, and `ids`
        # takes its place.
        grid = (triton.cdiv(a.size(0), BLOCK_ROWS) * triton.cdiv(n, BLOCK_COLUMNS),)
        _hidden_kernel[grid](
            a, w, bias, h, ids, rows.slots, key if drops else ids, rows.total, threshold, scale,
            n, k, drops, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH, is_interpreted(), num_warps=8, num_stages=3,
        )  # fmt: skip
        ctx.plan = (slots, hop, how, scale if drops else 1.0, (left.size(1), right.size(1)), left.dtype)
        ctx.save_for_backward(a, w, h, counts, rows.slots, rows.parents, rows.total)
        # No weights (None), and own rows to the right (True).
        return reduce_rows(h, slots, hop, nodes, how, None, True, a.dtype, table=False, dense_in=rows.row_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        slots, hop, how, scale, widths, dtype = ctx.plan
        a, w, h, counts, row_slots, row_parents, total_rows = ctx.saved_tensors
        grad = grad.contiguous()
        num = a.size(0)
        n, k = w.shape
        tree = (row_slots, row_parents, counts, total_rows)
        num_dst = slots.up_to(hop)
        mean = how == "mean"

        # The gradient of `a` needs grad_z as a matrix, so it is written once, and torch's products
        # use it for both gradients.
        if ctx.needs_input_grad[0]:
            grad_z = torch.empty_like(h)
            programs = triton.cdiv(num, GRADIENT_ROWS)
            bias_sums = torch.empty(programs, n, dtype=torch.float32, device=a.device)
            grid = (programs, triton.cdiv(n, 128))
            _gradient_kernel[grid](grad, h, *tree, grad_z, bias_sums, num, num_dst, scale, n, mean, GRADIENT_ROWS, 128)
            # The product runs over all rows of `a`. Rows beyond total_rows have a grad_z of 0, but must be
            # finite: 0 * NaN is NaN. In `nn/tree_layers.py` this branch runs only with `rows_by_slot`, where
            # all rows are in use. With `dense_rows`, `a` is aggregated from a table and has no gradient.
            grad_weights = _sum_splits((grad_z.t() @ a)[None], widths, dtype)
            return grad_z @ w, *grad_weights, _column_sums(bias_sums, dtype), *[None] * 8

        sums = torch.empty(SPLITS, n, k, dtype=torch.float32, device=a.device)
        bias_sums = torch.empty(SPLITS, n, dtype=torch.float32, device=a.device)
        # A program has R = 64 rows per step, C = 64 columns of z and D columns of `a`. D is 256, or for
        # smaller K a power of two that is at least K: either way the grid covers all K columns.
        _weight_kernel[(triton.cdiv(n, 64), triton.cdiv(k, 256), SPLITS)](
            a, grad, h, *tree, sums, bias_sums, num_dst, SPLITS, scale,
            n, k, mean, 64, 64, min(256, max(16, triton.next_power_of_2(k))), is_interpreted(), num_warps=4,
        )  # fmt: skip
        return None, *_sum_splits(sums, widths, dtype), _column_sums(bias_sums, dtype), *[None] * 8


class _TwoPartLinear(torch.autograd.Function):
    """`two_part_linear`. Products are torch's; packing and sums are kernels of this file. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
        w = _pack_weights(left, right, a.dtype)
        ctx.save_for_backward(a, w)
        ctx.widths = (left.size(1), right.size(1))
        ctx.dtype = left.dtype
        return torch.addmm(bias.to(a.dtype), a, w.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        a, w = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = _sum_splits((grad.t() @ a)[None], ctx.widths, ctx.dtype)
        grad_a = grad @ w if ctx.needs_input_grad[0] else None
        return grad_a, *grad_weights, _column_sums(grad, ctx.dtype)


def two_part_linear(a: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    """a [left | right]^T + bias in the precision of `a`: a linear layer of rows (reduced | own).

    Differentiable once.

    a: [rows, K]. left, right: [N, K1] and [N, K2] with K1 + K2 = K. bias: [N]. Concatenating and converting
    the weights, and splitting their gradients, take one kernel each.
    """
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
    """[slots of hops 0 .. hop, 2 * N]: (reduced | own) rows of h = dropout(relu(a [left | right]^T + bias)).

    a: [rows, K] in half precision, a row for each slot of hops 0 .. hop + 1, or for those that are not empty.
    left, right: the weights of the reduced and of the own part of `a`. bias: [N].
    nodes, counts: the node at each slot, -1 if it is empty, and the number of children drawn for it.
    rows: which slot each row of `a` belongs to.
    how: "sum" or "mean" over the children of a slot.
    p, key: dropout of h, keyed by slot. None as the key: no dropout.
    """
    out = _Hidden.apply(a, left, right, bias, slots, hop, nodes, counts, rows, how, p, key)
    assert isinstance(out, Tensor)
    return out
