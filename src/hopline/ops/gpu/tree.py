"""Triton kernels of the tree layout: a step's keys and seeds, drawing children, and numbering those that are there.

Shapes follow from the batch size and the fan-outs alone, and nothing is asked of the host, so that a whole step can be
captured in one CUDA graph.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops import random
from hopline.ops.gpu.runtime import GOLDEN, bounded, first_state, key_on, launching, mix
from hopline.ops.tree_slots import Slots

SLOTS_PER_PROGRAM = 128
_NUM_KEYS = tl.constexpr(triton.next_power_of_2(random.PLACES + 1))

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
    rank's share begins among the step's `seeds_per_step`. Keys are as `random.place_key` reads them.
    """
    seeds = torch.empty(batch_size, dtype=order.dtype, device=order.device)
    keys = torch.empty(random.PLACES + 1, dtype=torch.int64, device=order.device)
    grid = (triton.cdiv(batch_size, 1024),)
    _step_kernel[grid](state, order, order.numel(), seeds, keys, first, batch_size, random.PLACES + 1, 1024)
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

    place: Tensor
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
