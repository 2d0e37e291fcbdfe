"""Triton kernels of the two tiers: one gather that takes each row from where it is, and a count per row."""

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
def slot_of(place):
    """As `tiers.slot_of`."""
    return tl.where(place < -1, -2 - place, place)


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
    place: Tensor | None,
    ids: Tensor,
    counts: Tensor | None = None,
    order: Tensor | None = None,
    staged: bool = True,
) -> Tensor:
    """As `ops.tiers.gather_tiers`, in one launch that waits for nothing; ids beyond the rows give zeros too.

    order: a permutation of the positions in `ids`, in which they are read.
    """
    assert place is None or place.dtype == torch.int32
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
            ids if place is None else place,
            ids,
            ids if order is None else order,
            ids if counts is None else counts,
            words_of(out, word),
            ids.numel(),
            hot.size(0) if place is None else place.numel(),
            1 if counts is None else counts.size(0),
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            ALL_HOT=place is None,
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
