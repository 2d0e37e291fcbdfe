"""Numba kernels that sample neighbours, relabel nodes, gather rows and group edges.

`reference.py` defines each public function in plain torch; results here are equal to the bit. A sampled
block is made in three steps:

    sample_neighbors              IdMap.add                          gather_rows
    nodes -> sampled edges   ->   global ids -> local ids       ->   the rows of the batch's nodes
    (edge_ids, source ids)        (consecutive, first come first)

`sample_tree` makes the tree layout instead: a slot for every possible draw, and no relabelling.

A draw is over a *segment*: a run start .. stop - 1 of the edge array, with a state of a generator. `_segments`
finds them, one per node or slot, and the kernels `_draw_...` know nothing else of the graph:

    indptr, nodes  --_find_segments-->  starts, stops, states  --_draw_distinct, _draw_repeated-->  edge_ids
                                                               --_draw_weighted-->  edge_ids, limits
                           starts, stops, indices              --_draw_by_source-->  edge_ids

Random numbers. A segment's draws are the outputs of a SplitMix64 generator that starts at its state,
mix(key ^ node id), or mix(key ^ slot) in a tree. So a sample does not depend on threads or on the other nodes
of the batch. A smaller fan-out gives the first draws of a larger one.

Memory layout
    indptr     [num_nodes + 1] int64   edges are sorted by destination (CSC)
    indices    [num_edges]             int32 or int64: the source of each edge
    nodes      [n]                     int32 or int64: the nodes to sample for
    edge_ids   [num_sampled] int64     positions in `indices`

Speed. Ids come in no order, so a read is likely to miss the processor's caches. So loops prefetch the cache
line that they will need some iterations later. Every kernel runs in the calling thread.

Bad input. A node id out of range, or an indptr that does not fit the edges, raises a ValueError. A row id
or a group number out of range raises an IndexError. No memory outside the arrays is read before.
`self_loops` does not check its indptr.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu.page_cache import in_order_of_file, is_cold
from hopline.ops.cpu.runtime import GOLDEN, bounded, kernel, mix, prefetch
from hopline.ops.reference import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    WRONG_WEIGHT,
    Children,
    Neighbors,
    WeightedNeighbors,
    all_included,
    inclusion_of,
)
from hopline.ops.tree_slots import Slots

# Numba turns a shift of uint64 by int64 into float64.
_U1 = np.uint64(1)
_U11 = np.uint64(11)
_LARGEST = np.uint64((1 << 64) - 1)

# ---- iterations between the prefetch of a cache line and its use, by what a loop runs over. Rules of thumb.

NODES_AHEAD = 16
"""Nodes between a prefetch and its use."""
EDGES_AHEAD = 24
"""Edges between a prefetch and its use."""
ROWS_AHEAD = 8
"""Rows between a prefetch and its use."""


class _Segments(NamedTuple):
    """`reference.Segments` as the kernels take them."""

    starts: np.ndarray
    stops: np.ndarray
    states: np.ndarray


DENSE_MAP_BYTES = 1 << 29
"""Bytes up to which an `IdMap` is an array over all nodes of the graph; beyond, it is a hash map."""


@kernel
def _find_segments(indptr, nodes, draw_ids, key, num_edges, has_slots, starts, stops, states):
    """Fill the fields of `reference.Segments` for the rows of some nodes; returns whether the input is valid.

    It is not valid if a node is not in the graph, or if its edge range is not within the `num_edges` edges.
    has_slots: whether a node may be -1, an empty slot of a tree, which has an empty segment.
    """
    num_nodes = nodes.shape[0]
    for i in range(num_nodes):
        if i + NODES_AHEAD < num_nodes:
            prefetch(indptr, nodes[i + NODES_AHEAD])
        node = nodes[i]
        if has_slots and node == -1:
            starts[i] = 0
            stops[i] = 0
            continue
        if node < 0 or node + 1 >= indptr.shape[0]:
            return False
        start = indptr[node]
        stop = indptr[node + 1]
        if start < 0 or stop < start or stop > num_edges:
            return False
        starts[i] = start
        stops[i] = stop
        states[i] = mix(np.uint64(key) ^ np.uint64(draw_ids[i]))
    return True


def _segments(
    indptr: Tensor, nodes: Tensor, draw_ids: Tensor, key: int, num_edges: int, has_slots: bool = False
) -> _Segments:
    """The segments of the nodes, each the whole row of its node.

    Raises ValueError if the input is not valid.
    """
    num_nodes = nodes.numel()
    segments = _Segments(
        np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64), np.empty(num_nodes, dtype=np.uint64)
    )
    arrays = (indptr.numpy(), nodes.numpy(), draw_ids.numpy())
    if not _find_segments(*arrays, np.int64(key), num_edges, has_slots, *segments):
        raise ValueError(
            f"a node id is outside 0 .. {indptr.numel() - 2}, or the graph's indptr is damaged: "
            "check the ids, and the dataset by `hopline verify FOLDER`"
        )
    return segments


@kernel
def _count(starts, stops, fanout, replace, out_indptr):
    """Fill out_indptr[1:] with the running number of edges to draw.

    all edges (fanout < 0)    degree
    without replacement       min(degree, fanout)
    with replacement          fanout, or 0 if the segment is empty
    """
    total = 0
    for i in range(starts.shape[0]):
        degree = stops[i] - starts[i]
        if fanout < 0 or (degree < fanout and not replace):
            total += degree
        elif degree > 0:
            total += fanout
        out_indptr[i + 1] = total


@kernel
def _take_all(starts, out_indptr, edge_ids):
    """Write all positions of each segment to edge_ids[out_indptr[i] : out_indptr[i + 1]]."""
    for i in range(starts.shape[0]):
        offset = starts[i] - out_indptr[i]
        for e in range(out_indptr[i], out_indptr[i + 1]):
            edge_ids[e] = offset + e


@kernel
def _draw_repeated(starts, stops, states, fanout, out_starts, edge_ids):
    """Draw from each segment with replacement: draw j is one bounded number of its sequence.

    out_starts: [n or more] where the draws of each segment begin in `edge_ids`.
    """
    for i in range(starts.shape[0]):
        degree = stops[i] - starts[i]
        state = states[i]
        count = fanout if degree > 0 else 0
        for e in range(out_starts[i], out_starts[i] + count):
            state += GOLDEN
            edge_ids[e] = starts[i] + bounded(mix(state), degree)


@kernel
def _shuffle_small(degree, count, state, order, out):
    """Draw `count` different positions of 0 .. degree - 1: the first steps of a Fisher-Yates shuffle.

    Step j swaps position j with a random one from j on, and draws the value that comes to j. Only half of
    the swap is written: position j is not read again.

    order: [degree or more] int64, scratch; out: [count] int64. Costs O(degree), so it is for small degrees.
    """
    for j in range(degree):
        order[j] = j
    for j in range(count):
        state += GOLDEN
        target = j + bounded(mix(state), degree - j)
        out[j] = order[target]
        order[target] = order[j]


@kernel
def _shuffle_large(degree, count, state, slots, swap_target, swap_value, out):
    """Draw the same positions as `_shuffle_small` at a cost of O(count), for any degree.

    Reference:
        held = {}                              # position -> its value, if a swap has changed it
        for j in range(count):
            target = j + bounded(draw(j), degree - j)
            out[j] = held.get(target, target)
            held[target] = held.get(j, j)      # half of the swap

    `held` is a hash table with linear probing. Swap j has the key swap_target[j], a position, and the value
    swap_value[j]. A slot holds the number of the latest swap into its position, or -1 if it is empty. There
    are at least twice as many slots as swaps, so probing ends soon. The table is left empty for the next
    node.

    slots: [power of two, 2 * count or more] int64, all -1; swap_target, swap_value: [count or more] int64,
    scratch.
    """
    mask = slots.shape[0] - 1  # the size is a power of two, so `& mask` is the modulo
    for j in range(count):
        state += GOLDEN
        target = j + bounded(mix(state), degree - j)

        target_slot = (target * 0x9E3779B1) & mask  # multiplicative hashing, by 2**32 / golden ratio
        while slots[target_slot] >= 0 and swap_target[slots[target_slot]] != target:
            target_slot = (target_slot + 1) & mask
        out[j] = swap_value[slots[target_slot]] if slots[target_slot] >= 0 else target

        j_slot = (j * 0x9E3779B1) & mask
        while slots[j_slot] >= 0 and swap_target[slots[j_slot]] != j:
            j_slot = (j_slot + 1) & mask
        swap_value[j] = swap_value[slots[j_slot]] if slots[j_slot] >= 0 else j
        swap_target[j] = target
        slots[target_slot] = j
    slots[:] = -1


@kernel
def _draw_distinct(starts, stops, states, fanout, out_starts, edge_ids):
    """Draw from each segment without replacement: the first numbers of its keyed shuffle.

    out_starts: [n or more] where the draws of each segment begin in `edge_ids`. Scratch arrays are allocated once
    for all segments.
    """
    num_slots = 4
    while num_slots < 2 * fanout:
        num_slots *= 2
    order = np.empty(4 * fanout, dtype=np.int64)
    slots = np.full(num_slots, -1, dtype=np.int64)
    swap_target = np.empty(fanout, dtype=np.int64)
    swap_value = np.empty(fanout, dtype=np.int64)
    for i in range(starts.shape[0]):
        degree = stops[i] - starts[i]
        out = edge_ids[out_starts[i] : out_starts[i] + min(degree, fanout)]
        # Both give the same draws. Up to four times the fan-out (a rule of thumb) an array is used, and no
        # hashing.
        if degree <= order.shape[0]:
            _shuffle_small(degree, out.shape[0], states[i], order, out)
        else:
            _shuffle_large(degree, out.shape[0], states[i], slots, swap_target, swap_value, out)
        for j in range(out.shape[0]):
            out[j] += starts[i]


@kernel
def _replace_first(keys, places, size, key, place):
    """Put (key, place) into a heap instead of its first entry, which is the largest by key, then by place.

    The heap is the first `size` of keys and places: entries 2i + 1 and 2i + 2 are not larger than entry i.
    """
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size and (
            keys[child + 1] > keys[child] or (keys[child + 1] == keys[child] and places[child + 1] > places[child])
        ):
            child += 1
        if keys[child] < key or (keys[child] == key and places[child] < place):
            break
        keys[hole] = keys[child]
        places[hole] = places[child]
        hole = child
    keys[hole] = key
    places[hole] = place


@kernel
def _sort_heap(keys, places, size):
    """Sort the entries of a heap by key, then by place."""
    for last in range(size - 1, 0, -1):
        key = keys[0]
        place = places[0]
        _replace_first(keys, places, last, keys[last], places[last])
        keys[last] = key
        places[last] = place


@kernel
def _draw_weighted(starts, stops, states, weight, fanout, out_indptr, edge_ids, limits):
    """Draw from each segment the edges with the smallest keys, as `reference.sample_weighted` defines them.

    Fills out_indptr[1:], the first out_indptr[-1] of edge_ids, and limits, the smallest keys that are not drawn.
    Returns whether all weights are allowed. A heap holds the smallest keys so far, one more than are drawn.
    """
    keys = np.empty(fanout + 1, dtype=np.float64)
    places = np.empty(fanout + 1, dtype=np.int64)
    total = 0
    num_segments = starts.shape[0]
    for i in range(num_segments):
        if i + NODES_AHEAD < num_segments:
            prefetch(weight, starts[i + NODES_AHEAD])
        degree = stops[i] - starts[i]
        size = min(degree, fanout) + 1
        keys[:size] = np.inf
        places[:size] = degree
        state = states[i]
        for place in range(degree):
            state += GOLDEN
            w = np.float64(weight[starts[i] + place])
            if w == 0:
                continue
            if not (w >= SMALLEST_WEIGHT and w <= LARGEST_WEIGHT):  # NaN is neither
                return False
            u = np.float64(max(mix(state) >> _U11, _U1)) * 2.0**-53
            # A logarithm costs more than the rest of the loop, and -log(u) is at least 1 - u. The margin is for
            # rounding.
            if (1 - u) * (1 - 1e-9) > keys[0] * w:
                continue
            key = -np.log(u) / w
            if key < keys[0]:  # of equal keys the earlier one is in the heap
                _replace_first(keys, places, size, key, place)
        _sort_heap(keys, places, size)
        limits[i] = keys[size - 1]
        for j in range(size - 1):
            if keys[j] < np.inf:
                edge_ids[total] = starts[i] + places[j]
                total += 1
        out_indptr[i + 1] = total
    return True


@kernel
def _draw_by_source(starts, stops, indices, copies, key, fanout, out_starts, edge_ids):
    """Draw from each segment the edges whose sources have the smallest numbers, as `reference.sample_labor` does.

    copies: [num_edges], or empty if no edge has a copy. out_starts: as in `_draw_distinct`.
    """
    numbers = np.empty(fanout, dtype=np.uint64)
    places = np.empty(fanout, dtype=np.int64)
    num_segments = starts.shape[0]
    for i in range(num_segments):
        if i + NODES_AHEAD < num_segments:
            prefetch(indices, starts[i + NODES_AHEAD])
        degree = stops[i] - starts[i]
        size = min(degree, fanout)
        if size == 0:
            continue
        numbers[:size] = _LARGEST
        places[:size] = degree
        for place in range(degree):
            edge = starts[i] + place
            state = mix(np.uint64(key) ^ np.uint64(indices[edge])) + GOLDEN
            if copies.shape[0]:
                state += GOLDEN * np.uint64(copies[edge])
            number = mix(state)
            # The second case is the largest number of all, met before the heap is full.
            if number < numbers[0] or (number == numbers[0] and place < places[0]):
                _replace_first(numbers, places, size, number, place)
        _sort_heap(numbers, places, size)
        for j in range(size):
            edge_ids[out_starts[i] + j] = starts[i] + places[j]


@kernel
def _take(values, positions, out):
    """out[e] = values[positions[e]]."""
    size = positions.shape[0]
    for e in range(size):
        if e + EDGES_AHEAD < size:
            prefetch(values, positions[e + EDGES_AHEAD])
        out[e] = values[positions[e]]


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int,
    replace: bool = False,
    draw_ids: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each node, all of them with -1; as `reference.sample_neighbors`."""
    segments = _segments(indptr, nodes, nodes if draw_ids is None else draw_ids, key, indices.numel())
    out_indptr = np.zeros(nodes.numel() + 1, dtype=np.int64)
    _count(segments.starts, segments.stops, fanout, replace, out_indptr)
    positions = np.empty(out_indptr[-1], dtype=np.int64)
    if fanout < 0:
        _take_all(segments.starts, out_indptr, positions)
    else:
        draw = _draw_repeated if replace else _draw_distinct
        draw(*segments, fanout, out_indptr, positions)
    edge_ids = torch.from_numpy(positions)
    return Neighbors(torch.from_numpy(out_indptr), gather_rows(indices, edge_ids), edge_ids)


