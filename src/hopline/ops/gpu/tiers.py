"""Triton kernels of tables in two tiers: gathering, counting reads, and prefetching (staging) cold rows.

A table keeps copies of its hot rows in device memory and all rows in pinned host memory, which kernels read
directly (zero-copy). Between the two are staged rows: cold rows that were copied to the device for the next
steps only.

    pinned host memory                      device memory
    cold [num_rows, ...]                    hot [num_hot + 2 * capacity, ...]
        all rows            --stage-->          staged rows, two regions from num_hot on
                            --copies-->         hot rows, 0 .. num_hot - 1

Memory layout
    hot_slot  [num_rows] int32   s >= 0: the row is hot, in hot[s]. -1: cold. s < -1: staged, in hot[-2 - s]
    counts    [COUNTERS, 3] int64  reads of hot, cold and staged rows, to be summed over the first dimension.
                                   Programs add to different rows, to wait less for each other's atomics
    stamp     [num_rows] int32   the last window (group of steps) that claimed each row
    claimed   [capacity]         ids of the rows that a window claimed
    count     [1] int32          the number of claims of a window, which may exceed the capacity

Staging a window has three kernels. `claim` collects the cold rows that its steps will read, each once.
`stage` copies them to a region that no step reads. `point` then publishes the region in `hot_slot`, or
withdraws it. A row that did not fit is read from the host by the step itself, so no result depends on
staging.

Host memory answers rows that lie close together six times as fast as rows all over a large table, since
each page that is touched must be looked up. So the cold rows of many steps are read at once, by ascending
id, each one once.

Rows are copied as machine words, so one kernel serves every dtype. Nothing is differentiable, and nothing
synchronises. Bad input: `gather_tiers` returns zeros for an id out of range and `count_ids` leaves it out;
the other functions do not check ids.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu.runtime import is_interpreted, launch_on

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types that rows are copied as, widest first. `row_words` chooses the widest that fits."""
MAX_COLUMNS = 256
"""The most words of a row that a program of `_gather_tiers` copies at a time."""
GATHER_WORDS = 1024
"""Words that a program of `_gather_tiers` loads at once. As good as any other choice on an H200."""
GATHER_WARPS = 2
"""Warps of a program of `_gather_tiers`. As good as any other choice on an H200."""
COUNT_BLOCK = 1024
"""Ids per program of `_count_ids`."""


@triton.jit
def slot_of(hot_slot):
    """The position in `hot` of a hot or staged row, -1 for a cold row. hot_slot: as in the module docstring."""
    return tl.where(hot_slot < -1, -2 - hot_slot, hot_slot)


