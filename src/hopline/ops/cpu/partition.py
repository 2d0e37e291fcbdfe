"""Numba kernels that divide a graph into parts, and that count the edges and halos between parts.

`stream_parts` divides in three stages, without a copy of the graph:

    cluster                          pack                              refine
    label propagation: neighbours -> whole clusters into parts,   ->   label propagation between parts
    come to share a label            largest cluster first             of nearly equal sizes

The graph is stored by in-edges, so the neighbours that a node reaches by out-edges cannot be looked up.
Every node tells its label to its sources instead, and each source keeps the leading label in 8 bytes (see
`_vote`).

The other public functions:

    undirected        the graph with every edge in both directions, without repeated edges
    cut_edges         the number of edges between different parts
    edge_counts       the number of edges between each pair of parts
    halo_sizes        the number of halo nodes of each part
    add_to_sources    a sum over each node's out-edges: by it, callers count how often nodes are read

Memory layout
    indptr    [num_nodes + 1] int64    edges are sorted by destination (CSC)
    indices   [num_edges]              int32 or int64: the source of each edge
    part_of   [num_nodes] int32        the part of each node
    order     [num_nodes]              the nodes, sorted by part (in `_pack`: by cluster)
    ptr       [num_parts + 1] int64    part p has the nodes order[ptr[p] : ptr[p + 1]]

Threads. `stream_parts` and its kernels run in the calling thread: each node's choice depends on the choices
before it. The other functions divide nodes, edges or parts over threads, and count integers. So no
result depends on the number of threads.

Bad input. Only `add_to_sources` checks ids. For the other functions, `core/partition.py` calls
`check_edges` first.
"""

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
"""Edges between the prefetch of a cache line and its use."""
SETTLED = 0.01
"""A fraction of the nodes. Passes end after one in which at most this fraction has moved."""
CHUNK_NODES = 1 << 18
"""Nodes between two calls of `advance`, which reports progress. No effect on the result."""
TRIES = 32
"""Parts that `_pack` tries to fit a whole cluster into before it divides the cluster."""

_U32 = np.uint64(32)
"""A shift by 32 bits. A uint64, as all numbers that are mixed with draws."""
_SURE = np.uint64(0xFFFFFFFFFFFFFFFF)
"""The largest draw. A label with this draw wins every tie."""


@kernel
def _count(label, weight, mask, keys, counts, slots, num_used):
    """counts[label] += weight, in a hash map with linear probing; returns how many labels the map holds.

    keys: [mask + 1 or more] int32, the label in each slot, or -1 if it is empty.
    counts: [mask + 1 or more] int32, the count of the label in each slot.
    slots: int64; slots[:num_used] are the slots in use. The map is at most half full, so probing ends.
    """
    slot = np.int64((np.uint64(label) * GOLDEN) >> _U32) & mask
    while keys[slot] != label and keys[slot] >= 0:
        slot = (slot + 1) & mask
    if keys[slot] < 0:
        keys[slot] = label
        slots[num_used] = slot
        num_used += 1
    counts[slot] += weight
    return num_used


@kernel
def _choose(own_label, node, size, high, key, settles, keys, counts, slots, num_used):
    """The label that most neighbours have, among a node's own and those with fewer than `high` nodes.

    Ties are broken by a keyed draw for each (node, label). With `settles`, the own label wins all ties. The
    own label counts with the neighbours that have it, or with 0. The hash map (see `_count`) is left empty
    for the next node.
    """
    best_label = own_label
    best_count = 0
    best_draw = _SURE
    if not settles:
        best_draw = mix(key ^ np.uint64(own_label) ^ (np.uint64(node) << _U32))

    for i in range(num_used):
        if keys[slots[i]] == own_label:
            best_count = counts[slots[i]]
    for i in range(num_used):
        label = keys[slots[i]]
        count = counts[slots[i]]
        keys[slots[i]] = -1
        counts[slots[i]] = 0
        if label == own_label or count < best_count or size[label] >= high:
            continue
        draw = mix(key ^ np.uint64(label) ^ (np.uint64(node) << _U32))
        if count > best_count or draw > best_draw:
            best_label = label
            best_count = count
            best_draw = draw
    return best_label