def sample_weighted(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int,
    draw_ids: Tensor | None = None,
) -> WeightedNeighbors:
    """Up to `fanout` in-edges of each node by weight, all of them with -1; as `reference.sample_weighted`."""
    if fanout < 0:
        drawn = sample_neighbors(indptr, indices, nodes, fanout, key)
        return WeightedNeighbors(*drawn, all_included(drawn.edge_ids))
    segments = _segments(indptr, nodes, nodes if draw_ids is None else draw_ids, key, indices.numel())
    out_indptr = np.zeros(nodes.numel() + 1, dtype=np.int64)
    limits = np.empty(nodes.numel(), dtype=np.float64)
    # An upper bound: edges of weight 0 are not drawn.
    positions = np.empty(np.minimum(segments.stops - segments.starts, fanout).sum(), dtype=np.int64)
    if not _draw_weighted(*segments, weight.numpy(), fanout, out_indptr, positions, limits):
        raise ValueError(WRONG_WEIGHT)
    edge_ids = torch.from_numpy(positions[: out_indptr[-1]])
    offsets = torch.from_numpy(out_indptr)
    inclusion = inclusion_of(gather_rows(weight, edge_ids), torch.from_numpy(limits), offsets)
    return WeightedNeighbors(offsets, gather_rows(indices, edge_ids), edge_ids, inclusion)


