"""Numba kernels that make a sampled batch smaller: by splitting its seeds, or by cutting edges.

A batch is a list of blocks in the order of computation. The destinations of a block are the first of its
sources, so one local id names a node in every layer. The last block's destinations are the seeds.

Splitting gives micro-batches that together are the same batch:

    groups of seeds  ->  count   nodes and edges of each micro-batch, without making it
    one group        ->  take    the micro-batch, block by block from the seeds back to the inputs

Cutting leaves out edges until the rest fits:

    draw_numbers or hub_numbers   a number for each edge: those with the lowest numbers are kept
    entries                       the number from which on each node and edge is in the batch
    last_that_fits                the largest number at which the batch still fits
    cut_block                     the edges up to that number, as a new block

Each step costs one or a few passes over the edges, in the calling thread. Ids are not checked: the caller
gives blocks of a valid batch. `count` and `take` allocate their large arrays by torch, so that a memory
meter sees them.

Memory layout of a block
    indptr    [num_dst + 1] int64   destination d has the edges indptr[d] .. indptr[d + 1] - 1
    src_idx   [num_edges] int32     the source of each edge, as a local id
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix, prefetch

MAX_COUNTED_AT_ONCE = 64
"""Groups of seeds that one pass counts: as many as a uint64 has bits."""
EDGES_AHEAD = 16
"""Edges between the prefetch of a cache line and its use."""
Edges = tuple[np.ndarray, np.ndarray]
"""(indptr, src_idx) of a block: [num_dst + 1] int64 and [num_edges] int32."""


@kernel
def _mark_sources(indptr, src_idx, dst_marks, marks, num_edges):
    """Mark the sources that each group of seeds needs, and add up the edges into its destinations.

    Reference:
        for each edge e from s to d:
            marks[s] |= dst_marks[d]
            for each bit g of dst_marks[d]: num_edges[g] += 1

    dst_marks: [num_dst] uint64, bit g set if group g needs the destination.
    marks: [num_src or more] uint64, bit g set if group g needs the source. Bits are added.
    num_edges: [num_groups] int64, added to.
    """
    for d in range(indptr.shape[0] - 1):
        mark = dst_marks[d]
        start = indptr[d]
        stop = indptr[d + 1]
        if mark:
            for e in range(start, stop):
                if e + EDGES_AHEAD < src_idx.shape[0]:
                    prefetch(marks, src_idx[e + EDGES_AHEAD])
                marks[src_idx[e]] |= mark
            for g in range(num_edges.shape[0]):
                num_edges[g] += np.int64((mark >> np.uint64(g)) & np.uint64(1)) * (stop - start)


@kernel
def _count(marks, num_nodes):
    """Add the number of nodes that have bit g in `marks` to num_nodes[g].

    marks: [n] uint64; num_nodes: [num_groups] int64.
    """
    for i in range(marks.shape[0]):
        mark = marks[i]
        if mark:
            for g in range(num_nodes.shape[0]):
                num_nodes[g] += np.int64((mark >> np.uint64(g)) & np.uint64(1))


def count(blocks: Sequence[Edges], num_nodes: Sequence[int], groups: Sequence[np.ndarray]) -> np.ndarray:
    """The sizes of the micro-batch of each group of seeds: [num_groups, 2 * num_blocks + 1] int64.

    A row has the nodes of each layer, in the order of `num_nodes`, and then the edges of each block.

    blocks: in the order of computation.
    num_nodes: the nodes of each layer, from the inputs to the seeds: one more than there are blocks.
    groups: positions of seeds, no seed in two groups.
    """
    marks = torch.zeros(num_nodes[0], dtype=torch.int64).numpy().view(np.uint64)
    sizes = np.zeros((2 * len(blocks) + 1, len(groups)), dtype=np.int64)  # transposed at the end
    for first in range(0, len(groups), MAX_COUNTED_AT_ONCE):
        counted_groups = groups[first : first + MAX_COUNTED_AT_ONCE]
        counts = sizes[:, first : first + len(counted_groups)]
        node_counts = counts[: len(blocks) + 1]
        edge_counts = counts[len(blocks) + 1 :]
        marks[:] = 0
        for bit, seed_idx in enumerate(counted_groups):
            marks[seed_idx] = np.uint64(1) << np.uint64(bit)
        _count(marks[: num_nodes[-1]], node_counts[-1])
        for l in reversed(range(len(blocks))):
            indptr, src_idx = blocks[l]
            # A copy: a destination may also be a source. Marks that it gets as a source belong to the next
            # hop, and must not pass on to its own sources in this one.
            marks_view = torch.from_numpy(marks[: num_nodes[l + 1]].view(np.int64))
            dst_marks = marks_view.clone().numpy().view(np.uint64)
            _mark_sources(indptr, src_idx, dst_marks, marks, edge_counts[l])
            _count(marks[: num_nodes[l]], node_counts[l])
    return sizes.T


@kernel
def _take(indptr, src_idx, dst_idx, new_local, nodes, out_indptr, out_src_idx, positions):
    """Fill the block of `take`; returns how many sources it has.

    new_local: [num_src] int32, all -1 at first: the new local id of each old source.
    positions: empty if not asked for.
    """
    num_new_src = dst_idx.shape[0]
    for i in range(num_new_src):
        nodes[i] = dst_idx[i]
        new_local[dst_idx[i]] = i

    num_edges = 0
    for i in range(dst_idx.shape[0]):
        for e in range(indptr[dst_idx[i]], indptr[dst_idx[i] + 1]):
            node = src_idx[e]
            # No `if is_new:` here, for the reason in `sampling._add_to_array`. Both cases write to the same
            # arrays, and a known node writes what is there already.
            is_new = new_local[node] < 0
            local = num_new_src if is_new else new_local[node]
            nodes[local] = node
            new_local[node] = local
            num_new_src += is_new
            out_src_idx[num_edges] = local
            if positions.shape[0]:
                positions[num_edges] = e
            num_edges += 1
        out_indptr[i + 1] = num_edges
    return num_new_src


def take(
    indptr: Tensor, src_idx: Tensor, num_src: int, dst_idx: Tensor, with_positions: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(indptr, src_idx, nodes, positions) of the block of the chosen destinations, with new local ids.

    Arguments: `indptr`, `src_idx` and `num_src` are those of the old block. dst_idx: [n] int64, the chosen
    destinations, each once.

    Results:
    indptr: [n + 1] int64.
    src_idx: [num_edges] int32, new local ids.
    nodes: [num_new_src] int64, the old local id of each new source: destinations, then by first occurrence.
    positions: [num_edges] int64, each edge's position among the old block's edges; None unless
    `with_positions`.
    """
    block_indptr = indptr.numpy()
    chosen = dst_idx.numpy()
    num_edges = int((block_indptr[chosen + 1] - block_indptr[chosen]).sum())
    new_local = torch.full((num_src,), -1, dtype=torch.int32)
    nodes = torch.empty(min(num_src, chosen.shape[0] + num_edges), dtype=torch.int64)
    out_indptr = torch.zeros(chosen.shape[0] + 1, dtype=torch.int64)
    out_src_idx = torch.empty(num_edges, dtype=torch.int32)
    positions = torch.empty(num_edges if with_positions else 0, dtype=torch.int64)
    filled = (new_local, nodes, out_indptr, out_src_idx, positions)
    num_new_src = _take(block_indptr, src_idx.numpy(), chosen, *[t.numpy() for t in filled])
    new_nodes = nodes[:num_new_src].clone()  # a copy, so that the buffer for all possible sources is freed
    return out_indptr, out_src_idx, new_nodes, positions if with_positions else None