@kernel
def _vote(indptr, indices, node, label, ballots):
    """Tell a node's label to the sources of its in-edges: a vote at each of its in-neighbours.

    ballots: [num_nodes, 2] int32, a label and its lead. That is Boyer and Moore's majority vote: a vote for
    the label adds 1 to the lead, any other vote takes 1 off, and at 0 the next vote sets the label. A label
    that more than half of the votes are for is always found; otherwise the label may be any.
    """
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
def _sweep(indptr, indices, labels, size, ballots, low, high, key, settles, keys, counts, slots, first, last):
    """Give nodes first .. last - 1 the label of most of their neighbours; returns how many nodes moved.

    Reference:
        for node in range(first, last):
            votes = Counter(labels[s] for s in in_neighbors(node) if s != node)
            votes[leading label of ballots[node]] += its lead
            best_label = the label with most votes among the own label and those with fewer than `high` nodes
            if the own label has more than `low` nodes: labels[node] = best_label
            tell labels[node] to the ballots of the node's in-neighbours

    Nodes see the new labels of the nodes before them. A ballot is emptied when it is read. So it holds the
    votes since the node's last turn.

    labels: [num_nodes] int32; size: int32, the nodes of each label; keys, counts, slots: a hash map, see
    `_count`.
    """
    num_edges = indices.shape[0]
    num_moved = 0
    for node in range(first, last):
        start = indptr[node]
        stop = indptr[node + 1]
        # The map has at least twice as many slots as there can be labels: one for each in-edge, and the
        # ballot's. A node with few edges uses only the front of the arrays.
        mask = 7
        while mask + 1 < 2 * (stop - start + 1):
            mask = 2 * mask + 1
        num_used = 0
        for e in range(start, stop):
            if e + AHEAD < num_edges:
                prefetch(labels, indices[e + AHEAD])
                prefetch(ballots, 2 * np.int64(indices[e + AHEAD]))
            if indices[e] != node:
                num_used = _count(labels[indices[e]], 1, mask, keys, counts, slots, num_used)
        if ballots[node, 1] > 0:
            num_used = _count(ballots[node, 0], ballots[node, 1], mask, keys, counts, slots, num_used)
            ballots[node, 1] = 0

        own_label = labels[node]
        best_label = _choose(own_label, node, size, high, key, settles, keys, counts, slots, num_used)
        if best_label != own_label and size[own_label] > low:
            labels[node] = best_label
            size[own_label] -= 1
            size[best_label] += 1
            num_moved += 1
        _vote(indptr, indices, node, labels[node], ballots)
    return num_moved


@kernel
def _best_part(indptr, indices, members, part_of, size, high, links, touched):
    """The part with the highest score for a cluster, or -1 if no linked part can hold the whole cluster.

        score = links * (1 - size / (high + 1))        links: edges from nodes of the part into the cluster

    members: the cluster's nodes; part_of: -1 for nodes that have no part yet; size: [num_parts], the nodes
    of each part; links, touched: [num_parts] int64, scratch. `links` is 0 everywhere before and after.
    """
    num_touched = 0
    for i in range(members.shape[0]):
        for e in range(indptr[members[i]], indptr[members[i] + 1]):
            part = part_of[indices[e]]
            if part >= 0:
                if links[part] == 0:
                    touched[num_touched] = part
                    num_touched += 1
                links[part] += 1

    best_part = -1
    best_score = 0.0
    for t in range(num_touched):
        part = touched[t]
        score = links[part] * (1.0 - size[part] / (high + 1.0))
        if size[part] + members.shape[0] <= high and score > best_score:
            best_part = part
            best_score = score
        links[part] = 0
    return best_part


