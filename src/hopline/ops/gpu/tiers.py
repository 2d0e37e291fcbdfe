"""Triton kernels of tiered rows: one gather that takes each row from where it is, counts per row, and cold rows ahead.

Host memory answers rows that lie close together six times as fast as rows all over a large table, since each page that
is touched must be looked up. So the cold rows of many steps are read at once, by ascending id, each one once.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu.runtime import is_interpreted, launching

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What rows are copied as: the widest that divides a row, so one kernel serves every dtype."""
MAX_COLUMNS = 256
"""Words of a row that a program takes at a time."""
BLOCK_WORDS, NUM_WARPS = 1024, 2
"""Words a program has under way, and its warps: as good as any other choice on an H200, for both tiers."""
COUNT_BLOCK = 1024


@triton.jit
def slot_of(hot_slot):
    """As `tiers.slot_of`."""
    return tl.where(hot_slot < -1, -2 - hot_slot, hot_slot)


@triton.jit(do_not_specialize=["num_ids", "num_rows", "num_counters"])
def _gather_tiers(
    hot_ptr,
    cold_ptr,
    place_ptr,
    ids_ptr,
    order_ptr,
    counts_ptr,
    out_ptr,
    num_ids,
    num_rows,
    num_counters,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALL_HOT: tl.constexpr,
    HAS_COLD: tl.constexpr,
    COUNTS: tl.constexpr,
    ORDERED: tl.constexpr,
    STAGED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < num_ids
    if ORDERED:
        at = tl.load(order_ptr + at, mask=inside, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
    present = (ids >= 0) & (ids < num_rows)
    slots = ids
    if not ALL_HOT:
        slots = tl.load(place_ptr + ids, mask=present, other=-1).to(tl.int64)
        if not STAGED:
            slots = tl.maximum(slots, -1)
    hit, staged = present & (slots >= 0), present & (slots < -1)
    near = hit | staged
    readable = near
    first = hot_ptr + slot_of(slots) * WIDTH
    if HAS_COLD:
        readable = present
        first = tl.where(near, first, cold_ptr + ids * WIDTH)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        wide = (column < WIDTH)[None, :]
        words = tl.load(first[:, None] + column[None, :], mask=readable[:, None] & wide, other=0)
        tl.store(out_ptr + at[:, None] * WIDTH + column[None, :], words, mask=inside[:, None] & wide)
    if COUNTS:
        mine = counts_ptr + 3 * (tl.program_id(0) % num_counters)
        tl.atomic_add(mine, tl.sum(hit.to(tl.int64)), sem="relaxed")
        tl.atomic_add(mine + 1, tl.sum((present & (near == 0)).to(tl.int64)), sem="relaxed")
        tl.atomic_add(mine + 2, tl.sum(staged.to(tl.int64)), sem="relaxed")


@triton.jit(do_not_specialize=["num_ids", "num_rows"])
def _count_ids(seen_ptr, ids_ptr, num_ids, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < num_ids, other=-1).to(tl.int64)
    one = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_add(seen_ptr + ids, one, mask=(ids >= 0) & (ids < num_rows), sem="relaxed")


def gather_tiers(
    hot: Tensor,
    cold: Tensor | None,
    hot_slot: Tensor | None,
    ids: Tensor,
    counts: Tensor | None = None,
    order: Tensor | None = None,
    staged: bool = True,
) -> Tensor:
    """As `ops.tiers.gather_tiers`, in one launch that waits for nothing; ids beyond the rows give zeros too.

    order: a permutation of the positions in `ids`, in which they are read.
    """
    assert hot_slot is None or hot_slot.dtype == torch.int32
    out = torch.empty((ids.numel(), *hot.shape[1:]), dtype=hot.dtype, device=ids.device)
    if not out.numel():
        return out
    ids = ids.contiguous()
    assert hot.is_contiguous()
    assert cold is None or cold.is_contiguous()
    width, word = row_words(out, hot, cold)
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    block = BLOCK_WORDS * 32 if is_interpreted() else BLOCK_WORDS  # an interpreted program costs the same at any size
    rows = max(1, min(block // columns, triton.next_power_of_2(ids.numel())))
    source = out if hot.numel() == 0 else hot  # an empty tensor has no address
    with launching(ids.device):
        _gather_tiers[(triton.cdiv(ids.numel(), rows),)](
            words_of(source, word),
            words_of(source if cold is None else cold, word),
            ids if hot_slot is None else hot_slot,
            ids,
            ids if order is None else order,
            ids if counts is None else counts,
            words_of(out, word),
            ids.numel(),
            hot.size(0) if hot_slot is None else hot_slot.numel(),
            1 if counts is None else counts.size(0),
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            ALL_HOT=hot_slot is None,
            HAS_COLD=cold is not None,
            COUNTS=counts is not None,
            ORDERED=order is not None,
            STAGED=staged,
            num_warps=NUM_WARPS,
        )
    return out


def count_ids(seen: Tensor, ids: Tensor) -> None:
    """As `ops.tiers.count_ids`."""
    if ids.numel():
        with launching(ids.device):
            grid = (triton.cdiv(ids.numel(), COUNT_BLOCK),)
            _count_ids[grid](seen, ids.contiguous(), ids.numel(), seen.numel(), BLOCK=COUNT_BLOCK)


def row_words(*tensors: Tensor | None) -> tuple[int, torch.dtype]:
    """(words of a row, what they are): the widest that divides rows and where the tensors start."""
    first = tensors[0]
    assert first is not None
    row_bytes = first.element_size() * prod(first.shape[1:])
    starts = [t.data_ptr() for t in tensors if t is not None and t.numel()]
    word = next(w for w in WORDS if not any(n % w.itemsize for n in (row_bytes, *starts)))
    return row_bytes // word.itemsize, word


def words_of(rows: Tensor, word: torch.dtype) -> Tensor:
    """The same memory as one line of words."""
    return rows.reshape(-1).view(torch.uint8).view(word) if rows.numel() else rows


CLAIM_BLOCK = 1024
PROGRAMS, ROWS, NUM_WARPS = 64, 32, 4
"""Of the kernel that reads from the host: enough to keep the bus busy, and few, since training runs beside it."""
STAGED_COLUMNS = 64


@triton.jit(do_not_specialize=["num", "window", "capacity"])
def _claim_kernel(nodes, hot_slot, stamp, found, count, num, window, capacity, T: tl.constexpr):
    at = tl.program_id(0) * T + tl.arange(0, T)
    node = tl.load(nodes + at, mask=at < num, other=-1).to(tl.int64)
    cold = node >= 0
    cold = cold & (tl.load(hot_slot + node, mask=cold, other=0) < 0)
    before = tl.atomic_xchg(stamp + node, tl.full((T,), 0, tl.int32) + window, mask=cold, sem="relaxed")
    new = cold & (before != window)
    first = tl.atomic_add(count, tl.sum(new.to(tl.int32)), sem="relaxed")
    position = first + tl.cumsum(new.to(tl.int32)) - 1
    tl.store(found + position, node.to(found.dtype.element_ty), mask=new & (position < capacity))


@triton.jit(do_not_specialize=["capacity", "first_slot"])
def _stage_kernel(
    hot, cold, hot_slot, found, count, fetched, capacity, first_slot,
    WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Few programs that go over all rows; those staged already are copied from where they stand."""
    total = tl.minimum(tl.load(count), capacity)
    num_fetched = tl.zeros((), tl.int64)
    for start in range(tl.program_id(0) * R, total, tl.num_programs(0) * R):
        at = start + tl.arange(0, R)
        inside = at < total
        node = tl.load(found + at, mask=inside, other=0).to(tl.int64)
        where = tl.load(hot_slot + node, mask=inside, other=-1).to(tl.int64)
        source = tl.where(where < -1, hot + slot_of(where) * WIDTH, cold + node * WIDTH)
        target = hot + (first_slot + at).to(tl.int64) * WIDTH
        for begin in tl.static_range(0, WIDTH, C):
            column = begin + tl.arange(0, C)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            tl.store(target[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=mask), mask)
        num_fetched += tl.sum((inside & (where == -1)).to(tl.int64))
    tl.atomic_add(fetched, num_fetched, sem="relaxed")


@triton.jit(do_not_specialize=["num"])
def _gather_kernel(rows, ids, order, out, num, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    for start in range(tl.program_id(0) * R, num, tl.num_programs(0) * R):
        inside = start + tl.arange(0, R) < num
        at = tl.load(order + start + tl.arange(0, R), mask=inside, other=0).to(tl.int64)
        row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        for begin in tl.static_range(0, WIDTH, C):
            column = begin + tl.arange(0, C)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            words = tl.load(rows + row[:, None] * WIDTH + column[None, :], mask=mask)
            tl.store(out + at[:, None] * WIDTH + column[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _put_kernel(table, ids, order, rows, num, ADD: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    for start in range(tl.program_id(0) * R, num, tl.num_programs(0) * R):
        inside = start + tl.arange(0, R) < num
        at = tl.load(order + start + tl.arange(0, R), mask=inside, other=0).to(tl.int64)
        row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        for begin in tl.static_range(0, WIDTH, C):
            column = begin + tl.arange(0, C)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            target = table + row[:, None] * WIDTH + column[None, :]
            value = tl.load(rows + at[:, None] * WIDTH + column[None, :], mask=mask)
            if ADD:
                value += tl.load(target, mask=mask)
            tl.store(target, value, mask=mask)


@triton.jit(do_not_specialize=["capacity", "first_slot"])
def _point_kernel(hot_slot, found, count, capacity, first_slot, STANDS: tl.constexpr, T: tl.constexpr):
    at = tl.program_id(0) * T + tl.arange(0, T)
    inside = at < tl.minimum(tl.load(count), capacity)
    node = tl.load(found + at, mask=inside, other=0).to(tl.int64)
    value = tl.full((T,), -1, tl.int32)
    if STANDS:
        value = -2 - (first_slot + at).to(tl.int32)
    tl.store(hot_slot + node, value, mask=inside)


def claim(nodes: Tensor, hot_slot: Tensor, stamp: Tensor, window: int, found: Tensor, count: Tensor) -> None:
    """Add the nodes [n] that are not hot and that nobody has claimed in this window to `found`, -1 being none.

    stamp: [num_rows] int32, the last window that claimed each row. count: [1] int32, how many were claimed; only the
    first of them fit into `found`.
    """
    block = nodes.numel() if is_interpreted() else CLAIM_BLOCK
    block = triton.next_power_of_2(max(1, block))
    with launching(nodes.device):
        _claim_kernel[(triton.cdiv(nodes.numel(), block),)](
            nodes, hot_slot, stamp, found, count, nodes.numel(), window, found.numel(), block
        )


def stage(hot: Tensor, cold: Tensor, hot_slot: Tensor, found: Tensor, count: Tensor, first_slot: int, fetched: Tensor):
    """Copy the rows `found` [capacity], of which `count` are there, to hot[first_slot:]; `fetched` += from the host."""
    width, word = row_words(hot, cold)
    columns = min(STAGED_COLUMNS, triton.next_power_of_2(width))
    rows = triton.next_power_of_2(found.numel()) if is_interpreted() else ROWS
    with launching(hot.device):
        _stage_kernel[(1 if is_interpreted() else PROGRAMS,)](
            words_of(hot, word), words_of(cold, word), hot_slot, found, count, fetched, found.numel(), first_slot,
            WIDTH=width, R=rows, C=columns, num_warps=NUM_WARPS,
        )  # fmt: skip


def point(hot_slot: Tensor, found: Tensor, count: Tensor, first_slot: int | None) -> None:
    """Let the places of these rows be the slots from `first_slot` on, or nowhere."""
    block = triton.next_power_of_2(found.numel()) if is_interpreted() else CLAIM_BLOCK
    with launching(hot_slot.device):
        _point_kernel[(triton.cdiv(found.numel(), block),)](
            hot_slot, found, count, found.numel(), first_slot or 0, first_slot is not None, block
        )


def gather_aside(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids] of pinned host memory, by few programs and in ascending order; all ids must be in range."""
    out = torch.empty((ids.numel(), *rows.shape[1:]), dtype=rows.dtype, device=ids.device)
    width, word = row_words(rows, out)
    size = triton.next_power_of_2(max(1, ids.numel())) if is_interpreted() else ROWS
    with launching(ids.device):
        _gather_kernel[(1 if is_interpreted() else PROGRAMS,)](
            words_of(rows, word), ids, ids.argsort(), words_of(out, word), ids.numel(),
            WIDTH=width, R=size, C=min(STAGED_COLUMNS, triton.next_power_of_2(width)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def put_aside(table: Tensor, ids: Tensor, rows: Tensor, *, add: bool = False) -> None:
    """table[ids] = rows, or += rows, in pinned host memory; ids must be in range, and each there once."""
    width, rows = rows[:1].numel(), rows.contiguous()
    if rows.numel() == 0:
        return
    size = triton.next_power_of_2(ids.numel()) if is_interpreted() else ROWS
    with launching(ids.device):
        _put_kernel[(1 if is_interpreted() else PROGRAMS,)](
            table, ids, ids.argsort(), rows, ids.numel(), ADD=add,
            WIDTH=width, R=size, C=min(STAGED_COLUMNS, triton.next_power_of_2(width)), num_warps=NUM_WARPS,
        )  # fmt: skip


def unclaimed(dtype: torch.dtype) -> int:
    """What fills the rest of `found`, to come last when it is sorted."""
    return torch.iinfo(dtype).max
