"""Rows that lie in two places: copies of the hot ones near the kernels, all of them further away.

Behind the hot rows may stand some that were brought near for the next steps only (`staging`).
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 64
"""Rows of a counter tensor [COUNTERS, 3]: programs add to different ones, since one place would be fought over."""


def new_counts(device: torch.device | str) -> Tensor:
    """[COUNTERS, 3] int64 zeros: hits, misses and reads of staged rows, to be summed over the first dimension."""
    return torch.zeros(COUNTERS, 3, dtype=torch.int64, device=device)


def slot_of(hot_slot: Tensor) -> Tensor:
    """Slots in `hot` of rows that are hot or staged; -1 for the others."""
    return torch.where(hot_slot < -1, -2 - hot_slot, hot_slot)


def gather_tiers(
    hot: Tensor,
    cold: Tensor | None,
    hot_slot: Tensor | None,
    ids: Tensor,
    counts: Tensor | None = None,
    in_order: bool = False,
    staged: bool = True,
) -> Tensor:
    """The rows of `ids` [n]: hot[place[id]] where that is a slot, else cold[id]; zeros where the id is -1.

    hot [num_hot, ...]; cold [num_rows, ...], on a GPU pinned host memory; place [num_rows] int32 with -1 for cold rows
    and -2 - slot for staged ones, None where every row is hot and stands at its own id. counts: `new_counts()`, to
    which what was read is added.
    staged: whether staged rows are read where they stand; else where they are always, since they come and go.
    in_order: on a GPU, read by ascending id, which the host's memory answers half as fast again (an H200: 45 for 30
    GB/s at 256 bytes a row). It costs a sort, so it pays where a sixth of the rows or more are cold.
    """
    if ids.device.type == "cpu":
        return gather_tiers_reference(hot, cold, hot_slot, ids, counts, staged)
    from hopline.ops.gpu import tiers as gpu_tiers  # Triton is imported by those who use it only

    narrow = hot_slot is not None and hot_slot.numel() < 1 << 31  # half as many bits to sort by
    order = (ids.int() if narrow else ids).argsort() if in_order else None
    return gpu_tiers.gather_tiers(hot, cold, hot_slot, ids, counts, order, staged)


def count_ids(seen: Tensor, ids: Tensor) -> None:
    """seen[id] += 1 for every id [n] but -1; seen [num_rows] int32."""
    if ids.device.type == "cpu":
        present = ids[ids >= 0].long()
        seen.index_add_(0, present, torch.ones_like(present, dtype=seen.dtype))
        return
    from hopline.ops.gpu import tiers as gpu_tiers

    gpu_tiers.count_ids(seen, ids)


def gather_tiers_reference(
    hot: Tensor,
    cold: Tensor | None,
    hot_slot: Tensor | None,
    ids: Tensor,
    counts: Tensor | None = None,
    staged: bool = True,
) -> Tensor:
    """`gather_tiers` in plain torch: the definition."""
    num_rows = hot.size(0) if hot_slot is None else hot_slot.numel()
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"a row id is outside 0 .. {num_rows - 1}")
    rows = torch.zeros((ids.numel(), *hot.shape[1:]), dtype=hot.dtype, device=ids.device)
    present = ids >= 0
    slots = torch.where(present, ids.long() if hot_slot is None else hot_slot[ids.long()].long(), -1)
    slots = slots if staged else slots.clamp(min=-1)
    hit, is_staged = slots >= 0, slots < -1
    near, miss = hit | is_staged, present & (slots == -1)
    rows[near] = hot[slot_of(slots[near])]
    if cold is not None:
        rows[miss] = cold[ids[miss].long()]
    if counts is not None:
        counts[0] += torch.stack([hit.sum(), miss.sum(), is_staged.sum()])
    return rows
