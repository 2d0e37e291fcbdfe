"""Triton kernels for aggregation over destination-sorted edges and for keyed dropout, with their gradients.

`ops/reference.py` defines the same functions in plain torch. Aggregation computes, for every destination d,

    out[d] = sum, mean or max over the in-edges e of d of weight[e] * rows[src_idx[e]]      (0 without edges)

PyG gathers a message per edge into a matrix and scatters it. These kernels read each source row straight
from its table and add it up in registers, so no matrix with a row per edge exists (but see
`_weighted_max`).

Memory layout
    rows      [num_rows, WIDTH]    row-major, in device memory or in pinned host memory (a zero-copy read)
    indptr    [num_dst + 1] int64  CSC: the edges of d are indptr[d] .. indptr[d + 1] - 1
    src_idx   [num_edges]          int32 or int64: the row of each edge's source
    weight    [num_edges]          float32 or float64, or None
    own       [num_dst]            int32 or int64: the row of each destination, or None
    out       [num_dst, STRIDE]    STRIDE is WIDTH, or 2 * WIDTH with `own`: (reduced | rows[own])

Division of the work. Program (p, c) of the grid owns a tile of DSTS destinations x COLUMNS columns of `out`:

    for step in range(0, largest in-degree of the tile, EDGES):
        messages = rows[src_idx[the next EDGES edges of each destination]]  # [DSTS, EDGES, COLUMNS]
        total += messages.sum(axis=1)                                       # [DSTS, COLUMNS]

Gradients. The gradient of a gather is a scatter-add. With atomics its result would vary from run to run.
Instead, edges are sorted by source, and a kernel of the same form sums over each source's out-edges:

    grad_rows[s]   = sum(weight[e] * grad_out[dst(e)] for e with src_idx[e] == s)
    grad_weight[e] = dot(rows[src_idx[e]], grad_out[dst(e)])

No two threads add to the same number, so results are bitwise reproducible. Half types are summed in float32.

Bad input. An index out of range is never followed. It raises a flag in device memory (`runtime.report`),
and the host raises the error when it next reads the flags. Nothing in this file synchronises with the
device.

Dropout draws its mask in the kernel, draws it again in backward, and never stores it. After a ReLU the
second draw is not needed: the gradient passes where the output is above zero.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import (
    EDGE_ERROR,
    GOLDEN,
    accumulator,
    check_readable,
    error_flags,
    first_state,
    is_interpreted,
    key_on,
    launch_on,
    mix,
    report,
)
from hopline.ops.gpu.sampling import gather_rows, group_by_key
from hopline.ops.random import dropout_numbers
from hopline.ops.reference import check_shapes

COLUMNS_AT_ONCE = 256
"""Most columns per program; wider rows are divided among programs."""
TILE = 4096
"""Numbers per step of a program: destinations x edges x columns."""
WARP_COLUMNS = 128
"""Numbers of `out` that a program of a single warp owns: destinations x columns."""


@triton.jit
def _divide(a, b):
    """a / b with IEEE rounding, which Triton's `/` on float32 does not promise."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def _load_edge_ranges(indptr, flags, num_dst, num_edges, DSTS: tl.constexpr):
    """(destination, first edge, end of its edges), each [DSTS], for the destinations of this program.

    A destination with a damaged indptr raises a flag and gets an empty range: its edges are not read.
    """
    dst = tl.program_id(0) * DSTS + tl.arange(0, DSTS)
    is_dst = dst < num_dst
    start = tl.load(indptr + dst, mask=is_dst, other=0)
    stop = tl.load(indptr + dst + 1, mask=is_dst, other=0)

    is_wrong = (start < 0) | (stop < start) | (stop > num_edges)
    report(flags, EDGE_ERROR, is_wrong)
    return dst, start, tl.where(is_wrong, start, stop)


