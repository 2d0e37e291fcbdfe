"""Numba kernels that make synthetic graphs with classes, homophily and a heavy tail of degrees.

Everything about a node depends on the keys and the node alone. So any range of nodes can be made by itself,
in any thread and in any order. A graph larger than memory is made chunk by chunk:

    node  ->  rank (a keyed permutation)  ->  class = rank % num_classes
                                          ->  in-degree, larger for low ranks
                                          ->  sources: the nodes at ranks that are drawn, mostly low ones
              class                       ->  features: the mean of the class + noise

The permutation has an inverse, so member k of a class c is found directly: it is the node of rank
c + k * num_classes. No list of a class's members is needed, and no memory that grows with the graph.

Names of arguments
    key, rank_key, draw_key   uint64, of `ops.random.derive_key`
    half                      uint64, half the bits of the numbers that are permuted: 4**half >= num_nodes
    first                     the first node of the range; arrays hold an entry for each node of the range
    tail, cut, floor          floats, the shape of the degrees (see `_edges_before`)

Arguments are not checked.
"""

from __future__ import annotations

import numpy as np

from hopline.ops.cpu.runtime import GOLDEN, kernel, mix

# Numba turns a product of uint64 and int64 into float64, so every integer that meets a draw is a uint64.
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_U11 = np.uint64(11)
"""The shift that leaves the upper 53 bits of a draw."""
_U16 = np.uint64(16)
"""The shift from one 16-bit lane of a draw to the next."""
_LOW_16 = np.uint64(0xFFFF)
"""The mask of the lowest lane."""
_UNIT = 2.0**-53
"""The factor that turns the upper 53 bits of a draw into a float64 of 0 <= u < 1."""
_ROUNDS = 4
"""Rounds of the Feistel network."""
_SUM_MEAN = 131070.0
"""The mean of a sum of four uniform 16-bit numbers: 2 * 65535."""
_SUM_DEVIATION = 37837.2272
"""The standard deviation of a sum of four uniform 16-bit numbers: sqrt(4 * (65536**2 - 1) / 12)."""


@kernel
def _shuffle(value, key, half):
    """A keyed permutation of the numbers below 4**half: a Feistel network of `_ROUNDS` rounds.

    Each round maps (left, right) to (right, left ^ f(right)). The inverse of a round needs f, but not the
    inverse of f, so f may be any hash.
    """
    mask = (_ONE << half) - _ONE
    left = value >> half
    right = value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ (key + np.uint64(number) * GOLDEN)) & mask)
    return (left << half) | right


@kernel
def _unshuffle(value, key, half):
    """The inverse of `_shuffle`: the inverse rounds, from the last to the first."""
    mask = (_ONE << half) - _ONE
    left = value >> half
    right = value & mask
    for reverse_number in range(_ROUNDS):
        number = np.uint64(_ROUNDS - 1 - reverse_number)
        left, right = right ^ (mix(left ^ (key + number * GOLDEN)) & mask), left
    return (left << half) | right


@kernel
def rank_of(node, key, half, num_nodes):
    """The rank of a node, 0 .. num_nodes - 1, by a keyed permutation of all nodes."""
    value = _shuffle(np.uint64(node), key, half)
    # `_shuffle` permutes 4**half numbers, which may be more than num_nodes. Following its cycle until it
    # comes back to a number below num_nodes gives a permutation of the nodes alone (cycle walking).
    while value >= np.uint64(num_nodes):
        value = _shuffle(value, key, half)
    return np.int64(value)


@kernel
def node_at(rank, key, half, num_nodes):
    """The node at a rank: the inverse of `rank_of`, which follows the same cycle backwards."""
    value = _unshuffle(np.uint64(rank), key, half)
    while value >= np.uint64(num_nodes):
        value = _unshuffle(value, key, half)
    return np.int64(value)


@kernel
def fill_ranks(first, key, half, num_nodes, ranks):
    """ranks[i] = rank_of(first + i). ranks: [n] int64."""
    for i in range(ranks.shape[0]):
        ranks[i] = rank_of(first + i, key, half, num_nodes)


