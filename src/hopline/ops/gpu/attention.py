"""Triton kernels of graph attention (GATConv, GATv2Conv) over a tree's or a block's edges, with their gradients.

The softmax over a destination's edges runs while their source rows pass by, so neither the messages nor the attention
weights of all edges are ever built. Only the log of the softmax's sum is kept, per destination and head: backward
makes the weights again from it. In a tree each source has one parent, whose program writes the source's gradient; in
a block gradients are summed over edges grouped by source. No two threads add to the same number, so that every run
gives the same bits. Half types are summed in float32. Nothing here waits for the device.

One program holds one head of some destinations, or of some of a block's sources. In a tree an edge is numbered by the
slot of its source, and `sources` holds the node at each slot; in a block edges are sorted by destination, and
`sources` holds each one's source.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import (
    EDGE_ERROR,
    GOLDEN,
    error_flags,
    first_state,
    is_interpreted,
    key_on,
    launching,
    mix,
    report,
)
from hopline.ops.gpu.sampling import group_edges
from hopline.ops.tree_slots import Slots


@triton.jit
def _leaky(z, SLOPE: tl.constexpr):
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def _rows(rows, row, there, head, HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[..., CP] one head of each row, 0 where there is none; rows: a vector or a matrix of row numbers."""
    column = tl.arange(0, CP)
    if len(row.shape) == 1:
        at = rows + (row.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
        value = tl.load(at, mask=there[:, None] & (column < C)[None, :], other=0).to(ACC)
    else:
        at = rows + (row.to(tl.int64) * (HEADS * C) + head * C)[:, :, None] + column[None, None, :]
        value = tl.load(at, mask=there[:, :, None] & (column < C)[None, None, :], other=0).to(ACC)
    return value


@triton.jit
def _att(att, head, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    column = tl.arange(0, CP)
    return tl.load(att + head * C + column, mask=column < C, other=0).to(ACC)


@triton.jit
def _own_score(own, att_own, head, V2: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[R] what a destination itself adds to the scores of its edges; nothing in version 2, which adds its row."""
    return tl.sum(own, 1) * 0 if V2 else tl.sum(own * _att(att_own, head, C, CP, ACC)[None, :], 1)


@triton.jit
def _before_leaky(x, own, own_score, att, V2: tl.constexpr):
    """[R, E, CP] in version 2, [R, E] in version 1."""
    return x + own[:, None, :] if V2 else tl.sum(x * att[None, None, :], 2) + own_score[:, None]


@triton.jit
def _scores(z, att, V2: tl.constexpr, SLOPE: tl.constexpr):
    """[R, E] what the softmax is of."""
    return tl.sum(_leaky(z, SLOPE) * att[None, None, :], 2) if V2 else _leaky(z, SLOPE)


@triton.jit
def _kept(states, number, head, HEADS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr):
    """[R, E] the dropout factor of each edge; number: its place among its destination's, 0 being the self-loop."""
    if THRESHOLD > 0:
        raw = mix(states[:, None] + (number * HEADS + head + 1).to(tl.uint64) * GOLDEN)
        keep = (raw >> 48).to(tl.int32) >= THRESHOLD
        factor = tl.where(keep, tl.full((1, 1), SCALE, ACC), tl.full((1, 1), 0.0, ACC))
    else:
        factor = tl.full(number.shape, 1.0, ACC)
    return factor


@triton.jit
def _states(key, ids, d, there, THRESHOLD: tl.constexpr):
    if THRESHOLD > 0:
        states = first_state(tl.load(key), tl.load(ids + d, mask=there, other=0).to(tl.int64))
    else:
        states = d.to(tl.uint64)
    return states


@triton.jit
def _range(starts, stops, sources, d, inside, flags, num_edges, TREE: tl.constexpr):
    """(first edge, number of edges, the destination's node or number, whether it is there) of each destination."""
    start = tl.load(starts + d, mask=inside, other=0).to(tl.int64)
    if TREE:
        count = tl.load(stops + d, mask=inside, other=0).to(tl.int32)
        node = tl.load(sources + d, mask=inside, other=-1).to(tl.int64)
    else:
        stop = tl.load(stops + d, mask=inside, other=0)
        wrong = (start < 0) | (stop < start) | (stop > num_edges)
        report(flags, EDGE_ERROR, wrong)
        count = tl.where(wrong, 0, stop - start).to(tl.int32)
        node = tl.where(inside, d, -1).to(tl.int64)
    return start, count, node, node >= 0


@triton.jit
def _sources(sources, edge, is_edge, node, flags, num_src, LOOPS: tl.constexpr, TREE: tl.constexpr):
    """(source row, whether the edge counts): with LOOPS, edges from a node to itself give way to the one added."""
    found = tl.load(sources + edge, mask=is_edge, other=0).to(tl.int64)
    if TREE:
        src = edge
        counts = is_edge & (found >= 0)
    else:
        src = found
        wrong = is_edge & ((src < 0) | (src >= num_src))
        report(flags, EDGE_ERROR, wrong)
        counts = is_edge & (wrong == 0)
    if LOOPS:
        counts = counts & (found != node[:, None])
    return src, counts


# ---- forward


@triton.jit(do_not_specialize=["num_dst", "num_src", "num_edges"])
def attend_kernel(
    x, own_rows, att, att_own, starts, stops, sources, ids, key, out, exact, sums, flags, num_dst, num_src, num_edges,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, V2: tl.constexpr, LOOPS: tl.constexpr,
    TREE: tl.constexpr, SLOPE: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One head of R destinations: rows of E edges at a time, what was summed being scaled down to the new maximum."""
    head = tl.program_id(0) % HEADS
    d = tl.program_id(0) // HEADS * R + tl.arange(0, R)
    inside = d < num_dst
    start, count, node, there = _range(starts, stops, sources, d, inside, flags, num_edges, TREE)
    own = _rows(own_rows, d, there, head, HEADS, C, CP, ACC)
    vector = _att(att, head, C, CP, ACC)
    own_score = _own_score(own, att_own, head, V2, C, CP, ACC)
    states = _states(key, ids, d, there, THRESHOLD)
    most = tl.full((R,), float("-inf"), ACC)
    weights = tl.zeros((R,), ACC)
    total = tl.zeros((R, CP), ACC)
    if LOOPS:
        loop = _rows(x, d, there, head, HEADS, C, CP, ACC)
        loop_z = _before_leaky(loop[:, None, :], own, own_score, vector, V2)
        most = tl.where(there, tl.sum(_scores(loop_z, vector, V2, SLOPE), 1), most)
        weights = there.to(ACC)
        total = loop * _kept(states, tl.zeros((R, 1), tl.int32), head, HEADS, THRESHOLD, SCALE, ACC)
    for step in range(0, tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        is_edge = number[None, :] < count[:, None]
        src, is_edge = _sources(sources, start[:, None] + number, is_edge, node, flags, num_src, LOOPS, TREE)
        rows = _rows(x, src, is_edge, head, HEADS, C, CP, ACC)
        z = _before_leaky(rows, own, own_score, vector, V2)
        e = tl.where(is_edge, _scores(z, vector, V2, SLOPE), float("-inf"))
        higher = tl.maximum(most, tl.max(e, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no edge yet
        shrink = tl.exp(most - base)
        a = tl.exp(e - base[:, None])
        kept = _kept(states, tl.broadcast_to(number[None, :] + 1, (R, E)), head, HEADS, THRESHOLD, SCALE, ACC)
        weights = weights * shrink + tl.sum(a, 1)
        total = total * shrink[:, None] + tl.sum(rows * (a * kept)[:, :, None], 1)
        most = higher
    any_edge = weights > 0
    total = total / tl.where(any_edge, weights, 1.0)[:, None]
    column = tl.arange(0, CP)
    at = (d.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = inside[:, None] & (column < C)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    if out.dtype.element_ty != ACC:
        tl.store(exact + at, total, mask=mask)
    log_sum = tl.where(any_edge, most, 0.0) + tl.log(tl.where(any_edge, weights, 1.0))
    tl.store(sums + d.to(tl.int64) * HEADS + head, log_sum, mask=inside)


# ---- backward


@triton.jit
def _edge_gradients(
    x, is_edge, own, own_score, att, grad, log_sum, delta, kept, V2: tl.constexpr, SLOPE: tl.constexpr
):  # fmt: skip
    """Of [R, E] edges: (weight of the gradient that passes, gradients of z, of x, of own [R, CP] and of att).

    The gradient of own is [R, 1] in version 1, for the destination's own score.
    """
    z = _before_leaky(x, own, own_score, att, V2)
    a = tl.exp(tl.where(is_edge, _scores(z, att, V2, SLOPE) - log_sum[:, None], float("-inf")))
    passed = tl.sum(x * grad[:, None, :], 2)
    of_score = a * (kept * passed - delta[:, None])
    weight = a * kept
    if V2:
        of_z = of_score
        through = of_score[:, :, None] * tl.where(z > 0, att[None, None, :], att[None, None, :] * SLOPE)
        of_x = weight[:, :, None] * grad[:, None, :] + through
        of_own = tl.sum(through, 1)
        of_att = tl.sum(of_score[:, :, None] * _leaky(z, SLOPE), 1)
    else:
        of_z = tl.where(z > 0, of_score, of_score * SLOPE)
        of_x = weight[:, :, None] * grad[:, None, :] + of_z[:, :, None] * att[None, None, :]
        of_own = tl.sum(of_z, 1)[:, None]
        of_att = tl.sum(of_z[:, :, None] * x, 1)
    return weight, of_z, of_x, of_own, of_att


@triton.jit(do_not_specialize=["first_dst", "num", "num_src", "num_edges", "first_tile"])
def backward_kernel(
    x, own_rows, att, att_own, starts, stops, sources, ids, key, exact, sums, grad, grad_x, grad_own,
    weights, of_scores, att_parts, own_parts, flags, first_dst, num, num_src, num_edges, first_tile,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, V2: tl.constexpr, LOOPS: tl.constexpr,
    TREE: tl.constexpr, SLOPE: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    SHARED: tl.constexpr, ADD: tl.constexpr, FANOUT: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One head of R destinations from `first_dst` on. In a tree it writes the gradients of all their children's rows,
    in a block what each edge's source will need. Their own rows' gradients are added to what stands there (ADD), as
    the hop before has written them."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    inside = tile * R + tl.arange(0, R) < num
    d = first_dst + tile * R + tl.arange(0, R)
    start, count, node, there = _range(starts, stops, sources, d, inside, flags, num_edges, TREE)
    column = tl.arange(0, CP)
    own = _rows(own_rows, d, there, head, HEADS, C, CP, ACC)
    vector = _att(att, head, C, CP, ACC)
    own_score = _own_score(own, att_own, head, V2, C, CP, ACC)
    states = _states(key, ids, d, there, THRESHOLD)
    gradient = _rows(grad, d, there, head, HEADS, C, CP, ACC)
    delta = tl.sum(gradient * _rows(exact, d, there, head, HEADS, C, CP, ACC), 1)
    log_sum = tl.load(sums + d.to(tl.int64) * HEADS + head, mask=there, other=0)
    of_row = tl.zeros((R, CP), ACC)
    of_own = tl.zeros((R, CP if V2 else 1), ACC)
    of_att = tl.zeros((R, CP), ACC)
    if LOOPS:
        loop = _rows(x, d, there, head, HEADS, C, CP, ACC)[:, None, :]
        loop_kept = _kept(states, tl.zeros((R, 1), tl.int32), head, HEADS, THRESHOLD, SCALE, ACC)
        _, _, of_loop, more_own, of_att = _edge_gradients(
            loop, there[:, None], own, own_score, vector, gradient, log_sum, delta, loop_kept, V2, SLOPE
        )
        of_row = tl.sum(of_loop, 1)
        of_own += more_own
    for step in range(0, FANOUT if TREE else tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        edge = start[:, None] + number
        is_edge = number[None, :] < count[:, None]
        src, counts = _sources(sources, edge, is_edge, node, flags, num_src, LOOPS, TREE)
        rows = _rows(x, src, counts, head, HEADS, C, CP, ACC)
        kept = _kept(states, tl.broadcast_to(number[None, :] + 1, (R, E)), head, HEADS, THRESHOLD, SCALE, ACC)
        weight, of_z, of_rows, more_own, more_att = _edge_gradients(
            rows, counts, own, own_score, vector, gradient, log_sum, delta, kept, V2, SLOPE
        )
        of_own += more_own
        of_att += more_att
        if TREE:  # children that are not there get zeros
            at = grad_x + (edge * (HEADS * C) + head * C)[:, :, None] + column[None, None, :]
            slot = (inside[:, None] & (number < FANOUT)[None, :])[:, :, None] & (column < C)[None, None, :]
            tl.store(at, of_rows.to(grad_x.dtype.element_ty), mask=slot)
        else:
            tl.store(weights + edge * HEADS + head, weight, mask=is_edge)
            tl.store(of_scores + edge * HEADS + head, of_z, mask=is_edge)
    parts = (first_tile + tile).to(tl.int64) * (HEADS * C) + head * C + column
    tl.store(att_parts + parts, tl.sum(of_att, 0), mask=column < C)
    if not V2:
        tl.store(own_parts + parts, tl.sum(of_own * own, 0), mask=column < C)
        of_own = of_own * _att(att_own, head, C, CP, ACC)[None, :]
    at = (d.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = inside[:, None] & (column < C)[None, :]
    if SHARED:
        of_row += of_own
    else:
        tl.store(grad_own + at, of_own.to(grad_own.dtype.element_ty), mask=mask)
    if ADD:
        of_row += tl.load(grad_x + at, mask=mask, other=0).to(ACC)
    tl.store(grad_x + at, of_row.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def gather_kernel(
    x, own_rows, att, src_indptr, order, dst_idx, weights, of_scores, grad, grad_x, num_src, num_dst,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, V2: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One head of R sources of a block: the gradients of their edges summed, in the order of the edges."""
    head = tl.program_id(0) % HEADS
    s = tl.program_id(0) // HEADS * R + tl.arange(0, R)
    inside = s < num_src
    start = tl.load(src_indptr + s, mask=inside, other=0)
    count = (tl.load(src_indptr + s + 1, mask=inside, other=0) - start).to(tl.int32)
    column = tl.arange(0, CP)
    vector = _att(att, head, C, CP, ACC)
    row = _rows(x, s, inside, head, HEADS, C, CP, ACC) if V2 else tl.zeros((R, CP), ACC)
    total = tl.zeros((R, CP), ACC)
    of_score = tl.zeros((R,), ACC)
    for step in range(0, tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        is_edge = number[None, :] < count[:, None]
        edge = tl.load(order + start[:, None] + number, mask=is_edge, other=0)
        dst = tl.load(dst_idx + edge, mask=is_edge, other=0)
        weight = tl.load(weights + edge * HEADS + head, mask=is_edge, other=0)
        of_z = tl.load(of_scores + edge * HEADS + head, mask=is_edge, other=0)
        values = weight[:, :, None] * _rows(grad, dst, is_edge, head, HEADS, C, CP, ACC)
        if V2:
            z = row[:, None, :] + _rows(own_rows, dst, is_edge, head, HEADS, C, CP, ACC)
            values += of_z[:, :, None] * tl.where(z > 0, vector[None, None, :], vector[None, None, :] * SLOPE)
        else:
            of_score += tl.sum(of_z, 1)
        total += tl.sum(values, 1)
    if not V2:
        total += of_score[:, None] * vector[None, :]
    at = grad_x + (s.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = inside[:, None] & (column < C)[None, :]
    total += tl.load(at, mask=mask & (s < num_dst)[:, None], other=0).to(ACC)
    tl.store(at, total.to(grad_x.dtype.element_ty), mask=mask)


TILE = 2048
"""Numbers of source rows that a program has in flight: destinations times edges times columns of one head."""
EDGES_AT_ONCE = 8
"""Of one destination; more where destinations of a block have more."""
MAX_EDGES_AT_ONCE = 32
MIN_TILE_COLUMNS, MAX_TILE_ROWS = 8, 32
"""Of a tile. With a head of 1 column and 256 rows in a tile, four warps of an H200 summed some rows wrongly (Triton
3.6; 128 rows, or eight warps, did not), so tiles stay where a thread never holds two of them."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Which sources each destination attends to; the destinations are the first sources."""

    num_src: int
    num_dst: int
    starts: Tensor
    """[num_dst] each destination's first edge; in a tree an edge is numbered by the source it comes out of."""
    stops: Tensor
    """[num_dst] where its edges end; in a tree how many there are."""
    ids: Tensor
    """[num_dst] int64: what the draws at each destination are keyed by."""
    sources: Tensor
    """[num_edges] each edge's source; in a tree [num_src] the node at each slot, -1 where it is empty."""
    slots: Slots | None = None
    """How a tree's slots are numbered; None in a block."""
    hop: int = 0


def tree_edges(slots: Slots, hop: int, nodes: Tensor, counts: Tensor) -> Edges:
    """From hop + 1 and the hops before it to the hops 0 .. hop of a tree."""
    num_dst, device = slots.up_to(hop), nodes.device
    first = slots.first_children(device)
    return Edges(slots.up_to(hop + 1), num_dst, first, counts, slots.ids(device), nodes, slots, hop)


def block_edges(indptr: Tensor, src_idx: Tensor, num_src: int, ids: Tensor) -> Edges:
    return Edges(num_src, indptr.numel() - 1, indptr[:-1], indptr[1:], ids, src_idx)


@dataclass(frozen=True)
class _Plan:
    """What attention is computed, apart from its tensors."""

    heads: int
    v2: bool
    slope: float
    loops: bool
    p: float

    def constants(self, x: Tensor, with_draws: bool = True) -> dict[str, Any]:
        columns = x.size(1) // self.heads
        found = {
            "HEADS": self.heads,
            "C": columns,
            "CP": max(MIN_TILE_COLUMNS, triton.next_power_of_2(columns)),
            "V2": self.v2,
            "SLOPE": self.slope,
            "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
        }
        if with_draws:
            threshold = round(self.p * 65536)
            scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
            found |= {"LOOPS": self.loops, "THRESHOLD": threshold, "SCALE": scale}
        return found


def _tile(columns: int, edges: int) -> dict[str, int]:
    """R and E, destinations and edges of a tile, and the warps that share it: wide heads take many registers."""
    # In the interpreter work costs by the number of steps and not by their size.
    tile, most = (64 * TILE, 512) if is_interpreted() else (TILE, MAX_TILE_ROWS)
    edges = min(edges, max(1, tile // columns))
    return {"R": max(1, min(most, tile // (columns * edges))), "E": edges, "num_warps": 4 if columns < 256 else 8}


def _edges_at_once(edges: Edges, num_rows: int) -> int:
    """For a kernel over so many of the rows; in a block they may have any number of edges."""
    if edges.slots is not None:
        return EDGES_AT_ONCE
    mean = triton.next_power_of_2(triton.cdiv(edges.sources.numel(), num_rows))
    return min(max(mean, EDGES_AT_ONCE), MAX_EDGES_AT_ONCE)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, key: Tensor, edges: Edges,
        plan: _Plan,
    ) -> Tensor:  # fmt: skip
        x, own = x.contiguous(), None if own is None else own.contiguous()
        out = torch.empty(edges.num_dst, x.size(1), dtype=x.dtype, device=x.device)
        # Backward takes sums of differences that nearly cancel: rounded outputs would show in them.
        exact = out if x.dtype == _exact(x) else torch.empty_like(out, dtype=_exact(x))
        sums = torch.empty(edges.num_dst, plan.heads, dtype=_exact(x), device=x.device)
        constants = plan.constants(x)
        tile = _tile(constants["CP"], _edges_at_once(edges, edges.num_dst))
        with launching(x.device):
            attend_kernel[(triton.cdiv(edges.num_dst, tile["R"]) * plan.heads,)](
                x, x if own is None else own, att, att if att_own is None else att_own,
                edges.starts, edges.stops, edges.sources, edges.ids, key, out, exact, sums, error_flags(x.device),
                edges.num_dst, edges.num_src, edges.sources.numel(), TREE=edges.slots is not None, **constants, **tile,
            )  # fmt: skip
        ctx.edges, ctx.plan = edges, plan
        ctx.save_for_backward(x, own, att, att_own, key, exact, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, own, att, att_own, key, out, sums = ctx.saved_tensors
        edges, plan, grad, exact = ctx.edges, ctx.plan, grad.contiguous(), _exact(x)
        grad_x, grad_own = torch.empty_like(x), None if own is None else torch.empty_like(own)
        rows, is_tree, constants = x if own is None else own, edges.slots is not None, plan.constants(x)
        per_edge = torch.empty(2, 0 if is_tree else edges.sources.numel(), plan.heads, dtype=exact, device=x.device)
        launches = _launches(edges, constants["CP"])
        num_tiles = sum(triton.cdiv(num, tile["R"]) for _, num, _, tile in launches)
        parts = torch.empty(1 if plan.v2 else 2, num_tiles, *att.shape, dtype=exact, device=x.device)
        first_tile = 0
        with launching(x.device):
            for first, num, fanout, tile in launches:
                tiles = triton.cdiv(num, tile["R"])
                backward_kernel[(tiles * plan.heads,)](
                    x, rows, att, att if att_own is None else att_own, edges.starts, edges.stops, edges.sources,
                    edges.ids, key, out, sums, grad, grad_x, grad_x if grad_own is None else grad_own,
                    per_edge[0], per_edge[1], parts[0], parts[-1], error_flags(x.device), first, num, edges.num_src,
                    edges.sources.numel(), first_tile, TREE=is_tree, SHARED=own is None, ADD=first > 0, FANOUT=fanout,
                    **constants, **tile,
                )  # fmt: skip
                first_tile += tiles
        if not is_tree:
            _gather(x, rows, att, edges, plan, per_edge, grad, grad_x)
        of_att = parts.sum(1)
        of_att_own = None if att_own is None else of_att[1].to(att_own.dtype)
        return grad_x, grad_own, of_att[0].to(att.dtype), of_att_own, None, None, None


def _launches(edges: Edges, columns: int) -> list[tuple[int, int, int, dict[str, int]]]:
    """(first destination, how many, fan-out, tile): a tree's hops one after the other, a block at once."""
    if edges.slots is None:
        return [(0, edges.num_dst, 0, _tile(columns, _edges_at_once(edges, edges.num_dst)))]
    offsets, found = edges.slots.offsets, []
    for hop, fanout in enumerate(edges.slots.fanouts[: edges.hop + 1]):
        tile = _tile(columns, min(EDGES_AT_ONCE, triton.next_power_of_2(fanout)))
        found.append((offsets[hop], offsets[hop + 1] - offsets[hop], fanout, tile))
    return found


def _gather(
    x: Tensor, own: Tensor, att: Tensor, edges: Edges, plan: _Plan, per_edge: Tensor, grad: Tensor, grad_x: Tensor
) -> None:
    """Add to the gradients of a block's sources, in which the destinations' own are, those of their edges."""
    src_indptr, order = group_edges(edges.sources, edges.num_src)
    # Safe for any indptr, where `repeat_interleave` would have to ask its sum.
    positions = torch.arange(edges.sources.numel(), device=x.device)
    dst_idx = torch.searchsorted(edges.stops, positions, right=True, out_int32=True).clamp(max=edges.num_dst - 1)
    constants = plan.constants(x, with_draws=False)
    tile = _tile(constants["CP"], _edges_at_once(edges, edges.num_src))
    with launching(x.device):
        gather_kernel[(triton.cdiv(edges.num_src, tile["R"]) * plan.heads,)](
            x, own, att, src_indptr, order, dst_idx, per_edge[0], per_edge[1], grad, grad_x,
            edges.num_src, edges.num_dst, **constants, **tile,
        )  # fmt: skip


def attend(
    x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, edges: Edges,
    *, slope: float = 0.2, loops: bool = True, p: float = 0.0, key: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[num_dst, heads * columns]: each destination's sources, weighted by the softmax of their scores; differentiable.

    x: [num_src, heads * columns] projected rows. own: those of the destinations, where they are not the first of x.
    att: [heads, columns]. att_own: of the destinations' side (GATConv's att_dst); None for GATv2Conv's scores,
    att . leaky_relu(x_j + own_i). loops: edges from a node to itself give way to one such edge each. p: dropout of
    the weights, drawn from (key, destination, place of the edge). Rows of a tree's empty slots are never read; their
    gradients are 0, and so are their outputs.
    """
    assert x.size(0) == edges.num_src, "one row per source"
    if edges.num_dst == 0 or x.numel() == 0:
        return x[: edges.num_dst] * 0
    plan = _Plan(att.size(0), att_own is None, slope, loops, p)
    device_key = edges.ids if not p or key is None else key_on(x.device, key)
    assert not p or key is not None, "dropout needs a key"
    out = _Attend.apply(
        x, own, att.contiguous(), None if att_own is None else att_own.contiguous(), device_key, edges, plan
    )
    assert isinstance(out, Tensor)
    return out
