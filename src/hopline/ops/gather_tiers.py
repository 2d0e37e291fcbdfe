"""Gathering rows from a table in two tiers: copies of the hot rows in fast memory, all rows in slower memory.

    hot  [num_hot, ...]    device memory: copies of hot rows, then rows staged for the next steps only
    cold [num_rows, ...]   pinned host memory, which a GPU kernel reads directly

`hot_slot` [num_rows] int32 says where each row is read:

    s >= 0    hot: hot[s]
    s == -1   cold: cold[id]
    s < -1    staged: hot[-2 - s]. `methods.sampled.prefetch_rows` put the row there, for some steps only

Hot and staged rows have different codes, so that counts can tell them apart and `staged=False` can ignore
staged rows. This file holds the definition in plain torch, which runs on the CPU. The kernels are in
`ops.gpu.tiers`. No function of this file is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 64
"""Rows of a tensor of counts [COUNTERS, 3].

Programs of a kernel add to different rows, since atomic additions to one address would wait for each other.
"""


def new_counts(device: torch.device | str) -> Tensor:
    """[COUNTERS, 3] int64 zeros: reads of hot, cold and staged rows. Sum over the first dimension to read them."""
    return torch.zeros(COUNTERS, 3, dtype=torch.int64, device=device)


def slot_of(hot_slot: Tensor) -> Tensor:
    """The row of `hot` that holds each hot or staged row, -1 for cold rows. hot_slot: see the module."""
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
    """[n, ...] on the device of `ids`: the row of each id, zeros where the id is -1.

    hot: [num_hot, ...], hot and staged rows.
    cold: [num_rows, ...], all rows. If the ids are on a GPU, it is in pinned host memory. None: cold rows
    give zeros.
    hot_slot: [num_rows] int32, as in the module docstring. None: every row is hot, and hot[id] is row id.
    ids: [n]. On the CPU an id beyond the rows raises IndexError; on a GPU it gives zeros.
    counts: from `new_counts`. The reads of this call are added.
    in_order: whether a GPU reads by ascending id. It then reads host memory 1.5 times as fast (an H200: 45
    instead of 30 GB/s at 256 bytes a row). That costs a sort, so it pays if a sixth of the rows or more are
    cold.
    staged: whether staged rows are read from `hot`. Staged rows come and go with the steps of training. A
    reader that runs at other times passes False, and reads them from `cold`.
    """
    if ids.device.type == "cpu":
        return gather_tiers_reference(hot, cold, hot_slot, ids, counts, staged)
    # Here, so that Triton is imported only where a GPU is used.
    from hopline.ops.gpu import tiers as gpu_tiers

    order = None
    if in_order:
        fits_int32 = hot_slot is not None and hot_slot.numel() < 1 << 31
        sort_keys = ids.int() if fits_int32 else ids  # half as many bits to sort by
        order = sort_keys.argsort()
    return gpu_tiers.gather_tiers(hot, cold, hot_slot, ids, counts, order, staged)


def count_ids(seen: Tensor, ids: Tensor) -> None:
    """seen[id] += 1 for every id but -1. seen: [num_rows] int32. ids: [n], on the same device."""
    if ids.device.type == "cpu":
        valid_ids = ids[ids >= 0].long()
        seen.index_add_(0, valid_ids, torch.ones_like(valid_ids, dtype=seen.dtype))
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
    """The definition of `gather_tiers` in plain torch, on any device. Synchronises, to check the ids."""
    num_rows = hot.size(0) if hot_slot is None else hot_slot.numel()
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"a row id is outside 0 .. {num_rows - 1}")
    rows = torch.zeros((ids.numel(), *hot.shape[1:]), dtype=hot.dtype, device=ids.device)
    is_id = ids >= 0
    slots = ids.long() if hot_slot is None else hot_slot[ids.long()].long()
    slots = torch.where(is_id, slots, -1)
    if not staged:
        slots = slots.clamp(min=-1)  # the codes of staged rows become -1, that of cold rows
    is_hot = slots >= 0
    is_staged = slots < -1
    is_on_device = is_hot | is_staged
    is_cold = is_id & (slots == -1)
    rows[is_on_device] = hot[slot_of(slots[is_on_device])]
    if cold is not None:
        rows[is_cold] = cold[ids[is_cold].long()]
    if counts is not None:
        # Any of the COUNTERS rows would do: readers add them up.
        counts[0] += torch.stack([is_hot.sum(), is_cold.sum(), is_staged.sum()])
    return rows
