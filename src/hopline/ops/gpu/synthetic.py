"""Triton kernels that make a synthetic graph in device memory: ranks of nodes, sources of edges, features.

`ops.cpu.synthetic` is the definition, and both files make the same graph, bit for bit. Kernels use only
integers and IEEE operations, and are compiled without fusing a product with a sum. Degrees have no kernel
here: they come from float64 powers, whose last bit may differ between CPU and GPU. One edge more at a node
would shift all later edges.

    node  --rank-->  rank   a keyed permutation of the nodes; low ranks are popular
                            rank % num_classes is the class
    source of an edge       with probability `homophily` a node of the destination's class, else any node
    features                mean of the class + noise

The permutation is a Feistel network on the numbers below 4**half, of which there are at least num_nodes. A
result that is not a node is permuted again until it is one, which is still a bijection (cycle walking). It
is inverted the same way, so a source is drawn as a rank and turned into a node without a list of the
members of a class.

Memory layout
    indptr   [num_nodes + 1] int64    CSC
    ranks    [num_nodes] int64
    sources  [num_edges]              int32 or int64
    labels   [num_nodes] int64, means [num_classes, num_features] float32, features [num_nodes, num_features]

Each program makes BLOCK nodes, BLOCK edges, or ROWS rows of features. There are no gradients. Input is not
checked.
"""

# Triton compiles the bodies of kernels, and a launch takes options among the arguments; its type stubs know
# neither.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops.gpu.runtime import GOLDEN, first_state, is_interpreted, key_on, mix

_ROUNDS = tl.constexpr(4)
"""Rounds of the Feistel network, as in `ops.cpu.synthetic`."""
_LAST_ROUND = tl.constexpr(3 * GOLDEN.value % 2**64)
"""Distance of the last round's key from the first one's: (_ROUNDS - 1) * GOLDEN."""
_UNIT = tl.constexpr(2.0**-53)
"""Scale of a draw of 53 bits to 0 .. 1."""
_SUM_MEAN = tl.constexpr(131070.0)
"""Mean of the sum of four uniform 16-bit numbers: 2 * 65535."""
_SUM_DEVIATION = 37837.2272
"""Standard deviation of the sum of four uniform 16-bit numbers."""


@triton.jit
def _shuffle(value, key, half, mask):
    """One pass of a Feistel network: a bijection of the numbers below 4**half, uint64. mask: 2**half - 1."""
    left = value >> half
    right = value & mask
    for _ in tl.static_range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ key) & mask)
        key += GOLDEN
    return (left << half) | right


@triton.jit
def _unshuffle(value, key, half, mask):
    """The inverse of `_shuffle`: its rounds in reverse order."""
    left = value >> half
    right = value & mask
    key += _LAST_ROUND
    for _ in tl.static_range(_ROUNDS):
        left, right = right ^ (mix(left ^ key) & mask), left
        key -= GOLDEN
    return (left << half) | right


@triton.jit
def _walk(value, key, half, num_nodes, INVERSE: tl.constexpr):
    """The ranks of nodes, or with INVERSE the nodes at ranks: uint64.

    All values must be below num_nodes, else the loop may never end. Lanes that are done keep their value
    while the others of the program continue.
    """
    half = half.to(tl.uint64)
    num_nodes = num_nodes.to(tl.uint64)
    mask = (tl.full((), 1, tl.uint64) << half) - 1
    is_outside = value < num_nodes  # all true: every value takes the first pass
    while tl.max(is_outside.to(tl.int32), 0) > 0:
        next_value = _unshuffle(value, key, half, mask) if INVERSE else _shuffle(value, key, half, mask)
        value = tl.where(is_outside, next_value, value)
        is_outside = value >= num_nodes
    return value


