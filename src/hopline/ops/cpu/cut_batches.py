"""Numba kernels that take a batch apart: sizes and edges of its micro-batches, and which edges a smaller batch keeps.

torch allocates what they return, so that a memory meter sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix, prefetch

MAX_COUNTED_AT_ONCE = 64
"""Pieces that are counted together: one bit of a word each."""
EDGES_AHEAD = 16
Edges = tuple[np.ndarray, np.ndarray]
"""(indptr, src_idx) of a block."""


@kernel
def _reach(indptr, src_idx, before, pieces, num_edges):
    """Which pieces a node is in, from the destinations to the sources; and how many edges each piece has."""
    for d in range(indptr.shape[0] - 1):
        word, start, stop = before[d], indptr[d], indptr[d + 1]
        if word:
            for e in range(start, stop):
                if e + EDGES_AHEAD < src_idx.shape[0]:
                    prefetch(pieces, src_idx[e + EDGES_AHEAD])
                pieces[src_idx[e]] |= word
            for g in range(num_edges.shape[0]):
                num_edges[g] += np.int64((word >> np.uint64(g)) & np.uint64(1)) * (stop - start)


@kernel
def _count(pieces, num_nodes):
    for i in range(pieces.shape[0]):
        word = pieces[i]
        if word:
            for g in range(num_nodes.shape[0]):
                num_nodes[g] += np.int64((word >> np.uint64(g)) & np.uint64(1))


def count(blocks: Sequence[Edges], num_nodes: Sequence[int], groups: Sequence[np.ndarray]) -> np.ndarray:
    """[num_groups, 2 * num_blocks + 1] int64: nodes of each layer (as in num_nodes), then edges of each block, that
    lead to each group of seeds.

    blocks: in the order of computation; groups: positions of seeds, no seed in two of them.
    """
    pieces = torch.zeros(num_nodes[0], dtype=torch.int64).numpy().view(np.uint64)
    out = np.zeros((2 * len(blocks) + 1, len(groups)), dtype=np.int64)
    for first in range(0, len(groups), MAX_COUNTED_AT_ONCE):
        some = groups[first : first + MAX_COUNTED_AT_ONCE]
        counts = out[:, first : first + len(some)]
        pieces[:] = 0
        for bit, seed_idx in enumerate(some):
            pieces[seed_idx] = np.uint64(1) << np.uint64(bit)
        _count(pieces[: num_nodes[-1]], counts[len(blocks)])
        for l in reversed(range(len(blocks))):
            indptr, src_idx = blocks[l]
            before = torch.from_numpy(pieces[: num_nodes[l + 1]].view(np.int64)).clone().numpy().view(np.uint64)
            _reach(indptr, src_idx, before, pieces, counts[len(blocks) + 1 + l])
            _count(pieces[: num_nodes[l]], counts[l])
    return out.T


@kernel
def _take(indptr, src_idx, dst_idx, place, nodes, out_indptr, out_src_idx, positions):
    size = dst_idx.shape[0]
    for i in range(size):
        nodes[i] = dst_idx[i]
        place[dst_idx[i]] = i
    at = 0
    for i in range(dst_idx.shape[0]):
        for e in range(indptr[dst_idx[i]], indptr[dst_idx[i] + 1]):
            node = src_idx[e]
            new = place[node] < 0
            here = size if new else place[node]
            nodes[size if new else here] = node
            place[node] = here
            size += new
            out_src_idx[at] = here
            if positions.shape[0]:
                positions[at] = e
            at += 1
        out_indptr[i + 1] = at
    return size


def take(
    indptr: Tensor, src_idx: Tensor, num_src: int, dst_idx: Tensor, with_positions: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(indptr, src_idx, nodes, positions): the edges of some destinations, their sources numbered anew.

    nodes: where the new block's sources are among the old one's, destinations first, then by first occurrence;
    positions: where its edges are among the old ones, if asked for.
    """
    starts, rows = indptr.numpy(), dst_idx.numpy()
    num_edges = int((starts[rows + 1] - starts[rows]).sum())
    place = torch.full((num_src,), -1, dtype=torch.int32)
    nodes = torch.empty(min(num_src, rows.shape[0] + num_edges), dtype=torch.int64)
    out_indptr = torch.zeros(rows.shape[0] + 1, dtype=torch.int64)
    out_src_idx = torch.empty(num_edges, dtype=torch.int32)
    positions = torch.empty(num_edges if with_positions else 0, dtype=torch.int64)
    found = (place, nodes, out_indptr, out_src_idx, positions)
    size = _take(starts, src_idx.numpy(), rows, *[t.numpy() for t in found])
    return out_indptr, out_src_idx, nodes[:size].clone(), positions if with_positions else None


NEVER = np.iinfo(np.int64).max
_POSITIVE = np.uint64(NEVER)
_SAMPLE = 101


@kernel
def _draw(key, first, out):
    for e in range(out.shape[0]):
        out[e] = mix(mix(np.uint64(key) ^ np.uint64(first + e)) + GOLDEN) & _POSITIVE


def drawn_numbers(counts: Sequence[int], key: int) -> list[np.ndarray]:
    """A number for each edge of each block, int64 from 0 on, drawn from the key."""
    out = np.empty(sum(counts), dtype=np.int64)
    _draw(np.int64(key), 0, out)
    return np.split(out, np.cumsum(counts)[:-1])


@kernel
def _count_ends(indptr, src_idx, ends):
    for d in range(indptr.shape[0] - 1):
        ends[d] += indptr[d + 1] - indptr[d]
    for e in range(src_idx.shape[0]):
        ends[src_idx[e]] += 1