NEVER = np.iinfo(np.int64).max
"""The entry of a source that no edge needs: the largest int64."""
_POSITIVE = np.uint64(NEVER)
"""A mask that clears the sign bit of a draw."""
_SAMPLE = 101
"""Least number of values whose median is the pivot of `last_that_fits`. If there are fewer, it is the median of all."""


@kernel
def _draw(key, out):
    """out[e] = the first draw of (key, e), see `ops.random`, without its sign bit."""
    for e in range(out.shape[0]):
        out[e] = mix(mix(np.uint64(key) ^ np.uint64(e)) + GOLDEN) & _POSITIVE


def draw_numbers(counts: Sequence[int], key: int) -> list[np.ndarray]:
    """A random number for each edge of each block: int64, not negative, drawn from the key.

    counts: the number of edges of each block. An edge's draw depends on its position in the batch alone.
    """
    out = np.empty(sum(counts), dtype=np.int64)
    _draw(np.int64(key), out)
    return np.split(out, np.cumsum(counts)[:-1])


@kernel
def _count_ends(indptr, src_idx, ends):
    """Add a block's in-degrees and out-degrees to `ends` [num_nodes] float64."""
    for d in range(indptr.shape[0] - 1):
        ends[d] += indptr[d + 1] - indptr[d]
    for e in range(src_idx.shape[0]):
        ends[src_idx[e]] += 1


