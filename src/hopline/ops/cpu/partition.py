"""Numba kernels of partitions: dividing a graph into parts, what the parts cut, and how often nodes are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix, over_ranges, prefetch
from hopline.ops.random import derive_key

AHEAD = 24
"""Edges ahead of their use whose cache lines are asked for."""
SETTLED = 0.01
"""Passes end when no more than this share of the nodes moved in one."""
CHUNK_NODES = 1 << 18
"""Nodes between two reports of progress."""
TRIES = 32
"""Parts that are asked for room for a whole cluster before it is split."""

_U32 = np.uint64(32)
_SURE = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def _count(label, weight, mask, keys, counts, slots, used):
    """Add to the count of a label in a small hash map; returns how many labels it holds."""
    at = np.int64((np.uint64(label) * GOLDEN) >> _U32) & mask
    while keys[at] != label and keys[at] >= 0:
        at = (at + 1) & mask
    if keys[at] < 0:
        keys[at] = label
        slots[used] = at
        used += 1
    counts[at] += weight
    return used


@kernel
def _choose(own, node, size, high, key, settle, keys, counts, slots, used):
    """The label with most neighbours among those with room, and the map emptied; equal ones are drawn, or own stays."""
    best, most, luck = own, 0, _SURE
    if not settle:
        luck = mix(key ^ np.uint64(own) ^ (np.uint64(node) << _U32))
    for i in range(used):
        if keys[slots[i]] == own:
            most = counts[slots[i]]
    for i in range(used):
        label, count = keys[slots[i]], counts[slots[i]]
        keys[slots[i]] = -1
        counts[slots[i]] = 0
        if label == own or count < most or size[label] >= high:
            continue
        draw = mix(key ^ np.uint64(label) ^ (np.uint64(node) << _U32))
        if count > most or draw > luck:
            best, most, luck = label, count, draw
    return best


@kernel
def _vote(indptr, indices, node, label, ballots):
    """A node's label told to the sources of its in-edges, which keep the one that leads (Boyer and Moore's count)."""
    for e in range(indptr[node], indptr[node + 1]):
        source = indices[e]
        if source == node:
            continue
        if ballots[source, 1] == 0:
            ballots[source, 0] = label
            ballots[source, 1] = 1
        elif ballots[source, 0] == label:
            ballots[source, 1] += 1
        else:
            ballots[source, 1] -= 1


@kernel
def _sweep(indptr, indices, labels, size, ballots, low, high, key, settle, keys, counts, slots, first, last):
    """Each node of a range takes the label that most neighbours have; returns how many nodes moved.

    A label has at most `high` nodes, and is left by none once it has `low`. In-neighbours are looked up; of the
    neighbours by out-edges, which are not stored with the node, the ballots know the leading label.
    """
    num_edges, moved = indices.shape[0], 0
    for node in range(first, last):
        start, stop = indptr[node], indptr[node + 1]
        mask = 7
        while mask + 1 < 2 * (stop - start + 1):
            mask = 2 * mask + 1
        used = 0
        for e in range(start, stop):
            if e + AHEAD < num_edges:
                prefetch(labels, indices[e + AHEAD])
                prefetch(ballots, 2 * np.int64(indices[e + AHEAD]))
            if indices[e] != node:
                used = _count(labels[indices[e]], 1, mask, keys, counts, slots, used)
        if ballots[node, 1] > 0:
            used = _count(ballots[node, 0], ballots[node, 1], mask, keys, counts, slots, used)
            ballots[node, 1] = 0
        own = labels[node]
        best = _choose(own, node, size, high, key, settle, keys, counts, slots, used)
        if best != own and size[own] > low:
            labels[node] = best
            size[own] -= 1
            size[best] += 1
            moved += 1
        _vote(indptr, indices, node, labels[node], ballots)
    return moved


@kernel
def _best_part(indptr, indices, members, part_of, size, high, links, touched):
    """The part most linked to a cluster, the emptier the better; -1 if none of them has room."""
    num_touched = 0
    for i in range(members.shape[0]):
        for e in range(indptr[members[i]], indptr[members[i] + 1]):
            part = part_of[indices[e]]
            if part >= 0:
                if links[part] == 0:
                    touched[num_touched] = part
                    num_touched += 1
                links[part] += 1
    best, most = -1, 0.0
    for t in range(num_touched):
        part = touched[t]
        score = links[part] * (1.0 - size[part] / (high + 1.0))
        if size[part] + members.shape[0] <= high and score > most:
            best, most = part, score
        links[part] = 0
    return best


@kernel
def _pack(indptr, indices, order, ptr, clusters, high, part_of, size):
    """Clusters one by one into parts of at most `high` nodes: where their links are, else in turn, else in pieces."""
    num_parts = size.shape[0]
    mean = part_of.shape[0] / num_parts
    links, touched = np.zeros(num_parts, np.int64), np.empty(num_parts, np.int64)
    open_parts, num_open, turn = np.arange(num_parts), num_parts, 0  # those below the mean
    for cluster in clusters:
        members = order[ptr[cluster] : ptr[cluster + 1]]
        count = members.shape[0]
        part = _best_part(indptr, indices, members, part_of, size, high, links, touched)
        tries = 0
        while part < 0 and num_open > 0 and tries < TRIES:
            turn = turn if turn < num_open else 0
            if size[open_parts[turn]] >= mean:
                num_open -= 1
                open_parts[turn] = open_parts[num_open]
                continue
            if size[open_parts[turn]] + count <= high:
                part = open_parts[turn]
            turn, tries = turn + 1, tries + 1
        whole = part >= 0
        for i in range(count):
            # The room below the mean is never less than what is left.
            while not whole and (part < 0 or size[part] >= mean):
                turn = turn if turn < num_open else 0
                part = open_parts[turn]
                if size[part] >= mean:
                    num_open -= 1
                    open_parts[turn] = open_parts[num_open]
            part_of[members[i]] = part
            size[part] += 1


@kernel
def _even_out(order, part_of, size, low):
    """Parts below `low` get nodes of parts above the mean, neighbours in `order` together."""
    mean, light = part_of.shape[0] / size.shape[0], 0
    for node in order:
        while light < size.shape[0] and size[light] >= low:
            light += 1
        if light == size.shape[0]:
            return
        if size[part_of[node]] > mean:
            size[part_of[node]] -= 1
            size[light] += 1
            part_of[node] = light


@kernel
def _largest_degree(indptr):
    most = 0
    for node in range(indptr.shape[0] - 1):
        most = max(most, indptr[node + 1] - indptr[node])
    return most


def stream_parts(
    indptr: np.ndarray,
    indices: np.ndarray,
    num_parts: int,
    slack: float,
    key: int,
    passes: int,
    advance: Callable[[int], object],
) -> np.ndarray:
    """[num_nodes] int32: parts of (1 ± slack) times the mean size with few edges between them; 32 bytes per node.

    Labels spread over the edges until nodes of a community share one, each at most a part's size (Meyerhenke, Sanders
    and Schulz, 2014). The clusters are packed into parts, largest first, and then nodes move to the part most of
    their neighbours are in. Every pass reads the edges once in their order; `advance` hears of each range of nodes.
    """
    num_nodes = indptr.shape[0] - 1
    mean = num_nodes / num_parts
    low = max(1, int(mean * (1 - slack)))
    high = max(-(-num_nodes // num_parts), int(mean * (1 + slack)))
    scratch = _scratch(_largest_degree(indptr))

    def sweep(labels: np.ndarray, size: np.ndarray, least: int, most: int, times: range, settle: bool) -> None:
        ballots = np.zeros((num_nodes, 2), dtype=np.int32)
        for number in times:
            moved, pass_key = 0, np.uint64(derive_key(key, number) % 2**64)
            for first in range(0, num_nodes, CHUNK_NODES):
                last = min(first + CHUNK_NODES, num_nodes)
                moved += _sweep(
                    indptr, indices, labels, size, ballots, least, most, pass_key, settle, *scratch, first, last
                )
                advance(last - first)
            if moved <= SETTLED * num_nodes:
                return

    labels, size = np.arange(num_nodes, dtype=np.int32), np.ones(num_nodes, dtype=np.int32)
    sweep(labels, size, 0, max(1, int(mean)), range(passes), False)
    parts, part_sizes = _packed(indptr, indices, labels, size, num_parts, low, high)
    del labels, size
    sweep(parts, part_sizes, low, high, range(passes, passes + max(2, passes // 2)), True)
    return parts


def _scratch(max_edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A hash map (keys, counts) for the labels of any node's neighbours, and the list of its slots in use."""
    room = max(8, 1 << (2 * max_edges + 1).bit_length())
    return np.full(room, -1, np.int32), np.zeros(room, np.int32), np.empty(max_edges + 1, np.int64)