def num_ends(blocks: Sequence[Edges], num_nodes: int) -> np.ndarray:
    """[num_nodes] float64: how many edges begin or end at each node."""
    ends = np.zeros(num_nodes, dtype=np.float64)
    for edges in blocks:
        _count_ends(*edges, ends)
    return ends


@kernel
def _walk_on(indptr, src_idx, share, rank):
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            rank[src_idx[e]] += share[d]


def page_rank(blocks: Sequence[Edges], num_nodes: int, damping: float = 0.85, rounds: int = 8) -> np.ndarray:
    """[num_nodes] float64: how often a walk comes by that goes from a node to one it reads, as long as there is one."""
    reads = np.zeros(num_nodes, dtype=np.float64)
    for indptr, _ in blocks:
        reads[: indptr.shape[0] - 1] += np.diff(indptr)
    rank = np.full(num_nodes, 1 / num_nodes)
    for _ in range(rounds):
        share = damping * rank / np.maximum(reads, 1)
        rank = np.full(num_nodes, (1 - damping) / num_nodes)
        for edges in blocks:
            _walk_on(*edges, share, rank)
    return rank


@kernel
def _weigh(indptr, src_idx, hub, out):
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            out[e] = hub[src_idx[e]] * hub[d]


@kernel
def _tell_apart(bits, first, key, out):
    for e in range(bits.shape[0]):
        out[e] = (np.int64(bits[e]) << 32) | (((first + e) * 0x9E3779B1 + key) & 0xFFFFFFFF)


def hub_numbers(blocks: Sequence[Edges], hub: np.ndarray, key: int) -> list[np.ndarray]:
    """A number of its own for each edge of each block, int64 from 0 on; edges between larger hubs have larger ones.

    Positive floats are ordered as their bits are; equal ones are told apart by where they stand, in a mixed order.
    """
    numbers, first = [], 0
    for edges in blocks:
        weight, out = np.empty(edges[1].shape[0], dtype=np.float32), np.empty(edges[1].shape[0], dtype=np.int64)
        _weigh(*edges, hub, weight)
        _tell_apart(weight.view(np.int32), first, np.int64(key & 0xFFFFFFFF), out)
        numbers.append(out)
        first += out.shape[0]
    return numbers


@kernel
def _enter(indptr, src_idx, number, dst_entry, src_entry, edge_entry):
    for d in range(indptr.shape[0] - 1):
        src_entry[d] = dst_entry[d]
    for d in range(indptr.shape[0] - 1):
        for e in range(indptr[d], indptr[d + 1]):
            entry = max(number[e], dst_entry[d])
            edge_entry[e] = entry
            src_entry[src_idx[e]] = min(src_entry[src_idx[e]], entry)


def entries(edges: Edges, number: np.ndarray, dst_entry: np.ndarray, num_src: int) -> tuple[np.ndarray, np.ndarray]:
    """(of the sources, of the edges): the number from which on each is in, edges being taken by their numbers.

    An edge is in when it and its destination are; a source when it is such a destination, or one of its edges is in.
    """
    src_entry, edge_entry = np.full(num_src, NEVER), np.empty(number.shape[0], dtype=np.int64)
    _enter(*edges, number, dst_entry, src_entry, edge_entry)
    return src_entry, edge_entry


@kernel
def _to_front(values, kinds, first, stop, pivot, counts):
    """Values up to the pivot come first; counts: how many of each kind they are."""
    at = first
    for i in range(first, stop):
        if values[i] <= pivot:
            counts[kinds[i]] += 1
            values[i], values[at] = values[at], values[i]
            kinds[i], kinds[at] = kinds[at], kinds[i]
            at += 1
    return at


def last_that_fits(entries: Sequence[np.ndarray], fits: Callable[[np.ndarray], bool]) -> int:
    """The largest entry such that all up to it fit, -1 if none does; `fits` is asked for their number of each kind.

    Found as quickselect finds a median: what is decided is not looked at again.
    """
    values = np.concatenate(entries)
    kinds = np.repeat(np.arange(len(entries), dtype=np.uint8), [len(e) for e in entries])
    known, last, first, stop = np.zeros(len(entries), dtype=np.int64), -1, 0, values.shape[0]
    while first < stop:
        sample = values[first : stop : max(1, (stop - first) // _SAMPLE)]
        pivot = np.partition(sample, sample.shape[0] // 2)[sample.shape[0] // 2]
        counts = np.zeros_like(known)
        middle = _to_front(values, kinds, first, stop, pivot, counts)
        if fits(known + counts):
            known, last, first = known + counts, int(pivot), middle
        else:
            stop = _to_front(values, kinds, first, middle, pivot - 1, np.zeros_like(known))
    return last


@kernel
def _keep(indptr, src_idx, edge_entry, dst_entry, place, last, out_indptr, out_src, out_edges):
    row, at = 0, 0
    for d in range(indptr.shape[0] - 1):
        if dst_entry[d] > last:
            continue
        for e in range(indptr[d], indptr[d + 1]):
            if edge_entry[e] <= last:
                out_src[at], out_edges[at] = place[src_idx[e]], e
                at += 1
        row += 1
        out_indptr[row] = at
    return at


def kept_edges(
    edges: Edges, edge_entry: np.ndarray, dst_entry: np.ndarray, src_entry: np.ndarray, last: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, src_idx, edges): those whose entry is not after `last`, by the places of the sources that are kept."""
    place = (np.cumsum(src_entry <= last) - 1).astype(np.int32)
    indptr = np.zeros(np.count_nonzero(dst_entry <= last) + 1, dtype=np.int64)
    src_idx, kept = np.empty(edge_entry.shape[0], dtype=np.int32), np.empty(edge_entry.shape[0], dtype=np.int64)
    count = _keep(*edges, edge_entry, dst_entry, place, last, indptr, src_idx, kept)
    return indptr, src_idx[:count], kept[:count]
