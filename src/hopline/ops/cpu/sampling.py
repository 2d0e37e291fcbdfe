"""Numba kernels that sample blocks and trees, relabel, gather and group; definitions in `reference.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu.page_cache import in_order_of_file, is_cold
from hopline.ops.cpu.runtime import GOLDEN, bounded, kernel, mix, prefetch
from hopline.ops.reference import Children, Neighbors
from hopline.ops.tree_slots import Slots

NODES_AHEAD, EDGES_AHEAD, ROWS_AHEAD = 16, 24, 8
"""How far ahead of their use cache lines are asked for."""

DENSE_MAP_BYTES = 1 << 29
"""An id map is an array over all nodes up to this size, and a hash map beyond."""


@kernel
def _count(indptr, nodes, num_edges, fanout, replace, out_indptr):
    """Fill `out_indptr`; False if a node is not in the graph or its row not in the edge array."""
    num_nodes = nodes.shape[0]
    total = 0
    for i in range(num_nodes):
        if i + NODES_AHEAD < num_nodes:
            prefetch(indptr, nodes[i + NODES_AHEAD])
        if nodes[i] < 0 or nodes[i] + 1 >= indptr.shape[0]:
            return False
        start, stop = indptr[nodes[i]], indptr[nodes[i] + 1]
        if start < 0 or stop < start or stop > num_edges:
            return False
        degree = stop - start
        if fanout < 0 or (degree < fanout and not replace):
            total += degree
        elif degree > 0:
            total += fanout
        out_indptr[i + 1] = total
    return True


def _row_starts(indptr: Tensor, nodes: Tensor, num_edges: int, fanout: int, replace: bool) -> np.ndarray:
    out_indptr = np.zeros(nodes.numel() + 1, dtype=np.int64)
    if not _count(indptr.numpy(), nodes.numpy(), num_edges, fanout, replace, out_indptr):
        raise ValueError(
            f"a node id is outside 0 .. {indptr.numel() - 2}, or the graph's indptr is damaged: "
            "check the ids, and the dataset by `hopline verify FOLDER`"
        )
    return out_indptr


@kernel
def _all_edges(indptr, nodes, out_indptr, edge_ids):
    for i in range(nodes.shape[0]):
        start = indptr[nodes[i]] - out_indptr[i]
        for e in range(out_indptr[i], out_indptr[i + 1]):
            edge_ids[e] = start + e


@kernel
def _draw_with_replacement(indptr, nodes, key, out_indptr, edge_ids):
    for i in range(nodes.shape[0]):
        start = indptr[nodes[i]]
        degree = indptr[nodes[i] + 1] - start
        state = mix(np.uint64(key) ^ np.uint64(nodes[i]))
        for e in range(out_indptr[i], out_indptr[i + 1]):
            state += GOLDEN
            edge_ids[e] = start + bounded(mix(state), degree)


@kernel
def _shuffle_small(degree, count, state, order, out):
    """Fisher-Yates on an array of all positions: for degrees of the order of the fan-out."""
    for j in range(degree):
        order[j] = j
    for j in range(count):
        state += GOLDEN
        target = j + bounded(mix(state), degree - j)
        out[j] = order[target]
        order[target] = order[j]


@kernel
def _shuffle_large(degree, count, state, slots, moved_to, moved, out):
    """The same shuffle, keeping only the touched positions, in a small hash table: O(count) for any degree."""
    mask = slots.shape[0] - 1
    for j in range(count):
        state += GOLDEN
        target = j + bounded(mix(state), degree - j)
        slot = (target * 0x9E3779B1) & mask
        while slots[slot] >= 0 and moved_to[slots[slot]] != target:
            slot = (slot + 1) & mask
        out[j] = moved[slots[slot]] if slots[slot] >= 0 else target
        own = (j * 0x9E3779B1) & mask
        while slots[own] >= 0 and moved_to[slots[own]] != j:
            own = (own + 1) & mask
        moved[j] = moved[slots[own]] if slots[own] >= 0 else j
        moved_to[j] = target
        slots[slot] = j
    slots[:] = -1


@kernel
def _draw_without_replacement(indptr, nodes, fanout, key, out_indptr, edge_ids):
    num_slots = 4
    while num_slots < 2 * fanout:
        num_slots *= 2
    order = np.empty(4 * fanout, dtype=np.int64)
    slots = np.full(num_slots, -1, dtype=np.int64)
    moved_to, moved = np.empty(fanout, dtype=np.int64), np.empty(fanout, dtype=np.int64)
    num_nodes = nodes.shape[0]
    for i in range(num_nodes):
        if i + NODES_AHEAD < num_nodes:
            prefetch(indptr, nodes[i + NODES_AHEAD])
        start = indptr[nodes[i]]
        degree = indptr[nodes[i] + 1] - start
        out = edge_ids[out_indptr[i] : out_indptr[i + 1]]
        state = mix(np.uint64(key) ^ np.uint64(nodes[i]))
        if degree <= order.shape[0]:
            _shuffle_small(degree, out.shape[0], state, order, out)
        else:
            _shuffle_large(degree, out.shape[0], state, slots, moved_to, moved, out)
        for j in range(out.shape[0]):
            out[j] += start


@kernel
def _take(values, positions, out):
    size = positions.shape[0]
    for e in range(size):
        if e + EDGES_AHEAD < size:
            prefetch(values, positions[e + EDGES_AHEAD])
        out[e] = values[positions[e]]


def sample_neighbors(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, replace: bool = False
) -> Neighbors:
    starts, ids = indptr.numpy(), nodes.numpy()
    out_indptr = _row_starts(indptr, nodes, indices.numel(), fanout, replace)
    edge_ids = np.empty(out_indptr[-1], dtype=np.int64)
    if fanout < 0:
        _all_edges(starts, ids, out_indptr, edge_ids)
    elif replace:
        _draw_with_replacement(starts, ids, np.int64(key), out_indptr, edge_ids)
    else:
        _draw_without_replacement(starts, ids, fanout, np.int64(key), out_indptr, edge_ids)
    found = torch.from_numpy(edge_ids)
    return Neighbors(torch.from_numpy(out_indptr), gather_rows(indices, found), found)


def row_positions(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    starts, ids = indptr.numpy(), nodes.numpy()
    out_indptr = _row_starts(indptr, nodes, int(indptr[-1]), -1, False)
    positions = np.empty(out_indptr[-1], dtype=np.int64)
    _all_edges(starts, ids, out_indptr, positions)
    return torch.from_numpy(out_indptr), torch.from_numpy(positions)


@kernel
def _add_dense(place, ids, size, nodes, idx):
    num = nodes.shape[0]
    for e in range(num):
        if e + EDGES_AHEAD < num:
            prefetch(place, nodes[e + EDGES_AHEAD])
        node = nodes[e]
        if node < 0 or node >= place.shape[0]:
            return -1 - size
        # Written either way: whether a node is new is a coin toss that a branch would guess wrong half the time.
        at = place[node]
        is_new = at < 0
        at = size if is_new else at
        ids[size] = node
        place[node] = at
        idx[e] = at
        size += is_new
    return size


@kernel
def _clear_dense(place, ids, size):
    for i in range(size):
        if i + EDGES_AHEAD < size:
            prefetch(place, ids[i + EDGES_AHEAD])
        place[ids[i]] = -1


@kernel
def _add_hashed(slots, ids, size, num_nodes, nodes, idx):
    """`slots` holds places in `ids`; its length is a power of two, at least twice what it may come to hold."""
    mask = np.uint64(slots.shape[0] - 1)
    num = nodes.shape[0]
    for e in range(num):
        if e + EDGES_AHEAD < num:
            prefetch(slots, mix(np.uint64(nodes[e + EDGES_AHEAD])) & mask)
        node = nodes[e]
        if node < 0 or node >= num_nodes:
            return -1 - size
        slot = mix(np.uint64(node)) & mask
        while slots[slot] >= 0 and ids[slots[slot]] != node:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            slots[slot] = size
            ids[size] = node
            size += 1
        idx[e] = slots[slot]
    return size


class IdMap:
    """Global node ids to consecutive local ones, in order of first occurrence; reused batch after batch.

    One thread at a time may use it. The dense map is cleared by un-marking what was marked, so a batch costs what it
    touches and not the number of nodes.
    """

    def __init__(self, num_nodes: int, dense: bool | None = None) -> None:
        self.dense = num_nodes * 4 <= DENSE_MAP_BYTES if dense is None else dense
        self._num_nodes = num_nodes
        self._map = np.full(num_nodes if self.dense else 1 << 12, -1, dtype=np.int32)
        self._ids = np.empty(1 << 10, dtype=np.int64)
        self.size = 0

    def add(self, nodes: Tensor) -> Tensor:
        """Each node's local id [n] int32, new ones numbered on from the last."""
        new = nodes.numpy()
        self._reserve(self.size + new.shape[0] + 1)
        idx = np.empty(new.shape[0], dtype=np.int32)
        if self.dense:
            size = _add_dense(self._map, self._ids, self.size, new, idx)
        else:
            size = _add_hashed(self._map, self._ids, self.size, self._num_nodes, new, idx)
        self.size = size if size >= 0 else -1 - size
        if size < 0:
            raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
        return torch.from_numpy(idx)

    def _reserve(self, size: int) -> None:
        if size >= 1 << 31:
            raise ValueError("a batch may reach at most 2**31 nodes: make batch_size or the fan-outs smaller")
        if size > self._ids.shape[0]:
            self._ids = np.concatenate([self._ids[: self.size], np.empty(size, dtype=np.int64)])
        if not self.dense and 2 * size > self._map.shape[0]:
            self._map = np.full(1 << (2 * size).bit_length(), -1, dtype=np.int32)
            known = self._ids[: self.size].copy()
            _add_hashed(self._map, self._ids, 0, self._num_nodes, known, np.empty(known.shape[0], dtype=np.int32))

    def ids(self) -> Tensor:
        """The nodes added since the last clear, by local id: [size] int64."""
        return torch.from_numpy(self._ids[: self.size].copy())

    def clear(self) -> None:
        if self.dense:
            _clear_dense(self._map, self._ids, self.size)
        else:
            self._map.fill(-1)
        self.size = 0


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    top = max((int(t.max()) for t in (seeds, neighbors) if t.numel()), default=0)
    id_map = IdMap(top + 1, dense=top < 16 * (seeds.numel() + neighbors.numel()))
    id_map.add(seeds.long())
    idx = id_map.add(neighbors)
    return id_map.ids(), idx