def sample_labor(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, copies: Tensor | None = None
) -> Neighbors:
    """Up to `fanout` in-edges of each node, chosen by their sources' numbers; as `reference.sample_labor`."""
    if fanout < 0:
        return sample_neighbors(indptr, indices, nodes, fanout, key)
    segments = _segments(indptr, nodes, nodes, key, indices.numel())
    out_indptr = np.zeros(nodes.numel() + 1, dtype=np.int64)
    _count(segments.starts, segments.stops, fanout, False, out_indptr)
    positions = np.empty(out_indptr[-1], dtype=np.int64)
    copy_numbers = np.empty(0, dtype=np.int32) if copies is None else copies.numpy()
    _draw_by_source(
        *(segments.starts, segments.stops, indices.numpy(), copy_numbers, np.int64(key), fanout, out_indptr, positions)
    )
    edge_ids = torch.from_numpy(positions)
    return Neighbors(torch.from_numpy(out_indptr), gather_rows(indices, edge_ids), edge_ids)


@kernel
def _find_copies(indptr, indices, copies):
    """Write the number of earlier edges with the same source, within each row, to `copies` if it is not empty.

    Returns whether there is one.
    """
    found = False
    for node in range(indptr.shape[0] - 1):
        row = indices[indptr[node] : indptr[node + 1]]
        is_sorted = True
        for j in range(1, row.shape[0]):
            is_sorted &= row[j - 1] <= row[j]
        order = np.arange(0) if is_sorted else np.argsort(row, kind="mergesort")
        run = 0  # earlier edges of the same source
        for j in range(1, row.shape[0]):
            here = j if is_sorted else order[j]
            before = j - 1 if is_sorted else order[j - 1]
            run = run + 1 if row[here] == row[before] else 0
            if run and copies.shape[0] == 0:
                return True
            if run:
                found = True
                copies[indptr[node] + here] = run
    return found