def total_degrees(blocks: Sequence[Edges], num_nodes: int) -> np.ndarray:
    """[num_nodes] float64: the degree of each node, in-edges and out-edges of all blocks together."""
    ends = np.zeros(num_nodes, dtype=np.float64)
    for edges in blocks:
        _count_ends(*edges, ends)
    return ends


@kernel
def _walk_on(indptr, src_idx, share, rank):
    """rank[s] += share[d] for each edge from s to d. Both are float64, indexed by local id."""
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            rank[src_idx[e]] += share[d]


def page_rank(blocks: Sequence[Edges], num_nodes: int, damping: float = 0.85, rounds: int = 8) -> np.ndarray:
    """[num_nodes] float64: PageRank of walks against the edges, from a destination to one of its sources.

        rank[s] = (1 - damping) / num_nodes + damping * sum(rank[d] / in_degree[d] for each edge from s to d)

    Power iteration runs for `rounds` rounds. In-degrees are sums over all blocks. The walk ends at a node
    without in-edges: its rank is not spread over the other nodes, so ranks may add up to less than 1.
    """
    in_degree = np.zeros(num_nodes, dtype=np.float64)
    for indptr, _ in blocks:
        in_degree[: indptr.shape[0] - 1] += np.diff(indptr)
    rank = np.full(num_nodes, 1 / num_nodes)
    for _ in range(rounds):
        share = damping * rank / np.maximum(in_degree, 1)
        rank = np.full(num_nodes, (1 - damping) / num_nodes)
        for edges in blocks:
            _walk_on(*edges, share, rank)
    return rank


@kernel
def _weigh(indptr, src_idx, hub, out):
    """out[e] = hub[s] * hub[d] for each edge e from s to d."""
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            out[e] = hub[src_idx[e]] * hub[d]


@kernel
def _tell_apart(bits, first, key, out):
    """out[e] = bits[e] in the upper half, and a number that no other edge has in the lower half.

    Edge e of the block has the position first + e among the edges of all blocks. The factor is odd, so
    multiplying by it modulo 2**32 maps different positions to different numbers.
    """
    for e in range(bits.shape[0]):
        out[e] = (np.int64(bits[e]) << 32) | (((first + e) * 0x9E3779B1 + key) & 0xFFFFFFFF)


def hub_numbers(blocks: Sequence[Edges], hub: np.ndarray, key: int) -> list[np.ndarray]:
    """A number for each edge of each block, int64 and not negative: larger where the edge joins larger hubs.

    hub: [num_nodes] float64, not negative, by local id: how much of a hub a node is. The caller gives
    `total_degrees` or `page_rank`.

    The upper 32 bits are hub[source] * hub[destination], as the bits of a float32. For floats that are not
    negative, the order of the bits is the order of the values. The lower 32 bits break ties by a hash of
    the edge's position, so that no two edges have the same number.
    """
    numbers = []
    first = 0
    for edges in blocks:
        num_edges = edges[1].shape[0]
        weight = np.empty(num_edges, dtype=np.float32)
        out = np.empty(num_edges, dtype=np.int64)
        _weigh(*edges, hub, weight)
        _tell_apart(weight.view(np.int32), first, np.int64(key & 0xFFFFFFFF), out)
        numbers.append(out)
        first += num_edges
    return numbers


@kernel
def _enter(indptr, src_idx, number, dst_entry, src_entry, edge_entry):
    """Fill `src_entry` and `edge_entry` of `entries`. The caller has set `src_entry` to NEVER."""
    for d in range(indptr.shape[0] - 1):
        src_entry[d] = dst_entry[d]
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            entry = max(number[e], dst_entry[d])
            edge_entry[e] = entry
            src_entry[src_idx[e]] = min(src_entry[src_idx[e]], entry)