@kernel
def _pack(indptr, indices, order, ptr, clusters, high, part_of, size):
    """Put clusters one by one into parts of at most `high` nodes.

    For each cluster, the first of these that is possible:
        1. the linked part with the highest score (see `_best_part`)
        2. one of the next `TRIES` parts below the mean size, in turn, that can hold the whole cluster
        3. its nodes are spread: a part below the mean is filled up to the mean, then the next one

    order, ptr: the nodes of each cluster; clusters: in which order to go; part_of: -1 at first, filled; size:
    [num_parts] int32, 0 at first, filled.
    """
    num_parts = size.shape[0]
    mean = part_of.shape[0] / num_parts
    links = np.zeros(num_parts, np.int64)
    touched = np.empty(num_parts, np.int64)
    # open_parts[:num_open]: the parts below the mean. A part that has reached it is removed when its turn
    # comes, for good, since parts never shrink here.
    open_parts = np.arange(num_parts)
    num_open = num_parts
    next_open = 0

    for cluster in clusters:
        members = order[ptr[cluster] : ptr[cluster + 1]]
        num_members = members.shape[0]
        part = _best_part(indptr, indices, members, part_of, size, high, links, touched)

        num_tries = 0
        while part < 0 and num_open > 0 and num_tries < TRIES:
            next_open = next_open if next_open < num_open else 0
            if size[open_parts[next_open]] >= mean:
                num_open -= 1
                open_parts[next_open] = open_parts[num_open]
                continue
            if size[open_parts[next_open]] + num_members <= high:
                part = open_parts[next_open]
            next_open += 1
            num_tries += 1

        is_whole = part >= 0
        for i in range(num_members):
            # Fill a part up to the mean, then take the next open one. There is one as long as a node is left:
            # not all parts can have reached the mean before all nodes are placed.
            while not is_whole and (part < 0 or size[part] >= mean):
                next_open = next_open if next_open < num_open else 0
                part = open_parts[next_open]
                if size[part] >= mean:
                    num_open -= 1
                    open_parts[next_open] = open_parts[num_open]
            part_of[members[i]] = part
            size[part] += 1


@kernel
def _even_out(order, part_of, size, low):
    """Move nodes from parts above the mean to parts below `low`, until every part has `low` nodes.

    One pass over `order`, which has the nodes of a cluster together. So nodes of one cluster tend to move
    together.
    """
    mean = part_of.shape[0] / size.shape[0]
    light_part = 0
    for node in order:
        while light_part < size.shape[0] and size[light_part] >= low:
            light_part += 1
        if light_part == size.shape[0]:
            return
        if size[part_of[node]] > mean:
            size[part_of[node]] -= 1
            size[light_part] += 1
            part_of[node] = light_part


@kernel
def _largest_degree(indptr):
    """The largest in-degree."""
    largest = 0
    for node in range(indptr.shape[0] - 1):
        largest = max(largest, indptr[node + 1] - indptr[node])
    return largest