def edge_copies(indptr: Tensor, indices: Tensor) -> Tensor | None:
    """[num_edges] int32: how many earlier in-edges of its node have each edge's source; None if none has any."""
    # The first call ends at the first copy. Most graphs have none, and get no array.
    if not _find_copies(indptr.numpy(), indices.numpy(), np.empty(0, dtype=np.int32)):
        return None
    copies = np.zeros(indices.numel(), dtype=np.int32)
    _find_copies(indptr.numpy(), indices.numpy(), copies)
    return torch.from_numpy(copies)


def row_entries(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr [n + 1], positions [num_entries]), int64: all entries of the given rows of a CSR structure."""
    segments = _segments(indptr, nodes, nodes, 0, num_edges=int(indptr[-1]))
    out_indptr = np.zeros(nodes.numel() + 1, dtype=np.int64)
    _count(segments.starts, segments.stops, -1, False, out_indptr)
    positions = np.empty(out_indptr[-1], dtype=np.int64)
    _take_all(segments.starts, out_indptr, positions)
    return torch.from_numpy(out_indptr), torch.from_numpy(positions)


@kernel
def _add_to_array(local_of, node_ids, size, nodes, idx):
    """Add nodes to a map that is an array; returns its new size, or -1 - size if a node is out of range.

    local_of: [num_nodes] int32, the local id of each node, or -1.
    node_ids: [size + n + 1 or more] int64, the node of each local id.
    idx: [n] int32, filled: the local ids of `nodes`.

    Nodes before a bad one are added, and counted in `size`.
    """
    num = nodes.shape[0]
    for e in range(num):
        if e + EDGES_AHEAD < num:
            prefetch(local_of, nodes[e + EDGES_AHEAD])
        node = nodes[e]
        if node < 0 or node >= local_of.shape[0]:
            return -1 - size

        # No `if is_new:` here. Whether a node is new is a coin toss, and a branch would be predicted
        # wrongly half the time. A known node's write to node_ids[size] does no harm: the next new node
        # overwrites it, or it lies past the end.
        local = local_of[node]
        is_new = local < 0
        local = size if is_new else local
        node_ids[size] = node
        local_of[node] = local
        idx[e] = local
        size += is_new
    return size


@kernel
def _clear_array(local_of, node_ids, size):
    """Set `local_of` of the first `size` of `node_ids` back to -1."""
    for i in range(size):
        if i + EDGES_AHEAD < size:
            prefetch(local_of, node_ids[i + EDGES_AHEAD])
        local_of[node_ids[i]] = -1


@kernel
def _add_to_hash_table(slots, node_ids, size, num_nodes, nodes, idx):
    """Add nodes to a map that is a hash table; returns its new size, or -1 - size if a node is out of range.

    slots: [power of two] int32, a hash table with linear probing. A slot holds a local id, or -1 if it is
    empty; the key is the node node_ids[local id]. At least half of the slots stay empty, so probing ends.
    node_ids: [size + n or more] int64, the node of each local id.
    idx: [n] int32, filled: the local ids of `nodes`.
    """
    mask = np.uint64(slots.shape[0] - 1)
    num = nodes.shape[0]
    for e in range(num):
        if e + EDGES_AHEAD < num:
            prefetch(slots, mix(np.uint64(nodes[e + EDGES_AHEAD])) & mask)
        node = nodes[e]
        if node < 0 or node >= num_nodes:
            return -1 - size
        slot = mix(np.uint64(node)) & mask
        while slots[slot] >= 0 and node_ids[slots[slot]] != node:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            slots[slot] = size
            node_ids[size] = node
            size += 1
        idx[e] = slots[slot]
    return size


@kernel
def _enter(slots, node_ids, start, stop):
    """Enter local ids start .. stop - 1 into a hash table. Of several with one node, it finds the first."""
    mask = np.uint64(slots.shape[0] - 1)
    for local in range(start, stop):
        node = node_ids[local]
        slot = mix(np.uint64(node)) & mask
        while slots[slot] >= 0 and node_ids[slots[slot]] != node:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            slots[slot] = local


class IdMap:
    """A map from global node ids to consecutive local ids, in order of first occurrence.

    A map is made once and used for many batches, with `clear` between them. One thread at a time may use it.

    Up to `DENSE_MAP_BYTES` the map is *dense*: an array with an entry for every node of the graph. `clear`
    resets only the entries that were set, so the time of a batch depends on its own nodes alone. In a
    larger graph the map is a hash table, which grows with the largest batch and is cleared as a whole.
    """

    def __init__(self, num_nodes: int, dense: bool | None = None) -> None:
        self.dense = num_nodes * 4 <= DENSE_MAP_BYTES if dense is None else dense
        self._num_nodes = num_nodes
        self._map = np.full(num_nodes if self.dense else 1 << 12, -1, dtype=np.int32)
        self._ids = np.empty(1 << 10, dtype=np.int64)
        self.size = 0

    def add(self, nodes: Tensor) -> Tensor:
        """[n] int32: the local id of each node. New nodes get the next free local ids.

        Raises ValueError if a node is outside the graph.
        """
        new_nodes = nodes.numpy()
        # One more than can be needed: `_add_to_array` also writes at position `size`.
        self._reserve(self.size + new_nodes.shape[0] + 1)
        idx = np.empty(new_nodes.shape[0], dtype=np.int32)
        if self.dense:
            size = _add_to_array(self._map, self._ids, self.size, new_nodes, idx)
        else:
            size = _add_to_hash_table(self._map, self._ids, self.size, self._num_nodes, new_nodes, idx)
        # Nodes added before a bad one count as well: a dense map must know them, or `clear` would leave
        # their marks.
        self.size = size if size >= 0 else -1 - size
        if size < 0:
            raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
        return torch.from_numpy(idx)

    def _reserve(self, size: int) -> None:
        """Allocate for `size` nodes in all. A hash table that could get more than half full is built anew."""
        if size >= 1 << 31:  # local ids are int32
            raise ValueError("a batch may reach at most 2**31 nodes: make batch_size or the fan-outs smaller")
        if size > self._ids.shape[0]:
            # Longer than `size` asks for, so that a batch that grows is copied only a few times.
            self._ids = np.concatenate([self._ids[: self.size], np.empty(size, dtype=np.int64)])
        if not self.dense and 2 * size > self._map.shape[0]:
            self._map = np.full(1 << (2 * size).bit_length(), -1, dtype=np.int32)
            _enter(self._map, self._ids, 0, self.size)

    def add_each(self, nodes: Tensor) -> None:
        """Give every node a local id of its own, also a repeated one. `add` finds its first. Only in a hash table."""
        assert not self.dense
        size = self.size + nodes.numel()
        self._reserve(size)
        self._ids[self.size : size] = nodes.numpy()
        _enter(self._map, self._ids, self.size, size)
        self.size = size

    def ids(self, start: int = 0) -> Tensor:
        """[size - start] int64: the global id of each local id from `start` on, a copy."""
        return torch.from_numpy(self._ids[start : self.size].copy())

    def clear(self) -> None:
        """Forget all nodes, for the next batch."""
        if self.dense:
            _clear_array(self._map, self._ids, self.size)
        else:
            self._map.fill(-1)
        self.size = 0


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [num_distinct] int64, idx [num_neighbors] int32): distinct nodes, and neighbours' local ids.

    Seeds come first in `ids`, then neighbours by first occurrence.
    """
    # The map is an array up to the largest id, unless that has over 16 entries per given node. A rule of
    # thumb.
    largest = max((int(t.max()) for t in (seeds, neighbors) if t.numel()), default=0)
    id_map = IdMap(largest + 1, dense=largest < 16 * (seeds.numel() + neighbors.numel()))
    id_map.add(seeds.long())
    idx = id_map.add(neighbors)
    return id_map.ids(), idx


