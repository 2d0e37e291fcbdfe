"""Triton kernels of the tree layout: keys and seeds of a step, drawing children, and reducing their rows to parents.

Shapes follow from the batch size and the fan-outs alone, and nothing is asked of the host, so that a whole step can be
captured in one CUDA graph.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops import random
from hopline.ops.gpu.runtime import GOLDEN, bounded, first_state, key_on, launching, mix
from hopline.ops.gpu.tiers import slot_of
from hopline.ops.tree_slots import Slots

SLOTS_PER_PROGRAM = 128
_NUM_KEYS = tl.constexpr(triton.next_power_of_2(random.NUM_PURPOSES + 1))

# ---- the order of an epoch, and keys and seeds of a step


@triton.jit(do_not_specialize=["key", "step", "position", "num"])
def _epoch_kernel(state, ahead, draws, key, step, position, num, T: tl.constexpr):
    """Both states at a place of an epoch; a draw for each of its seeds, as `random.permutation` makes it."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    tl.store(draws + i, mix(first_state(key.to(tl.int64), i) + GOLDEN).to(tl.int64), mask=i < num)
    if tl.program_id(0) == 0:
        place = tl.arange(0, 4)
        value = tl.where(place == 0, key.to(tl.int64), tl.where(place == 1, step, position).to(tl.int64))
        tl.store(state + place, value, mask=place < 3)
        tl.store(ahead + place, value, mask=place < 3)


def start_epoch(state: Tensor, ahead: Tensor, num_seeds: int, key: int, step: int, position: int) -> Tensor:
    """Both states at a place of the epoch with that key, and a draw for each seed: sorted by it they are in its order.

    One kernel, where torch would need forty: in a short epoch their launches take longer than a step.
    """
    draws = torch.empty(num_seeds, dtype=torch.int64, device=state.device)
    grid = (max(1, triton.cdiv(num_seeds, 1024)),)
    with launching(state.device):
        _epoch_kernel[grid](state, ahead, draws, key, step, position, num_seeds, 1024)
    return draws