@kernel
def _in_range(ids, size):
    inside = True
    for i in range(ids.shape[0]):
        inside &= (ids[i] >= 0) & (ids[i] < size)
    return inside


@kernel
def _gather(rows, ids, out):
    num, width = out.shape
    for i in range(num):
        if i + ROWS_AHEAD < num:
            first = np.int64(ids[i + ROWS_AHEAD]) * width
            for word in range(0, width, max(1, 64 // rows.itemsize)):
                prefetch(rows, first + word)
        row, target = rows[ids[i]], out[i]
        for c in range(width):
            target[c] = row[c]


@kernel
def _gather_piece(rows, ids, piece, out):
    for i in piece:
        row, target = rows[ids[i]], out[i]
        for c in range(row.shape[0]):
            target[c] = row[c]


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Rows are copied as machine words, so one kernel serves every dtype."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row ids must be a 1-D int64 tensor, not {list(ids.shape)} {ids.dtype}")
    if not _in_range(ids.numpy(), rows.size(0)):
        raise IndexError(f"a row id is outside 0 .. {rows.size(0) - 1}")
    if not rows.is_contiguous() or (rows.requires_grad and torch.is_grad_enabled()):
        return rows.index_select(0, ids.long().to(rows.device))  # in threads, rows[ids] adds up gradients in any order
    out = torch.empty((ids.numel(), *rows.shape[1:]), dtype=rows.dtype)
    row_bytes = rows.element_size() * (rows[:1].numel() if rows.size(0) else 0)
    if out.numel() == 0:
        return out
    word = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % w.itemsize == 0)
    if rows.data_ptr() % word.itemsize or out.data_ptr() % word.itemsize:
        word = torch.uint8
    width = row_bytes // word.itemsize
    source, places, target = _words(rows, word).reshape(-1, width), ids.numpy(), _words(out, word).reshape(-1, width)
    if is_cold(rows, places):
        for piece in in_order_of_file(rows, places):
            _gather_piece(source, places, piece, target)
    elif width == 1:
        _take(source.reshape(-1), places, target.reshape(-1))
    else:
        _gather(source, places, target)
    return out