@kernel
def _edges_before(rank, num_nodes, num_edges, tail, cut, floor):
    """The number of edges into all nodes of a lower rank: 0 for rank 0, num_edges for rank num_nodes.

    It is the integral of the density of edges at t = rank / num_nodes, rounded down:

        density(t) = (1 - floor) * (t + cut)**(tail - 1) * (1 - t) / norm + floor        0 <= t <= 1

    With tail < 1 low ranks have large degrees, and `cut` keeps the density at 0 finite. `floor` is the
    fraction of the edges that are spread evenly. A degree is the difference of two neighbouring values, so
    degrees add up to num_edges exactly, whatever the rounding.
    """
    if rank >= num_nodes:
        return np.int64(num_edges)
    t = rank / num_nodes
    # With s = t + cut, s**(tail - 1) * (high - s) has the integral s**tail * (high / tail - s / (tail + 1)).
    low = cut
    high = 1.0 + cut
    shifted = t + cut
    integral_low = low**tail * (high / tail - low / (tail + 1.0))
    integral_high = high**tail * (high / tail - high / (tail + 1.0))
    integral_shifted = shifted**tail * (high / tail - shifted / (tail + 1.0))
    share = (integral_shifted - integral_low) / (integral_high - integral_low)
    return np.int64(num_edges * ((1.0 - floor) * share + floor * t))


@kernel
def fill_degrees(ranks, num_nodes, num_edges, tail, cut, floor, degrees):
    """degrees[i] = the in-degree of the node with rank ranks[i]. Both: [n] int64."""
    for i in range(ranks.shape[0]):
        r = ranks[i]
        up_to_rank = _edges_before(r + 1, num_nodes, num_edges, tail, cut, floor)
        below_rank = _edges_before(r, num_nodes, num_edges, tail, cut, floor)
        degrees[i] = up_to_rank - below_rank


@kernel
def fill_sources(first, ranks, indptr, rank_key, draw_key, half, num_nodes, num_classes, homophily, sources):
    """Draw the sources of all in-edges of the nodes first .. first + n - 1.

    Reference, for each in-edge of a node with rank `own_rank` and class `own_class`:
        coin, u = two uniform draws from (draw_key, node, number of the edge)
        if coin < homophily: rank = that of member int(num_members * u**2) of the class `own_class`
        else:                rank = int(num_nodes * u**2)
        if rank == own_rank: rank = the next rank of the same class, or else the one before  # no self-loop
        source = node_at(rank)

    The square makes low ranks more frequent.

    ranks: [n] int64, of the nodes; indptr: [n + 1] int64, their edges, where indptr[0] need not be 0;
    sources: [indptr[n] - indptr[0]], filled. A class has at least two nodes.
    """
    base = indptr[0]
    for i in range(ranks.shape[0]):
        own_rank = ranks[i]
        own_class = own_rank % num_classes
        num_members = (num_nodes - own_class + num_classes - 1) // num_classes
        state = mix(draw_key ^ np.uint64(first + i))
        for e in range(indptr[i], indptr[i + 1]):
            draw_number = _TWO * np.uint64(e - indptr[i])
            coin = np.float64(mix(state + (draw_number + _ONE) * GOLDEN) >> _U11) * _UNIT
            u = np.float64(mix(state + (draw_number + _TWO) * GOLDEN) >> _U11) * _UNIT
            if coin < homophily:
                rank = own_class + num_classes * np.int64(num_members * u * u)
            else:
                rank = np.int64(num_nodes * u * u)
            if rank == own_rank:
                rank = rank + num_classes if rank + num_classes < num_nodes else rank - num_classes
            sources[e - base] = node_at(rank, rank_key, half, num_nodes)


@kernel
def fill_features(first, labels, means, noise, key, rows):
    """rows[i] = means[labels[i]] + noise * (nearly normal numbers), for the nodes first .. first + n - 1.

    A nearly normal number is the sum of the four 16-bit lanes of one draw, from (key, node, column). It is
    shifted and scaled to mean 0 and standard deviation 1.

    labels: [n] int64; means: [num_classes, num_features]; rows: [n, num_features] float32, filled.
    """
    num_features = rows.shape[1]
    scale = np.float32(noise / _SUM_DEVIATION)
    for i in range(rows.shape[0]):
        state = mix(key ^ np.uint64(first + i))
        class_mean = means[labels[i]]
        for j in range(num_features):
            bits = mix(state + np.uint64(j + 1) * GOLDEN)
            total = np.float32(bits & _LOW_16) + np.float32((bits >> _U16) & _LOW_16)
            bits >>= np.uint64(32)
            total += np.float32(bits & _LOW_16) + np.float32(bits >> _U16)
            rows[i, j] = class_mean[j] + scale * (total - np.float32(_SUM_MEAN))