@triton.jit
def _load_sources(src_idx, flags, start, stop, step, num_rows, EDGES: tl.constexpr):
    """(edge, source, whether it may be read), each [DSTS, EDGES]: the next EDGES edges of each destination.

    A source out of range raises a flag and is masked, as are edges beyond the destination's last one.
    """
    edge = start[:, None] + step + tl.arange(0, EDGES)[None, :]
    is_edge = edge < stop[:, None]
    src = tl.load(src_idx + edge, mask=is_edge, other=0).to(tl.int64)
    is_wrong = is_edge & ((src < 0) | (src >= num_rows))
    report(flags, EDGE_ERROR, is_wrong)
    return edge, src, is_edge & (is_wrong == 0)


@triton.jit
def _load_rows(rows, row, is_edge, column, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """rows[row][column] in the precision of the sum: [DSTS, EDGES, COLUMNS], 0 where `is_edge` is false."""
    mask = is_edge[:, :, None] & (column < WIDTH)[None, None, :]
    return tl.load(rows + row[:, :, None] * WIDTH + column[None, None, :], mask=mask, other=0).to(ACC)


@triton.jit
def _copy_own(rows, own, out, flags, dst, is_dst, column, num_rows, WIDTH: tl.constexpr):
    """out[d, WIDTH:] = rows[own[d]]. An id out of range raises a flag, and its half row stays unwritten."""
    row = tl.load(own + dst, mask=is_dst, other=0).to(tl.int64)
    is_wrong = is_dst & ((row < 0) | (row >= num_rows))
    report(flags, EDGE_ERROR, is_wrong)

    mask = (is_dst & (is_wrong == 0))[:, None] & (column < WIDTH)[None, :]
    own_rows = tl.load(rows + row[:, None] * WIDTH + column[None, :], mask=mask, other=0)
    tl.store(out + dst.to(tl.int64)[:, None] * (2 * WIDTH) + WIDTH + column[None, :], own_rows, mask=mask)


@triton.jit(do_not_specialize=["num_dst", "num_edges", "num_rows"])
def _sum_kernel(
    rows, indptr, src_idx, weight, own, out, flags, num_dst, num_edges, num_rows,
    MEAN: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr,
    DSTS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[d, :WIDTH] = sum or mean over the edges e of d of (weight[e] *) rows[src_idx[e]].

    With `own`, rows[own[d]] goes to the right half of out[d]. The mean divides by the number of edges, also
    if they have weights.
    """
    dst, start, stop = _load_edge_ranges(indptr, flags, num_dst, num_edges, DSTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    total = tl.zeros((DSTS, COLUMNS), ACC)
    longest = tl.max(stop - start, axis=0)
    for step in range(0, longest, EDGES):
        edge, src, is_edge = _load_sources(src_idx, flags, start, stop, step, num_rows, EDGES)
        messages = _load_rows(rows, src, is_edge, column, WIDTH, ACC)
        if weight is not None:
            messages *= tl.load(weight + edge, mask=is_edge, other=0).to(ACC)[:, :, None]
        total += tl.sum(messages, axis=1)
    if MEAN:
        degree = tl.maximum(stop - start, 1).to(ACC)
        total = _divide(total, degree[:, None])

    is_dst = dst < num_dst
    mask = is_dst[:, None] & (column < WIDTH)[None, :]
    tl.store(out + dst.to(tl.int64)[:, None] * STRIDE + column[None, :], total, mask=mask)
    if own is not None:
        _copy_own(rows, own, out, flags, dst, is_dst, column, num_rows, WIDTH)


@triton.jit(do_not_specialize=["num_dst", "num_edges", "num_rows"])
def _max_kernel(
    rows, indptr, src_idx, own, out, flags, num_dst, num_edges, num_rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr,
    DSTS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[d, :WIDTH] = maximum over the edges e of d of rows[src_idx[e]], 0 without edges.

    With `own`, rows[own[d]] goes to the right half of out[d]. A NaN among the sources makes the maximum
    NaN, as in torch.
    """
    dst, start, stop = _load_edge_ranges(indptr, flags, num_dst, num_edges, DSTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    maximum = tl.full((DSTS, COLUMNS), float("-inf"), ACC)
    has_nan = tl.full((DSTS, COLUMNS), 0, tl.int32)
    longest = tl.max(stop - start, axis=0)
    for step in range(0, longest, EDGES):
        _, src, is_edge = _load_sources(src_idx, flags, start, stop, step, num_rows, EDGES)
        messages = _load_rows(rows, src, is_edge, column, WIDTH, ACC)
        # `tl.max` drops NaN, where torch returns it. So NaN is noted apart and put back after the loop.
        has_nan = tl.maximum(has_nan, tl.max((messages != messages).to(tl.int32), axis=1))
        candidates = tl.where(is_edge[:, :, None] & (messages == messages), messages, float("-inf"))
        maximum = tl.maximum(maximum, tl.max(candidates, axis=1))
    maximum = tl.where((stop > start)[:, None], maximum, 0)
    maximum = tl.where(has_nan > 0, float("nan"), maximum)

    is_dst = dst < num_dst
    mask = is_dst[:, None] & (column < WIDTH)[None, :]
    tl.store(out + dst.to(tl.int64)[:, None] * STRIDE + column[None, :], maximum, mask=mask)
    if own is not None:
        _copy_own(rows, own, out, flags, dst, is_dst, column, num_rows, WIDTH)


@triton.jit(do_not_specialize=["num_dst", "num_edges", "num_rows"])
def _max_shares_kernel(
    rows, indptr, src_idx, out, grad, shares, flags, num_dst, num_edges, num_rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr,
    DSTS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """shares[d] = grad[d] / ties[d]: the gradient that each edge which reaches the maximum gets.

    ties[d, c] is the number of edges of d whose source equals out[d, c]. A maximum of 0 has one tie more, as
    in torch: the gradient of `scatter_reduce` counts the zeros that the result was initialised with.
    """
    dst, start, stop = _load_edge_ranges(indptr, flags, num_dst, num_edges, DSTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (dst < num_dst)[:, None] & (column < WIDTH)[None, :]
    dst_row = dst.to(tl.int64)[:, None]
    maximum = tl.load(out + dst_row * STRIDE + column[None, :], mask=mask, other=0).to(ACC)

    ties = (maximum == 0).to(tl.int32)
    longest = tl.max(stop - start, axis=0)
    for step in range(0, longest, EDGES):
        _, src, is_edge = _load_sources(src_idx, flags, start, stop, step, num_rows, EDGES)
        messages = _load_rows(rows, src, is_edge, column, WIDTH, ACC)
        is_tie = is_edge[:, :, None] & (messages == maximum[:, None, :])
        ties += tl.sum(is_tie.to(tl.int32), axis=1)

    gradient = tl.load(grad + dst_row * STRIDE + column[None, :], mask=mask, other=0).to(ACC)
    # Nothing equals NaN, so a maximum that is NaN has 0 ties. The 1 only avoids a division by 0: for the
    # same reason no source equals that maximum in `_max_backward_kernel`, so its share is never used.
    target = shares + dst_row * WIDTH + column[None, :]
    tl.store(target, _divide(gradient, tl.maximum(ties, 1).to(ACC)), mask=mask)


@triton.jit(do_not_specialize=["num_src", "num_edges", "num_dst"])
def _max_backward_kernel(
    rows, src_indptr, dst_idx, out, shares, grad_rows, flags, num_src, num_edges, num_dst,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr,
    DSTS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_rows[s] = sum over the out-edges (s, d) of shares[d], in the columns where rows[s] equals out[d].

    Edges are sorted by source: src_indptr [num_src + 1], dst_idx [num_edges]. A program owns DSTS sources.
    """
    src, start, stop = _load_edge_ranges(src_indptr, flags, num_src, num_edges, DSTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (src < num_src)[:, None] & (column < WIDTH)[None, :]
    offset = src.to(tl.int64)[:, None] * WIDTH + column[None, :]
    src_rows = tl.load(rows + offset, mask=mask, other=0).to(ACC)

    total = tl.zeros((DSTS, COLUMNS), ACC)
    longest = tl.max(stop - start, axis=0)
    for step in range(0, longest, EDGES):
        _, dst, is_edge = _load_sources(dst_idx, flags, start, stop, step, num_dst, EDGES)
        shares_of_dst = _load_rows(shares, dst, is_edge, column, WIDTH, ACC)
        edge_mask = is_edge[:, :, None] & (column < WIDTH)[None, None, :]
        maximum = tl.load(out + dst[:, :, None] * STRIDE + column[None, None, :], mask=edge_mask, other=0).to(ACC)
        is_maximum = maximum == src_rows[:, None, :]
        total += tl.sum(tl.where(is_maximum, shares_of_dst, 0), axis=1)

    tl.store(grad_rows + offset, total, mask=mask)


@triton.jit(do_not_specialize=["num_edges", "num_rows", "num_dst"])
def _dots_kernel(
    rows, grad, src_idx, dst_idx, dots, num_edges, num_rows, num_dst,
    WIDTH: tl.constexpr, ACC: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dots[e] = dot(rows[src_idx[e]], grad[dst_idx[e]]), the gradient of the weight of edge e.

    A program owns EDGES edges. An edge with an index out of range gets 0 and raises no flag: the forward pass
    has checked the same indices.
    """
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    is_edge = edge < num_edges
    src = tl.load(src_idx + edge, mask=is_edge, other=0).to(tl.int64)
    dst = tl.load(dst_idx + edge, mask=is_edge, other=0).to(tl.int64)
    is_valid = is_edge & (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_dst)

    total = tl.zeros((EDGES,), ACC)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = is_valid[:, None] & (column < WIDTH)[None, :]
        messages = tl.load(rows + src[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(ACC)
        gradient = tl.load(grad + dst[:, None] * WIDTH + column[None, :], mask=mask, other=0)
        total += tl.sum(messages * gradient, axis=1)

    tl.store(dots + edge, total, mask=is_edge)


def _tile(num_rows: int, num_edges: int, width: int, warp: bool = False) -> tuple[tuple[int, int], dict[str, int]]:
    """(grid, constants of the launch) of a kernel that loops over the edges of each of `num_rows` rows.

    warp: give each program a single warp and WARP_COLUMNS numbers of the output, if a row is narrow enough.

    The numbers of edges per step are rules of thumb.
    """
    columns = min(triton.next_power_of_2(width), COLUMNS_AT_ONCE)
    edges = 16 if num_edges > 4 * num_rows else 8
    tile = TILE
    options = {}

    if is_interpreted():  # the interpreter's time depends on the number of steps, not on their size
        edges = 64
        tile = 64 * TILE
    elif warp and columns <= WARP_COLUMNS:
        edges = 16
        tile = 16 * WARP_COLUMNS
        options = {"num_warps": 1}

    dsts = max(1, tile // (columns * edges))
    grid = (triton.cdiv(num_rows, dsts), triton.cdiv(width, columns))
    return grid, {"DSTS": dsts, "EDGES": edges, "COLUMNS": columns, **options}


def _run_sum(
    rows: Tensor, indptr: Tensor, src_idx: Tensor, weight: Tensor | None, own: Tensor | None, mean: bool, out: Tensor
) -> None:
    """Launch `_sum_kernel`: write sums or means to out[:, :width], and rows[own] to out[:, width:]."""
    num_dst = indptr.numel() - 1
    width = rows.size(1)
    if out.numel() == 0:
        return
    grid, blocks = _tile(num_dst, src_idx.numel(), width, warp=True)
    with launch_on(out.device):
        _sum_kernel[grid](
            *(rows, indptr, src_idx, weight, own, out, error_flags(out.device)),
            *(num_dst, src_idx.numel(), rows.size(0)),
            MEAN=mean,
            WIDTH=width,
            STRIDE=out.size(1),
            ACC=accumulator(rows.dtype)[1],
            **blocks,
        )


def _run_max(rows: Tensor, indptr: Tensor, src_idx: Tensor, own: Tensor | None, out: Tensor) -> None:
    """Launch `_max_kernel`: write maxima to out[:, :width], and rows[own] to out[:, width:]."""
    num_dst = indptr.numel() - 1
    width = rows.size(1)
    if out.numel() == 0:
        return
    grid, blocks = _tile(num_dst, src_idx.numel(), width)
    with launch_on(out.device):
        _max_kernel[grid](
            *(rows, indptr, src_idx, own, out, error_flags(out.device)),
            *(num_dst, src_idx.numel(), rows.size(0)),
            WIDTH=width,
            STRIDE=out.size(1),
            ACC=accumulator(rows.dtype)[1],
            **blocks,
        )


def _sum_backward(
    grad: Tensor, dst_idx: Tensor, src_idx: Tensor, weight: Tensor | None, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """[num_rows, width]: the gradient of each row, a sum of (weight *) grad[dst] over its out-edges.

    grad: [num_dst, width]. dst_idx, src_idx: [num_edges] in any order; they are sorted by source first.
    """
    src_indptr, order = group_by_key(src_idx, num_rows)
    grad_rows = torch.empty(num_rows, grad.size(1), dtype=dtype, device=grad.device)
    scale = None if weight is None else weight[order]
    _run_sum(grad, src_indptr, dst_idx[order], scale, None, False, grad_rows)
    return grad_rows


def _max_backward(rows: Tensor, indptr: Tensor, src_idx: Tensor, dst_idx: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """[num_rows, width]: the gradient of each row through the maximum.

    out, grad: [num_dst, width], or [num_dst, 2 * width] with own rows on the right, which are not read.
    """
    num_dst, stride = out.shape
    width = rows.size(1)
    num_edges = src_idx.numel()
    sum_dtype, triton_sum_dtype = accumulator(rows.dtype)
    shares = torch.empty(num_dst, width, dtype=sum_dtype, device=grad.device)
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=grad.device)
    src_indptr, order = group_by_key(src_idx, rows.size(0))
    flags = error_flags(grad.device)
    sizes = {"WIDTH": width, "STRIDE": stride, "ACC": triton_sum_dtype}

    with launch_on(grad.device):
        if shares.numel():
            grid, blocks = _tile(num_dst, num_edges, width)
            edges = (rows, indptr, src_idx, out, grad, shares, flags, num_dst, num_edges, rows.size(0))
            _max_shares_kernel[grid](*edges, **sizes, **blocks)
        if grad_rows.numel():
            grid, blocks = _tile(rows.size(0), num_edges, width)
            edges = (rows, src_indptr, dst_idx[order], out, shares, grad_rows, flags, rows.size(0), num_edges, num_dst)
            _max_backward_kernel[grid](*edges, **sizes, **blocks)
    return grad_rows


def _dots(rows: Tensor, grad: Tensor, src_idx: Tensor, dst_idx: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_edges] of `dtype`: the gradient of each edge's weight; see `_dots_kernel`."""
    num_edges = src_idx.numel()
    width = rows.size(1)
    dots = torch.empty(num_edges, dtype=dtype, device=grad.device)
    if num_edges and width:
        columns = min(triton.next_power_of_2(width), COLUMNS_AT_ONCE)
        edges = max(1, TILE // columns)
        with launch_on(grad.device):
            _dots_kernel[(triton.cdiv(num_edges, edges),)](
                *(rows, grad, src_idx, dst_idx, dots, num_edges, rows.size(0), grad.size(0)),
                WIDTH=width,
                ACC=accumulator(rows.dtype)[1],
                EDGES=edges,
                COLUMNS=columns,
            )
        return dots
    return dots.zero_()


class _ReduceEdges(torch.autograd.Function):
    """`reduce_edges` after its checks.

    Rows are saved only if backward reads them: for max, and for the gradient of a weight. Backward is not
    differentiable again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        indptr: Tensor,
        src_idx: Tensor,
        reduce: str,
        weight: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        flat = _as_matrix(rows)
        num_dst = indptr.numel() - 1
        width = flat.size(1)
        shape = rows.shape[1:] if own is None else (2 * width,)
        out = torch.empty(num_dst, *shape, dtype=rows.dtype, device=src_idx.device)
        target = out.view(num_dst, math.prod(shape))
        if reduce == "max":
            _run_max(flat, indptr, src_idx, own, target)
        else:
            _run_sum(flat, indptr, src_idx, weight, own, reduce == "mean", target)
        ctx.reduce = reduce
        ctx.shape = rows.shape
        ctx.dtype = rows.dtype
        needs_rows = reduce == "max" or (weight is not None and weight.requires_grad)
        maxima = out if reduce == "max" else None
        ctx.save_for_backward(rows if needs_rows else None, indptr, src_idx, weight, own, maxima)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        rows, indptr, src_idx, weight, own, out = ctx.saved_tensors
        num_rows = ctx.shape[0]
        width = math.prod(ctx.shape[1:])
        num_dst = grad.size(0)
        grad = grad.reshape(num_dst, width if own is None else 2 * width).contiguous()
        grad_reduced = grad[:, :width]
        grad_own = grad[:, width:]  # no columns without `own`
        if ctx.reduce == "mean":
            # Divided in the accumulator's precision: half types would round here, before the sum.
            sum_dtype = accumulator(ctx.dtype)[0]
            degree = indptr.diff().clamp(min=1).to(sum_dtype)
            grad_reduced = grad_reduced.to(sum_dtype) / degree[:, None]
            grad_own = grad_own.to(sum_dtype)  # `_with_own_edges` concatenates the two

        dst_idx = _destinations(indptr, src_idx.numel())
        grad_rows = None
        if ctx.needs_input_grad[0] and ctx.reduce == "max":
            maxima = out.view(num_dst, grad.size(1))
            grad_rows = _max_backward(_as_matrix(rows), indptr, src_idx, dst_idx, maxima, grad)
            if own is not None:
                own_dst_idx = torch.arange(num_dst, device=grad.device)
                grad_rows += _sum_backward(grad_own.contiguous(), own_dst_idx, own, None, num_rows, ctx.dtype)
        elif ctx.needs_input_grad[0]:
            edges = (grad_reduced.contiguous(), dst_idx, src_idx, weight)
            if own is not None:
                edges = _with_own_edges(grad_reduced, grad_own, dst_idx, src_idx, weight, own)
            grad_rows = _sum_backward(*edges, num_rows, ctx.dtype)
        if grad_rows is not None:
            grad_rows = grad_rows.view(ctx.shape)

        grad_weight = None
        if weight is not None and ctx.needs_input_grad[4]:
            grad_weight = _dots(_as_matrix(rows), grad_reduced.contiguous(), src_idx, dst_idx, weight.dtype)
        return grad_rows, None, None, None, grad_weight, None


def _with_own_edges(
    grad_reduced: Tensor, grad_own: Tensor, dst_idx: Tensor, src_idx: Tensor, weight: Tensor | None, own: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(grad, dst_idx, src_idx, weight) with the own rows as further edges: one sum does both gradients.

    grad becomes [2 * num_dst, width]: the left halves, then the right halves. The own row of destination d
    is an edge of weight 1 from row own[d] to row num_dst + d of this grad.
    """
    own_dst_idx = torch.arange(own.numel(), 2 * own.numel(), device=own.device)
    both_grads = torch.cat([grad_reduced, grad_own])
    both_dst_idx = torch.cat([dst_idx, own_dst_idx])
    both_src_idx = torch.cat([src_idx.to(own.dtype), own])
    both_weights = None if weight is None else torch.cat([weight, weight.new_ones(own.numel())])
    return both_grads, both_dst_idx, both_src_idx, both_weights


def _destinations(indptr: Tensor, num_edges: int) -> Tensor:
    """[num_edges] int32: the destination of each edge.

    `repeat_interleave` would synchronise with the device to learn its output's size. This search does not.
    From a damaged indptr it may return numbers out of range, which the kernels check.
    """
    edges = torch.arange(num_edges, device=indptr.device)
    return torch.searchsorted(indptr, edges, right=True, out_int32=True) - 1


def _as_matrix(rows: Tensor) -> Tensor:
    """[num_rows, product of all other sizes]: the rows as kernels read them, without autograd."""
    return rows.detach().reshape(rows.size(0), math.prod(rows.shape[1:])).contiguous()


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """[num_dst, ...], or [num_dst, 2 * width] with `own`: as defined by `reference.reduce_edges`.

    Differentiable.

    Wrong shapes raise at once. A source, an own row or an indptr out of range raises when the host next
    reads the flags: see `runtime.check_device_errors`.
    """
    check_readable("the table of rows", rows)
    check_shapes(rows, indptr, src_idx, weight, own)
    if weight is not None and reduce == "max":
        return _weighted_max(rows, indptr, src_idx, weight, own)
    if weight is not None:
        weight = weight.to(accumulator(rows.dtype)[0]).contiguous()
    own = None if own is None else own.contiguous()
    out = _ReduceEdges.apply(rows, indptr.contiguous(), src_idx.contiguous(), reduce, weight, own)
    assert isinstance(out, Tensor)
    return out


def _weighted_max(rows: Tensor, indptr: Tensor, src_idx: Tensor, weight: Tensor, own: Tensor | None) -> Tensor:
    """`reduce_edges` of a maximum with weights. The exception in this file: it builds a message per edge.

    Backward needs the product weight[e] * rows[src_idx[e]] of every edge. No conv asks for weighted maxima
    often enough to justify a fused kernel.
    """
    sum_dtype = accumulator(rows.dtype)[0]
    factor = weight.to(sum_dtype).view(-1, *[1] * (rows.dim() - 1))
    messages = gather_rows(rows, src_idx).to(sum_dtype) * factor
    edges = torch.arange(src_idx.numel(), device=src_idx.device)
    out = reduce_edges(messages, indptr, edges, "max").to(rows.dtype)
    return out if own is None else torch.cat([out, gather_rows(rows, own)], dim=1)


DROPOUT_TILE = 2048
"""Numbers per program of the dropout kernels."""


@triton.jit(do_not_specialize=["num"])
def _dropout_kernel(
    x, ids, key, out, num,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """out[i, c] = x[i, c] * SCALE where the element is kept, else 0. With RELU, relu(x) takes the place of x.

    x, out: [num, WIDTH]. ids: [num], the node id of each row. key: [1] int64 in device memory. A draw of 64
    bits serves four columns with 16 bits each, so that the mask depends on (key, node id, column) alone:

        state = first_state(key, ids[i])
        bits = mix(state + (c // 4 + 1) * GOLDEN) >> 16 * (c % 4) & 0xFFFF
        keep = bits >= THRESHOLD

    A program owns ROWS rows and DRAWS draws of each: a tile of [ROWS, DRAWS, 4] numbers.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    draw = tl.program_id(1) * DRAWS + tl.arange(0, DRAWS)
    lane = tl.arange(0, 4)

    state = first_state(tl.load(key), tl.load(ids + i, mask=i < num, other=0).to(tl.int64))
    drawn_bits = mix(state[:, None] + (draw + 1).to(tl.uint64)[None, :] * GOLDEN)
    lane_bits = (drawn_bits[:, :, None] >> (16 * lane).to(tl.uint64)[None, None, :]) & 0xFFFF
    # SCALE is a compile-time constant: Triton would pass a float argument as float32, too coarse for
    # float64 rows.
    factor = tl.where(lane_bits >= THRESHOLD, tl.full((1, 1, 1), SCALE, ACC), tl.full((1, 1, 1), 0.0, ACC))

    column = draw[:, None] * 4 + lane[None, :]
    mask = (i < num)[:, None, None] & (column < WIDTH)[None, :, :]
    offset = i.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
    value = tl.load(x + offset, mask=mask, other=0).to(ACC)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays: where(value > 0, value, 0) would lose it
    tl.store(out + offset, value * factor, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _masked_gradient_kernel(grad, out, masked, num, SCALE: tl.constexpr, ACC: tl.constexpr, T: tl.constexpr):
    """masked[i] = grad[i] * SCALE where out[i] is above 0 or NaN, else 0. A program owns T of the `num` numbers."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    scaled = tl.load(grad + i, mask=i < num, other=0).to(ACC) * tl.full((1,), SCALE, ACC)
    target = masked + i
    # NaN <= 0 is false, so the gradient passes at NaN.
    is_blocked = tl.load(out + i, mask=i < num, other=0) <= 0
    tl.store(target, tl.where(is_blocked, 0.0, scaled), mask=i < num)


class _KeyedDropout(torch.autograd.Function):
    """Dropout with a drawn mask. Backward is the same dropout of the gradient, so key and ids are all it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(key, ids)
        return _apply_dropout(x, p, key, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return keyed_dropout(grad, ctx.p, *ctx.saved_tensors), None, None, None


class _ReluDropout(torch.autograd.Function):
    """ReLU and dropout in one kernel. Backward reads the mask of both off the output, the only tensor it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, ids: Tensor) -> Tensor:
        ctx.p = p
        out = _apply_dropout(x, p, key, ids, relu=True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return _MaskedGradient.apply(grad, ctx.saved_tensors[0], ctx.p), None, None, None


class _MaskedGradient(torch.autograd.Function):
    """The backward pass of `_ReluDropout`. A linear function of `grad`, so its own gradient has the same mask."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, out: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(out)
        grad = grad.contiguous()
        masked = torch.empty_like(out)
        tile = (16 if is_interpreted() else 1) * DROPOUT_TILE
        if out.numel():
            _, scale = dropout_numbers(p)
            _, scale_dtype = accumulator(out.dtype)
            with launch_on(out.device):
                _masked_gradient_kernel[(triton.cdiv(out.numel(), tile),)](
                    *(grad, out, masked, out.numel()), SCALE=scale, ACC=scale_dtype, T=tile
                )
        return masked

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return _MaskedGradient.apply(grad, ctx.saved_tensors[0].detach(), ctx.p), None, None


def _apply_dropout(x: Tensor, p: float, key: Tensor, ids: Tensor, relu: bool = False) -> Tensor:
    """Launch `_dropout_kernel` on x, or on relu(x)."""
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    num = x.size(0)
    width = math.prod(x.shape[1:])
    threshold, scale = dropout_numbers(p)
    draws = min(triton.next_power_of_2(triton.cdiv(width, 4)), DROPOUT_TILE // 4)
    tile = (16 if is_interpreted() else 1) * DROPOUT_TILE
    rows = max(1, tile // (4 * draws))
    with launch_on(x.device):
        _dropout_kernel[(triton.cdiv(num, rows), triton.cdiv(width, 4 * draws))](
            *(x, ids, key, out, num),
            THRESHOLD=threshold,
            SCALE=scale,
            WIDTH=width,
            ACC=accumulator(x.dtype)[1],
            RELU=relu,
            ROWS=rows,
            DRAWS=draws,
        )
    return out


def relu_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """`keyed_dropout` of relu(x) in one kernel. Differentiable. Saves only its output for backward."""
    assert ids.numel() == x.size(0), "one node id per row"
    out = _ReluDropout.apply(x, p, key_on(x.device, key), ids.contiguous())
    assert isinstance(out, Tensor)
    return out


def keyed_dropout(x: Tensor, p: float, key: int | Tensor, ids: Tensor) -> Tensor:
    """Dropout of x [n, ...], defined by `reference.keyed_dropout`. Differentiable."""
    assert ids.numel() == x.size(0), "one node id per row"
    out = _KeyedDropout.apply(x, p, key_on(x.device, key), ids.contiguous())
    assert isinstance(out, Tensor)
    return out