@kernel
def _are_in_range(ids, size):
    """Whether all ids are within 0 .. size - 1."""
    is_inside = True
    for i in range(ids.shape[0]):
        is_inside &= (ids[i] >= 0) & (ids[i] < size)
    return is_inside


@kernel
def _gather(rows, ids, out):
    """out[i] = rows[ids[i]].

    All cache lines of a row (64 bytes each) are prefetched ROWS_AHEAD rows before.
    """
    num, width = out.shape
    for i in range(num):
        if i + ROWS_AHEAD < num:
            first_word = np.int64(ids[i + ROWS_AHEAD]) * width
            for word in range(0, width, max(1, 64 // rows.itemsize)):
                prefetch(rows, first_word + word)
        row = rows[ids[i]]
        target = out[i]
        for c in range(width):
            target[c] = row[c]


@kernel
def _gather_at(rows, ids, positions, out):
    """out[i] = rows[ids[i]] for each i in `positions`."""
    for i in positions:
        row = rows[ids[i]]
        target = out[i]
        for c in range(row.shape[0]):
            target[c] = row[c]


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids], for any dtype. ids: [n] int32 or int64.

    Rows are copied as machine words, the widest that divides a row, so one kernel serves every dtype. Rows
    of a mapped file that are not in memory are read in the order of the file (see `page_cache`). Raises
    IndexError if an id is out of range.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row ids must be a 1-D int32 or int64 tensor, not {list(ids.shape)} {ids.dtype}")
    if not _are_in_range(ids.numpy(), rows.size(0)):
        raise IndexError(f"a row id is outside 0 .. {rows.size(0) - 1}")
    if not rows.is_contiguous() or (rows.requires_grad and torch.is_grad_enabled()):
        # Not rows[ids]: in threads, its gradient is added up in any order.
        return rows.index_select(0, ids.long().to(rows.device))
    out = torch.empty((ids.numel(), *rows.shape[1:]), dtype=rows.dtype)
    if out.numel() == 0:
        return out

    row_bytes = rows.element_size() * rows[:1].numel()
    word = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % w.itemsize == 0)
    # A tensor may start at an address that is not a multiple of the word.
    if rows.data_ptr() % word.itemsize or out.data_ptr() % word.itemsize:
        word = torch.uint8
    width = row_bytes // word.itemsize

    source = _words(rows, word).reshape(-1, width)
    row_ids = ids.numpy()
    target = _words(out, word).reshape(-1, width)
    if is_cold(rows, row_ids):
        for positions in in_order_of_file(rows, row_ids):
            _gather_at(source, row_ids, positions, target)
    elif width == 1:
        _take(source.reshape(-1), row_ids, target.reshape(-1))
    else:
        _gather(source, row_ids, target)
    return out