def _packed(
    indptr: np.ndarray, indices: np.ndarray, labels: np.ndarray, size: np.ndarray, num_parts: int, low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Clusters, given as labels and how many nodes have each, as parts and their sizes."""
    ptr = np.zeros(size.shape[0] + 1, dtype=np.int64)
    np.cumsum(size, out=ptr[1:])
    order = np.empty(labels.shape[0], dtype=np.int32)
    _group(labels, ptr[:-1].copy(), order)
    clusters = np.argsort(-size, kind="stable")[: np.count_nonzero(size)]
    parts, part_sizes = labels, np.zeros(num_parts, dtype=np.int32)  # the labels are not needed any more
    parts.fill(-1)
    _pack(indptr, indices, order, ptr, clusters, high, parts, part_sizes)
    _even_out(order, parts, part_sizes, low)
    return parts, part_sizes


@kernel
def _group(labels, cursor, order):
    """Nodes by label, ascending within one."""
    for node in range(labels.shape[0]):
        order[cursor[labels[node]]] = node
        cursor[labels[node]] += 1


@kernel
def _count_both_ways(indptr, indices, degrees, first, last):
    for node in range(first, last):
        own = 0
        for e in range(indptr[node], indptr[node + 1]):
            if indices[e] != node:
                own += 1
                atomic_add(degrees, indices[e], 1)
        atomic_add(degrees, node, own)


@kernel
def _fill_both_ways(indptr, indices, cursor, neighbors):
    for node in range(indptr.shape[0] - 1):
        for e in range(indptr[node], indptr[node + 1]):
            source = indices[e]
            if e + AHEAD < indices.shape[0]:
                prefetch(cursor, indices[e + AHEAD])
            if source != node:
                neighbors[cursor[node]] = source
                cursor[node] += 1
                neighbors[cursor[source]] = node
                cursor[source] += 1


@kernel
def _sort_rows(starts, neighbors, kept, first, last):
    """Each row in ascending order with every neighbour once; `kept` of them."""
    for node in range(first, last):
        row = neighbors[starts[node] : starts[node + 1]]
        row.sort()
        count = 0
        for i in range(row.shape[0]):
            if i == 0 or row[i] != row[i - 1]:
                # Written at or before what is read next, so the comparison above sees the sorted row.
                row[count] = row[i]
                count += 1
        kept[node] = count


@kernel
def _close_gaps(starts, kept, neighbors, out_starts):
    for node in range(kept.shape[0]):
        source, target = starts[node], out_starts[node]
        for i in range(kept[node]):
            neighbors[target + i] = neighbors[source + i]


def undirected(indptr: np.ndarray, indices: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(starts, neighbors) of the graph with every edge in both directions, once, and no self-loops."""
    num_nodes, num_edges = indptr.shape[0] - 1, indices.shape[0]
    degrees = np.zeros(num_nodes, dtype=np.int64)
    over_ranges(lambda a, b: _count_both_ways(indptr, indices, degrees, a, b), num_nodes, num_edges)
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(degrees, out=starts[1:])
    neighbors = np.empty(int(starts[-1]), dtype=dtype)
    _fill_both_ways(indptr, indices, starts[:-1].copy(), neighbors)
    over_ranges(lambda a, b: _sort_rows(starts, neighbors, degrees, a, b), num_nodes, num_edges)
    out_starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(degrees, out=out_starts[1:])
    _close_gaps(starts, degrees, neighbors, out_starts)
    neighbors.resize(int(out_starts[-1]), refcheck=False)  # gives back the memory of what was repeated
    return out_starts.astype(dtype, copy=False), neighbors


@kernel
def _cut(indptr, indices, part_of, first, last):
    count = 0
    for node in range(first, last):
        for e in range(indptr[node], indptr[node + 1]):
            if e + AHEAD < indices.shape[0]:
                prefetch(part_of, indices[e + AHEAD])
            count += part_of[indices[e]] != part_of[node]
    return count


def cut_edges(indptr: np.ndarray, indices: np.ndarray, part_of: np.ndarray) -> int:
    """How many edges lead from one part to another."""
    counts: list[int] = []
    over_ranges(lambda a, b: counts.append(_cut(indptr, indices, part_of, a, b)), part_of.shape[0], indices.shape[0])
    return sum(counts)


@kernel
def _count_pairs(indptr, indices, part_of, order, ptr, counts, first, last):
    for part in range(first, last):
        for i in range(ptr[part], ptr[part + 1]):
            for e in range(indptr[order[i]], indptr[order[i] + 1]):
                counts[part, part_of[indices[e]]] += 1


def edge_counts(
    indptr: np.ndarray, indices: np.ndarray, part_of: np.ndarray, order: np.ndarray, ptr: np.ndarray
) -> np.ndarray:
    """[num_parts, num_parts] int64: edges into the part of the row from the part of the column."""
    num_parts = ptr.shape[0] - 1
    counts = np.zeros((num_parts, num_parts), dtype=np.int64)
    # A row belongs to one thread, so nothing is added by two.
    over_ranges(
        lambda a, b: _count_pairs(indptr, indices, part_of, order, ptr, counts, a, b), num_parts, indices.shape[0]
    )
    return counts


@kernel
def _count_halos(indptr, indices, part_of, order, ptr, groups, group_ptr, sizes, first, last):
    seen, member = np.full(part_of.shape[0], -1, np.int32), np.full(ptr.shape[0], -1, np.int32)
    for group in range(first, last):
        parts = groups[group_ptr[group] : group_ptr[group + 1]]
        for part in parts:
            member[part] = group
        for part in parts:
            for i in range(ptr[part], ptr[part + 1]):
                for e in range(indptr[order[i]], indptr[order[i] + 1]):
                    source = indices[e]
                    if member[part_of[source]] != group and seen[source] != group:
                        seen[source] = group
                        sizes[group] += 1


def halo_sizes(
    indptr: np.ndarray,
    indices: np.ndarray,
    part_of: np.ndarray,
    order: np.ndarray,
    ptr: np.ndarray,
    groups: np.ndarray,
    group_ptr: np.ndarray,
) -> np.ndarray:
    """[num_groups] int64: distinct sources, outside a group of parts, of the edges into it."""
    sizes = np.zeros(group_ptr.shape[0] - 1, dtype=np.int64)
    over_ranges(
        lambda a, b: _count_halos(indptr, indices, part_of, order, ptr, groups, group_ptr, sizes, a, b),
        sizes.shape[0],
        indices.shape[0],
    )
    return sizes


@intrinsic
def _atomic_add(typingctx, array, index, value):
    """array[index] += value, whole, also where other threads add to the same place."""
    signature = types.void(array, index, array.dtype)

    def codegen(context, builder, signature, args):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        position = context.cast(builder, args[1], signature.args[1], types.intp)
        builder.atomic_rmw("add", builder.gep(data, [position]), args[2], "monotonic")
        return context.get_dummy_value()

    return signature, codegen


atomic_add: Any = _atomic_add  # Numba supplies the first argument, which type checkers cannot know


@kernel
def _add(indptr, indices, values, out, first, last):
    """False if an edge leads out of the graph."""
    num_nodes, num_edges = out.shape[0], indices.shape[0]
    for node in range(first, last):
        value = values[node]
        if value == 0:
            continue
        for e in range(indptr[node], indptr[node + 1]):
            if e + AHEAD < num_edges:
                prefetch(out, indices[e + AHEAD])
            source = indices[e]
            if source < 0 or source >= num_nodes:
                return False
            atomic_add(out, source, value)
    return True


def add_to_sources(indptr: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """[num_nodes] int64: at each node the sum of `values` [num_nodes] int64 over the nodes that its out-edges reach.

    Sums of integers are the same in any order, so the threads need not agree on one.
    """
    starts, sources, amounts = indptr.numpy(), indices.numpy(), values.numpy()
    out = np.zeros(values.numel(), dtype=np.int64)
    inside = []
    # Cut by edges and not by nodes: a few nodes may have most of them.
    over_ranges(
        lambda a, b: inside.append(_add(starts, sources, amounts, out, *_nodes(starts, a, b))),
        indices.numel(),
        indices.numel(),
    )
    if not all(inside):
        raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
    return torch.from_numpy(out)


def _nodes(indptr: np.ndarray, first_edge: int, last_edge: int) -> tuple[int, int]:
    """The nodes whose in-edges begin in a range of edges."""
    first, last = np.searchsorted(indptr[:-1], [first_edge, last_edge], side="left")
    return int(first), int(last)