def stream_parts(
    indptr: np.ndarray,
    indices: np.ndarray,
    num_parts: int,
    slack: float,
    key: int,
    passes: int,
    advance: Callable[[int], object],
) -> np.ndarray:
    """[num_nodes] int32: the part of each node. Few edges lead from one part to another.

    Parts have (1 ± slack) times the mean size. They are found in three stages:

    1. Cluster: every node starts with a label of its own. In each pass it takes the label that most of its
       neighbours have. No label gets more nodes than a mean part has (Meyerhenke, Sanders and Schulz, 2014).
    2. Pack: clusters are put into parts, the largest first (see `_pack`).
    3. Refine: nodes move to the part that most of their neighbours are in, within the limits of size.

    There are at most `passes` passes in stage 1, and half as many, at least 2, in stage 3. A pass reads the
    edges once, in their order. Memory: 32 bytes per node.

    advance: called with the number of nodes of each range that a pass has finished.
    """
    num_nodes = indptr.shape[0] - 1
    mean = num_nodes / num_parts
    low = max(1, int(mean * (1 - slack)))
    high = max(-(-num_nodes // num_parts), int(mean * (1 + slack)))
    scratch = _scratch(_largest_degree(indptr))

    def sweep(
        labels: np.ndarray, size: np.ndarray, min_size: int, max_size: int, pass_numbers: range, settles: bool
    ) -> None:
        # `pass_numbers`: the numbers of the passes, each of which has draws of its own.
        ballots = np.zeros((num_nodes, 2), dtype=np.int32)
        for number in pass_numbers:
            num_moved = 0
            pass_key = np.uint64(derive_key(key, number) % 2**64)
            for first in range(0, num_nodes, CHUNK_NODES):
                last = min(first + CHUNK_NODES, num_nodes)
                num_moved += _sweep(
                    indptr, indices, labels, size, ballots, min_size, max_size, pass_key, settles, *scratch, first, last
                )
                advance(last - first)
            if num_moved <= SETTLED * num_nodes:
                return

    labels = np.arange(num_nodes, dtype=np.int32)
    size = np.ones(num_nodes, dtype=np.int32)
    max_cluster = max(1, int(mean))
    sweep(labels, size, min_size=0, max_size=max_cluster, pass_numbers=range(passes), settles=False)
    parts, part_sizes = _pack_clusters(indptr, indices, labels, size, num_parts, low, high)
    del labels, size
    refine_passes = range(passes, passes + max(2, passes // 2))
    sweep(parts, part_sizes, min_size=low, max_size=high, pass_numbers=refine_passes, settles=True)
    return parts


def _scratch(max_edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys, counts, slots): an empty hash map for the labels of any node's neighbours; see `_count`."""
    min_slots = 2 * (max_edges + 1)  # see `_sweep`
    num_slots = max(8, 1 << (min_slots - 1).bit_length())  # the next power of two
    return np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.int32), np.empty(max_edges + 1, np.int64)


def _pack_clusters(
    indptr: np.ndarray, indices: np.ndarray, labels: np.ndarray, size: np.ndarray, num_parts: int, low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """(part_of [num_nodes], part_sizes [num_parts]), int32: clusters in parts of `low` to `high` nodes.

    labels: [num_nodes] int32, the cluster of each node. It is overwritten, and is the `part_of` returned.
    size: the number of nodes of each label.
    """
    ptr = np.zeros(size.shape[0] + 1, dtype=np.int64)
    np.cumsum(size, out=ptr[1:])
    order = np.empty(labels.shape[0], dtype=np.int32)
    _group(labels, ptr[:-1].copy(), order)
    num_clusters = np.count_nonzero(size)  # labels that no node has any more come last, and are left out
    clusters = np.argsort(-size, kind="stable")[:num_clusters]
    parts = labels  # the memory is used again: `order` has replaced the labels
    part_sizes = np.zeros(num_parts, dtype=np.int32)
    parts.fill(-1)
    _pack(indptr, indices, order, ptr, clusters, high, parts, part_sizes)
    _even_out(order, parts, part_sizes, low)
    return parts, part_sizes


@kernel
def _group(labels, cursor, order):
    """Write the nodes to `order`, sorted by label and then by id.

    cursor: the start of each label's nodes in `order`, advanced.
    """
    for node in range(labels.shape[0]):
        order[cursor[labels[node]]] = node
        cursor[labels[node]] += 1


@kernel
def _count_both_ways(indptr, indices, degrees, first, last):
    """Add the edges into nodes first .. last - 1 to the degrees of both their ends, without self-loops.

    Sources may belong to the range of another thread, so additions are atomic.
    """
    for node in range(first, last):
        num_in_edges = 0
        for e in range(indptr[node], indptr[node + 1]):
            if indices[e] != node:
                num_in_edges += 1
                atomic_add(degrees, indices[e], 1)
        atomic_add(degrees, node, num_in_edges)


@kernel
def _fill_both_ways(indptr, indices, cursor, neighbors):
    """Write each edge's source to its destination's row, and the destination to the source's row.

    cursor: [num_nodes] int64, the start of each row, advanced.
    """
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
def _sort_rows(starts, neighbors, num_distinct, first, last):
    """Sort each row, and leave every neighbour once at its front. num_distinct: filled, their number."""
    for node in range(first, last):
        row = neighbors[starts[node] : starts[node + 1]]
        row.sort()
        count = 0
        for i in range(row.shape[0]):
            if i == 0 or row[i] != row[i - 1]:
                # In place, which is safe since count <= i: a step writes at its own position or before it.
                # At its own position it writes the value that is already in it. So the next comparison sees
                # the sorted row.
                row[count] = row[i]
                count += 1
        num_distinct[node] = count


@kernel
def _close_gaps(starts, num_distinct, neighbors, out_starts):
    """Move the first num_distinct[node] neighbours of each row to out_starts[node].

    In place, which is safe since rows only move to the front.
    """
    for node in range(num_distinct.shape[0]):
        source = starts[node]
        target = out_starts[node]
        for i in range(num_distinct[node]):
            neighbors[target + i] = neighbors[source + i]


def undirected(indptr: np.ndarray, indices: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(starts [num_nodes + 1], neighbors [num_pairs]), of `dtype`: every edge in both directions, in CSR.

    A neighbour is listed once, however many edges join the two nodes. Self-loops are left out. Rows are
    ascending. The peak memory is that of twice the graph's edges, before repeated ones are removed.
    """
    num_nodes = indptr.shape[0] - 1
    num_edges = indices.shape[0]
    degrees = np.zeros(num_nodes, dtype=np.int64)
    over_ranges(lambda a, b: _count_both_ways(indptr, indices, degrees, a, b), num_nodes, num_edges)
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(degrees, out=starts[1:])
    neighbors = np.empty(int(starts[-1]), dtype=dtype)
    _fill_both_ways(indptr, indices, starts[:-1].copy(), neighbors)
    num_distinct = degrees  # the memory is used again: `starts` has replaced the degrees
    over_ranges(lambda a, b: _sort_rows(starts, neighbors, num_distinct, a, b), num_nodes, num_edges)
    out_starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(num_distinct, out=out_starts[1:])
    _close_gaps(starts, num_distinct, neighbors, out_starts)
    neighbors.resize(int(out_starts[-1]), refcheck=False)  # frees the memory of repeated edges
    return out_starts.astype(dtype, copy=False), neighbors


@kernel
def _count_cut(indptr, indices, part_of, first, last):
    """The number of edges into nodes first .. last - 1 that come from another part."""
    count = 0
    for node in range(first, last):
        for e in range(indptr[node], indptr[node + 1]):
            if e + AHEAD < indices.shape[0]:
                prefetch(part_of, indices[e + AHEAD])
            count += part_of[indices[e]] != part_of[node]
    return count


def cut_edges(indptr: np.ndarray, indices: np.ndarray, part_of: np.ndarray) -> int:
    """The number of edges that lead from one part to another."""
    counts: list[int] = []
    over_ranges(
        lambda a, b: counts.append(_count_cut(indptr, indices, part_of, a, b)), part_of.shape[0], indices.shape[0]
    )
    return sum(counts)


@kernel
def _count_pairs(indptr, indices, part_of, order, ptr, counts, first, last):
    """Fill the rows first .. last - 1 of `counts`, see `edge_counts`."""
    for part in range(first, last):
        for i in range(ptr[part], ptr[part + 1]):
            for e in range(indptr[order[i]], indptr[order[i] + 1]):
                counts[part, part_of[indices[e]]] += 1


def edge_counts(
    indptr: np.ndarray, indices: np.ndarray, part_of: np.ndarray, order: np.ndarray, ptr: np.ndarray
) -> np.ndarray:
    """[num_parts, num_parts] int64: entry (p, q) is the number of edges into part p from part q."""
    num_parts = ptr.shape[0] - 1
    counts = np.zeros((num_parts, num_parts), dtype=np.int64)
    # Threads divide the rows, so no two of them add to the same number and no atomics are needed.
    over_ranges(
        lambda a, b: _count_pairs(indptr, indices, part_of, order, ptr, counts, a, b), num_parts, indices.shape[0]
    )
    return counts


@kernel
def _count_halos(indptr, indices, part_of, order, ptr, sizes, first, last):
    """Add the halo sizes of the parts first .. last - 1 to `sizes`, see `halo_sizes`.

    `seen_by` holds the last part that has counted each node, so that marks need not be cleared between parts. Each
    call allocates it: 4 bytes per node.
    """
    seen_by = np.full(part_of.shape[0], -1, np.int32)
    for part in range(first, last):
        for i in range(ptr[part], ptr[part + 1]):
            for e in range(indptr[order[i]], indptr[order[i] + 1]):
                source = indices[e]
                if part_of[source] != part and seen_by[source] != part:
                    seen_by[source] = part
                    sizes[part] += 1


def halo_sizes(
    indptr: np.ndarray, indices: np.ndarray, part_of: np.ndarray, order: np.ndarray, ptr: np.ndarray
) -> np.ndarray:
    """[num_parts] int64: the number of halo nodes of each part.

    A halo node is a source, outside the part, of an edge into it. It counts once, however many edges it has.
    """
    sizes = np.zeros(ptr.shape[0] - 1, dtype=np.int64)
    over_ranges(
        lambda a, b: _count_halos(indptr, indices, part_of, order, ptr, sizes, a, b), sizes.shape[0], indices.shape[0]
    )
    return sizes


@intrinsic
def _atomic_add(typingctx, array, index, value):
    """array[index] += value, atomically: no addition is lost when threads add to the same number."""
    signature = types.void(array, index, array.dtype)

    def codegen(context, builder, signature, args):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        position = context.cast(builder, args[1], signature.args[1], types.intp)
        # "monotonic" orders nothing but this number: the sums are read only after all threads have ended.
        builder.atomic_rmw("add", builder.gep(data, [position]), args[2], "monotonic")
        return context.get_dummy_value()

    return signature, codegen


atomic_add: Any = _atomic_add  # Numba supplies the first argument, which type checkers cannot know


@kernel
def _add_to_sources(indptr, indices, values, out, first, last):
    """out[s] += values[d] for each edge from s into a node d of first .. last - 1, atomically.

    Returns False, with `out` half done, if a source is not in the graph.
    """
    num_nodes = out.shape[0]
    num_edges = indices.shape[0]
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
    """[num_nodes] int64: out[s] = the sum of values[d] over all edges from s to d.

    Threads add atomically, in any order. Sums of integers do not depend on the order, so every run gives
    the same result. Raises ValueError if a source is outside the graph.

    values: [num_nodes] int64.
    """
    graph_indptr = indptr.numpy()
    sources = indices.numpy()
    amounts = values.numpy()
    out = np.zeros(values.numel(), dtype=np.int64)
    are_valid: list[bool] = []

    def add_range(first_edge: int, last_edge: int) -> None:
        first, last = _node_range(graph_indptr, first_edge, last_edge)
        are_valid.append(_add_to_sources(graph_indptr, sources, amounts, out, first, last))

    # Ranges have equal numbers of edges, not of nodes: a few nodes may have most of the edges.
    over_ranges(add_range, indices.numel(), indices.numel())
    if not all(are_valid):
        raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
    return torch.from_numpy(out)


def _node_range(indptr: np.ndarray, first_edge: int, last_edge: int) -> tuple[int, int]:
    """(first, last): nodes first .. last - 1 are those whose in-edges begin in first_edge .. last_edge - 1.

    Ranges of edges that follow each other give ranges of nodes that do not overlap, so each node has one
    thread.
    """
    first, last = np.searchsorted(indptr[:-1], [first_edge, last_edge], side="left")
    return int(first), int(last)
