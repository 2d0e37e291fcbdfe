"""Numba kernels that measure how a division into parts cuts a graph."""

from __future__ import annotations

import numpy as np

from hopline.ops.cpu.runtime import kernel, over_ranges, prefetch

AHEAD = 24
"""Edges ahead of their use whose cache lines are asked for."""


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
