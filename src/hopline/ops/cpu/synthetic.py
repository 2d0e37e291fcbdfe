"""Kernels of the synthetic graphs: all depends on the seed and the node, so any range can be made alone.

A keyed permutation gives each node a rank; the rank decides the class (`rank % num_classes`) and the
degree (low ranks are popular). The permutation can be inverted, so neighbours are drawn by rank, and no
list of members is needed.
"""

from __future__ import annotations

import numpy as np

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix

_ONE, _TWO, _U11, _U16 = np.uint64(1), np.uint64(2), np.uint64(11), np.uint64(16)
_LOW_16 = np.uint64(0xFFFF)
_UNIT = 2.0**-53
_ROUNDS = 4
# The sum of four uniform 16-bit numbers has mean 2 * 65535 and this standard deviation.
_SUM_MEAN = 131070.0
_SUM_DEVIATION = 37837.2272


@kernel
def _shuffle(value, key, half):
    """One pass of a Feistel network: a bijection of the numbers below 4**half."""
    mask = (_ONE << half) - _ONE
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ (key + np.uint64(turn) * GOLDEN)) & mask)
    return (left << half) | right


@kernel
def _unshuffle(value, key, half):
    mask = (_ONE << half) - _ONE
    left, right = value >> half, value & mask
    for back in range(_ROUNDS):
        turn = np.uint64(_ROUNDS - 1 - back)
        left, right = right ^ (mix(left ^ (key + turn * GOLDEN)) & mask), left
    return (left << half) | right


@kernel
def rank_of(node, key, half, num_nodes):
    """Where a node comes in the keyed order of all nodes."""
    value = _shuffle(np.uint64(node), key, half)
    while value >= np.uint64(num_nodes):  # walk on until the number is a node again: still a bijection
        value = _shuffle(value, key, half)
    return np.int64(value)


@kernel
def node_at(rank, key, half, num_nodes):
    """The node at a rank: the inverse of `rank_of`."""
    value = _unshuffle(np.uint64(rank), key, half)
    while value >= np.uint64(num_nodes):
        value = _unshuffle(value, key, half)
    return np.int64(value)


@kernel
def fill_ranks(first, key, half, num_nodes, ranks):
    """ranks[i] = rank of node first + i."""
    for i in range(ranks.shape[0]):
        ranks[i] = rank_of(first + i, key, half, num_nodes)


@kernel
def _edges_before(rank, num_nodes, num_edges, tail, cut, floor):
    """Edges into all nodes of lower rank: differences of it are degrees, and they add up exactly."""
    if rank >= num_nodes:
        return np.int64(num_edges)
    t = rank / num_nodes
    low, high, here = cut, 1.0 + cut, t + cut
    power_low = low**tail * (high / tail - low / (tail + 1.0))
    power_high = high**tail * (high / tail - high / (tail + 1.0))
    power_here = here**tail * (high / tail - here / (tail + 1.0))
    share = (power_here - power_low) / (power_high - power_low)
    return np.int64(num_edges * ((1.0 - floor) * share + floor * t))


@kernel
def fill_degrees(ranks, num_nodes, num_edges, tail, cut, floor, degrees):
    """degrees[i] = in-degree of the node with rank ranks[i]."""
    for i in range(ranks.shape[0]):
        r = ranks[i]
        degrees[i] = _edges_before(r + 1, num_nodes, num_edges, tail, cut, floor) - _edges_before(
            r, num_nodes, num_edges, tail, cut, floor
        )


@kernel
def fill_sources(first, ranks, indptr, rank_key, draw_key, half, num_nodes, num_classes, homophily, sources):
    """The sources of all in-edges of nodes first .. first + len(ranks) - 1, popular nodes more often."""
    base = indptr[0]
    for i in range(ranks.shape[0]):
        own = ranks[i]
        home = own % num_classes
        num_members = (num_nodes - home + num_classes - 1) // num_classes
        state = mix(draw_key ^ np.uint64(first + i))
        for e in range(indptr[i], indptr[i + 1]):
            place = _TWO * np.uint64(e - indptr[i])
            coin = np.float64(mix(state + (place + _ONE) * GOLDEN) >> _U11) * _UNIT
            u = np.float64(mix(state + (place + _TWO) * GOLDEN) >> _U11) * _UNIT
            if coin < homophily:
                rank = home + num_classes * np.int64(num_members * u * u)
            else:
                rank = np.int64(num_nodes * u * u)
            if rank == own:
                rank = rank + num_classes if rank + num_classes < num_nodes else rank - num_classes
            sources[e - base] = node_at(rank, rank_key, half, num_nodes)


@kernel
def fill_features(first, labels, means, noise, key, rows):
    """rows[i] = mean of the node's class + noise that is nearly normal."""
    num_features = rows.shape[1]
    scale = np.float32(noise / _SUM_DEVIATION)
    for i in range(rows.shape[0]):
        state = mix(key ^ np.uint64(first + i))
        center = means[labels[i]]
        for j in range(num_features):
            bits = mix(state + np.uint64(j + 1) * GOLDEN)
            total = np.float32(bits & _LOW_16) + np.float32((bits >> _U16) & _LOW_16)
            bits >>= np.uint64(32)
            total += np.float32(bits & _LOW_16) + np.float32(bits >> _U16)
            rows[i, j] = center[j] + scale * (total - np.float32(_SUM_MEAN))
