"""Numba kernels of `sample_hops`: find the segments of some rows, narrow them by time, and follow the drawn edges.

`ops/hops.py` has the rule, the loop over hops and the definition. Results here are equal to the bit. Between these
kernels, those of `sampling` draw from the segments. Every kernel runs in the calling thread, so a process may be
forked at any time.

Bad input. A kernel returns what it found, and reads nothing outside its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hopline.ops import hops
from hopline.ops.cpu import sampling
from hopline.ops.cpu.runtime import GOLDEN, kernel, mix, prefetch
from hopline.ops.cpu.sampling import EDGES_AHEAD, NODES_AHEAD, IdMap
from hopline.ops.hops import ALL_BITS, BAD_IDS, LEVEL_BITS, UNSORTED, Drawn, Draws, Edges, Relation, Rows
from hopline.ops.reference import LARGEST_WEIGHT, SMALLEST_WEIGHT, WRONG_WEIGHT

_LEVEL_MASK = np.uint64((1 << LEVEL_BITS) - 1)
_LEVELS = float(1 << LEVEL_BITS)

# ---- what a kernel found
_RIGHT = 0
_OUTSIDE = 1
_DESCENDING = 2
_MESSAGES = {_OUTSIDE: BAD_IDS, _DESCENDING: UNSORTED}


@kernel
def _find_rows(indptr, ids, first_row, node_bits, key, num_edges, starts, stops, states):
    """Fill the fields of `reference.Segments` for rows first_row .. first_row + n - 1, keyed by their numbers."""
    mask = (np.uint64(1) << np.uint64(node_bits)) - np.uint64(1)
    num_rows = ids.shape[0]
    for i in range(num_rows):
        if i + NODES_AHEAD < num_rows:
            prefetch(indptr, np.int64(np.uint64(ids[i + NODES_AHEAD]) & mask))
        node = np.int64(np.uint64(ids[i]) & mask)
        if node < 0 or node + 1 >= indptr.shape[0]:
            return _OUTSIDE
        start = indptr[node]
        stop = indptr[node + 1]
        if start < 0 or stop < start or stop > num_edges:
            return _OUTSIDE
        starts[i] = start
        stops[i] = stop
        states[i] = mix(np.uint64(key) ^ np.uint64(first_row + i))
    return _RIGHT


@kernel
def _narrow(starts, stops, ids, node_bits, bounds, times, are_node_times, indices, most):
    """Move `stops` to the first edge that is later than its row's bound, by binary search.

    times: by edge, or by source if `are_node_times`. most: the number of edges to leave, the latest; -1 for all.
    """
    num_rows = starts.shape[0]
    for i in range(num_rows):
        bound = bounds[ids[i] >> node_bits]
        low = starts[i]
        high = stops[i]
        while low < high:
            middle = (low + high) // 2
            at = np.int64(indices[middle]) if are_node_times else middle
            if at < 0 or at >= times.shape[0]:
                return _OUTSIDE
            if times[at] <= bound:
                low = middle + 1
            else:
                high = middle
        if low > starts[i]:
            first = np.int64(indices[starts[i]]) if are_node_times else starts[i]
            last = np.int64(indices[low - 1]) if are_node_times else low - 1
            if first < 0 or first >= times.shape[0]:
                return _OUTSIDE
            if times[first] > times[last]:  # the search has read `last`, so it is inside
                return _DESCENDING
        stops[i] = low
        if most >= 0:
            starts[i] = max(starts[i], low - most)
    return _RIGHT


@kernel
def _are_in_time(out_indptr, edge_ids, ids, node_bits, bounds, times, are_node_times, indices):
    """Whether every drawn edge is within its row's bound. It is, if times ascend; nothing later ever passes."""
    for i in range(ids.shape[0]):
        bound = bounds[ids[i] >> node_bits]
        for e in range(out_indptr[i], out_indptr[i + 1]):
            at = np.int64(indices[edge_ids[e]]) if are_node_times else edge_ids[e]
            if at < 0 or at >= times.shape[0]:
                return _OUTSIDE
            if times[at] > bound:
                return _DESCENDING
    return _RIGHT


@kernel
def _follow(indices, ids, first_row, node_bits, out_indptr, edge_ids, destinations, sources):
    """Fill the rows that drew the edges, and the ids of the edges' sources, which belong to the rows' examples."""
    num_drawn = edge_ids.shape[0]
    for i in range(ids.shape[0]):
        example = (ids[i] >> node_bits) << node_bits
        for e in range(out_indptr[i], out_indptr[i + 1]):
            if e + EDGES_AHEAD < num_drawn:
                prefetch(indices, edge_ids[e + EDGES_AHEAD])
            node = np.int64(indices[edge_ids[e]])
            if node < 0 or node >> node_bits != 0:
                return _OUTSIDE
            destinations[e] = first_row + i
            sources[e] = example | node
    return _RIGHT


@kernel
def _draw_weighted_repeated(starts, stops, states, weight, fanout, longest, out_indptr, edge_ids):
    """Draw from each segment by weight, with replacement, as `hops._draw_weighted_repeated` defines it.

    Fills out_indptr[1:] and the first out_indptr[-1] of edge_ids. Returns whether all weights are allowed.
    """
    sums = np.empty(longest, dtype=np.float64)
    total = 0
    for i in range(starts.shape[0]):
        degree = stops[i] - starts[i]
        sum_so_far = 0.0
        for place in range(degree):
            w = np.float64(weight[starts[i] + place])
            if not (w == 0 or (w >= SMALLEST_WEIGHT and w <= LARGEST_WEIGHT)):
                return False
            sum_so_far += w
            sums[place] = sum_so_far
        if sum_so_far == np.inf:  # no level would lie below the sum
            return False
        state = states[i]
        for _ in range(fanout if sum_so_far > 0 else 0):
            state += GOLDEN
            level = np.float64(mix(state) & _LEVEL_MASK) / _LEVELS * sum_so_far
            edge_ids[total] = starts[i] + np.searchsorted(sums[:degree], level, side="right")
            total += 1
        out_indptr[i + 1] = total
    return True