def _words(tensor: Tensor, word: torch.dtype) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(str(word).removeprefix("torch."))


@kernel
def _group(keys, cursor, order):
    for e in range(keys.shape[0]):
        group = keys[e]
        order[cursor[group]] = e
        cursor[group] += 1


@kernel
def _histogram(keys, counts):
    for e in range(keys.shape[0]):
        counts[keys[e]] += 1


def group_edges(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    groups = keys.numpy()
    if not _in_range(groups, num_groups):
        raise IndexError(f"a group is outside 0 .. {num_groups - 1}")
    indptr = np.zeros(num_groups + 1, dtype=np.int64)
    _histogram(groups, indptr[1:])
    np.cumsum(indptr, out=indptr)
    order = np.empty(groups.shape[0], dtype=np.int64)
    _group(groups, indptr[:-1].copy(), order)
    return torch.from_numpy(indptr), torch.from_numpy(order)


@kernel
def _find_self_loops(indptr, indices, out):
    count = 0
    for node in range(indptr.shape[0] - 1):
        for e in range(indptr[node], indptr[node + 1]):
            if indices[e] == node:
                if count < out.shape[0]:
                    out[count] = e
                count += 1
    return count


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    none = np.empty(0, dtype=np.int64)
    found = np.empty(_find_self_loops(indptr.numpy(), indices.numpy(), none), dtype=np.int64)
    if found.shape[0]:
        _find_self_loops(indptr.numpy(), indices.numpy(), found)
    return torch.from_numpy(found)


@kernel
def _draw(indptr, num_edges, nodes, slots, fanout, key, replace, counts, edge_ids):
    """Fill `counts` and `edge_ids`; False if a node is not in the graph or its row not in the edge array."""
    num_slots = 4
    while num_slots < 2 * fanout:
        num_slots *= 2
    order = np.empty(4 * fanout, dtype=np.int64)
    table = np.full(num_slots, -1, dtype=np.int64)
    moved_to, moved = np.empty(fanout, dtype=np.int64), np.empty(fanout, dtype=np.int64)
    for i in range(nodes.shape[0]):
        if i + NODES_AHEAD < nodes.shape[0]:
            prefetch(indptr, nodes[i + NODES_AHEAD])
        node = nodes[i]
        counts[i] = 0
        if node < 0:
            continue
        if node + 1 >= indptr.shape[0]:
            return False
        start, stop = indptr[node], indptr[node + 1]
        if start < 0 or stop < start or stop > num_edges:
            return False
        degree = stop - start
        if degree == 0:
            continue
        state = mix(np.uint64(key) ^ np.uint64(slots[i]))
        count = fanout if replace else min(degree, fanout)
        counts[i] = count
        out = edge_ids[i, :count]
        if replace:
            for j in range(count):
                state += GOLDEN
                out[j] = bounded(mix(state), degree)
        elif degree <= order.shape[0]:
            _shuffle_small(degree, count, state, order, out)
        else:
            _shuffle_large(degree, count, state, table, moved_to, moved, out)
        for j in range(count):
            out[j] += start
    return True


@kernel
def _take_edges(indices, counts, edge_ids, out):
    fanout = edge_ids.shape[1]
    flat = edge_ids.reshape(-1)
    for i in range(counts.shape[0]):
        for j in range(fanout):
            at = i * fanout + j
            if at + EDGES_AHEAD < flat.shape[0]:
                prefetch(indices, flat[at + EDGES_AHEAD])
            out[i, j] = indices[edge_ids[i, j]] if j < counts[i] else -1


def sample_children(
    indptr: Tensor, indices: Tensor, nodes: Tensor, slots: Tensor, fanout: int, key: int, replace: bool = False
) -> Children:
    counts = torch.empty(nodes.numel(), dtype=torch.int32)
    edge_ids = torch.zeros(nodes.numel(), fanout, dtype=torch.int64)
    ids = torch.empty(nodes.numel(), fanout, dtype=indices.dtype)
    asked = (nodes.numpy(), slots.numpy(), fanout, np.int64(key), replace)
    if not _draw(indptr.numpy(), indices.numel(), *asked, counts.numpy(), edge_ids.numpy()):
        raise ValueError(
            f"a node id is outside 0 .. {indptr.numel() - 2}, or the graph's indptr is damaged: "
            "check the ids, and the dataset by `hopline verify FOLDER`"
        )
    _take_edges(indices.numpy(), counts.numpy(), edge_ids.numpy(), ids.numpy())
    return Children(ids, counts, edge_ids)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int,
    replace: bool = False,
    with_edges: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return reference.sample_tree(indptr, indices, seeds, slots, key, replace, with_edges, draw=sample_children)