@triton.jit(do_not_specialize=["num_ids", "num_rows", "num_counters"])
def _gather_tiers(
    hot_ptr,
    cold_ptr,
    hot_slot_ptr,
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
    """out[i] = the row ids[i], from `hot` or `cold`. Each program copies ROWS rows of WIDTH words.

    ALL_HOT: no row is cold, and `hot` is read by id. HAS_COLD: whether `cold` is given; else cold rows give
    zeros.
    ORDERED: process the positions of `ids` in the order of `order_ptr`. STAGED: whether staged rows are
    read from `hot`; else they count as cold.
    """
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_id = position < num_ids
    if ORDERED:
        position = tl.load(order_ptr + position, mask=is_id, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + position, mask=is_id, other=-1).to(tl.int64)
    is_in_table = (ids >= 0) & (ids < num_rows)

    slots = ids
    if not ALL_HOT:
        slots = tl.load(hot_slot_ptr + ids, mask=is_in_table, other=-1).to(tl.int64)
        if not STAGED:
            slots = tl.maximum(slots, -1)
    is_hot = is_in_table & (slots >= 0)
    is_staged = is_in_table & (slots < -1)
    is_on_device = is_hot | is_staged

    is_readable = is_on_device
    row_pointers = hot_ptr + slot_of(slots) * WIDTH
    if HAS_COLD:
        is_readable = is_in_table
        row_pointers = tl.where(is_on_device, row_pointers, cold_ptr + ids * WIDTH)

    for first_column in tl.static_range(0, WIDTH, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        is_column = (column < WIDTH)[None, :]
        words = tl.load(row_pointers[:, None] + column[None, :], mask=is_readable[:, None] & is_column, other=0)
        tl.store(out_ptr + position[:, None] * WIDTH + column[None, :], words, mask=is_id[:, None] & is_column)

    if COUNTS:
        counters = counts_ptr + 3 * (tl.program_id(0) % num_counters)
        tl.atomic_add(counters, tl.sum(is_hot.to(tl.int64)), sem="relaxed")
        tl.atomic_add(counters + 1, tl.sum((is_in_table & (is_on_device == 0)).to(tl.int64)), sem="relaxed")
        tl.atomic_add(counters + 2, tl.sum(is_staged.to(tl.int64)), sem="relaxed")


@triton.jit(do_not_specialize=["num_ids", "num_rows"])
def _count_ids(seen_ptr, ids_ptr, num_ids, num_rows, BLOCK: tl.constexpr):
    """seen[id] += 1. Integer atomics, so the result does not depend on the order of threads."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + position, mask=position < num_ids, other=-1).to(tl.int64)
    ones = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_add(seen_ptr + ids, ones, mask=(ids >= 0) & (ids < num_rows), sem="relaxed")


def gather_tiers(
    hot: Tensor,
    cold: Tensor | None,
    hot_slot: Tensor | None,
    ids: Tensor,
    counts: Tensor | None = None,
    order: Tensor | None = None,
    staged: bool = True,
) -> Tensor:
    """`ops.gather_tiers.gather_tiers` on the device, in one launch.

    Unlike in that function, any id out of range gives zeros.

    order: [n], a permutation of the positions of `ids`: the order in which rows are read. The result does not
    depend on it. By default the order of `ids`.
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
    # An interpreted program costs the same at any size.
    words_per_program = GATHER_WORDS * 32 if is_interpreted() else GATHER_WORDS
    rows = max(1, min(words_per_program // columns, triton.next_power_of_2(ids.numel())))
    # A kernel needs an address for every argument. Other tensors take the place of those that are empty or
    # missing, and are not read for them.
    source = out if hot.numel() == 0 else hot
    with launch_on(ids.device):
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
            num_warps=GATHER_WARPS,
        )
    return out


def count_ids(seen: Tensor, ids: Tensor) -> None:
    """seen[id] += 1 for every id in range, as `ops.gather_tiers.count_ids`. seen: [num_rows] int32."""
    if ids.numel():
        with launch_on(ids.device):
            grid = (triton.cdiv(ids.numel(), COUNT_BLOCK),)
            _count_ids[grid](seen, ids.contiguous(), ids.numel(), seen.numel(), BLOCK=COUNT_BLOCK)


def row_words(*tensors: Tensor | None) -> tuple[int, torch.dtype]:
    """(words per row, type of a word): the widest type that divides the bytes of a row and all addresses.

    All tensors have rows of the shape and dtype of the first one. Empty and missing tensors are left out.
    """
    first = tensors[0]
    assert first is not None
    row_bytes = first.element_size() * prod(first.shape[1:])
    starts = [t.data_ptr() for t in tensors if t is not None and t.numel()]
    word = next(w for w in WORDS if not any(n % w.itemsize for n in (row_bytes, *starts)))
    return row_bytes // word.itemsize, word


def words_of(rows: Tensor, word: torch.dtype) -> Tensor:
    """The memory of contiguous rows as a 1-D tensor of words. An empty tensor is returned as it is."""
    return rows.reshape(-1).view(torch.uint8).view(word) if rows.numel() else rows


# ---- staging, and other access to host memory while training runs

CLAIM_BLOCK = 1024
"""Ids per program of `claim` and `point`."""
HOST_PROGRAMS = 64
"""Programs of a kernel that accesses host memory: enough to keep the bus busy, few because training runs meanwhile."""
HOST_ROWS = 32
"""Rows that a program of a kernel that accesses host memory copies at a time."""
HOST_WARPS = 4
"""Warps of a program of a kernel that accesses host memory."""
STAGED_COLUMNS = 64
"""The most words of a row that a program of a kernel that accesses host memory copies at a time."""


@triton.jit(do_not_specialize=["num", "window", "capacity"])
def _claim_kernel(nodes, hot_slot, stamp, claimed, count, num, window, capacity, T: tl.constexpr):
    """Append the nodes that are not hot, and new in this window, to `claimed`, in any order.

    The caller sorts them.

    The first lane that exchanges the stamp of a row gets an older window back; any other lane gets this
    window. So exactly one lane claims each row. A program reserves its part of `claimed` by one atomic add
    for all its lanes.
    """
    i = tl.program_id(0) * T + tl.arange(0, T)
    node = tl.load(nodes + i, mask=i < num, other=-1).to(tl.int64)
    is_node = node >= 0
    # Cold, or staged by the window before.
    is_cold = is_node & (tl.load(hot_slot + node, mask=is_node, other=0) < 0)
    last_window = tl.atomic_xchg(stamp + node, tl.full((T,), 0, tl.int32) + window, mask=is_cold, sem="relaxed")
    is_new = is_cold & (last_window != window)

    first = tl.atomic_add(count, tl.sum(is_new.to(tl.int32)), sem="relaxed")
    position = first + tl.cumsum(is_new.to(tl.int32)) - 1
    tl.store(claimed + position, node.to(claimed.dtype.element_ty), mask=is_new & (position < capacity))


@triton.jit(do_not_specialize=["capacity", "first_slot"])
def _stage_kernel(
    hot, cold, hot_slot, claimed, count, fetched, capacity, first_slot,
    WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Copy row claimed[i] to hot[first_slot + i]. HOST_PROGRAMS programs stride over all rows, R at a time.

    A row that the window before has staged is copied within the device. Only rows read from the host are
    added to `fetched`, [1] int64.
    """
    total = tl.minimum(tl.load(count), capacity)
    num_fetched = tl.zeros((), tl.int64)
    for start in range(tl.program_id(0) * R, total, tl.num_programs(0) * R):
        i = start + tl.arange(0, R)
        is_claimed = i < total
        node = tl.load(claimed + i, mask=is_claimed, other=0).to(tl.int64)
        slot_code = tl.load(hot_slot + node, mask=is_claimed, other=-1).to(tl.int64)
        source = tl.where(slot_code < -1, hot + slot_of(slot_code) * WIDTH, cold + node * WIDTH)
        target = hot + (first_slot + i).to(tl.int64) * WIDTH
        for first_column in tl.static_range(0, WIDTH, C):
            column = first_column + tl.arange(0, C)
            mask = is_claimed[:, None] & (column < WIDTH)[None, :]
            target_words = target[:, None] + column[None, :]
            words = tl.load(source[:, None] + column[None, :], mask=mask)
            tl.store(target_words, words, mask)
        num_fetched += tl.sum((is_claimed & (slot_code == -1)).to(tl.int64))
    tl.atomic_add(fetched, num_fetched, sem="relaxed")


@triton.jit(do_not_specialize=["num"])
def _gather_kernel(rows, ids, order, out, num, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """out[i] = rows[ids[i]], read in the order of `order`. HOST_PROGRAMS programs stride over the ids, R at a time."""
    for start in range(tl.program_id(0) * R, num, tl.num_programs(0) * R):
        is_id = start + tl.arange(0, R) < num
        position = tl.load(order + start + tl.arange(0, R), mask=is_id, other=0).to(tl.int64)
        row = tl.load(ids + position, mask=is_id, other=0).to(tl.int64)
        for first_column in tl.static_range(0, WIDTH, C):
            column = first_column + tl.arange(0, C)
            mask = is_id[:, None] & (column < WIDTH)[None, :]
            words = tl.load(rows + row[:, None] * WIDTH + column[None, :], mask=mask)
            tl.store(out + position[:, None] * WIDTH + column[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _put_kernel(table, ids, order, rows, num, ADD: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """table[ids[i]] = rows[i], or += with ADD, in the order of `order`. No atomics: each id must occur once.

    Numbers and not machine words, since ADD computes with them.
    """
    for start in range(tl.program_id(0) * R, num, tl.num_programs(0) * R):
        is_id = start + tl.arange(0, R) < num
        position = tl.load(order + start + tl.arange(0, R), mask=is_id, other=0).to(tl.int64)
        row = tl.load(ids + position, mask=is_id, other=0).to(tl.int64)
        for first_column in tl.static_range(0, WIDTH, C):
            column = first_column + tl.arange(0, C)
            mask = is_id[:, None] & (column < WIDTH)[None, :]
            target = table + row[:, None] * WIDTH + column[None, :]
            values = tl.load(rows + position[:, None] * WIDTH + column[None, :], mask=mask)
            if ADD:
                values += tl.load(target, mask=mask)
            tl.store(target, values, mask=mask)


@triton.jit(do_not_specialize=["capacity", "first_slot"])
def _point_kernel(hot_slot, claimed, count, capacity, first_slot, STAGED: tl.constexpr, T: tl.constexpr):
    """hot_slot[claimed[i]] = the code of the staged row first_slot + i (STAGED), or -1 for a cold row."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    is_claimed = i < tl.minimum(tl.load(count), capacity)
    node = tl.load(claimed + i, mask=is_claimed, other=0).to(tl.int64)
    code = tl.full((T,), -1, tl.int32)
    if STAGED:
        code = -2 - (first_slot + i).to(tl.int32)
    tl.store(hot_slot + node, code, mask=is_claimed)


def claim(nodes: Tensor, hot_slot: Tensor, stamp: Tensor, window: int, claimed: Tensor, count: Tensor) -> None:
    """Append those of `nodes` that are not hot and were not claimed before in this window to `claimed`.

    nodes: [n], -1 for an empty slot. stamp: [num_rows] int32, the last window that claimed each row.
    claimed: [capacity], filled with `unclaimed` at the start of a window. count: [1] int32, the number of
    claims; those beyond the capacity are counted but not written.
    """
    block = nodes.numel() if is_interpreted() else CLAIM_BLOCK
    block = triton.next_power_of_2(max(1, block))
    with launch_on(nodes.device):
        _claim_kernel[(triton.cdiv(nodes.numel(), block),)](
            nodes, hot_slot, stamp, claimed, count, nodes.numel(), window, claimed.numel(), block
        )


def stage(
    hot: Tensor, cold: Tensor, hot_slot: Tensor, claimed: Tensor, count: Tensor, first_slot: int, fetched: Tensor
):
    """Copy the rows of the first `count` ids of `claimed` to hot[first_slot:].

    claimed: [capacity], sorted, so that host memory is read by ascending id. fetched: [1] int64, to which
    the number of rows read from the host is added. `hot_slot` is read to find rows that are staged already;
    `point` changes it.
    """
    width, word = row_words(hot, cold)
    columns = min(STAGED_COLUMNS, triton.next_power_of_2(width))
    rows = triton.next_power_of_2(claimed.numel()) if is_interpreted() else HOST_ROWS
    with launch_on(hot.device):
        _stage_kernel[(1 if is_interpreted() else HOST_PROGRAMS,)](
            words_of(hot, word), words_of(cold, word), hot_slot, claimed, count, fetched, claimed.numel(), first_slot,
            WIDTH=width, R=rows, C=columns, num_warps=HOST_WARPS,
        )  # fmt: skip


def point(hot_slot: Tensor, claimed: Tensor, count: Tensor, first_slot: int | None) -> None:
    """Declare the rows of the first `count` ids of `claimed` staged in hot[first_slot:].

    With first_slot None they are declared cold.
    """
    block = triton.next_power_of_2(claimed.numel()) if is_interpreted() else CLAIM_BLOCK
    with launch_on(hot_slot.device):
        _point_kernel[(triton.cdiv(claimed.numel(), block),)](
            hot_slot, claimed, count, claimed.numel(), first_slot or 0, first_slot is not None, block
        )


def gather_host_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids] from pinned host memory while training runs: few programs, which read by ascending id.

    All ids must be in range.
    """
    out = torch.empty((ids.numel(), *rows.shape[1:]), dtype=rows.dtype, device=ids.device)
    width, word = row_words(rows, out)
    rows_per_program = triton.next_power_of_2(max(1, ids.numel())) if is_interpreted() else HOST_ROWS
    with launch_on(ids.device):
        _gather_kernel[(1 if is_interpreted() else HOST_PROGRAMS,)](
            words_of(rows, word), ids, ids.argsort(), words_of(out, word), ids.numel(),
            WIDTH=width, R=rows_per_program, C=min(STAGED_COLUMNS, triton.next_power_of_2(width)), num_warps=HOST_WARPS,
        )  # fmt: skip
    return out


def put_host_rows(table: Tensor, ids: Tensor, rows: Tensor, *, add: bool = False) -> None:
    """table[ids] = rows, or += rows with `add`, in pinned host memory, by few programs.

    All ids must be in range, and each may occur once. The host must synchronise before it reads the rows.
    """
    width = rows[:1].numel()
    rows = rows.contiguous()
    if rows.numel() == 0:
        return
    rows_per_program = triton.next_power_of_2(ids.numel()) if is_interpreted() else HOST_ROWS
    with launch_on(ids.device):
        _put_kernel[(1 if is_interpreted() else HOST_PROGRAMS,)](
            table, ids, ids.argsort(), rows, ids.numel(), ADD=add,
            WIDTH=width, R=rows_per_program, C=min(STAGED_COLUMNS, triton.next_power_of_2(width)), num_warps=HOST_WARPS,
        )  # fmt: skip


def unclaimed(dtype: torch.dtype) -> int:
    """The largest number of a dtype. It fills the unused end of `claimed`, and comes last when `claimed` is sorted."""
    return torch.iinfo(dtype).max
