"""Triton kernels of graph attention (GATConv, GATv2Conv) on blocks and trees, with their gradients.

For one head, let x_j be the projected row of source j and own_i that of destination i. The kernels compute

    z_ij  = <att, x_j> + <att_own, own_i>        e_ij = leaky_relu(z_ij)               GATConv   (V2 false)
    z_ij  = x_j + own_i                          e_ij = <att, leaky_relu(z_ij)>        GATv2Conv (V2 true)
    a_ij  = softmax of e_ij over the in-edges of i
    out_i = sum over j of f_ij * a_ij * x_j      f_ij: the dropout factor, 0 or 1 / (1 - p)

PyG builds scores, weights and messages of all edges. These kernels compute the softmax online: they read
the source row of each edge once, and update a maximum, a sum of exponentials and a weighted sum of rows.
The forward pass stores neither messages nor attention weights. It saves its inputs, its output, and the
log-sum-exp S_i of each destination and head.

Gradients. Let g_i be the gradient of out_i. Backward recomputes the weights and applies the chain rule:

    a_ij             = exp(e_ij - S_i)
    delta_i          = <g_i, out_i>
    gradient of e_ij = a_ij * (f_ij * <x_j, g_i> - delta_i)

The gradient of x_j is a sum over the out-edges of j. It is computed without atomics, and so is bitwise
reproducible:
- Tree (a slot for every possible draw, see `tree`): every slot but a seed's has one parent. The program of
  the parent writes the gradient of the child.
- Block: a first kernel writes two numbers per edge and head. A second kernel sums over edges grouped by
  source.

Memory layout. C is the number of columns of a head. CP is C padded to a power of two, at least
MIN_TILE_COLUMNS.
    x           [num_src, HEADS * C]   row-major. The destinations are the first sources
    own_rows    [num_dst, HEADS * C]   x itself if destinations and sources share a projection
    att         [HEADS, C]
    att_own     [HEADS, C]             not read if V2
    out         [num_dst, HEADS * C]   dtype of x
    exact       [num_dst, HEADS * C]   the same rows in float32 if x has a half type, else `out` itself
    sums        [num_dst, HEADS]       S_i in float32 or float64
    sources     block: [num_edges]     each edge's source. Edges are sorted by destination
                tree:  [num_src]       the node at each slot, -1 if it is empty. An edge has the number of its
                                       source's slot
    starts      [num_dst]              the first edge of each destination
    stops       [num_dst]              block: the end of its edges. Tree: their number

Division of the work. A program owns one head of R destinations (of R sources in `gather_kernel`), and takes
E of their edges at a time: tiles of [R, E, CP] numbers. Program p owns head p % HEADS of tile p // HEADS.

Bad input. In a block an index out of range raises a flag (`runtime.report`), and its edge is left out. The
indices of a tree follow from its shape and are not checked. Half types are summed in float32. Nothing in
this file synchronises with the device.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.runtime import (
    EDGE_ERROR,
    GOLDEN,
    accumulator,
    error_flags,
    first_state,
    is_interpreted,
    key_on,
    launch_on,
    mix,
    report,
)
from hopline.ops.gpu.sampling import group_by_key
from hopline.ops.random import dropout_numbers
from hopline.ops.tree_slots import Slots


@triton.jit
def _leaky(z, SLOPE: tl.constexpr):
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def _load_rows(rows, row, is_row, head, HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[..., CP]: one head of rows[row], 0 where `is_row` is false. row: [R] or [R, E] row numbers."""
    column = tl.arange(0, CP)
    if len(row.shape) == 1:
        pointers = rows + (row.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
        values = tl.load(pointers, mask=is_row[:, None] & (column < C)[None, :], other=0).to(ACC)
    else:
        pointers = rows + (row.to(tl.int64) * (HEADS * C) + head * C)[:, :, None] + column[None, None, :]
        values = tl.load(pointers, mask=is_row[:, :, None] & (column < C)[None, None, :], other=0).to(ACC)
    return values


@triton.jit
def _load_att(att, head, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[CP]: the attention vector of one head, padded with zeros."""
    column = tl.arange(0, CP)
    return tl.load(att + head * C + column, mask=column < C, other=0).to(ACC)


@triton.jit
def _own_score(own, att_own, head, V2: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ACC: tl.constexpr):
    """[R]: <att_own, own_i>, the destination's part of z in GATConv. 0 in GATv2Conv, which adds own_i."""
    return tl.sum(own, 1) * 0 if V2 else tl.sum(own * _load_att(att_own, head, C, CP, ACC)[None, :], 1)


@triton.jit
def _pre_activation(x, own, own_score, att, V2: tl.constexpr):
    """z_ij, the input of LeakyReLU: [R, E, CP] in GATv2Conv, [R, E] in GATConv."""
    return x + own[:, None, :] if V2 else tl.sum(x * att[None, None, :], 2) + own_score[:, None]


@triton.jit
def _scores(z, att, V2: tl.constexpr, SLOPE: tl.constexpr):
    """[R, E]: e_ij, the input of the softmax."""
    return tl.sum(_leaky(z, SLOPE) * att[None, None, :], 2) if V2 else _leaky(z, SLOPE)


@triton.jit
def _dropout_factors(
    states, number, head, HEADS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr
):
    """[R, E]: the dropout factor of each edge and head, 0 or SCALE.

    THRESHOLD: the dropout probability times 65536, compared with the upper 16 bits of a draw.
    number: [R, E] the index of the edge among those of its destination, from 1 on. The added self-loop is
    number 0. The draw is keyed by (key, destination, number, head), so backward draws the same factors
    again.
    """
    if THRESHOLD > 0:
        raw = mix(states[:, None] + (number * HEADS + head + 1).to(tl.uint64) * GOLDEN)
        is_kept = (raw >> 48).to(tl.int32) >= THRESHOLD
        factors = tl.where(is_kept, tl.full((1, 1), SCALE, ACC), tl.full((1, 1), 0.0, ACC))
    else:
        factors = tl.full(number.shape, 1.0, ACC)
    return factors


@triton.jit
def _load_states(key, ids, dst, is_dst, THRESHOLD: tl.constexpr):
    """[R] uint64: the random state of each destination. Without dropout a placeholder that nobody reads."""
    if THRESHOLD > 0:
        states = first_state(tl.load(key), tl.load(ids + dst, mask=is_dst, other=0).to(tl.int64))
    else:
        states = dst.to(tl.uint64)
    return states


@triton.jit
def _load_edge_ranges(starts, stops, sources, dst, is_dst, flags, num_edges, TREE: tl.constexpr):
    """(first edge, number of edges, node, whether it exists), each [R], for the destinations dst.

    node: what `_load_sources` compares sources with to find self-loops. In a tree the node at slot dst, in
    a block dst itself. A destination of a block with a damaged indptr raises a flag and gets no edges.
    """
    start = tl.load(starts + dst, mask=is_dst, other=0).to(tl.int64)
    if TREE:
        count = tl.load(stops + dst, mask=is_dst, other=0).to(tl.int32)
        node = tl.load(sources + dst, mask=is_dst, other=-1).to(tl.int64)
    else:
        stop = tl.load(stops + dst, mask=is_dst, other=0)
        is_wrong = (start < 0) | (stop < start) | (stop > num_edges)
        report(flags, EDGE_ERROR, is_wrong)
        count = tl.where(is_wrong, 0, stop - start).to(tl.int32)
        node = tl.where(is_dst, dst, -1).to(tl.int64)
    return start, count, node, node >= 0


@triton.jit
def _load_sources(sources, edge, is_edge, node, flags, num_src, LOOPS: tl.constexpr, TREE: tl.constexpr):
    """(row of the source in x, whether the edge is used), each [R, E].

    Edges are not used if their slot is empty or their source is out of range, which raises a flag. With
    LOOPS, edges from a node to itself are not used either: one self-loop per destination replaces them, as
    in PyG.
    """
    source_ids = tl.load(sources + edge, mask=is_edge, other=0).to(tl.int64)
    if TREE:
        src = edge
        is_used = is_edge & (source_ids >= 0)
    else:
        src = source_ids
        is_wrong = is_edge & ((src < 0) | (src >= num_src))
        report(flags, EDGE_ERROR, is_wrong)
        is_used = is_edge & (is_wrong == 0)
    if LOOPS:
        is_used = is_used & (source_ids != node[:, None])
    return src, is_used


# ---- forward


@triton.jit(do_not_specialize=["num_dst", "num_src", "num_edges"])
def attend_kernel(
    x, own_rows, att, att_own, starts, stops, sources, ids, key, out, exact, sums, flags, num_dst, num_src, num_edges,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, V2: tl.constexpr, LOOPS: tl.constexpr,
    TREE: tl.constexpr, SLOPE: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The rows of `out` and the log-sum-exp of R destinations, for one head.

    The softmax is online. Over the edges seen so far, `maximum` is the largest e_ij, `exp_sum` the sum of
    exp(e_ij - maximum), and `total` the sum of f_ij * exp(e_ij - maximum) * x_j. When a step raises
    `maximum`, both sums are multiplied by exp(old maximum - new maximum). A destination without edges gets
    0.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    dst = tile * R + tl.arange(0, R)
    is_dst = dst < num_dst
    start, count, node, has_node = _load_edge_ranges(starts, stops, sources, dst, is_dst, flags, num_edges, TREE)
    own = _load_rows(own_rows, dst, has_node, head, HEADS, C, CP, ACC)
    head_att = _load_att(att, head, C, CP, ACC)
    own_score = _own_score(own, att_own, head, V2, C, CP, ACC)
    states = _load_states(key, ids, dst, has_node, THRESHOLD)

    maximum = tl.full((R,), float("-inf"), ACC)
    exp_sum = tl.zeros((R,), ACC)
    total = tl.zeros((R, CP), ACC)
    if LOOPS:
        # The self-loop comes first: its score is the first maximum, so its exponential is exp(0) = 1. It is
        # a tile of one edge per destination: sums over axis 1 only drop that axis.
        loop_rows = _load_rows(x, dst, has_node, head, HEADS, C, CP, ACC)
        loop_z = _pre_activation(loop_rows[:, None, :], own, own_score, head_att, V2)
        maximum = tl.where(has_node, tl.sum(_scores(loop_z, head_att, V2, SLOPE), 1), maximum)
        exp_sum = has_node.to(ACC)
        total = loop_rows * _dropout_factors(states, tl.zeros((R, 1), tl.int32), head, HEADS, THRESHOLD, SCALE, ACC)

    for step in range(0, tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        is_edge = number[None, :] < count[:, None]
        src, is_used = _load_sources(sources, start[:, None] + number, is_edge, node, flags, num_src, LOOPS, TREE)
        src_rows = _load_rows(x, src, is_used, head, HEADS, C, CP, ACC)
        z = _pre_activation(src_rows, own, own_score, head_att, V2)
        scores = tl.where(is_used, _scores(z, head_att, V2, SLOPE), float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no edge yet: avoids -inf - -inf
        shrink = tl.exp(maximum - base)
        powers = tl.exp(scores - base[:, None])
        edge_number = tl.broadcast_to(number[None, :] + 1, (R, E))
        factors = _dropout_factors(states, edge_number, head, HEADS, THRESHOLD, SCALE, ACC)
        exp_sum = exp_sum * shrink + tl.sum(powers, 1)
        total = total * shrink[:, None] + tl.sum(src_rows * (powers * factors)[:, :, None], 1)
        maximum = new_maximum

    has_edge = exp_sum > 0
    total = total / tl.where(has_edge, exp_sum, 1.0)[:, None]
    column = tl.arange(0, CP)
    offset = (dst.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = is_dst[:, None] & (column < C)[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)
    if out.dtype.element_ty != ACC:
        tl.store(exact + offset, total, mask=mask)
    log_sum = tl.where(has_edge, maximum, 0.0) + tl.log(tl.where(has_edge, exp_sum, 1.0))
    tl.store(sums + dst.to(tl.int64) * HEADS + head, log_sum, mask=is_dst)


# ---- backward


@triton.jit
def _edge_gradients(
    x, is_edge, own, own_score, att, grad, log_sum, delta, factors, V2: tl.constexpr, SLOPE: tl.constexpr
):  # fmt: skip
    """Gradients through [R, E] edges, by the formulas at the head of this file. Returns a tuple of five:

    weight  [R, E]      a_ij * f_ij, the factor of g_i in the gradient of x_j
    of_z    [R, E]      GATConv: the gradient of z_ij. GATv2Conv: that of e_ij
    of_x    [R, E, CP]  the edge's part of the gradient of x_j
    of_own  [R, CP]     GATv2Conv: the gradient of own_i. GATConv: [R, 1], that of <att_own, own_i>
    of_att  [R, CP]     the part of these edges in the gradient of att

    Edges that are masked by `is_edge` have a_ij = 0 and add nothing.
    """
    z = _pre_activation(x, own, own_score, att, V2)
    a = tl.exp(tl.where(is_edge, _scores(z, att, V2, SLOPE) - log_sum[:, None], float("-inf")))
    dots = tl.sum(x * grad[:, None, :], 2)
    of_score = a * (factors * dots - delta[:, None])
    weight = a * factors
    if V2:
        of_z = of_score
        through_z = of_score[:, :, None] * tl.where(z > 0, att[None, None, :], att[None, None, :] * SLOPE)
        of_x = weight[:, :, None] * grad[:, None, :] + through_z
        of_own = tl.sum(through_z, 1)
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

    Tree: writes to grad_x the gradients of all children of its destinations. Block: writes, for
    `gather_kernel`, `weight` and `of_z` of each edge to `weights` and `of_scores`, both [num_edges, HEADS].

    In both layouts, the row of each destination in grad_x gets the gradient through its self-loop. If
    SHARED, x_i is also own_i, and the gradient of own_i is added to that row. Otherwise it goes to
    grad_own.

    ADD: the destinations are the children of the hop before, whose launch has written their rows of grad_x.
    This launch adds to them. Launches run one after the other, and in each one a single program writes a
    slot's head, so no atomics are needed.

    att_parts, own_parts: [num_tiles, HEADS, C], the gradients of att and att_own from each tile. `_Attend`
    adds up the tiles.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    is_dst = tile * R + tl.arange(0, R) < num
    dst = first_dst + tile * R + tl.arange(0, R)
    start, count, node, has_node = _load_edge_ranges(starts, stops, sources, dst, is_dst, flags, num_edges, TREE)
    column = tl.arange(0, CP)
    own = _load_rows(own_rows, dst, has_node, head, HEADS, C, CP, ACC)
    head_att = _load_att(att, head, C, CP, ACC)
    own_score = _own_score(own, att_own, head, V2, C, CP, ACC)
    states = _load_states(key, ids, dst, has_node, THRESHOLD)
    gradient = _load_rows(grad, dst, has_node, head, HEADS, C, CP, ACC)
    delta = tl.sum(gradient * _load_rows(exact, dst, has_node, head, HEADS, C, CP, ACC), 1)
    log_sum = tl.load(sums + dst.to(tl.int64) * HEADS + head, mask=has_node, other=0)

    of_row = tl.zeros((R, CP), ACC)
    of_own = tl.zeros((R, CP if V2 else 1), ACC)
    of_att = tl.zeros((R, CP), ACC)
    if LOOPS:
        loop_rows = _load_rows(x, dst, has_node, head, HEADS, C, CP, ACC)[:, None, :]
        loop_factors = _dropout_factors(states, tl.zeros((R, 1), tl.int32), head, HEADS, THRESHOLD, SCALE, ACC)
        _, _, of_loop, added_own, of_att = _edge_gradients(
            loop_rows, has_node[:, None], own, own_score, head_att, gradient, log_sum, delta, loop_factors, V2, SLOPE
        )
        of_row = tl.sum(of_loop, 1)
        of_own += added_own

    # In a tree, all FANOUT slots: grad_x is not initialised, and empty slots must get zeros.
    for step in range(0, FANOUT if TREE else tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        edge = start[:, None] + number
        is_edge = number[None, :] < count[:, None]
        src, is_used = _load_sources(sources, edge, is_edge, node, flags, num_src, LOOPS, TREE)
        src_rows = _load_rows(x, src, is_used, head, HEADS, C, CP, ACC)
        edge_number = tl.broadcast_to(number[None, :] + 1, (R, E))
        factors = _dropout_factors(states, edge_number, head, HEADS, THRESHOLD, SCALE, ACC)
        weight, of_z, of_rows, added_own, added_att = _edge_gradients(
            src_rows, is_used, own, own_score, head_att, gradient, log_sum, delta, factors, V2, SLOPE
        )
        of_own += added_own
        of_att += added_att

        if TREE:
            pointers = grad_x + (edge * (HEADS * C) + head * C)[:, :, None] + column[None, None, :]
            slot_mask = (is_dst[:, None] & (number < FANOUT)[None, :])[:, :, None] & (column < C)[None, None, :]
            tl.store(pointers, of_rows.to(grad_x.dtype.element_ty), mask=slot_mask)
        else:
            tl.store(weights + edge * HEADS + head, weight, mask=is_edge)
            tl.store(of_scores + edge * HEADS + head, of_z, mask=is_edge)

    part_offset = (first_tile + tile).to(tl.int64) * (HEADS * C) + head * C + column
    tl.store(att_parts + part_offset, tl.sum(of_att, 0), mask=column < C)
    if not V2:
        # So far `of_own` is the gradient of the number <att_own, own_i>. Times att_own it is that of own_i.
        tl.store(own_parts + part_offset, tl.sum(of_own * own, 0), mask=column < C)
        of_own = of_own * _load_att(att_own, head, C, CP, ACC)[None, :]

    offset = (dst.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = is_dst[:, None] & (column < C)[None, :]
    if SHARED:
        of_row += of_own
    else:
        tl.store(grad_own + offset, of_own.to(grad_own.dtype.element_ty), mask=mask)
    if ADD:
        of_row += tl.load(grad_x + offset, mask=mask, other=0).to(ACC)
    tl.store(grad_x + offset, of_row.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def gather_kernel(
    x, own_rows, att, src_indptr, order, dst_idx, weights, of_scores, grad, grad_x, num_src, num_dst,
    HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, V2: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """grad_x[s] += the gradients of all out-edges of s, for one head of R sources of a block.

    The edges of source s are order[src_indptr[s] : src_indptr[s + 1]]. Each adds weight * g_i and, through
    its score, of_z * att (GATConv) or of_z * att * leaky_relu'(z) (GATv2Conv). `backward_kernel` has
    written the rows of the destinations, which are the first sources. Rows of other sources start from 0.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    src = tile * R + tl.arange(0, R)
    is_src = src < num_src
    start = tl.load(src_indptr + src, mask=is_src, other=0)
    count = (tl.load(src_indptr + src + 1, mask=is_src, other=0) - start).to(tl.int32)
    column = tl.arange(0, CP)
    head_att = _load_att(att, head, C, CP, ACC)
    src_rows = _load_rows(x, src, is_src, head, HEADS, C, CP, ACC) if V2 else tl.zeros((R, CP), ACC)

    total = tl.zeros((R, CP), ACC)
    # In GATConv every edge adds of_z * att. The loop sums of_z, and att is multiplied once after it.
    of_score = tl.zeros((R,), ACC)
    for step in range(0, tl.max(count, 0), E):
        number = step + tl.arange(0, E)
        is_edge = number[None, :] < count[:, None]
        edge = tl.load(order + start[:, None] + number, mask=is_edge, other=0)
        dst = tl.load(dst_idx + edge, mask=is_edge, other=0)
        weight = tl.load(weights + edge * HEADS + head, mask=is_edge, other=0)
        of_z = tl.load(of_scores + edge * HEADS + head, mask=is_edge, other=0)
        gradients = weight[:, :, None] * _load_rows(grad, dst, is_edge, head, HEADS, C, CP, ACC)
        if V2:
            z = src_rows[:, None, :] + _load_rows(own_rows, dst, is_edge, head, HEADS, C, CP, ACC)
            gradients += of_z[:, :, None] * tl.where(z > 0, head_att[None, None, :], head_att[None, None, :] * SLOPE)
        else:
            of_score += tl.sum(of_z, 1)
        total += tl.sum(gradients, 1)
    if not V2:
        total += of_score[:, None] * head_att[None, :]

    pointers = grad_x + (src.to(tl.int64) * (HEADS * C) + head * C)[:, None] + column[None, :]
    mask = is_src[:, None] & (column < C)[None, :]
    total += tl.load(pointers, mask=mask & (src < num_dst)[:, None], other=0).to(ACC)
    tl.store(pointers, total.to(grad_x.dtype.element_ty), mask=mask)


TILE = 2048
"""Numbers per step of a program: destinations x edges x columns of one head."""
EDGES_AT_ONCE = 8
"""Edges per destination and step in a tree, and the least in a block."""
MAX_EDGES_AT_ONCE = 32
"""Most edges per destination and step, for blocks with a large mean degree."""
# The next two numbers are chosen so that no thread holds two rows of a tile. With 1 column and 256 rows,
# four warps of an H200 summed some rows wrongly under Triton 3.6. With 128 rows, or with eight warps, they
# did not.
MIN_TILE_COLUMNS = 8
MAX_TILE_ROWS = 32


@dataclass(frozen=True, eq=False)
class AttentionEdges:
    """The edges over which destinations attend to sources, of a block or of a tree.

    Destinations are the first sources. In a block, edges are sorted by destination. In a tree, an edge is
    numbered by the slot of its source. Tensors of a tree may be longer than stated: kernels read only their
    first elements.
    """

    num_src: int
    num_dst: int
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


def tree_edges(slots: Slots, hop: int, nodes: Tensor, counts: Tensor) -> AttentionEdges:
    """The edges of a tree from the slots of hops 0 .. hop + 1 to those of hops 0 .. hop.

    nodes: the node at each slot, -1 if it is empty. counts: the number of children drawn for each slot.
    """
    return AttentionEdges(
        num_src=slots.up_to(hop + 1),
        num_dst=slots.up_to(hop),
        starts=slots.first_children(nodes.device),
        stops=counts,
        ids=slots.ids(nodes.device),
        sources=nodes,
        slots=slots,
        hop=hop,
    )


def block_edges(indptr: Tensor, src_idx: Tensor, num_src: int, ids: Tensor) -> AttentionEdges:
    """The edges of a block in CSC form. ids: what dropout is keyed by, one per destination at least."""
    return AttentionEdges(
        num_src=num_src, num_dst=indptr.numel() - 1, starts=indptr[:-1], stops=indptr[1:], ids=ids, sources=src_idx
    )


@dataclass(frozen=True)
class _Plan:
    """The options of one attention layer, which kernels get as compile-time constants."""

    heads: int
    v2: bool
    """Whether scores are those of GATv2Conv, else of GATConv."""
    slope: float
    """Slope of LeakyReLU for negative numbers."""
    loops: bool
    """Whether one self-loop per destination replaces the edges from a node to itself."""
    p: float
    """Dropout probability of the attention weights."""

    def constants(self, x: Tensor, with_draws: bool = True) -> dict[str, Any]:
        """The compile-time constants of a launch by name. with_draws: add those of dropout and loops."""
        columns = x.size(1) // self.heads
        constants = {
            "HEADS": self.heads,
            "C": columns,
            "CP": max(MIN_TILE_COLUMNS, triton.next_power_of_2(columns)),
            "V2": self.v2,
            "SLOPE": self.slope,
            "ACC": accumulator(x.dtype)[1],
        }
        if with_draws:
            # Dropout compares 16 bits of a draw: 65536 possible values.
            threshold, scale = dropout_numbers(self.p)
            constants |= {"LOOPS": self.loops, "THRESHOLD": threshold, "SCALE": scale}
        return constants


def _tile(columns: int, edges: int) -> dict[str, int]:
    """R, E and num_warps of a launch: rows and edges of a tile, and the warps that share it.

    Wide heads take many registers, so eight warps share a tile of 256 columns or more.
    """
    tile = TILE
    max_rows = MAX_TILE_ROWS
    if is_interpreted():  # the interpreter's time depends on the number of steps, not on their size
        tile = 64 * TILE
        max_rows = 512
    edges = min(edges, max(1, tile // columns))
    rows = max(1, min(max_rows, tile // (columns * edges)))
    return {"R": rows, "E": edges, "num_warps": 4 if columns < 256 else 8}


def _edges_per_step(edges: AttentionEdges, num_rows: int) -> int:
    """E for a kernel that owns `num_rows` rows: in a block about their mean degree, within limits."""
    if edges.slots is not None:
        return EDGES_AT_ONCE
    mean = triton.next_power_of_2(triton.cdiv(edges.sources.numel(), num_rows))
    return min(max(mean, EDGES_AT_ONCE), MAX_EDGES_AT_ONCE)


class _Attend(torch.autograd.Function):
    """`attend` after its checks. Backward is not differentiable again.

    If `own` is None, the first rows of x are the own rows. If `att_own` is None, att takes its place in the
    launch: a kernel needs some address, and with V2 it never reads this one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, key: Tensor,
        edges: AttentionEdges, plan: _Plan,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        own = None if own is None else own.contiguous()
        out = torch.empty(edges.num_dst, x.size(1), dtype=x.dtype, device=x.device)
        sum_dtype = accumulator(x.dtype)[0]
        # Backward sums differences from <g_i, out_i> that nearly cancel. An output rounded to half
        # precision would show in these sums, so half types keep a float32 copy of it.
        exact = out if x.dtype == sum_dtype else torch.empty_like(out, dtype=sum_dtype)
        sums = torch.empty(edges.num_dst, plan.heads, dtype=sum_dtype, device=x.device)
        constants = plan.constants(x)
        tile = _tile(constants["CP"], _edges_per_step(edges, edges.num_dst))
        own_rows = x if own is None else own
        att_own_or_any = att if att_own is None else att_own
        with launch_on(x.device):
            attend_kernel[(triton.cdiv(edges.num_dst, tile["R"]) * plan.heads,)](
                x, own_rows, att, att_own_or_any,
                edges.starts, edges.stops, edges.sources, edges.ids, key, out, exact, sums, error_flags(x.device),
                edges.num_dst, edges.num_src, edges.sources.numel(), TREE=edges.slots is not None, **constants, **tile,
            )  # fmt: skip
        ctx.edges = edges
        ctx.plan = plan
        ctx.save_for_backward(x, own, att, att_own, key, exact, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, own, att, att_own, key, exact, sums = ctx.saved_tensors
        edges = ctx.edges
        plan = ctx.plan
        grad = grad.contiguous()
        sum_dtype = accumulator(x.dtype)[0]
        grad_x = torch.empty_like(x)
        grad_own = None if own is None else torch.empty_like(own)
        own_rows = x if own is None else own
        is_tree = edges.slots is not None
        constants = plan.constants(x)
        # What `_gather` needs of a block's edges: `weights` and `of_scores`.
        per_edge = torch.empty(2, 0 if is_tree else edges.sources.numel(), plan.heads, dtype=sum_dtype, device=x.device)
        launches = _launches(edges, constants["CP"])
        num_tiles = sum(launch.num_tiles for launch in launches)
        # The gradients of att and, in GATConv, of att_own, which GATv2Conv does not have.
        parts = torch.empty(1 if plan.v2 else 2, num_tiles, *att.shape, dtype=sum_dtype, device=x.device)

        # A kernel needs an address for every argument, even for a missing tensor, which it does not touch.
        att_own_or_any = att if att_own is None else att_own
        grad_own_or_any = grad_x if grad_own is None else grad_own
        first_tile = 0
        with launch_on(x.device):
            for launch in launches:
                # ADD: every launch but the first, which starts at destination 0.
                backward_kernel[(launch.num_tiles * plan.heads,)](
                    x, own_rows, att, att_own_or_any, edges.starts, edges.stops, edges.sources,
                    edges.ids, key, exact, sums, grad, grad_x, grad_own_or_any,
                    per_edge[0], per_edge[1], parts[0], parts[-1], error_flags(x.device),
                    launch.first_dst, launch.num_dst, edges.num_src, edges.sources.numel(), first_tile,
                    TREE=is_tree, SHARED=own is None, ADD=launch.first_dst > 0, FANOUT=launch.fanout,
                    **constants, **launch.tile,
                )  # fmt: skip
                first_tile += launch.num_tiles
        if not is_tree:
            _gather(x, own_rows, att, edges, plan, per_edge, grad, grad_x)

        of_att = parts.sum(1)
        of_att_own = None if att_own is None else of_att[1].to(att_own.dtype)
        return grad_x, grad_own, of_att[0].to(att.dtype), of_att_own, None, None, None


class _Launch(NamedTuple):
    """One launch of `backward_kernel`."""

    first_dst: int
    num_dst: int
    fanout: int
    """Slots of each destination's children. 0 in a block."""
    tile: dict[str, int]
    """R, E and num_warps, from `_tile`."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles of R destinations. Each has a program per head."""
        return triton.cdiv(self.num_dst, self.tile["R"])


def _launches(edges: AttentionEdges, columns: int) -> list[_Launch]:
    """The launches of `backward_kernel`, in order.

    A block takes one launch. A tree takes one per hop, from the seeds on: a hop adds to gradients that the
    hop before has written.
    """
    if edges.slots is None:
        return [_Launch(0, edges.num_dst, 0, _tile(columns, _edges_per_step(edges, edges.num_dst)))]
    offsets = edges.slots.offsets
    launches = []
    for hop, fanout in enumerate(edges.slots.fanouts[: edges.hop + 1]):
        tile = _tile(columns, min(EDGES_AT_ONCE, triton.next_power_of_2(fanout)))
        launches.append(_Launch(offsets[hop], offsets[hop + 1] - offsets[hop], fanout, tile))
    return launches


def _gather(
    x: Tensor,
    own: Tensor,
    att: Tensor,
    edges: AttentionEdges,
    plan: _Plan,
    per_edge: Tensor,
    grad: Tensor,
    grad_x: Tensor,
) -> None:
    """Launch `gather_kernel`: add all edges' gradients to grad_x, which has those of destinations already."""
    src_indptr, order = group_by_key(edges.sources, edges.num_src)
    # `repeat_interleave` would synchronise with the device to learn its output's size. This search does
    # not, and the clamp keeps its result in range for any indptr.
    positions = torch.arange(edges.sources.numel(), device=x.device)
    dst_idx = torch.searchsorted(edges.stops, positions, right=True, out_int32=True).clamp(max=edges.num_dst - 1)
    constants = plan.constants(x, with_draws=False)
    tile = _tile(constants["CP"], _edges_per_step(edges, edges.num_src))
    with launch_on(x.device):
        gather_kernel[(triton.cdiv(edges.num_src, tile["R"]) * plan.heads,)](
            x, own, att, src_indptr, order, dst_idx, per_edge[0], per_edge[1], grad, grad_x,
            edges.num_src, edges.num_dst, **constants, **tile,
        )  # fmt: skip


def attend(
    x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, edges: AttentionEdges,
    *, slope: float = 0.2, loops: bool = True, p: float = 0.0, key: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[num_dst, heads * columns]: the sum of each destination's sources, weighted by attention.

    Differentiable.

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
    plan = _Plan(heads=att.size(0), v2=att_own is None, slope=slope, loops=loops, p=p)
    # Without dropout no key is read, and any tensor will do.
    device_key = edges.ids if not p or key is None else key_on(x.device, key)
    assert not p or key is not None, "dropout needs a key"
    if att_own is not None:
        att_own = att_own.contiguous()
    out = _Attend.apply(x, own, att.contiguous(), att_own, device_key, edges, plan)
    assert isinstance(out, Tensor)
    return out