def _words(tensor: Tensor, word: torch.dtype) -> np.ndarray:
    """The memory of a contiguous tensor as a flat array of words. It is shared, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(str(word).removeprefix("torch."))


@kernel
def _group(keys, cursor, order):
    """The second pass of a counting sort: write each edge to the next free position of its group.

    cursor: [num_groups] int64, the start of each group at first, and its end at last.
    """
    for e in range(keys.shape[0]):
        group = keys[e]
        order[cursor[group]] = e
        cursor[group] += 1


@kernel
def _histogram(keys, counts):
    """counts[g] += the number of keys that are g."""
    for e in range(keys.shape[0]):
        counts[keys[e]] += 1


def group_by_key(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(indptr [num_groups + 1], order [num_edges]), int64: a stable counting sort of edges by their keys.

    Group g has the edges order[indptr[g] : indptr[g + 1]]. Raises IndexError if a key is outside
    0 .. num_groups - 1.
    """
    groups = keys.numpy()
    if not _are_in_range(groups, num_groups):
        raise IndexError(f"a group is outside 0 .. {num_groups - 1}")
    indptr = np.zeros(num_groups + 1, dtype=np.int64)
    _histogram(groups, indptr[1:])
    np.cumsum(indptr, out=indptr)
    order = np.empty(groups.shape[0], dtype=np.int64)
    _group(groups, indptr[:-1].copy(), order)
    return torch.from_numpy(indptr), torch.from_numpy(order)


