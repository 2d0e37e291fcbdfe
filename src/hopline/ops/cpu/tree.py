"""Numba kernel for the tree layout: every slot draws neighbours of its own; definition in `reference.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.cpu.runtime import GOLDEN, bounded, kernel, mix, prefetch
from hopline.ops.cpu.sampling import EDGES_AHEAD, NODES_AHEAD, _shuffle_large, _shuffle_small
from hopline.ops.reference import Children
from hopline.ops.tree_slots import Slots


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
def _take(indices, counts, edge_ids, out):
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
    _take(indices.numpy(), counts.numpy(), edge_ids.numpy(), ids.numpy())
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
