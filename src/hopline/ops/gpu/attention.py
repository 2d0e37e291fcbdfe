"""Triton kernels of graph attention (GATConv, GATv2Conv) on blocks and on the tree layout, with their gradients.

For one head, let x_j be the projected row of source j and own_i that of destination i. The kernels compute

    z_ij  = <att, x_j> + <att_own, own_i>        e_ij = leaky_relu(z_ij)               GATConv   (V2 false)
    z_ij  = x_j + own_i                          e_ij = <att, leaky_relu(z_ij)>        GATv2Conv (V2 true)
    a_ij  = softmax of e_ij over the in-edges of i
    out_i = sum over j of kept_ij * a_ij * x_j   kept_ij: the dropout factor, 0 or 1 / (1 - p)

PyG builds scores, weights and messages of all edges. These kernels compute the softmax online: they read the source
row of each edge once, and update a maximum, a sum of exponentials and a weighted sum of rows. Neither messages nor
attention weights are stored in the forward pass. For backward it saves, with its inputs and its output, only the
log-sum-exp S_i of each destination and head.

Gradients. Let g_i be the gradient of out_i. Backward recomputes the weights and applies the chain rule:

    a_ij             = exp(e_ij - S_i)
    delta_i          = <g_i, out_i>
    gradient of e_ij = a_ij * (kept_ij * <x_j, g_i> - delta_i)

The gradient of x_j is a sum over the out-edges of j. It is computed without atomics, and so is bitwise reproducible:
- Tree layout: every slot but a seed's has one parent. The program of the parent writes the gradient of the child.
- Block: a first kernel writes two numbers per edge and head. A second kernel sums over edges grouped by source.

Memory layout (C is the number of columns of a head; CP is C padded to a power of two, at least MIN_TILE_COLUMNS)
    x           [num_src, HEADS * C]   row-major. The destinations are the first sources
    own_rows    [num_dst, HEADS * C]   x itself if destinations and sources share a projection
    att         [HEADS, C]             att_own as well (V2 false)
    out         [num_dst, HEADS * C]   exact: the same in float32, for half types
    sums        [num_dst, HEADS]       S_i in float32 or float64
    sources     block: [num_edges] each edge's source, edges sorted by destination. Tree: [num_src] the node at each
                slot, -1 if it is empty. An edge of a tree is numbered by the slot of its source

Division of the work. A program owns one head of R destinations (of R sources in `gather_kernel`), and takes E of
their edges at a time: tiles of [R, E, CP] numbers. Program p owns head p % HEADS of tile p // HEADS.

Bad input. In a block an index out of range raises a flag (`runtime.report`), and its edge is left out. The indices of
a tree follow from its shape and are not checked. Half types are summed in float32. Nothing in this file synchronises
with the device.
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
    """LeakyReLU with the slope SLOPE for negative numbers."""
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def _rows(rows, row, there, head, HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[..., CP]: one head of rows[row], 0 where `there` is false. row: [R] or [R, E] row numbers."""
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
    """[CP]: the attention vector of one head, padded with zeros."""
    column = tl.arange(0, CP)
    return tl.load(att + head * C + column, mask=column < C, other=0).to(ACC)