@kernel
def _find_self_loops(indptr, indices, out):
    """Write the positions of self-loops to `out` as far as they fit; returns how many there are."""
    count = 0
    for node in range(indptr.shape[0] - 1):
        for e in range(indptr[node], indptr[node + 1]):
            if indices[e] == node:
                if count < out.shape[0]:
                    out[count] = e
                count += 1
    return count


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """[num_loops] int64: the positions of the edges from a node to itself, ascending."""
    # The first call only counts, so that the second has an array of the right size to write to.
    nothing = np.empty(0, dtype=np.int64)
    num_loops = _find_self_loops(indptr.numpy(), indices.numpy(), nothing)
    positions = np.empty(num_loops, dtype=np.int64)
    if num_loops:
        _find_self_loops(indptr.numpy(), indices.numpy(), positions)
    return torch.from_numpy(positions)


@kernel
def _take_children(indices, starts, stops, replace, edge_ids, counts, out):
    """out[i, j] = the source of edge edge_ids[i, j], or -1 from j = counts[i] on. Fills `counts` first."""
    fanout = edge_ids.shape[1]
    flat = edge_ids.reshape(-1)
    for i in range(counts.shape[0]):
        degree = stops[i] - starts[i]
        count = min(degree, fanout) if not replace or degree == 0 else fanout
        counts[i] = count
        for j in range(fanout):
            position = i * fanout + j
            if position + EDGES_AHEAD < flat.shape[0]:
                prefetch(indices, flat[position + EDGES_AHEAD])
            out[i, j] = indices[edge_ids[i, j]] if j < count else -1


def sample_children(
    indptr: Tensor, indices: Tensor, nodes: Tensor, slots: Tensor, fanout: int, key: int, replace: bool = False
) -> Children:
    """Up to `fanout` in-edges of the node in each slot of a tree; defined in `reference.sample_children`.

    Keyed by (key, slot): a node in two slots of a tree has different draws in them.
    """
    num_slots = nodes.numel()
    segments = _segments(indptr, nodes, slots, key, indices.numel(), has_slots=True)
    positions = np.zeros((num_slots, fanout), dtype=np.int64)
    draw = _draw_repeated if replace else _draw_distinct
    draw(*segments, fanout, np.arange(0, num_slots * fanout, fanout), positions.reshape(-1))

    counts = np.empty(num_slots, dtype=np.int32)
    ids = torch.empty(num_slots, fanout, dtype=indices.dtype)
    _take_children(indices.numpy(), segments.starts, segments.stops, replace, positions, counts, ids.numpy())
    return Children(ids, torch.from_numpy(counts), torch.from_numpy(positions))


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`, hop by hop; defined in `reference.sample_tree`."""
    return reference.sample_tree(indptr, indices, seeds, slots, key, replace, with_edges, draw=sample_children)