@triton.jit(do_not_specialize=["first", "count", "num_nodes", "half"])
def _ranks_kernel(key_ptr, out_ptr, first, count, num_nodes, half, BLOCK: tl.constexpr):
    """out[i] = the rank of node first + i. Lanes beyond the end walk from node 0, since a walk needs a valid node."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_node = i < count
    node = tl.where(is_node, first + i, 0).to(tl.uint64)
    rank = _walk(node, tl.load(key_ptr).to(tl.uint64), half, num_nodes, False)
    tl.store(out_ptr + i, rank.to(tl.int64), mask=is_node)


@triton.jit
def _find_destinations(edge, indptr_ptr, num_nodes, num_halvings):
    """The destination of each edge, by bisection. Invariant: indptr[low] <= edge < indptr[high]."""
    low = tl.zeros_like(edge)
    high = low + num_nodes
    for _ in range(num_halvings):
        middle = (low + high) // 2
        has_begun = tl.load(indptr_ptr + middle) <= edge
        low = tl.where(has_begun, middle, low)
        high = tl.where(has_begun, high, middle)
    return low


@triton.jit(do_not_specialize=["num_nodes", "num_edges", "num_classes", "half", "num_heads"])
def _sources_kernel(
    indptr_ptr, ranks_ptr, rank_key_ptr, draw_key_ptr, out_ptr,
    num_nodes, num_edges, num_classes, half, num_heads, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[e] = the source of edge e: a rank by two draws of its destination's sequence, turned into a node.

    The first draw is a coin of 53 bits. Below num_heads, the source is a rank of the destination's class,
    else any rank. The second draw, u in 0 .. 1, says which one: its square prefers low ranks. If this is the
    destination's rank, the next rank of the class takes its place, or the one before if there is no next.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_edge = i < num_edges
    edge = tl.where(is_edge, i, 0)
    node = _find_destinations(edge, indptr_ptr, num_nodes, 2 * half)  # num_nodes is at most 4**half
    own_rank = tl.load(ranks_ptr + node)
    own_class = own_rank % num_classes
    num_members = (num_nodes - own_class + num_classes - 1) // num_classes

    state = first_state(tl.load(draw_key_ptr), node)
    draw_number = 2 * (edge - tl.load(indptr_ptr + node)).to(tl.uint64)
    coin = (mix(state + (draw_number + 1) * GOLDEN) >> 11).to(tl.int64)
    u = (mix(state + (draw_number + 2) * GOLDEN) >> 11).to(tl.int64).to(tl.float64) * _UNIT
    is_same_class = coin < num_heads
    num_choices = tl.where(is_same_class, num_members, num_nodes)
    choice = (num_choices.to(tl.float64) * u * u).to(tl.int64)
    rank = tl.where(is_same_class, own_class + num_classes * choice, choice)
    other_rank = tl.where(rank + num_classes < num_nodes, rank + num_classes, rank - num_classes)
    rank = tl.where(rank == own_rank, other_rank, rank)

    source = _walk(rank.to(tl.uint64), tl.load(rank_key_ptr).to(tl.uint64), half, num_nodes, True)
    tl.store(out_ptr + i, source.to(out_ptr.dtype.element_ty), mask=is_edge)


@triton.jit(do_not_specialize=["num_rows", "num_features"])
def _features_kernel(
    labels_ptr, means_ptr, scale_ptr, key_ptr, out_ptr, num_rows, num_features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[node, column] = means[label, column] + scale * (sum of four 16-bit numbers of one draw - its mean).

    The sum of four uniform numbers approximates a normal one with integers alone.
    """
    node = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (node < num_rows)[:, None] & (column < num_features)[None, :]
    label = tl.load(labels_ptr + node, mask=node < num_rows, other=0)
    class_mean = tl.load(means_ptr + label[:, None] * num_features + column[None, :], mask=mask, other=0.0)

    state = first_state(tl.load(key_ptr), node)
    bits = mix(state[:, None] + ((column + 1).to(tl.uint64) * GOLDEN)[None, :])
    total = ((bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + (bits >> 48)).to(tl.float32)
    rows = class_mean + tl.load(scale_ptr) * (total - _SUM_MEAN)
    tl.store(out_ptr + node[:, None] * num_features + column[None, :], rows.to(out_ptr.dtype.element_ty), mask=mask)


_WALKS = 128
"""Nodes or edges per program. Few, since a walk lasts until the slowest lane has ended."""
_WARPS = 1
"""Warps of a program that walks. One, since a walk lasts until the slowest lane has ended."""
_CELLS = 1024
"""Features (rows x columns) per program."""


def _block_size(size: int, block: int) -> int:
    """Numbers per program: `block` on a GPU.

    In the interpreter, where every program costs the same, all `size` numbers, up to 65536.
    """
    return min(triton.next_power_of_2(size), 1 << 16) if is_interpreted() else block


def ranks(first: int, count: int, key: int, half: int, num_nodes: int, device: torch.device) -> Tensor:
    """[count] int64: the ranks of nodes first .. first + count - 1. half: num_nodes is at most 4**half."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    block = _block_size(count, _WALKS)
    grid = (triton.cdiv(count, block),)
    _ranks_kernel[grid](key_on(device, key), out, first, count, num_nodes, half, BLOCK=block, num_warps=_WARPS)
    return out


def sources(
    indptr: Tensor,
    ranks: Tensor,
    rank_key: int,
    draw_key: int,
    half: int,
    num_classes: int,
    homophily: float,
    dtype: torch.dtype,
) -> Tensor:
    """[num_edges]: the source of every in-edge. Synchronises with the device, to read the number of edges.

    indptr: [num_nodes + 1] int64 and ranks: [num_nodes] int64, both of all nodes of the graph. homophily: the
    probability that a source is drawn from the class of its destination. dtype: that of the result.
    """
    num_nodes = ranks.numel()
    num_edges = int(indptr[-1])
    device = indptr.device
    out = torch.empty(num_edges, dtype=dtype, device=device)
    if num_edges == 0:
        return out
    # Triton would round a float argument to float32. A coin is a multiple of 2**-53, so `coin < homophily`
    # equals an integer comparison with homophily * 2**53, rounded up.
    num_heads = math.ceil(homophily * 2**53)
    block = _block_size(num_edges, _WALKS)
    _sources_kernel[(triton.cdiv(num_edges, block),)](
        indptr, ranks, key_on(device, rank_key), key_on(device, draw_key), out,
        num_nodes, num_edges, num_classes, half, num_heads,
        BLOCK=block, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def features(labels: Tensor, means: Tensor, key: int, dtype: torch.dtype) -> Tensor:
    """[num_nodes, num_features] of `dtype`: the mean of each node's class plus noise of standard deviation 1.

    labels: [num_nodes] int64. means: [num_classes, num_features] float32.
    """
    num_nodes = labels.numel()
    num_features = means.size(1)
    out = torch.empty(num_nodes, num_features, dtype=dtype, device=labels.device)
    scale = torch.full((1,), 1 / _SUM_DEVIATION, dtype=torch.float32, device=labels.device)
    columns = triton.next_power_of_2(num_features)
    block_rows = max(1, _block_size(num_nodes * columns, _CELLS) // columns)
    _features_kernel[(triton.cdiv(num_nodes, block_rows),)](
        labels, means, scale, key_on(labels.device, key), out, num_nodes, num_features,
        ROWS=block_rows, COLUMNS=columns, enable_fp_fusion=False,
    )  # fmt: skip
    return out