@triton.jit
def _own_score(own, att_own, head, V2: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[R]: <att_own, own_i>, the destination's part of z in GATConv. 0 in GATv2Conv, where own_i itself is added."""
    return tl.sum(own, 1) * 0 if V2 else tl.sum(own * _att(att_own, head, C, CP, ACC)[None, :], 1)


@triton.jit
def _before_leaky(x, own, own_score, att, V2: tl.constexpr):
    """z_ij, the input of LeakyReLU: [R, E, CP] in GATv2Conv, [R, E] in GATConv."""
    return x + own[:, None, :] if V2 else tl.sum(x * att[None, None, :], 2) + own_score[:, None]


@triton.jit
def _scores(z, att, V2: tl.constexpr, SLOPE: tl.constexpr):
    """[R, E]: e_ij, the input of the softmax."""
    return tl.sum(_leaky(z, SLOPE) * att[None, None, :], 2) if V2 else _leaky(z, SLOPE)


@triton.jit
def _kept(states, number, head, HEADS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr):
    """[R, E]: the dropout factor of each edge and head, 0 or SCALE.

    number: [R, E] the index of the edge among those of its destination, from 1 on. The added self-loop is number 0.
    The draw is keyed by (key, destination, number, head), so backward draws the same factors again.
    """
    if THRESHOLD > 0:
        raw = mix(states[:, None] + (number * HEADS + head + 1).to(tl.uint64) * GOLDEN)
        keep = (raw >> 48).to(tl.int32) >= THRESHOLD
        factor = tl.where(keep, tl.full((1, 1), SCALE, ACC), tl.full((1, 1), 0.0, ACC))
    else:
        factor = tl.full(number.shape, 1.0, ACC)
    return factor


@triton.jit
def _states(key, ids, d, there, THRESHOLD: tl.constexpr):
    """[R] uint64: the random state of each destination. Without dropout a placeholder, which `_kept` does not use."""
    if THRESHOLD > 0:
        states = first_state(tl.load(key), tl.load(ids + d, mask=there, other=0).to(tl.int64))
    else:
        states = d.to(tl.uint64)
    return states


@triton.jit
def _range(starts, stops, sources, d, inside, flags, num_edges, TREE: tl.constexpr):
    """(first edge, number of edges, node, whether it exists), each [R], for the destinations d.

    node: what `_sources` compares sources with to find self-loops. In a tree the node at slot d, in a block d itself.
    A destination of a block with a damaged indptr raises a flag and gets no edges.
    """
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
    """(row of the source in x, whether the edge counts), each [R, E].

    Edges do not count if their slot is empty or their source is out of range, which raises a flag. With LOOPS, edges
    from a node to itself do not count either: one self-loop per destination replaces them, as in PyG.
    """
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
    """The rows of `out` and the log-sum-exp of R destinations, for one head.

    The softmax is online. Over the edges seen so far, `most` is the largest e_ij, `weights` the sum of
    exp(e_ij - most), and `total` the sum of kept_ij * exp(e_ij - most) * x_j. When a step raises `most`, both sums
    are multiplied by exp(old most - new most). A destination without edges gets 0.
    """
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
        # The self-loop comes first: its score is the first maximum, so its exponential is exp(0) = 1.
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
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no edge yet: avoids -inf - -inf
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
    """Gradients through [R, E] edges, by the formulas at the head of this file. Returns a tuple of five:

    weight  [R, E]      a_ij * kept_ij, the factor of g_i in the gradient of x_j
    of_z    [R, E]      GATConv: the gradient of z_ij. GATv2Conv: that of e_ij
    of_x    [R, E, CP]  the edge's part of the gradient of x_j
    of_own  [R, CP]     GATv2Conv: the gradient of own_i. GATConv: [R, 1], that of <att_own, own_i>
    of_att  [R, CP]     the part of these edges in the gradient of att

    Edges that are masked by `is_edge` have a_ij = 0 and add nothing.
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
    """Gradients of one head of R destinations, out of `num` destinations from `first_dst` on.

    Tree: writes to grad_x the gradients of all children of its destinations. Block: writes, for `gather_kernel`,
    `weight` and `of_z` of each edge to `weights` and `of_scores`, both [num_edges, HEADS].

    Both: write the gradient of each destination's row to grad_x, through its self-loop and, if SHARED, as own_i. If
    not SHARED, the gradient of own_i goes to grad_own. With ADD, grad_x already holds what the launch of the hop
    before wrote for the same slots as children, and this kernel adds to it. Launches run one after the other, and in
    each one a single program writes a slot's head, so no atomics are needed.

    att_parts, own_parts: [num_tiles, HEADS, C], the gradients of att and att_own from each tile. `_Attend` adds up
    the tiles.
    """
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
        # The loop of a tree runs over all FANOUT slots, since grad_x is not initialised: empty slots get zeros.
        if TREE:
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
    """grad_x[s] += the gradients of all out-edges of s, for one head of R sources of a block.

    The edges of source s are order[src_indptr[s] : src_indptr[s + 1]]. Each adds weight * g_i and, through its score,
    of_z * att (GATConv) or of_z * att * leaky_relu'(z) (GATv2Conv). `backward_kernel` has written the rows of the
    destinations, which are the first sources. Rows of other sources start from 0.
    """
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
"""Numbers per step of a program: destinations x edges x columns of one head. A rule of thumb."""
EDGES_AT_ONCE = 8
"""Edges per destination and step in a tree, and the least in a block. A rule of thumb."""
MAX_EDGES_AT_ONCE = 32
"""Most edges per destination and step, for blocks with a large mean degree. A rule of thumb."""
MIN_TILE_COLUMNS, MAX_TILE_ROWS = 8, 32
"""Least columns and most rows of a tile on a GPU, chosen so that no thread holds two rows of a tile.

With 1 column and 256 rows, four warps of an H200 summed some rows wrongly under Triton 3.6. With 128 rows, or with
eight warps, they did not.
"""


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges over which destinations attend to sources, of a block or of a tree.

    Destinations are the first sources. In a block, edges are sorted by destination. In a tree, an edge is numbered by
    the slot of its source. Tensors of a tree may be longer than stated: kernels read only their first elements.
    """

    num_src: int
    """Number of sources."""
    num_dst: int
    """Number of destinations."""
    starts: Tensor
    """[num_dst]: the first edge of each destination."""
    stops: Tensor
    """[num_dst]: in a block, the end of each destination's edges. In a tree, the number of its edges."""
    ids: Tensor
    """[num_dst] int64: the ids by which the dropout of each destination's edges is keyed."""
    sources: Tensor
    """Block: [num_edges], the source of each edge. Tree: [num_src], the node at each slot, -1 if empty."""
    slots: Slots | None = None
    """The numbering of a tree's slots. None in a block."""
    hop: int = 0
    """The last hop of a tree whose slots are destinations. Unused in a block."""


def tree_edges(slots: Slots, hop: int, nodes: Tensor, counts: Tensor) -> Edges:
    """The edges of a tree whose destinations are the slots of hops 0 .. hop, and whose sources those of 0 .. hop + 1.

    nodes: the node at each slot, -1 if it is empty. counts: the number of children drawn for each slot.
    """
    num_dst, device = slots.up_to(hop), nodes.device
    first = slots.first_children(device)
    return Edges(slots.up_to(hop + 1), num_dst, first, counts, slots.ids(device), nodes, slots, hop)


def block_edges(indptr: Tensor, src_idx: Tensor, num_src: int, ids: Tensor) -> Edges:
    """The edges of a block in CSC form. ids: what dropout is keyed by, one per destination at least."""
    return Edges(num_src, indptr.numel() - 1, indptr[:-1], indptr[1:], ids, src_idx)


@dataclass(frozen=True)
class _Plan:
    """The options of one attention layer, which kernels get as compile-time constants."""

    heads: int
    """Number of heads."""
    v2: bool
    """Whether scores are those of GATv2Conv, else of GATConv."""
    slope: float
    """Slope of LeakyReLU for negative numbers."""
    loops: bool
    """Whether one self-loop per destination replaces the edges from a node to itself."""
    p: float
    """Dropout probability of the attention weights."""

    def constants(self, x: Tensor, with_draws: bool = True) -> dict[str, Any]:
        """The compile-time constants of a launch by name. with_draws: include those of dropout and self-loops."""
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
    """R, E and num_warps of a launch: rows and edges of a tile, and the warps that share it.

    Wide heads take many registers, so eight warps share a tile of 256 columns or more.
    """
    # The interpreter's time depends on the number of steps, not on their size.
    tile, most = (64 * TILE, 512) if is_interpreted() else (TILE, MAX_TILE_ROWS)
    edges = min(edges, max(1, tile // columns))
    return {"R": max(1, min(most, tile // (columns * edges))), "E": edges, "num_warps": 4 if columns < 256 else 8}


def _edges_at_once(edges: Edges, num_rows: int) -> int:
    """E for a kernel that owns `num_rows` rows: in a block about their mean degree, within the limits above."""
    if edges.slots is not None:
        return EDGES_AT_ONCE
    mean = triton.next_power_of_2(triton.cdiv(edges.sources.numel(), num_rows))
    return min(max(mean, EDGES_AT_ONCE), MAX_EDGES_AT_ONCE)


def _exact(x: Tensor) -> torch.dtype:
    """The dtype in which x is summed: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Attend(torch.autograd.Function):
    """`attend` after its checks. Backward is not differentiable again.

    If `own` is None, the first rows of x are the own rows. If `att_own` is None, att takes its place in the launch:
    a kernel needs some address, and with V2 it never reads this one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, key: Tensor, edges: Edges,
        plan: _Plan,
    ) -> Tensor:  # fmt: skip
        x, own = x.contiguous(), None if own is None else own.contiguous()
        out = torch.empty(edges.num_dst, x.size(1), dtype=x.dtype, device=x.device)
        # Backward sums differences from <g_i, out_i> that nearly cancel. An output rounded to half precision would
        # show in these sums, so half types keep a float32 copy of it.
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
    """(first destination, number of destinations, fan-out, tile) of each launch of `backward_kernel`, in order.

    A block takes one launch. A tree takes one per hop, from the seeds on: a hop adds to gradients that the hop before
    has written.
    """
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
    """Launch `gather_kernel`: add the gradients of all edges to grad_x, where destinations have their own already."""
    src_indptr, order = group_edges(edges.sources, edges.num_src)
    # `repeat_interleave` would synchronise with the device to learn its output's size. This search does not, and the
    # clamp keeps its result in range for any indptr.
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
    """[num_dst, heads * columns]: the sum of each destination's sources, weighted by attention. Differentiable.

    x: [num_src, heads * columns], the projected rows of the sources.
    own: [num_dst, heads * columns], the projected rows of the destinations. None: the first rows of x.
    att: [heads, columns], the attention vectors; GATConv's att_src or GATv2Conv's att.
    att_own: [heads, columns], GATConv's att_dst. None: scores are those of GATv2Conv.
    slope: the slope of LeakyReLU for negative numbers.
    loops: replace edges from a node to itself by one self-loop per destination.
    p: dropout probability of the attention weights. Draws are keyed by key, destination, edge and head.
    key: needed if p is above 0.

    In a tree, rows of empty slots are never read. Their outputs and gradients are 0.
    """
    assert x.size(0) == edges.num_src, "one row per source"
    if edges.num_dst == 0 or x.numel() == 0:
        return x[: edges.num_dst] * 0  # the product keeps x in autograd's graph
    plan = _Plan(att.size(0), att_own is None, slope, loops, p)
    # Without dropout no key is read, and any tensor will do.
    device_key = edges.ids if not p or key is None else key_on(x.device, key)
    assert not p or key is not None, "dropout needs a key"
    out = _Attend.apply(
        x, own, att.contiguous(), None if att_own is None else att_own.contiguous(), device_key, edges, plan
    )
    assert isinstance(out, Tensor)
    return out
