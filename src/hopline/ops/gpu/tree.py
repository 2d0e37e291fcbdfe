"""Triton kernels of the tree layout: seeds and keys, sampling, aggregation from children to parents.

In the tree layout (`ops.tree_slots`) every possible draw has a slot. Shapes follow from the batch size and
the fan-outs alone, and no function of this file synchronises. So a whole step can be captured in one CUDA
graph. The price is that a node drawn twice is computed twice, and that slots without a node stay empty.

    order, state  --next_step-->  seeds, keys  --sample_tree-->  nodes, counts
    nodes, counts, rows of slots or a table  --reduce_rows, reduce_tree-->  aggregated rows

Memory layout
    state      [3] int64              the epoch's key, the step's number, its first seed's position in `order`
    order      [num_epoch_seeds]      node ids in the order of the epoch
    nodes      [num_slots]            dtype of the graph's indices: the node at each slot, -1 if it is empty
    counts     [num_parents] int32    the draws of each slot that has children; they fill its first children
    weight     [num_slots]            the weight of the edge from each slot to its parent, optional
    x          [num_rows, WIDTH], a table read by node id, or [slots up to hop + 1, WIDTH], a row per slot
    out        [slots up to hop, WIDTH], or [slots up to hop, 2 * WIDTH] with own rows: (reduced | own)

Slots of one hop are contiguous, and so are the children of one slot. Aggregation needs no index of edges:

    first = offset of hop h + 1
    for i, slot in enumerate(slots of hop h):
        children  = range(first + i * FANOUT, first + (i + 1) * FANOUT)
        out[slot] = reduce(weight[c] * x[c] for c in children if nodes[c] >= 0)     # 0 without children

How the work is divided. Program (p, c) of a kernel on rows owns a tile of R slots x C columns.
`_reduce_kernel` is launched once per hop, because FANOUT is a compile-time constant.

Gradients. Every slot has at most one parent. So the gradient of a gather, in general a scatter-add, is here
a gather:

    grad_x[c] = weight[c] * grad_out[parent(c)]                  sum
    grad_x[c] = weight[c] * grad_out[parent(c)] / count          mean
    grad_x[c] = weight[c] * grad_out[parent(c)] / ties           max, where c reaches the maximum, else 0

plus the own part of grad_out[c] with own rows. Weights get no gradient. There are no atomics on rows, so
every run gives the same bits. Half types are summed in float32.

Bad input. These kernels check no id: a seed must be -1 or a node of the graph, and indptr and indices must
be valid.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops import random
from hopline.ops.gpu.runtime import GOLDEN, draw_distinct, draw_repeated, first_state, key_on, launch_on, mix
from hopline.ops.gpu.tiers import slot_of
from hopline.ops.tree_slots import Slots

SLOTS_PER_PROGRAM = 128
"""Slots per program of the sampling kernel: one per thread, with Triton's default of four warps."""
_NUM_KEYS = tl.constexpr(triton.next_power_of_2(random.NUM_PURPOSES + 1))
"""Lanes that derive the keys of a step: a block of Triton has a power of two of them."""

# ---- the order of an epoch, and keys and seeds of a step


@triton.jit(do_not_specialize=["key", "step", "position", "num"])
def _epoch_kernel(state, ahead, draws, key, step, position, num, T: tl.constexpr):
    """draws[i] = the first draw of number i by `key`, as in `random.permutation`.

    Program 0 also sets `state` and `ahead`, see `start_epoch`.
    """
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    tl.store(draws + i, mix(first_state(key.to(tl.int64), i) + GOLDEN).to(tl.int64), mask=i < num)
    if tl.program_id(0) == 0:
        field = tl.arange(0, 4)  # three fields, padded to a power of two
        value = tl.where(field == 0, key.to(tl.int64), tl.where(field == 1, step, position).to(tl.int64))
        tl.store(state + field, value, mask=field < 3)
        tl.store(ahead + field, value, mask=field < 3)


