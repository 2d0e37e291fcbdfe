"""Triton kernels that reduce the rows of a tree's slots to their parents', and spread gradients back."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.tiers import slot_of
from hopline.ops.tree_slots import Slots

TILE = 1024
"""Elements of a tile of rows and columns."""


@triton.jit
def _source(node, slot, in_place, there, TABLE: tl.constexpr, DENSE_IN: tl.constexpr):
    """The row that a slot's values stand in."""
    if TABLE:
        row = node
    elif DENSE_IN:
        row = tl.load(in_place + slot, mask=there, other=0).to(tl.int64)
    else:
        row = slot
    return row


@triton.jit
def _row_pointers(x, cold, tier, row, there, width, TIERED: tl.constexpr):
    """Where each row begins: in the one array of rows, or in the hot or the cold one."""
    if TIERED:
        place = tl.load(tier + row, mask=there, other=-1).to(tl.int64)
        pointer = tl.where(place == -1, cold + row * width, x + slot_of(place) * width)
    else:
        pointer = x + row * width
    return pointer


@triton.jit(do_not_specialize=["num", "first_dst", "first_child"])
def _reduce_kernel(
    x, cold, tier, hits, nodes, weight, out, in_place, out_place, num, first_dst, first_child,
    WIDTH: tl.constexpr, FANOUT: tl.constexpr, HOW: tl.constexpr, TABLE: tl.constexpr, TIERED: tl.constexpr,
    DENSE_IN: tl.constexpr, DENSE_OUT: tl.constexpr, OWN: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Rows of one hop: `x` is a table read by node (in two tiers, if TIERED), or has a row per slot (or dense)."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = row < num
    width_ok = column < WIDTH
    first = first_child + row.to(tl.int64) * FANOUT
    lowest = float("-inf") if HOW == "max" else 0.0
    total = tl.full((R, C), lowest, ACC)
    count = tl.zeros((R,), tl.int32)
    hot = tl.zeros((R,), tl.int32)
    staged = tl.zeros((R,), tl.int32)
    for c in tl.static_range(FANOUT):
        node = tl.load(nodes + first + c, mask=inside, other=-1).to(tl.int64)
        there = node >= 0
        source = _source(node, first + c, in_place, there, TABLE, DENSE_IN)
        pointer = _row_pointers(x, cold, tier, source, there, WIDTH, TIERED)
        value = tl.load(pointer[:, None] + column[None, :], mask=there[:, None] & width_ok[None, :], other=0).to(ACC)
        if WEIGHTED:
            value *= tl.load(weight + first + c, mask=there, other=0).to(ACC)[:, None]
        if HOW == "max":
            wins = (value > total) | (value != value)  # NaN must come through, as it does in torch
            total = tl.where(there[:, None] & wins, value, total)
        else:
            total += value
        count += there.to(tl.int32)
        if TIERED:
            place = tl.load(tier + source, mask=there, other=-1)
            hot += (place >= 0).to(tl.int32)
            staged += (place < -1).to(tl.int32)
    if HOW == "mean":
        total = total / tl.maximum(count, 1).to(ACC)[:, None]
    if HOW == "max":
        total = tl.where((count > 0)[:, None], total, 0.0)
    columns: tl.constexpr = 2 * WIDTH if OWN else WIDTH
    slot = (first_dst + row).to(tl.int64)
    written = inside
    if DENSE_OUT:
        written = inside & (tl.load(nodes + slot, mask=inside, other=-1) >= 0)
        slot = tl.load(out_place + slot, mask=written, other=0).to(tl.int64)
    target = out + slot[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=written[:, None] & width_ok[None, :])
    if OWN:
        node = tl.load(nodes + first_dst + row, mask=inside, other=-1).to(tl.int64)
        there = node >= 0
        source = _source(node, (first_dst + row).to(tl.int64), in_place, there, TABLE, DENSE_IN)
        pointer = _row_pointers(x, cold, tier, source, there, WIDTH, TIERED)
        own = tl.load(pointer[:, None] + column[None, :], mask=there[:, None] & width_ok[None, :], other=0)
        tl.store(target + WIDTH, own.to(out.dtype.element_ty), mask=written[:, None] & width_ok[None, :])
        count += there.to(tl.int32)
        if TIERED:
            place = tl.load(tier + source, mask=there, other=-1)
            hot += (place >= 0).to(tl.int32)
            staged += (place < -1).to(tl.int32)
    if TIERED:
        if tl.program_id(1) == 0:
            mine = hits + 3 * (tl.program_id(0) % COUNTERS)
            tl.atomic_add(mine, tl.sum(hot).to(tl.int64), sem="relaxed")
            tl.atomic_add(mine + 1, tl.sum(count - hot - staged).to(tl.int64), sem="relaxed")
            tl.atomic_add(mine + 2, tl.sum(staged).to(tl.int64), sem="relaxed")


@triton.jit
def _product(value, factor, most, ACC: tl.constexpr):
    """A weighted value as the maximum was taken of, and stored: equal to it where it is the largest."""
    return (value.to(ACC) * factor.to(ACC)).to(most.dtype)


@triton.jit(do_not_specialize=["num_dst"])
def _ties_kernel(
    x, nodes, first_children, counts, weight, out, grad, shares, num_dst,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """torch's rule: the edges that reach the maximum share its gradient, with the initial 0 if the maximum is 0."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = row < num_dst
    ok = inside[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    most = tl.load(out + at, mask=ok, other=0)
    ties = (most == 0).to(tl.float32)
    first = tl.load(first_children + row, mask=inside, other=0).to(tl.int64)
    count = tl.load(counts + row, mask=inside, other=0)
    for c in range(tl.max(count)):
        pointer = x + (first + c)[:, None] * WIDTH + column[None, :]
        value = tl.load(pointer, mask=ok & (c < count)[:, None], other=float("nan"))
        if WEIGHTED:
            factor = tl.load(weight + first + c, mask=inside & (c < count), other=0)
            value = _product(value, factor[:, None], most, ACC)
        ties += (value == most).to(tl.float32)
    share = tl.load(grad + at, mask=ok, other=0) / tl.maximum(ties, 1)
    target = shares + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, share.to(shares.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _spread_kernel(
    grad, shares, x, most, nodes, parents, counts, weight, out, num_src, num_dst,
    WIDTH: tl.constexpr, HOW: tl.constexpr, OWN: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Each source has one parent at most: its gradient is read, not summed up."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = row < num_src
    width_ok = (column < WIDTH)[None, :]
    columns: tl.constexpr = 2 * WIDTH if OWN else WIDTH
    parent = tl.load(parents + row, mask=inside, other=-1).to(tl.int64)
    there = (parent >= 0) & (tl.load(nodes + row, mask=inside, other=-1) >= 0)
    from_parent = parent[:, None] * columns + column[None, :]
    if HOW == "max":
        own_value = tl.load(x + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside[:, None] & width_ok)
        largest = tl.load(most + from_parent, mask=there[:, None] & width_ok, other=float("nan"))
        if WEIGHTED:
            own_value = _product(own_value, tl.load(weight + row, mask=there, other=0)[:, None], largest, ACC)
        reached = largest == own_value
        share = parent[:, None] * WIDTH + column[None, :]
        total = tl.where(reached, tl.load(shares + share, mask=there[:, None] & width_ok, other=0), 0).to(ACC)
    else:
        total = tl.load(grad + from_parent, mask=there[:, None] & width_ok, other=0).to(ACC)
    if HOW == "mean":
        total = total / tl.maximum(tl.load(counts + parent, mask=there, other=1), 1).to(ACC)[:, None]
    if WEIGHTED:
        total *= tl.load(weight + row, mask=there, other=0).to(ACC)[:, None]
    if OWN:
        own = row.to(tl.int64)[:, None] * columns + WIDTH + column[None, :]
        total += tl.load(grad + own, mask=(row < num_dst)[:, None] & width_ok, other=0).to(ACC)
    target = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & width_ok)


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    columns = min(256, triton.next_power_of_2(width))
    return max(1, min(32, TILE // columns)), columns


def _accumulator(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def reduce_rows(
    x: Tensor,
    slots: Slots,
    hop: int,
    nodes: Tensor,
    how: str,
    weight: Tensor | None,
    own: bool,
    dtype: torch.dtype,
    table: bool,
    tiers: tuple[Tensor, Tensor, Tensor] | None = None,
    dense_in: Tensor | None = None,
    dense_out: Tensor | None = None,
) -> Tensor:
    """[slots up to `hop`, ...]: each slot's children reduced, its own row to their right if asked for.

    x: rows of a table, read by the slots' nodes, or of all slots. tiers: (cold rows, place of each row as in
    `ops.tiers.gather_tiers`, counters as `ops.tiers.new_counts`), where `x` holds a table's hot rows only. dense_in,
    dense_out: `RowMap.place`, where rows are kept only for slots that are there.
    """
    width = prod(x.shape[1:])
    out = torch.empty(slots.up_to(hop), 2 * width if own else width, dtype=dtype, device=nodes.device)
    rows, columns = _tile(width)
    cold, tier, hits = tiers or (x, nodes, nodes)
    x = x if x.numel() else cold  # an empty tensor has no address
    for h in range(hop + 1):
        num = slots.offsets[h + 1] - slots.offsets[h]
        grid = (triton.cdiv(num, rows), triton.cdiv(width, columns))
        _reduce_kernel[grid](
            x, cold, tier, hits, nodes, nodes if weight is None else weight, out,
            nodes if dense_in is None else dense_in, nodes if dense_out is None else dense_out,
            num, slots.offsets[h], slots.offsets[h + 1],
            width, slots.fanouts[h], how, table, tiers is not None, dense_in is not None, dense_out is not None,
            own, weight is not None, _accumulator(x.dtype), rows, columns, 1 if tiers is None else hits.size(0),
        )  # fmt: skip
    return out


class _ReduceTree(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slots: Slots, hop: int, nodes: Tensor, counts: Tensor, how: str, weight: Any, own: bool
    ) -> Tensor:
        x = x.contiguous()
        out = reduce_rows(x, slots, hop, nodes, how, weight, own, x.dtype, table=False)
        ctx.plan = (slots, hop, how, own, x.shape)
        is_max = how == "max"
        ctx.save_for_backward(nodes, counts, weight, x if is_max else None, out if is_max else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        slots, hop, how, own, shape = ctx.plan
        nodes, counts, weight, x, most = ctx.saved_tensors
        grad, width, device = grad.contiguous(), shape[1:].numel(), nodes.device
        num_dst, num_src = slots.up_to(hop), slots.up_to(hop + 1)
        rows, columns = _tile(width)
        shares = grad
        if how == "max":
            shares = torch.empty(num_dst, width, dtype=grad.dtype, device=device)
            grid = (triton.cdiv(num_dst, rows), triton.cdiv(width, columns))
            _ties_kernel[grid](
                x, nodes, slots.first_children(device), counts, nodes if weight is None else weight, most, grad, shares,
                num_dst, width, grad.size(1), weight is not None, _accumulator(x.dtype), rows, columns,
            )  # fmt: skip
        out = torch.empty(shape, dtype=grad.dtype, device=device)
        grid = (triton.cdiv(num_src, rows), triton.cdiv(width, columns))
        _spread_kernel[grid](
            grad, shares, grad if x is None else x, grad if most is None else most, nodes, slots.parents(device),
            counts, nodes if weight is None else weight, out, num_src, num_dst,
            width, how, own, weight is not None, _accumulator(grad.dtype), rows, columns,
        )  # fmt: skip
        return out, None, None, None, None, None, None, None


def reduce_tree(
    x: Tensor,
    slots: Slots,
    hop: int,
    nodes: Tensor,
    counts: Tensor,
    how: str,
    weight: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """Rows of all slots up to hop + 1 reduced to those of their parents, differentiable; definition in reference."""
    assert x.size(0) == slots.up_to(hop + 1), "one row per slot"
    weight = None if weight is None else weight.contiguous()
    out = _ReduceTree.apply(x, slots, hop, nodes, counts, how, weight, own)
    assert isinstance(out, Tensor)
    return out if own else out.view(-1, *x.shape[1:])