@triton.jit
def _derive(state, part):
    return mix(state + (part + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _step_kernel(state, order, size, seeds, keys, first, BATCH: tl.constexpr, NUM_KEYS: tl.constexpr, T: tl.constexpr):
    """state: [epoch key, step, position]; seeds from the position on, and the keys of the step."""
    epoch_key = tl.load(state)
    step = tl.load(state + 1)
    position = tl.load(state + 2)
    i = tl.program_id(0) * T + tl.arange(0, T)
    at = position + first + i
    inside = (i < BATCH) & (at < size)
    tl.store(seeds + i, tl.load(order + at, mask=inside, other=-1), mask=i < BATCH)
    if tl.program_id(0) == 0:
        step_key = _derive(mix(epoch_key.to(tl.uint64)), step)
        place = tl.arange(0, _NUM_KEYS)
        derived = _derive(mix(step_key), (place - 2).to(tl.int64))
        key = tl.where(place == 0, step_key, derived)
        tl.store(keys + place, key.to(tl.int64), mask=place < NUM_KEYS)


@triton.jit
def _advance_kernel(state, seeds_per_step):
    tl.store(state + 1, tl.load(state + 1) + 1)
    tl.store(state + 2, tl.load(state + 2) + seeds_per_step)


def next_step(state: Tensor, order: Tensor, batch_size: int, first: int, seeds_per_step: int) -> tuple[Tensor, Tensor]:
    """(seeds, keys) of the step that `state` stands at, and `state` moved on to the next one.

    state: [3] int64, the epoch's key, the step's number, and where its seeds begin in `order`. first: where this
    rank's share begins among the step's `seeds_per_step`. Keys are as `random.purpose_key` reads them.
    """
    seeds = torch.empty(batch_size, dtype=order.dtype, device=order.device)
    keys = torch.empty(random.NUM_PURPOSES + 1, dtype=torch.int64, device=order.device)
    grid = (triton.cdiv(batch_size, 1024),)
    _step_kernel[grid](state, order, order.numel(), seeds, keys, first, batch_size, random.NUM_PURPOSES + 1, 1024)
    _advance_kernel[(1,)](state, seeds_per_step)
    return seeds, keys


# ---- drawing


@triton.jit(do_not_specialize=["num"])
def _children_kernel(
    indptr, indices, nodes, slots, key, ids, counts, edge_ids, num,
    FANOUT: tl.constexpr, REPLACE: tl.constexpr, EDGES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One slot a lane. The shuffle's touched positions are kept in registers: O(fan-out) for any degree."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    inside = i < num
    node = tl.load(nodes + i, mask=inside, other=-1).to(tl.int64)
    there = node >= 0
    start = tl.load(indptr + node, mask=there, other=0)
    degree = tl.load(indptr + node + 1, mask=there, other=0) - start
    state = first_state(tl.load(key), tl.load(slots + i, mask=inside, other=0))
    moved_to = ()
    moved = ()
    count = tl.minimum(degree, FANOUT).to(tl.int32)
    if REPLACE:
        count = tl.where(degree > 0, FANOUT, 0).to(tl.int32)
    tl.store(counts + i, count, mask=inside)
    for j in tl.static_range(FANOUT):
        state += GOLDEN
        if REPLACE:
            pick = bounded(mix(state), degree)
        else:
            target = (j + bounded(mix(state), tl.maximum(degree - j, 1))).to(tl.int32)
            pick = target
            at_j = tl.full((T,), j, tl.int32)
            for q in tl.static_range(j):  # the latest swap into a position says what it holds
                pick = tl.where(moved_to[q] == target, moved[q], pick)
                at_j = tl.where(moved_to[q] == j, moved[q], at_j)
            moved_to = moved_to + (target,)
            moved = moved + (at_j,)
        taken = j < count
        edge = start + pick
        out = i.to(tl.int64) * FANOUT + j
        tl.store(ids + out, tl.load(indices + edge, mask=taken, other=-1), mask=inside)
        if EDGES:
            tl.store(edge_ids + out, tl.where(taken, edge, 0), mask=inside)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int | Tensor,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    device, offsets = seeds.device, slots.offsets
    nodes = torch.empty(offsets[-1], dtype=indices.dtype, device=device)
    counts = torch.empty(slots.up_to(slots.num_hops - 1), dtype=torch.int32, device=device)
    edge_ids = torch.empty(offsets[-1] - slots.num_seeds if with_edges else 0, dtype=torch.int64, device=device)
    nodes[: slots.num_seeds].copy_(seeds)
    step_key, ids = key_on(device, key if isinstance(key, int) else key[:1]), slots.ids(device)
    for hop, fanout in enumerate(slots.fanouts):
        here, below = slice(offsets[hop], offsets[hop + 1]), slice(offsets[hop + 1], offsets[hop + 2])
        num = offsets[hop + 1] - offsets[hop]
        edges = edge_ids[offsets[hop + 1] - slots.num_seeds :] if with_edges else edge_ids
        grid = (triton.cdiv(num, SLOTS_PER_PROGRAM),)
        _children_kernel[grid](
            indptr, indices, nodes[here], ids[here], step_key, nodes[below], counts[here], edges, num,
            fanout, replace, with_edges, SLOTS_PER_PROGRAM,
        )  # fmt: skip
    return nodes, counts, edge_ids if with_edges else None


# ---- the slots that are there


class RowMap(NamedTuple):
    """Which slots the rows of a matrix belong to: all of them in order, or only those that are not empty."""

    row_of_slot: Tensor
    """[num_slots] int32: each slot's row; any where it has none."""
    slots: Tensor
    """[num_slots] int32: each row's slot, any beyond the last row."""
    parents: Tensor
    """[num_slots] int32: the slot that each row's slot is a child of; -1 at seeds and empty slots."""
    total: Tensor
    """[1] int32: how many rows there are; only the device knows."""


@triton.jit(do_not_specialize=["num"])
def _dense_kernel(nodes, upto, all_parents, place, slots, parents, num, T: tl.constexpr):
    slot = tl.program_id(0) * T + tl.arange(0, T)
    there = tl.load(nodes + slot, mask=slot < num, other=-1) >= 0
    row = tl.load(upto + slot, mask=there, other=1) - 1
    tl.store(place + slot, row, mask=there)
    tl.store(slots + row, slot, mask=there)
    tl.store(parents + row, tl.load(all_parents + slot, mask=there, other=-1), mask=there)


@triton.jit(do_not_specialize=["num"])
def _present_kernel(nodes, all_parents, parents, num, T: tl.constexpr):
    slot = tl.program_id(0) * T + tl.arange(0, T)
    there = tl.load(nodes + slot, mask=slot < num, other=-1) >= 0
    tl.store(parents + slot, tl.load(all_parents + slot, mask=there, other=-1), mask=slot < num)


def dense_rows(nodes: Tensor, all_parents: Tensor) -> RowMap:
    """A row for each slot that holds a node, in their order. nodes: of a tree's first hops."""
    num = nodes.numel()
    upto = torch.cumsum(nodes >= 0, 0, dtype=torch.int32)
    place, slots, parents = torch.empty(3, num, dtype=torch.int32, device=nodes.device)
    _dense_kernel[(triton.cdiv(num, 1024),)](nodes, upto, all_parents, place, slots, parents, num, 1024)
    return RowMap(place, slots, parents, upto[-1:])


def rows_by_slot(nodes: Tensor, all_parents: Tensor) -> RowMap:
    """A row for each slot, empty ones included."""
    num = nodes.numel()
    same, total = _counted(num, nodes.device)
    parents = torch.empty_like(same)
    _present_kernel[(triton.cdiv(num, 1024),)](nodes, all_parents, parents, num, 1024)
    return RowMap(same, same, parents, total)


@lru_cache(maxsize=64)  # of captured graphs, which do not hold what they read
def _counted(num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(num, dtype=torch.int32, device=device), torch.full((1,), num, dtype=torch.int32, device=device)


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
    dense_out: `RowMap.row_of_slot`, where rows are kept only for slots that are there.
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