def entries(edges: Edges, number: np.ndarray, dst_entry: np.ndarray, num_src: int) -> tuple[np.ndarray, np.ndarray]:
    """(src_entry [num_src], edge_entry [num_edges]), int64: the entries of a block's sources and edges.

    Suppose that a batch starts with its seeds and takes edges in the order of their numbers. The *entry* of
    a node or an edge is the number at which the batch first computes with it:

        edge_entry[e] = max(number[e], dst_entry[d])              an edge needs its destination
        src_entry[s]  = min(edge_entry of the edges from s)       a source is needed by any of its edges,
                        or dst_entry[s] if that is less           or because it is a destination itself

    So the batch cut at a number is all nodes and edges with an entry up to that number. Blocks are handled
    from the last to the first: `src_entry` of one is `dst_entry` of the block before. Seeds have the entry
    -1.
    """
    src_entry = np.full(num_src, NEVER)
    edge_entry = np.empty(number.shape[0], dtype=np.int64)
    _enter(*edges, number, dst_entry, src_entry, edge_entry)
    return src_entry, edge_entry


@kernel
def _to_front(values, kinds, first, stop, pivot, counts):
    """Move values up to the pivot to the front of first .. stop - 1; returns the end of that front.

    `kinds` moves along with `values`. counts[k] is increased by the number of values of kind k in the front.
    """
    front_end = first
    for i in range(first, stop):
        if values[i] <= pivot:
            counts[kinds[i]] += 1
            values[i], values[front_end] = values[front_end], values[i]
            kinds[i], kinds[front_end] = kinds[front_end], kinds[i]
            front_end += 1
    return front_end


def last_that_fits(entries: Sequence[np.ndarray], fits: Callable[[np.ndarray], bool]) -> int:
    """The largest value v such that all values up to v fit together, or -1 if none does.

    entries: the values, one array for each kind: each layer's nodes and each block's edges.
    fits: whether the given number of values of each kind fits, [num_kinds] int64. More values never fit
    better.

    The search is a quickselect: each round about halves the range first .. stop - 1 of undecided values. So
    its time is about linear in the number of values.

        values   [ fit, counted in `num_fitting` | undecided | do not fit ]
                                                  first       stop
    """
    values = np.concatenate(entries)
    kinds = np.repeat(np.arange(len(entries), dtype=np.uint8), [len(e) for e in entries])
    num_fitting = np.zeros(len(entries), dtype=np.int64)
    last = -1
    first = 0
    stop = values.shape[0]

    while first < stop:
        sample = values[first : stop : max(1, (stop - first) // _SAMPLE)]
        pivot = np.partition(sample, sample.shape[0] // 2)[sample.shape[0] // 2]
        counts = np.zeros_like(num_fitting)
        middle = _to_front(values, kinds, first, stop, pivot, counts)
        if fits(num_fitting + counts):
            num_fitting = num_fitting + counts
            last = int(pivot)
            first = middle
        else:
            # Values equal to the pivot do not fit either. Without them the range shrinks in every round.
            stop = _to_front(values, kinds, first, middle, pivot - 1, np.zeros_like(num_fitting))
    return last


@kernel
def _keep(indptr, src_idx, edge_entry, dst_entry, new_local, last, out_indptr, out_src, out_edges):
    """Fill the block of `cut_block`; returns its number of edges. new_local: [num_src], new local ids."""
    num_dst = 0
    num_edges = 0
    for d in range(indptr.shape[0] - 1):
        if dst_entry[d] > last:
            continue
        for e in range(indptr[d], indptr[d + 1]):
            if edge_entry[e] <= last:
                out_src[num_edges] = new_local[src_idx[e]]
                out_edges[num_edges] = e
                num_edges += 1
        num_dst += 1
        out_indptr[num_dst] = num_edges
    return num_edges


def cut_block(
    edges: Edges, edge_entry: np.ndarray, dst_entry: np.ndarray, src_entry: np.ndarray, last: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, src_idx, edges): the block of the nodes and edges whose entry is at most `last`.

    indptr: [num_kept_dst + 1] int64.
    src_idx: [num_kept_edges] int32, local ids among the kept sources, whose order does not change.
    edges: [num_kept_edges] int64, each edge's position among the old block's edges.
    """
    # The number of kept sources before each one. It means nothing for a source that is not kept, and is not
    # read for such a source: the entry of a source is never after that of its edges.
    new_local = (np.cumsum(src_entry <= last) - 1).astype(np.int32)
    indptr = np.zeros(np.count_nonzero(dst_entry <= last) + 1, dtype=np.int64)
    src_idx = np.empty(edge_entry.shape[0], dtype=np.int32)
    positions = np.empty(edge_entry.shape[0], dtype=np.int64)
    num_edges = _keep(*edges, edge_entry, dst_entry, new_local, last, indptr, src_idx, positions)
    return indptr, src_idx[:num_edges], positions[:num_edges]
