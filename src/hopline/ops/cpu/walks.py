"""The Numba kernel of random walks as node2vec's, and their definition in Python.

A walk goes from v along one of v's edges. From its second step on, with t the node before v, an edge to x weighs

    1 / p   if x is t
    1       if t has an edge to x
    1 / q   otherwise

An edge is drawn with a chance like its weight, by rejection: one is drawn uniformly, and accepted with the chance
weight / largest weight. After TRIES rejections the weights of all of v's edges are added up, and one draw decides. So
p = 1e9, "never go back", ends where going back is the only way. A node without edges is not left.

Draws of walk i are keyed by (key, i).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopline.ops.cpu.runtime import GOLDEN, bounded, kernel, mix
from hopline.ops.random import bounded as bounded_of
from hopline.ops.random import draw, uniform

TRIES = 32
"""Rejections after which a step adds up the weights of all edges. A rule of thumb."""
_MASK_53 = np.uint64((1 << 53) - 1)


@kernel
def _weight(indptr, indices, before, node, p, q):
    """The weight of an edge to `node`, if `before` is the node before the one that is left."""
    if node == before:
        return 1 / p
    for e in range(indptr[before], indptr[before + 1]):
        if indices[e] == node:
            return 1.0
    return 1 / q


@kernel
def _walk(indptr, indices, seeds, p, q, key, out):
    """Fill out [num_walks, length + 1]; returns whether all ids were inside the graph."""
    num_nodes = indptr.shape[0] - 1
    largest = max(1 / p, 1.0, 1 / q)
    least = min(1 / p, 1.0, 1 / q)
    for i in range(seeds.shape[0]):
        node = np.int64(seeds[i])
        before = np.int64(-1)
        if node < 0 or node >= num_nodes:
            return False
        out[i, 0] = node
        state = mix(np.uint64(key) ^ np.uint64(i))
        for step in range(1, out.shape[1]):
            start = np.int64(indptr[node])
            stop = np.int64(indptr[node + 1])
            if start < 0 or stop < start or stop > indices.shape[0]:
                return False
            if stop == start:
                out[i, step] = node
                continue
            chosen = np.int64(-1)
            for _ in range(TRIES):
                state += GOLDEN
                target = np.int64(indices[start + bounded(mix(state), stop - start)])
                if before < 0 or least == largest:
                    chosen = target
                    break
                state += GOLDEN
                level = np.float64(mix(state) & _MASK_53) / 2.0**53 * largest
                # Below the least weight every edge is accepted, so the row of `before` need not be read.
                if level < least or level < _weight(indptr, indices, before, target, p, q):
                    chosen = target
                    break
            if chosen < 0 and before >= 0:
                total = 0.0
                for e in range(start, stop):
                    total += _weight(indptr, indices, before, np.int64(indices[e]), p, q)
                state += GOLDEN
                level = np.float64(mix(state) & _MASK_53) / 2.0**53 * total
                for e in range(start, stop):
                    chosen = np.int64(indices[e])
                    level -= _weight(indptr, indices, before, chosen, p, q)
                    if level < 0:
                        break
            if chosen < 0 or chosen >= num_nodes:
                return False
            before = node
            node = chosen
            out[i, step] = node
    return True


def random_walk(indptr: Tensor, indices: Tensor, seeds: Tensor, length: int, p: float, q: float, key: int) -> Tensor:
    """[n, length + 1] int64: the nodes of a walk from each seed. Raises ValueError for ids outside the graph."""
    out = np.empty((seeds.numel(), length + 1), dtype=np.int64)
    if not _walk(indptr.numpy(), indices.numpy(), seeds.numpy(), float(p), float(q), np.int64(key), out):
        raise ValueError("a seed or an edge is outside the graph: check the seeds, rowptr and col")
    return torch.from_numpy(out)


def walk_of(
    indptr: Tensor, indices: Tensor, seed: int, number: int, length: int, p: float, q: float, key: int
) -> list[int]:
    """The nodes of one walk, by the definition: what the kernel fills in for walk `number`."""
    used = 0

    def next_draw() -> Tensor:
        nonlocal used
        used += 1
        return draw(key, torch.tensor([number]), used - 1)

    def edges_of(node: int) -> list[int]:
        return indices[int(indptr[node]) : int(indptr[node + 1])].tolist()

    def weight(target: int) -> float:
        if target == walk[-2]:
            return 1 / p
        return 1.0 if target in edges_of(walk[-2]) else 1 / q

    walk = [seed]
    largest = max(1 / p, 1.0, 1 / q)
    for _ in range(length):
        targets = edges_of(walk[-1])
        if not targets:
            walk.append(walk[-1])
            continue
        chosen = -1
        for _ in range(TRIES):
            target = targets[int(bounded_of(next_draw(), torch.tensor([len(targets)])))]
            if len(walk) == 1 or p == q == 1 or float(uniform(next_draw(), 53)) * largest < weight(target):
                chosen = target
                break
        if chosen < 0:
            level = float(uniform(next_draw(), 53)) * sum(map(weight, targets))
            for chosen in targets:
                level -= weight(chosen)
                if level < 0:
                    break
        walk.append(chosen)
    return walk