@kernel
def _with_uncut(starts, stops, fanout, cut_indptr, cut_ids, out_indptr, edge_ids):
    """Join the draws of segments longer than the fan-out with all edges of the others, segment by segment."""
    total = 0
    number = 0
    for i in range(starts.shape[0]):
        if stops[i] - starts[i] > fanout:
            for e in range(cut_indptr[number], cut_indptr[number + 1]):
                edge_ids[total] = cut_ids[e]
                total += 1
            number += 1
        else:
            for e in range(starts[i], stops[i]):
                edge_ids[total] = e
                total += 1
        out_indptr[i + 1] = total


def _draw(segments: tuple[np.ndarray, ...], fanout: int, replace: bool, weight: Tensor | None) -> tuple[Any, Any]:
    """(indptr [n + 1], edge_ids): the draws of each segment, as `hops._draw` defines them."""
    starts, stops, states = segments
    out_indptr = np.zeros(starts.shape[0] + 1, dtype=np.int64)
    longest = int((stops - starts).max())
    takes_all = fanout < 0 or (longest <= fanout and not replace)
    sampling._count(starts, stops, -1 if takes_all else fanout, replace, out_indptr)
    edge_ids = np.empty(out_indptr[-1], dtype=np.int64)
    if takes_all:
        sampling._take_all(starts, out_indptr, edge_ids)
        return out_indptr, edge_ids
    if weight is None:
        draw = sampling._draw_repeated if replace else sampling._draw_distinct
        draw(starts, stops, states, fanout, out_indptr, edge_ids)
        return out_indptr, edge_ids
    if replace:
        are_allowed = _draw_weighted_repeated(*segments, weight.numpy(), fanout, longest, out_indptr, edge_ids)
    else:
        is_cut = stops - starts > fanout
        cut_indptr = np.zeros(np.count_nonzero(is_cut) + 1, dtype=np.int64)
        cut_ids = np.empty(fanout * cut_indptr.shape[0], dtype=np.int64)
        limits = np.empty(cut_indptr.shape[0] - 1, dtype=np.float64)
        cut = (starts[is_cut], stops[is_cut], states[is_cut])
        are_allowed = sampling._draw_weighted(*cut, weight.numpy(), fanout, cut_indptr, cut_ids, limits)
        _with_uncut(starts, stops, fanout, cut_indptr, cut_ids, out_indptr, edge_ids)
    if not are_allowed:
        raise ValueError(WRONG_WEIGHT)
    return out_indptr, edge_ids[: out_indptr[-1]]


def _check(found: int) -> None:
    if found != _RIGHT:
        raise ValueError(_MESSAGES[found])


def draw_edges(relation: Relation, ids: Tensor, first_row: int, fanout: int, draws: Draws) -> Drawn:
    """The edges that some rows draw in one hop; defined in `hops.draw_edges`."""
    num_rows = ids.numel()
    row_ids = ids.numpy()
    indices = relation.indices.numpy()
    starts = np.empty(num_rows, dtype=np.int64)
    stops = np.empty(num_rows, dtype=np.int64)
    states = np.empty(num_rows, dtype=np.uint64)
    bits = draws.node_bits
    where = (relation.indptr.numpy(), row_ids, first_row, bits, np.int64(relation.key), indices.shape[0])
    _check(_find_rows(*where, starts, stops, states))
    timed = None
    if relation.times is not None and draws.bounds is not None:
        timed = (row_ids, bits, draws.bounds.numpy(), relation.times.numpy(), relation.are_node_times, indices)
        _check(_narrow(starts, stops, *timed, fanout if draws.only_last else -1))

    out_indptr, edge_ids = _draw((starts, stops, states), fanout, draws.replace, relation.weight)
    if timed is not None:
        _check(_are_in_time(out_indptr, edge_ids, *timed))

    destinations = np.empty(edge_ids.shape[0], dtype=np.int64)
    sources = np.empty(edge_ids.shape[0], dtype=np.int64)
    _check(_follow(indices, row_ids, first_row, bits, out_indptr, edge_ids, destinations, sources))
    return Drawn(torch.from_numpy(edge_ids), torch.from_numpy(destinations), torch.from_numpy(sources))


def sample_hops(
    relations: Sequence[Relation],
    seeds: Sequence[tuple[int, Tensor]],
    num_types: int,
    replace: bool = False,
    is_disjoint: bool = False,
    bounds: Tensor | None = None,
    only_last: bool = False,
) -> tuple[list[Rows], list[Edges]]:
    """(rows by type, edges by relation) sampled around seeds; defined in `hops.sample_hops`."""
    given = (relations, seeds, num_types, replace, is_disjoint, bounds, only_last)
    return hops.sample_hops(*given, draw=draw_edges, new_map=_new_map)


def _new_map(device: torch.device) -> IdMap:
    # A hash table: ids of pairs are too sparse for an array, and an array over all nodes would be cleared every call.
    return IdMap((1 << ALL_BITS) - 1, dense=False)
