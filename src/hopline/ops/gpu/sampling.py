"""Triton kernels that sample neighbours, gather rows and map global ids to local ids.

`hopline.ops.reference` defines every function of this file in plain torch. Edges are grouped by torch's own
sort.

Memory layout
    indptr    [num_nodes + 1] int64  CSC: node v has the in-edges indptr[v] .. indptr[v + 1] - 1
    indices   [num_edges]            int32 or int64, the source node of each edge
    rows      [num_rows, ...]        any dtype, row-major

These arrays are in device memory, or in pinned host memory, which kernels read directly (zero-copy). Ids
and results are always in device memory.

Sampling takes three passes, because the size of the result depends on the degrees:

    _count_kernel            cumsum, one read by the host       _distinct_kernel or _replace_kernel
    degrees of the nodes ->  offsets and number of edges   ->   draws, and writes to its own offsets

The host synchronises once per call, in the second pass, since it must allocate the result. One lane of a
program draws for one node: O(fanout) registers and O(fanout ** 2) comparisons, whatever the degree.

Draws by weight or by source (`_smallest_kernel`) give a program to each node, which looks at all of its in-edges.

`DeviceIdMap` maps global ids to local ids without a hash table. One int64 *stamp* per node of the graph holds

    bits 32 and up   the step in which the node was last seen
    bits 0 to 30     LATEST - arrival, where a smaller arrival says that the node came earlier in that step

`atomic_max` keeps the newest step, and within it the first occurrence. Stamps of older steps lose against
any new one, so the map is never cleared. The local ids follow the order of the input, whatever the order in
which threads run.

Bad input. A kernel never follows an id out of range. It raises an error flag in device memory (see
`runtime`), and the next call that synchronises raises the Python error.

The kernels of this file have no gradients. Where one is needed, `gather_rows` falls back to torch.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.gpu.runtime import (
    GOLDEN,
    GROUP_ERROR,
    INDEX_ERROR,
    NODE_ERROR,
    ROW_ERROR,
    WEIGHT_ERROR,
    bounded,
    check_readable,
    draw_distinct,
    error_flags,
    first_state,
    is_readable,
    key_on,
    launch_on,
    mix,
    read_with_errors,
    report,
)
from hopline.ops.reference import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    Neighbors,
    SortedIdMap,
    WeightedNeighbors,
    all_included,
    inclusion_of,
)

NODES_AT_ONCE = 128
"""Nodes per program of the sampling kernels: one per thread, with Triton's default of four warps."""

UNROLLED_FANOUT = 25
"""Largest fan-out whose shuffle is unrolled, with one register per swap.

Larger fan-outs use `_distinct_many_kernel`, which has a loop and keeps the swaps of a node in a row of a
2-D block.
"""

ROW_EDGES = 128
"""In-edges of a node that a program of the draws by keys looks at together."""

GATHER_WORDS = 2048
"""Machine words that a program of `gather_rows` loads at once."""
GATHER_COLUMNS = 512
"""Most machine words of one row that a program of `gather_rows` loads at once."""

SELF_LOOP_EDGES = 1 << 24
"""Edges per round of `self_loops`, which needs an int64 destination for each of them."""


