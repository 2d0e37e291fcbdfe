"""Numba kernels that leave edges out of a batch: which come first, what each one brings with it, how many fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix

NEVER = np.iinfo(np.int64).max
_POSITIVE = np.uint64(NEVER)
_SAMPLE = 101
Edges = tuple[np.ndarray, np.ndarray]
"""(indptr, src_idx) of a block."""


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