def start_epoch(state: Tensor, ahead: Tensor, num_seeds: int, key: int, step: int, position: int) -> Tensor:
    """Set both states to one position of an epoch, and return a draw for each of its seeds.

    Returns [num_seeds] int64 on the device. The seeds, stably sorted by these draws, are in the order of
    the epoch.

    state, ahead: [3] int64 on the device, see the module docstring. Training advances `state`; prefetching
    advances `ahead`. key: the key of the epoch. step: the number of steps done. position: the number of
    seeds done.

    One kernel, where torch would need forty: in a short epoch their launches take longer than a step.
    """
    draws = torch.empty(num_seeds, dtype=torch.int64, device=state.device)
    grid = (max(1, triton.cdiv(num_seeds, 1024)),)
    with launch_on(state.device):
        _epoch_kernel[grid](state, ahead, draws, key, step, position, num_seeds, 1024)
    return draws


@triton.jit
def _derive(state, part):
    """One round of `random.derive_key`, on uint64."""
    return mix(state + (part + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _step_kernel(state, order, size, seeds, keys, first, BATCH: tl.constexpr, NUM_KEYS: tl.constexpr, T: tl.constexpr):
    """The BATCH seeds from order[position + first] on, with -1 beyond the end.

    Program 0 also writes the keys.

    keys[0] is the step's key, derive_key(epoch key, step). keys[i], from 1 on, is the key of purpose i - 2:
    derive_key(step's key, i - 2). Purposes are numbered from -1 on, see `random.purpose_key`.
    """
    epoch_key = tl.load(state)
    step = tl.load(state + 1)
    position = tl.load(state + 2)

    i = tl.program_id(0) * T + tl.arange(0, T)
    seed_position = position + first + i
    is_seed = (i < BATCH) & (seed_position < size)
    tl.store(seeds + i, tl.load(order + seed_position, mask=is_seed, other=-1), mask=i < BATCH)

    if tl.program_id(0) == 0:
        step_key = _derive(mix(epoch_key.to(tl.uint64)), step)
        key_number = tl.arange(0, _NUM_KEYS)
        derived = _derive(mix(step_key), (key_number - 2).to(tl.int64))
        key = tl.where(key_number == 0, step_key, derived)
        tl.store(keys + key_number, key.to(tl.int64), mask=key_number < NUM_KEYS)


@triton.jit
def _advance_kernel(state, seeds_per_step):
    """Move `state` to the next step.

    A launch of its own: all programs of `_step_kernel` must have read it before.
    """
    tl.store(state + 1, tl.load(state + 1) + 1)
    tl.store(state + 2, tl.load(state + 2) + seeds_per_step)


def next_step(state: Tensor, order: Tensor, batch_size: int, first: int, seeds_per_step: int) -> tuple[Tensor, Tensor]:
    """(seeds, keys) of the current step of `state`. Advances `state` to the next step.

    seeds: [batch_size], dtype of `order`: node ids, -1 beyond the end of the epoch.
    keys: [1 + NUM_PURPOSES] int64, as `random.purpose_key` reads them.

    state: [3] int64: the epoch's key, the step's number, and the position of the step's first seed in
    `order`.
    first: the position of this rank's first seed among the step's `seeds_per_step` seeds.
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
    """FANOUT children of each slot of one hop: `reference.sample_children`. One lane draws for one slot.

    nodes: the node at each slot. slots: the id of each slot, by which its draws are keyed.
    ids: the result, the node of each child, -1 where nothing was drawn.
    An empty slot has degree 0, and its children are empty slots.
    """
    i = tl.program_id(0) * T + tl.arange(0, T)
    is_slot = i < num
    node = tl.load(nodes + i, mask=is_slot, other=-1).to(tl.int64)
    is_node = node >= 0
    start = tl.load(indptr + node, mask=is_node, other=0)
    degree = tl.load(indptr + node + 1, mask=is_node, other=0) - start
    state = first_state(tl.load(key), tl.load(slots + i, mask=is_slot, other=0))

    count = tl.minimum(degree, FANOUT).to(tl.int32)
    if REPLACE:
        count = tl.where(degree > 0, FANOUT, 0).to(tl.int32)
    tl.store(counts + i, count, mask=is_slot)

    if REPLACE:
        picks = draw_repeated(state, degree, FANOUT)
    else:
        picks = draw_distinct(state, degree, FANOUT)
    for j in tl.static_range(FANOUT):
        is_drawn = j < count
        edge = start + picks[j]
        child = i.to(tl.int64) * FANOUT + j
        tl.store(ids + child, tl.load(indices + edge, mask=is_drawn, other=-1), mask=is_slot)
        if EDGES:
            tl.store(edge_ids + child, tl.where(is_drawn, edge, 0), mask=is_slot)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int | Tensor,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`, as `reference.sample_tree`: one launch per hop.

    key: a number, or a tensor on the device whose first element is the step's key.
    edge_ids: None unless `with_edges`. Seeds have no edge to a parent, so edge_ids[0] belongs to slot
    `num_seeds`.
    """
    device = seeds.device
    offsets = slots.offsets
    nodes = torch.empty(offsets[-1], dtype=indices.dtype, device=device)
    counts = torch.empty(slots.up_to(slots.num_hops - 1), dtype=torch.int32, device=device)
    edge_ids = torch.empty(offsets[-1] - slots.num_seeds if with_edges else 0, dtype=torch.int64, device=device)
    nodes[: slots.num_seeds].copy_(seeds)
    step_key = key_on(device, key if isinstance(key, int) else key[:1])
    ids = slots.ids(device)

    for hop, fanout in enumerate(slots.fanouts):
        parents = slice(offsets[hop], offsets[hop + 1])
        children = slice(offsets[hop + 1], offsets[hop + 2])
        num = offsets[hop + 1] - offsets[hop]
        edges = edge_ids[offsets[hop + 1] - slots.num_seeds :] if with_edges else edge_ids
        grid = (triton.cdiv(num, SLOTS_PER_PROGRAM),)
        _children_kernel[grid](
            indptr, indices, nodes[parents], ids[parents], step_key, nodes[children], counts[parents], edges, num,
            fanout, replace, with_edges, SLOTS_PER_PROGRAM,
        )  # fmt: skip
    return nodes, counts, edge_ids if with_edges else None


# ---- rows for the slots that hold a node


class RowMap(NamedTuple):
    """The relation between slots and the rows of a matrix.

    The matrix has a row for every slot (`rows_by_slot`), or only for slots that hold a node (`dense_rows`).
    Its shape is the same in both cases, since the host does not know how many slots are empty.
    """

    row_of_slot: Tensor
    """[num_slots] int32: the row of each slot. Undefined where a slot has no row."""
    slots: Tensor
    """[num_slots] int32: the slot of each row. Undefined beyond the last row."""
    parents: Tensor
    """[num_slots] int32: the parent slot of each row's slot, -1 for seeds and empty slots. Undefined beyond
    the last row.
    """
    total: Tensor
    """[1] int32 on the device: the number of rows."""


@triton.jit(do_not_specialize=["num"])
def _dense_kernel(nodes, num_up_to, all_parents, row_of_slot, slots, parents, num, T: tl.constexpr):
    """Fill a `RowMap` for slots that hold a node.

    num_up_to: [num] int32, the number of slots that hold a node, up to and including each slot.
    """
    slot = tl.program_id(0) * T + tl.arange(0, T)
    has_node = tl.load(nodes + slot, mask=slot < num, other=-1) >= 0
    row = tl.load(num_up_to + slot, mask=has_node, other=1) - 1
    tl.store(row_of_slot + slot, row, mask=has_node)
    tl.store(slots + row, slot, mask=has_node)
    tl.store(parents + row, tl.load(all_parents + slot, mask=has_node, other=-1), mask=has_node)


@triton.jit(do_not_specialize=["num"])
def _parents_kernel(nodes, all_parents, parents, num, T: tl.constexpr):
    """parents[slot] = all_parents[slot] where the slot holds a node, else -1."""
    slot = tl.program_id(0) * T + tl.arange(0, T)
    has_node = tl.load(nodes + slot, mask=slot < num, other=-1) >= 0
    tl.store(parents + slot, tl.load(all_parents + slot, mask=has_node, other=-1), mask=slot < num)


def dense_rows(nodes: Tensor, all_parents: Tensor) -> RowMap:
    """The map of a matrix with rows only for slots that hold a node, in the order of the slots.

    nodes: [num_slots], the nodes of the first hops of a tree. all_parents: `Slots.parents`, of these slots
    at least.
    """
    num = nodes.numel()
    num_up_to = torch.cumsum(nodes >= 0, 0, dtype=torch.int32)
    row_of_slot, slots, parents = torch.empty(3, num, dtype=torch.int32, device=nodes.device)
    _dense_kernel[(triton.cdiv(num, 1024),)](nodes, num_up_to, all_parents, row_of_slot, slots, parents, num, 1024)
    return RowMap(row_of_slot, slots, parents, num_up_to[-1:])


def rows_by_slot(nodes: Tensor, all_parents: Tensor) -> RowMap:
    """The map of a matrix with a row for each slot, empty ones included. Arguments as in `dense_rows`."""
    num = nodes.numel()
    identity, total = _identity_map(num, nodes.device)
    parents = torch.empty_like(identity)
    _parents_kernel[(triton.cdiv(num, 1024),)](nodes, all_parents, parents, num, 1024)
    return RowMap(identity, identity, parents, total)


@cache
def _identity_map(num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([num] int32: 0 .. num - 1, [1] int32: num) on the device.

    Cached to keep the tensors alive: a captured CUDA graph has their addresses but holds no reference to
    them. So the cache has no limit. It takes 4 bytes per slot for each number of slots in a process.
    """
    identity = torch.arange(num, dtype=torch.int32, device=device)
    total = torch.full((1,), num, dtype=torch.int32, device=device)
    return identity, total


TILE = 1024
"""Numbers in a tile of slots x columns, for rows of up to 256 columns."""


@triton.jit
def _load_row_numbers(node, slot, in_row_of_slot, has_node, TABLE: tl.constexpr, DENSE_IN: tl.constexpr):
    """The row of `x` of each slot: its node (TABLE), its `RowMap.row_of_slot` (DENSE_IN), or the slot."""
    if TABLE:
        row = node
    elif DENSE_IN:
        row = tl.load(in_row_of_slot + slot, mask=has_node, other=0).to(tl.int64)
    else:
        row = slot
    return row


@triton.jit
def _row_pointers(x, cold, tier, row, has_node, width, TIERED: tl.constexpr):
    """The address of each row of `x`.

    If TIERED, `x` has the hot and staged rows and `cold` all rows. `tier` is the `hot_slot` of `tiers`: it
    says where a row is read.
    """
    if TIERED:
        hot_slot = tl.load(tier + row, mask=has_node, other=-1).to(tl.int64)
        pointer = tl.where(hot_slot == -1, cold + row * width, x + slot_of(hot_slot) * width)
    else:
        pointer = x + row * width
    return pointer


@triton.jit(do_not_specialize=["num", "first_dst", "first_child"])
def _reduce_kernel(
    x, cold, tier, hits, nodes, weight, out, in_row_of_slot, out_row_of_slot, num, first_dst, first_child,
    WIDTH: tl.constexpr, FANOUT: tl.constexpr, HOW: tl.constexpr, TABLE: tl.constexpr, TIERED: tl.constexpr,
    DENSE_IN: tl.constexpr, DENSE_OUT: tl.constexpr, OWN: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Aggregate the children of the slots of one hop.

    Program (p, c): R slots from p * R on, C columns from c * C on.

    x: with TABLE a table read by node id. Otherwise one row per slot, or with DENSE_IN only rows of slots
    that hold a node.
    cold, tier, hits: `cold`, `hot_slot` and `counts` of `tiers`, used if TIERED. `x` is then its `hot`.
    first_dst, first_child: the offsets of this hop and of the next one.
    """
    index = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    is_slot = index < num
    is_column = column < WIDTH
    first_slot = first_child + index.to(tl.int64) * FANOUT  # the first child of each slot

    initial = float("-inf") if HOW == "max" else 0.0
    total = tl.full((R, C), initial, ACC)
    num_read = tl.zeros((R,), tl.int32)
    num_hot = tl.zeros((R,), tl.int32)
    num_staged = tl.zeros((R,), tl.int32)
    for child in tl.static_range(FANOUT):
        node = tl.load(nodes + first_slot + child, mask=is_slot, other=-1).to(tl.int64)
        has_node = node >= 0
        row = _load_row_numbers(node, first_slot + child, in_row_of_slot, has_node, TABLE, DENSE_IN)
        pointer = _row_pointers(x, cold, tier, row, has_node, WIDTH, TIERED)
        mask = has_node[:, None] & is_column[None, :]
        messages = tl.load(pointer[:, None] + column[None, :], mask=mask, other=0).to(ACC)
        if WEIGHTED:
            messages *= tl.load(weight + first_slot + child, mask=has_node, other=0).to(ACC)[:, None]
        if HOW == "max":
            is_larger = (messages > total) | (messages != messages)  # NaN must come through, as it does in torch
            total = tl.where(has_node[:, None] & is_larger, messages, total)
        else:
            total += messages
        num_read += has_node.to(tl.int32)
        if TIERED:
            hot_slot = tl.load(tier + row, mask=has_node, other=-1)
            num_hot += (hot_slot >= 0).to(tl.int32)
            num_staged += (hot_slot < -1).to(tl.int32)

    if HOW == "mean":
        total = total / tl.maximum(num_read, 1).to(ACC)[:, None]
    if HOW == "max":
        total = tl.where((num_read > 0)[:, None], total, 0.0)

    stride: tl.constexpr = 2 * WIDTH if OWN else WIDTH
    slot = (first_dst + index).to(tl.int64)
    out_row = slot
    is_written = is_slot
    if DENSE_OUT:
        is_written = is_slot & (tl.load(nodes + slot, mask=is_slot, other=-1) >= 0)
        out_row = tl.load(out_row_of_slot + slot, mask=is_written, other=0).to(tl.int64)
    target = out + out_row[:, None] * stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_written[:, None] & is_column[None, :])

    if OWN:
        node = tl.load(nodes + first_dst + index, mask=is_slot, other=-1).to(tl.int64)
        has_node = node >= 0
        row = _load_row_numbers(node, slot, in_row_of_slot, has_node, TABLE, DENSE_IN)
        pointer = _row_pointers(x, cold, tier, row, has_node, WIDTH, TIERED)
        own_rows = tl.load(pointer[:, None] + column[None, :], mask=has_node[:, None] & is_column[None, :], other=0)
        tl.store(target + WIDTH, own_rows.to(out.dtype.element_ty), mask=is_written[:, None] & is_column[None, :])
        num_read += has_node.to(tl.int32)
        if TIERED:
            hot_slot = tl.load(tier + row, mask=has_node, other=-1)
            num_hot += (hot_slot >= 0).to(tl.int32)
            num_staged += (hot_slot < -1).to(tl.int32)

    if TIERED:
        # Programs of further columns read the same rows: only the first column of programs counts them.
        if tl.program_id(1) == 0:
            counters = hits + 3 * (tl.program_id(0) % COUNTERS)
            tl.atomic_add(counters, tl.sum(num_hot).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters + 1, tl.sum(num_read - num_hot - num_staged).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters + 2, tl.sum(num_staged).to(tl.int64), sem="relaxed")


@triton.jit
def _weighted_message(message, factor, maximum, ACC: tl.constexpr):
    """message * factor, rounded exactly as the forward pass rounded it before it stored the maximum.

    Only so does `==` find the edges that reach the maximum.
    """
    return (message.to(ACC) * factor.to(ACC)).to(maximum.dtype)


@triton.jit(do_not_specialize=["num_dst"])
def _max_shares_kernel(
    x, nodes, first_children, counts, weight, out, grad, shares, num_dst,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Gradient of max, first half: shares[d] = grad[d] / (edges that reach the maximum at d), per column.

    This is torch's rule for ties. A maximum of 0 counts one edge more, as in torch: the gradient of
    `scatter_reduce` counts the zeros that the result was initialised with.

    shares: [num_dst, WIDTH]. out and grad: [num_dst, STRIDE], whose first WIDTH columns are the maxima and
    their gradients.
    """
    dst = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    is_dst = dst < num_dst
    mask = is_dst[:, None] & (column < WIDTH)[None, :]
    offset = dst.to(tl.int64)[:, None] * STRIDE + column[None, :]
    maximum = tl.load(out + offset, mask=mask, other=0)
    ties = (maximum == 0).to(tl.float32)
    first_child = tl.load(first_children + dst, mask=is_dst, other=0).to(tl.int64)
    count = tl.load(counts + dst, mask=is_dst, other=0)

    for child in range(tl.max(count)):
        pointer = x + (first_child + child)[:, None] * WIDTH + column[None, :]
        # NaN where there is no child: it equals no maximum.
        messages = tl.load(pointer, mask=mask & (child < count)[:, None], other=float("nan"))
        if WEIGHTED:
            factors = tl.load(weight + first_child + child, mask=is_dst & (child < count), other=0)
            messages = _weighted_message(messages, factors[:, None], maximum, ACC)
        ties += (messages == maximum).to(tl.float32)

    share = tl.load(grad + offset, mask=mask, other=0) / tl.maximum(ties, 1)
    target = shares + dst.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, share.to(shares.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _backward_kernel(
    grad, shares, x, maxima, nodes, parents, counts, weight, grad_x, num_src, num_dst,
    WIDTH: tl.constexpr, HOW: tl.constexpr, OWN: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradient of the rows of all slots: grad_x [num_src, WIDTH], by the formulas of the module docstring.

    Each slot has at most one parent, so its gradient is read from the parent's and not summed over edges.
    With OWN the second half of the slot's own row of `grad` is added.
    """
    slot = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    is_slot = slot < num_src
    is_column = (column < WIDTH)[None, :]
    stride: tl.constexpr = 2 * WIDTH if OWN else WIDTH
    parent = tl.load(parents + slot, mask=is_slot, other=-1).to(tl.int64)
    is_child = (parent >= 0) & (tl.load(nodes + slot, mask=is_slot, other=-1) >= 0)
    parent_offset = parent[:, None] * stride + column[None, :]

    if HOW == "max":
        messages = tl.load(x + slot.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=is_slot[:, None] & is_column)
        # NaN where a slot has no parent: it equals no message.
        maximum = tl.load(maxima + parent_offset, mask=is_child[:, None] & is_column, other=float("nan"))
        if WEIGHTED:
            factors = tl.load(weight + slot, mask=is_child, other=0)
            messages = _weighted_message(messages, factors[:, None], maximum, ACC)
        is_maximum = maximum == messages
        share_offset = parent[:, None] * WIDTH + column[None, :]
        share = tl.load(shares + share_offset, mask=is_child[:, None] & is_column, other=0)
        total = tl.where(is_maximum, share, 0).to(ACC)
    else:
        total = tl.load(grad + parent_offset, mask=is_child[:, None] & is_column, other=0).to(ACC)
    if HOW == "mean":
        count = tl.maximum(tl.load(counts + parent, mask=is_child, other=1), 1)
        total = total / count.to(ACC)[:, None]
    if WEIGHTED:
        total *= tl.load(weight + slot, mask=is_child, other=0).to(ACC)[:, None]
    if OWN:
        own_offset = slot.to(tl.int64)[:, None] * stride + WIDTH + column[None, :]
        total += tl.load(grad + own_offset, mask=(slot < num_dst)[:, None] & is_column, other=0).to(ACC)

    target = grad_x + slot.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(grad_x.dtype.element_ty), mask=is_slot[:, None] & is_column)


def _tile(width: int) -> tuple[int, int]:
    """(slots, columns) of a tile for rows of `width` numbers: at most 32 slots and 256 columns."""
    columns = min(256, triton.next_power_of_2(width))
    return max(1, min(32, TILE // columns)), columns


def _accumulator(dtype: torch.dtype) -> Any:
    """The type of sums: float64 for float64, else float32."""
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
    """[slots up to `hop`, width]: the aggregated children of each slot.

    Not differentiable; see `reduce_tree`.

    x: with `table` the rows of a table, read by the slots' nodes. Otherwise one row per slot of hops
    0 .. hop + 1.
    own: whether the slot's own row follows to the right, which makes the result
    [slots up to `hop`, 2 * width].
    tiers: (cold rows, hot slot of each row, counters), if `x` holds only the hot rows of a table. They are
    as in `ops.gather_tiers.gather_tiers`.
    dense_in, dense_out: `RowMap.row_of_slot`, if `x` or the result has rows only for slots that hold a node.
    """
    width = prod(x.shape[1:])
    out = torch.empty(slots.up_to(hop), 2 * width if own else width, dtype=dtype, device=nodes.device)
    rows, columns = _tile(width)
    # A kernel needs an address for every argument. `nodes`, or `x`, takes the place of tensors that it does
    # not read.
    cold, tier, hits = tiers or (x, nodes, nodes)
    x = x if x.numel() else cold  # an empty tensor has no address
    weight_or_any = nodes if weight is None else weight
    in_row_of_slot = nodes if dense_in is None else dense_in
    out_row_of_slot = nodes if dense_out is None else dense_out
    num_counters = 1 if tiers is None else hits.size(0)

    for h in range(hop + 1):
        num = slots.offsets[h + 1] - slots.offsets[h]
        grid = (triton.cdiv(num, rows), triton.cdiv(width, columns))
        _reduce_kernel[grid](
            x, cold, tier, hits, nodes, weight_or_any, out, in_row_of_slot, out_row_of_slot,
            num, slots.offsets[h], slots.offsets[h + 1],
            width, slots.fanouts[h], how, table, tiers is not None, dense_in is not None, dense_out is not None,
            own, weight is not None, _accumulator(x.dtype), rows, columns, num_counters,
        )  # fmt: skip
    return out


class _ReduceTree(torch.autograd.Function):
    """`reduce_rows` on rows of slots, with the gradient for them.

    Keeps rows and result for backward only for max.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slots: Slots, hop: int, nodes: Tensor, counts: Tensor, how: str, weight: Any, own: bool
    ) -> Tensor:
        x = x.contiguous()
        out = reduce_rows(x, slots, hop, nodes, how, weight, own, x.dtype, table=False)
        ctx.plan = (slots, hop, how, own, x.shape)
        if how == "max":
            ctx.save_for_backward(nodes, counts, weight, x, out)
        else:
            ctx.save_for_backward(nodes, counts, weight, None, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        slots, hop, how, own, shape = ctx.plan
        nodes, counts, weight, x, maxima = ctx.saved_tensors
        grad = grad.contiguous()
        width = shape[1:].numel()
        device = nodes.device
        num_dst = slots.up_to(hop)
        num_src = slots.up_to(hop + 1)
        rows, columns = _tile(width)
        weight_or_any = nodes if weight is None else weight  # a kernel needs some address

        shares = grad  # of sum and mean, where no kernel reads it
        if how == "max":
            shares = torch.empty(num_dst, width, dtype=grad.dtype, device=device)
            grid = (triton.cdiv(num_dst, rows), triton.cdiv(width, columns))
            _max_shares_kernel[grid](
                x, nodes, slots.first_children(device), counts, weight_or_any, maxima, grad, shares,
                num_dst, width, grad.size(1), weight is not None, _accumulator(x.dtype), rows, columns,
            )  # fmt: skip
        else:
            # `_backward_kernel` reads neither rows nor maxima, but needs some address.
            x = grad
            maxima = grad

        grad_x = torch.empty(shape, dtype=grad.dtype, device=device)
        grid = (triton.cdiv(num_src, rows), triton.cdiv(width, columns))
        _backward_kernel[grid](
            grad, shares, x, maxima, nodes, slots.parents(device), counts, weight_or_any, grad_x, num_src, num_dst,
            width, how, own, weight is not None, _accumulator(grad.dtype), rows, columns,
        )  # fmt: skip
        return grad_x, None, None, None, None, None, None, None


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
    """Aggregate the rows of all slots up to hop + 1 to their parents. Differentiable in `x`, not in `weight`.

    x: [slots up to hop + 1, ...]. Returns [slots up to hop, ...]; with `own` [slots up to hop, 2 * width],
    where the slot's own row follows to the right. The result equals `reference.reduce_edges` on the edges
    of the tree.
    """
    assert x.size(0) == slots.up_to(hop + 1), "one row per slot"
    weight = None if weight is None else weight.contiguous()
    out = _ReduceTree.apply(x, slots, hop, nodes, counts, how, weight, own)
    assert isinstance(out, Tensor)
    return out if own else out.view(-1, *x.shape[1:])