@triton.jit(do_not_specialize=["num", "num_nodes", "num_edges", "fanout"])
def _count_kernel(
    indptr, nodes, starts, degrees, out_indptr, flags, num, num_nodes, num_edges, fanout,
    REPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First edge, degree and number of draws of each node. The number of draws goes to out_indptr[1 + i].

    A program owns BLOCK nodes. fanout: below 0, all in-edges are drawn.
    A node outside the graph, or with a damaged indptr, raises NODE_ERROR and counts as a node without edges.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_node = i < num
    node = tl.load(nodes + i, mask=is_node, other=0).to(tl.int64)

    is_in_graph = is_node & (node >= 0) & (node < num_nodes)
    start = tl.load(indptr + node, mask=is_in_graph, other=0)
    stop = tl.load(indptr + node + 1, mask=is_in_graph, other=0)
    is_valid = is_in_graph & (start >= 0) & (stop >= start) & (stop <= num_edges)
    report(flags, NODE_ERROR, is_node & (is_valid == 0))

    degree = tl.where(is_valid, stop - start, 0)
    limit = tl.where(fanout < 0, degree, fanout)
    count = tl.where(degree > 0, limit, 0) if REPLACE else tl.minimum(degree, limit)

    tl.store(starts + i, tl.where(is_valid, start, 0), mask=is_node)
    tl.store(degrees + i, degree.to(tl.int32), mask=is_node)
    tl.store(out_indptr + 1 + i, count, mask=is_node)


def _count(
    indptr: Tensor, nodes: Tensor, num_edges: int, fanout: int, replace: bool
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(starts, degrees, out_indptr, total) for n nodes. Synchronises with the device, to read `total`.

    starts: [n] int64, the first in-edge of each node. degrees: [n] int32, its number of in-edges.
    out_indptr: [n + 1] int64, the offsets of the draws of each node. total: the number of draws of all
    nodes.
    """
    num = nodes.numel()
    device = nodes.device
    starts = torch.empty(num, dtype=torch.int64, device=device)
    degrees = torch.empty(num, dtype=torch.int32, device=device)
    out_indptr = torch.zeros(num + 1, dtype=torch.int64, device=device)
    if num == 0:
        return starts, degrees, out_indptr, 0
    with launch_on(device):
        _count_kernel[(triton.cdiv(num, 1024),)](
            *(indptr, nodes, starts, degrees, out_indptr, error_flags(device)),
            *(num, indptr.numel() - 1, num_edges, fanout),
            REPLACE=replace,
            BLOCK=1024,
        )
    out_indptr.cumsum_(0)
    return starts, degrees, out_indptr, read_with_errors(out_indptr[-1:])


@triton.jit
def _load_segments(draw_ids, starts, degrees, out_indptr, key, num, BLOCK: tl.constexpr):
    """The segment of each node of this program: (first edge, degree, offset in the result, state of the generator).

    Lanes beyond the last node have degree 0, so that every mask by degree leaves them out.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_node = i < num
    start = tl.load(starts + i, mask=is_node, other=0)
    degree = tl.load(degrees + i, mask=is_node, other=0)
    offset = tl.load(out_indptr + i, mask=is_node, other=0)
    draw_id = tl.load(draw_ids + i, mask=is_node, other=0).to(tl.int64)
    return start, degree, offset, first_state(tl.load(key), draw_id)


@triton.jit(do_not_specialize=["num"])
def _distinct_kernel(
    indices, draw_ids, starts, degrees, out_indptr, key, ids, edge_ids, num, FANOUT: tl.constexpr, BLOCK: tl.constexpr
):
    """Draws without replacement, unrolled over FANOUT.

    Program p draws for nodes p * BLOCK .. (p + 1) * BLOCK - 1.
    """
    start, degree, offset, state = _load_segments(draw_ids, starts, degrees, out_indptr, key, num, BLOCK)
    picks = draw_distinct(state, degree, FANOUT)

    # All loads before the first store, so that they are in flight together.
    sources = ()
    for j in tl.static_range(FANOUT):
        sources = sources + (tl.load(indices + start + picks[j], mask=j < degree, other=0),)
    for j in tl.static_range(FANOUT):
        tl.store(ids + offset + j, sources[j], mask=j < degree)
        tl.store(edge_ids + offset + j, start + picks[j], mask=j < degree)


@triton.jit
def _value_at(swap_targets, swap_values, columns, position, initial):
    """The value at a position of the shuffle after the swaps so far: [BLOCK] int32.

    swap_targets, swap_values: [BLOCK, COLUMNS] int32. Swap j moved the value `swap_values[:, j]` to the
    position `swap_targets[:, j]`. The latest swap into a position decides. Without one the position still
    holds `initial`.
    """
    latest_swap = tl.max(tl.where(swap_targets == position[:, None], columns[None, :], -1), axis=1)
    value = tl.sum(tl.where(columns[None, :] == latest_swap[:, None], swap_values, 0), axis=1)
    return tl.where(latest_swap >= 0, value, initial)


@triton.jit(do_not_specialize=["num", "fanout"])
def _distinct_many_kernel(
    indices, draw_ids, starts, degrees, out_indptr, key, ids, edge_ids, num, fanout,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws without replacement, for fan-outs too large to unroll.

    COLUMNS is a power of two, at least the fan-out.

    The swaps of a node are one row of two [BLOCK, COLUMNS] blocks. The picks equal those of
    `_distinct_kernel`.
    """
    start, degree, offset, state = _load_segments(draw_ids, starts, degrees, out_indptr, key, num, BLOCK)
    columns = tl.arange(0, COLUMNS)
    swap_targets = tl.full((BLOCK, COLUMNS), -1, tl.int32)
    swap_values = tl.full((BLOCK, COLUMNS), 0, tl.int32)

    max_draws = tl.minimum(tl.max(degree, axis=0), fanout)
    for j in range(max_draws):
        state += GOLDEN
        target = (j + bounded(mix(state), tl.maximum(degree - j, 1))).to(tl.int32)
        position_j = tl.zeros_like(target) + j
        edge = start + _value_at(swap_targets, swap_values, columns, target, target)
        value_at_j = _value_at(swap_targets, swap_values, columns, position_j, position_j)

        is_j = columns[None, :] == j
        swap_targets = tl.where(is_j, target[:, None], swap_targets)
        swap_values = tl.where(is_j, value_at_j[:, None], swap_values)

        tl.store(ids + offset + j, tl.load(indices + edge, mask=j < degree, other=0), mask=j < degree)
        tl.store(edge_ids + offset + j, edge, mask=j < degree)


@triton.jit(do_not_specialize=["num", "fanout"])
def _replace_kernel(
    indices, draw_ids, starts, degrees, out_indptr, key, ids, edge_ids, num, fanout, BLOCK: tl.constexpr
):
    """Draws with replacement: draw j of a node is one bounded number of its keyed sequence."""
    start, degree, offset, state = _load_segments(draw_ids, starts, degrees, out_indptr, key, num, BLOCK)
    for j in range(fanout):
        state += GOLDEN
        edge = start + bounded(mix(state), degree)
        tl.store(ids + offset + j, tl.load(indices + edge, mask=degree > 0, other=0), mask=degree > 0)
        tl.store(edge_ids + offset + j, edge, mask=degree > 0)


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    replace: bool = False,
    draw_ids: Tensor | None = None,
) -> Neighbors:
    """`reference.sample_neighbors` on the device. Synchronises once, to learn the number of edges.

    nodes: [n] int32 or int64 on the device, as draw_ids. indptr and indices: on the device or in pinned host
    memory. key: a number, or a tensor [1] int64 on the device.
    """
    indptr = indptr.contiguous()
    indices = indices.contiguous()
    nodes = nodes.contiguous()
    check_readable("the graph", indptr, indices)
    if fanout < 0:
        out_indptr, edge_ids = _row_entries(indptr, nodes, indices.numel())
        return Neighbors(out_indptr, gather_rows(indices, edge_ids), edge_ids)

    num = nodes.numel()
    device = nodes.device
    starts, degrees, out_indptr, total = _count(indptr, nodes, indices.numel(), fanout, replace)
    ids = torch.empty(total, dtype=indices.dtype, device=device)
    edge_ids = torch.empty(total, dtype=torch.int64, device=device)
    keyed_by = nodes if draw_ids is None else draw_ids.contiguous()
    arguments = (indices, keyed_by, starts, degrees, out_indptr, key_on(device, key), ids, edge_ids, num)
    with launch_on(device):
        if total == 0:
            pass
        elif replace:
            _replace_kernel[(triton.cdiv(num, NODES_AT_ONCE),)](*arguments, fanout, BLOCK=NODES_AT_ONCE)
        elif fanout <= UNROLLED_FANOUT:
            _distinct_kernel[(triton.cdiv(num, NODES_AT_ONCE),)](*arguments, FANOUT=fanout, BLOCK=NODES_AT_ONCE)
        else:
            # Fewer nodes per program as rows get wider, so that the two blocks of swaps stay at 2048
            # numbers each.
            columns = triton.next_power_of_2(fanout)
            block = max(1, 2048 // columns)
            _distinct_many_kernel[(triton.cdiv(num, block),)](*arguments, fanout, COLUMNS=columns, BLOCK=block)
    return Neighbors(out_indptr, ids, edge_ids)


_NO_KEY = tl.constexpr((1 << 63) - 1)
"""Not below any key."""
_INFINITE = tl.constexpr(0x7FF0000000000000)
"""The bits of an infinite float64."""
_SMALLEST_WEIGHT = tl.constexpr(SMALLEST_WEIGHT)
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)


@triton.jit
def _weighted_keys(weight, edge, place, state, is_edge, flags):
    """(int64 key, whether it has one) of some in-edges of a node. The bits of positive float64 have their order."""
    w = tl.load(weight + edge, mask=is_edge, other=0).to(tl.float64)
    is_allowed = (w == 0) | ((w >= _SMALLEST_WEIGHT) & (w <= _LARGEST_WEIGHT))
    report(flags, WEIGHT_ERROR, is_edge & (is_allowed == 0))
    raw = mix(state + GOLDEN * (place + 1).to(tl.uint64))
    u = tl.maximum((raw >> 11).to(tl.int64), 1).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
    has_key = is_edge & is_allowed & (w > 0)
    key = -tl.log(u) / tl.where(has_key, w, 1.0)
    return key.to(tl.int64, bitcast=True), has_key


@triton.jit
def _source_keys(indices, copies, edge, key, is_edge, HAS_COPIES: tl.constexpr):
    """int64 keys of some in-edges of a node by their sources, in the order of unsigned numbers."""
    source = tl.load(indices + edge, mask=is_edge, other=0).to(tl.int64)
    state = first_state(key, source) + GOLDEN
    if HAS_COPIES:
        state += GOLDEN * tl.load(copies + edge, mask=is_edge, other=0).to(tl.uint64)
    return (mix(state) ^ 0x8000000000000000).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["fanout"])
def _smallest_kernel(
    indices, values, draw_ids, starts, degrees, out_indptr, key, edge_ids, limits, flags, fanout,
    WEIGHTED: tl.constexpr, HAS_COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws the in-edges of a node with the smallest keys, by weight or by source. Program p draws for node p.

    It passes over the row once for every draw, and computes its keys each time: nothing of a long row is kept.

    values: the weight of each edge, or its number among copies. edge_ids: -1 where a node has fewer edges with a key.
    limits: the bits of the smallest key that is not drawn, for weighted draws.
    """
    i = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + i)
    degree = tl.load(degrees + i)
    offset = tl.load(out_indptr + i)
    the_key = tl.load(key)
    state = first_state(the_key, tl.load(draw_ids + i).to(tl.int64))
    size = tl.minimum(degree, fanout)
    last_key = tl.full((), -(1 << 63), tl.int64)
    last_place = tl.full((), -1, tl.int32)
    for j in range(size + 1):
        best_key = tl.full((), _NO_KEY, tl.int64)
        best_place = degree
        for first in range(0, degree, BLOCK):
            place = first + tl.arange(0, BLOCK)
            has_key = place < degree
            if WEIGHTED:
                keys, has_key = _weighted_keys(values, start + place, place, state, has_key, flags)
            else:
                keys = _source_keys(indices, values, start + place, the_key, has_key, HAS_COPIES)
            is_left = has_key & ((keys > last_key) | ((keys == last_key) & (place > last_place)))
            least = tl.min(tl.where(is_left, keys, _NO_KEY), axis=0)
            least_place = tl.min(tl.where(is_left & (keys == least), place, degree), axis=0)
            is_better = (least < best_key) | ((least == best_key) & (least_place < best_place))
            best_key = tl.where(is_better, least, best_key)
            best_place = tl.where(is_better, least_place, best_place)
        is_found = best_place < degree
        tl.store(edge_ids + offset + j, tl.where(is_found, start + best_place, -1), mask=j < size)
        if WEIGHTED:
            tl.store(limits + i, tl.where(is_found, best_key, _INFINITE), mask=j == size)
        last_key = best_key
        last_place = best_place


def _draw_smallest(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    keyed_by: Tensor,
    weighted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out_indptr, edge_ids, limits) of draws by keys. edge_ids has -1 where a node has fewer edges with a key.

    values: as in `_smallest_kernel`; None: no edge has a copy. keyed_by: [n], the ids that decide the states.
    """
    indptr = indptr.contiguous()
    nodes = nodes.contiguous()
    given = indices if values is None else values.contiguous()
    check_readable("the graph", indptr, indices, given)
    num = nodes.numel()
    device = nodes.device
    starts, degrees, out_indptr, total = _count(indptr, nodes, indices.numel(), fanout, False)
    edge_ids = torch.empty(total, dtype=torch.int64, device=device)
    limits = torch.empty(num, dtype=torch.int64, device=device)
    if num:
        with launch_on(device):
            _smallest_kernel[(num,)](
                *(indices.contiguous(), given, keyed_by.contiguous(), starts, degrees, out_indptr),
                *(key_on(device, key), edge_ids, limits, error_flags(device), fanout),
                WEIGHTED=weighted,
                HAS_COPIES=values is not None and not weighted,
                BLOCK=ROW_EDGES,
                num_warps=1,
            )
    return out_indptr, edge_ids, limits.view(torch.float64)


def sample_weighted(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int | Tensor,
    draw_ids: Tensor | None = None,
) -> WeightedNeighbors:
    """`reference.sample_weighted` on the device. Synchronises three times, to learn numbers of edges."""
    if fanout < 0:
        drawn = sample_neighbors(indptr, indices, nodes, fanout, key)
        return WeightedNeighbors(*drawn, all_included(drawn.edge_ids))
    keyed_by = nodes if draw_ids is None else draw_ids
    offsets, edge_ids, limits = _draw_smallest(indptr, indices, weight, nodes, fanout, key, keyed_by, weighted=True)
    # A node with edges of weight 0 may have got fewer than its share of the array.
    is_drawn = edge_ids >= 0
    num_before = torch.cat([offsets.new_zeros(1), is_drawn.cumsum(0)])
    out_indptr = num_before[offsets]
    read_with_errors(num_before[-1:])
    edge_ids = edge_ids[is_drawn]
    inclusion = inclusion_of(gather_rows(weight, edge_ids), limits, out_indptr)
    return WeightedNeighbors(out_indptr, gather_rows(indices, edge_ids), edge_ids, inclusion)


def sample_labor(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int | Tensor, copies: Tensor | None = None
) -> Neighbors:
    """`reference.sample_labor` on the device. Synchronises once, to learn the number of edges."""
    if fanout < 0:
        return sample_neighbors(indptr, indices, nodes, fanout, key)
    out_indptr, edge_ids, _ = _draw_smallest(indptr, indices, copies, nodes, fanout, key, nodes, weighted=False)
    return Neighbors(out_indptr, gather_rows(indices, edge_ids), edge_ids)


def edge_copies(indptr: Tensor, indices: Tensor) -> Tensor | None:
    """`reference.edge_copies`, by the CPU: it is computed once for a graph."""
    copies = cpu_sampling.edge_copies(indptr.cpu(), indices.cpu())
    return None if copies is None else copies.to(indices.device)


def row_entries(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.row_entries` on the device. Synchronises once, to learn the number of entries."""
    indptr = indptr.contiguous()
    nodes = nodes.contiguous()
    check_readable("the graph", indptr)
    # No array is read at these positions, so there is no number of edges to check against. A row still
    # raises an error if its end lies before its start.
    return _row_entries(indptr, nodes, (1 << 63) - 1)


def _row_entries(indptr: Tensor, nodes: Tensor, num_edges: int) -> tuple[Tensor, Tensor]:
    """(out_indptr, positions) of all entries of these rows. A row that ends beyond num_edges is an error."""
    starts, _, out_indptr, total = _count(indptr, nodes, num_edges, -1, False)
    # Entry k of the result belongs to a node i and lies at starts[i] + (k - out_indptr[i]).
    shift = torch.repeat_interleave(starts - out_indptr[:-1], out_indptr.diff(), output_size=total)
    return out_indptr, shift + torch.arange(total, device=nodes.device)


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.relabel` on the device.

    Synchronises twice: for the range of the ids, and for their number.
    """
    all_ids = torch.cat([seeds.long(), neighbors.long()])
    if all_ids.numel() == 0:
        return all_ids, all_ids.int()
    smallest, largest = torch.stack(torch.aminmax(all_ids)).tolist()
    if smallest < 0:
        raise ValueError("an edge index is out of range: node ids are not negative")
    # Few ids from a wide range are sorted: a dense map would allocate and clear 8 bytes for every number up
    # to the largest. The factor is a rule of thumb.
    if largest >= 16 * all_ids.numel():
        return reference.relabel(seeds, neighbors)
    id_map = DeviceIdMap(largest + 1, all_ids.device, dense=True)
    idx = id_map.add(all_ids)
    return id_map.ids(), idx[seeds.numel() :]


# ---- rows


@triton.jit(do_not_specialize=["num", "num_rows"])
def _gather_kernel(
    rows, ids, out, flags, num, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out[i] = rows[ids[i]], for rows of WIDTH machine words.

    An id out of range raises ROW_ERROR and reads row 0.

    Program (p, c) copies the columns c * COLUMNS .. (c + 1) * COLUMNS - 1 of ROWS rows at a time. It starts
    at block p and strides by the number of programs, so any number of programs covers all rows.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for block in range(tl.program_id(0), tl.cdiv(num, ROWS), tl.num_programs(0)):
        i = block * ROWS + tl.arange(0, ROWS)
        row = tl.load(ids + i, mask=i < num, other=0).to(tl.int64)
        is_wrong = (row < 0) | (row >= num_rows)
        report(flags, ROW_ERROR, is_wrong)
        row = tl.where(is_wrong, 0, row)

        mask = (i < num)[:, None] & (column < WIDTH)[None, :]
        words = tl.load(rows + row[:, None] * WIDTH + column[None, :], mask=mask)
        tl.store(out + i.to(tl.int64)[:, None] * WIDTH + column[None, :], words, mask=mask)


def gather_rows(rows: Tensor, ids: Tensor, programs: int | None = None) -> Tensor:
    """rows[ids] on the device of the ids, for any dtype: rows are copied as machine words.

    rows: [num_rows, ...] in device memory, or in host memory. The kernel reads pinned host memory directly;
    other host memory is gathered by the CPU and then moved. ids: [n] int32 or int64 on the device. An id
    out of range raises at the next call that synchronises.

    programs: the most programs to launch per column of tiles. While they wait for host memory, the rest of
    the GPU is free for other kernels. By default one program per tile.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row ids must be a 1-D int32 or int64 tensor, not {list(ids.shape)} {ids.dtype}")
    if not is_readable(rows) or (not rows.is_contiguous() and not rows.is_cuda):
        return cpu_sampling.gather_rows(rows, ids.cpu()).to(ids.device)
    if ids.numel() and rows.size(0) == 0:
        raise IndexError("a row id is outside its table, which is empty")
    # torch's indexing handles strides, and records the gradient that the kernel does not have.
    if not rows.is_contiguous() or (rows.requires_grad and torch.is_grad_enabled()):
        return rows[ids.long()]
    ids = ids.contiguous()
    out = torch.empty((ids.numel(), *rows.shape[1:]), dtype=rows.dtype, device=ids.device)
    if out.numel() == 0:
        return out
    word = _widest_word(rows, out)
    width = out[0].numel() * out.element_size() // word.itemsize
    columns = min(triton.next_power_of_2(width), GATHER_COLUMNS)
    rows_per_program = max(1, GATHER_WORDS // columns)
    num_blocks = triton.cdiv(ids.numel(), rows_per_program)
    with launch_on(ids.device):
        _gather_kernel[(min(num_blocks, programs or num_blocks), triton.cdiv(width, columns))](
            *(_words(rows, word), ids, _words(out, word), error_flags(ids.device), ids.numel(), rows.size(0)),
            WIDTH=width,
            ROWS=rows_per_program,
            COLUMNS=columns,
        )
    return out


def _widest_word(rows: Tensor, out: Tensor) -> torch.dtype:
    """The widest integer type that divides the bytes of a row and the addresses of both tensors."""
    sizes = (rows[0].numel() * rows.element_size(), rows.data_ptr(), out.data_ptr())
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if all(size % word.itemsize == 0 for size in sizes))


def _words(tensor: Tensor, word: torch.dtype) -> Tensor:
    """The memory of a contiguous tensor as a 1-D tensor of words."""
    return tensor.detach().view(-1).view(torch.uint8).view(word)


# ---- edges


def group_by_key(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """`reference.group_by_key` on the device, without synchronising.

    A key out of range raises GROUP_ERROR later.
    """
    error_flag = error_flags(keys.device)[GROUP_ERROR.value]
    error_flag.logical_or_(((keys < 0) | (keys >= num_groups)).any())
    sort_keys = keys.int() if num_groups < 1 << 31 else keys.long()  # half the bits to sort
    sorted_keys, order = torch.sort(sort_keys, stable=True)
    groups = torch.arange(num_groups + 1, dtype=sort_keys.dtype, device=keys.device)
    return torch.searchsorted(sorted_keys, groups), order


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """`reference.self_loops` on the device, SELF_LOOP_EDGES edges a round. Synchronises in each round."""
    positions = [torch.empty(0, dtype=torch.int64, device=indices.device)]
    for first in range(0, indices.numel(), SELF_LOOP_EDGES):
        sources = indices[first : first + SELF_LOOP_EDGES]
        edges = torch.arange(first, first + sources.numel(), device=indices.device)
        destinations = torch.searchsorted(indptr, edges, right=True) - 1
        positions.append((sources == destinations).nonzero().view(-1) + first)
    return torch.cat(positions)


DENSE_MAP_BYTES = 1 << 31
"""Bytes that the stamps of a map may take (2 GiB). A map of a larger graph sorts ids instead."""

LAST_STEP = (1 << 31) - 1
"""The largest step that fits into a stamp without touching its sign. Also the limit of a batch's nodes."""
LATEST = tl.constexpr((1 << 31) - 1)
"""The largest arrival. A stamp holds LATEST - arrival, so that `atomic_max` keeps the earliest one."""

BLOCK = 1024
"""Ids per program of the three kernels below."""


@triton.jit(do_not_specialize=["num", "num_nodes", "size", "step"])
def _stamp_kernel(stamps, nodes, flags, num, num_nodes, size, step, BLOCK: tl.constexpr):
    """Pass 1 of 3: stamp every node with this step and its earliest arrival.

    The arrival of a node that already has a local id in this step is that id, which is below `size`. The
    arrival of a new node is `size` + the position of its first occurrence in `nodes`. So one maximum serves
    both cases. A node outside the graph raises INDEX_ERROR and is not stamped.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(nodes + i, mask=i < num, other=0).to(tl.int64)
    is_in_graph = (node >= 0) & (node < num_nodes)
    report(flags, INDEX_ERROR, is_in_graph == 0)
    stamp = (step.to(tl.int64) << 32) | (LATEST - (size.to(tl.int64) + i))
    tl.atomic_max(stamps + node, stamp, mask=(i < num) & is_in_graph, sem="relaxed")


@triton.jit(do_not_specialize=["num", "num_nodes", "size"])
def _first_kernel(stamps, nodes, arrivals, is_first, num, num_nodes, size, BLOCK: tl.constexpr):
    """Pass 2 of 3: read each node's arrival, and flag (0 or 1) whether this position is its first occurrence.

    A pass of its own, because a stamp is final only when all programs of pass 1 have ended.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(nodes + i, mask=i < num, other=0).to(tl.int64)
    is_in_graph = (i < num) & (node >= 0) & (node < num_nodes)
    arrival = LATEST - (tl.load(stamps + node, mask=is_in_graph, other=LATEST) & LATEST)
    tl.store(arrivals + i, arrival.to(tl.int32), mask=i < num)
    tl.store(is_first + i, (is_in_graph & (arrival == size + i)).to(tl.int32), mask=i < num)


@triton.jit(do_not_specialize=["num", "size", "step"])
def _number_kernel(
    stamps, nodes, arrivals, is_first, first_counts, ids, idx, num, size, step, BLOCK: tl.constexpr
):  # fmt: skip
    """Pass 3 of 3: write the local ids. Known nodes keep theirs; new ones are numbered by first occurrence.

    first_counts: [num] int32, the number of first occurrences up to and including each position. Only the
    lane of a first occurrence writes the id and the stamp of its node, so no two lanes write to one
    address. A node out of range is never a first occurrence, so nothing is written at its number.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    arrival = tl.load(arrivals + i, mask=i < num, other=0)
    is_new = (i < num) & (arrival >= size)
    local = tl.where(is_new, size - 1 + tl.load(first_counts + arrival - size, mask=is_new, other=0), arrival)
    tl.store(idx + i, local, mask=i < num)
    is_writer = tl.load(is_first + i, mask=i < num, other=0) != 0
    node = tl.load(nodes + i, mask=is_writer, other=0).to(tl.int64)
    tl.store(ids + local, node, mask=is_writer)
    stamp = (step.to(tl.int64) << 32) | (LATEST - local.to(tl.int64))
    tl.store(stamps + node, stamp, mask=is_writer)


class DeviceIdMap(SortedIdMap):
    """Map from global ids to local ids on a GPU, as `cpu.sampling.IdMap` is on the CPU.

    Reused batch after batch.

    The map owns its stamps and the list of its ids. One thread at a time may use it, on one stream.

    dense: whether every node of the graph has a stamp of 8 bytes. By default, if they fit into
    DENSE_MAP_BYTES. A map without stamps sorts, as `SortedIdMap` does.
    """

    def __init__(self, num_nodes: int, device: torch.device, dense: bool | None = None) -> None:
        super().__init__(num_nodes, device)
        self.dense = num_nodes * 8 <= DENSE_MAP_BYTES if dense is None else dense
        self._stamps = torch.zeros(num_nodes if self.dense else 0, dtype=torch.int64, device=device)
        self._step = 1

    def add(self, nodes: Tensor) -> Tensor:
        """[n] int32: the local id of each node. New nodes get the next free ids.

        Synchronises with the device.
        """
        if self.size + nodes.numel() >= LAST_STEP:
            raise ValueError("a batch may reach at most 2**31 nodes: make batch_size or the fan-outs smaller")
        if not self.dense:
            return super().add(nodes)
        nodes = nodes.contiguous()
        num = nodes.numel()
        idx = torch.empty(num, dtype=torch.int32, device=self.device)
        if num == 0:
            return idx
        arrivals = torch.empty_like(idx)
        is_first = torch.empty_like(idx)
        # For the case that all nodes are new: their number is known only after the kernels.
        self._reserve(self.size + num)
        grid = (triton.cdiv(num, BLOCK),)
        with launch_on(self.device):
            _stamp_kernel[grid](
                *(self._stamps, nodes, error_flags(self.device), num, self.num_nodes, self.size, self._step),
                BLOCK=BLOCK,
            )
            _first_kernel[grid](self._stamps, nodes, arrivals, is_first, num, self.num_nodes, self.size, BLOCK=BLOCK)
            first_counts = is_first.cumsum(0, dtype=torch.int32)
            _number_kernel[grid](
                *(self._stamps, nodes, arrivals, is_first, first_counts, self._ids, idx, num, self.size, self._step),
                BLOCK=BLOCK,
            )
        self.size += read_with_errors(first_counts[-1:])
        return idx

    def ids(self) -> Tensor:
        """[size] int64: the nodes added since the last `clear`, by local id.

        A copy: the next batch reuses `_ids`.
        """
        return super().ids().clone()

    def clear(self) -> None:
        """Forget all nodes. Costs nothing: stamps of an earlier step count as unseen."""
        super().clear()
        self._step += 1
        if self._step > LAST_STEP:
            # Steps start again at 1, which would lose against the stamps of all earlier steps.
            self._stamps.zero_()
            self._step = 1

    def _reserve(self, size: int) -> None:
        """Grow `_ids` to hold at least `size` ids, by powers of two, so that few batches need to copy."""
        if size > self._ids.numel():
            larger = torch.empty(1 << size.bit_length(), dtype=torch.int64, device=self.device)
            larger[: self.size] = self._ids[: self.size]
            self._ids = larger
