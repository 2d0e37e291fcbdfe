"""Numba kernels that take a batch apart: how large pieces would be, and the edges of one of them.

What they return is allocated by torch, so that a meter sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hopline.ops.cpu.runtime import kernel, prefetch

MOST_AT_ONCE = 64
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
    for first in range(0, len(groups), MOST_AT_ONCE):
        some = groups[first : first + MOST_AT_ONCE]
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
