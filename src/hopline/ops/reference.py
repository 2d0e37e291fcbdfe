"""The definition of every operation in plain torch, and the oracle of the tests.

Written to be read, not to be fast.

`hopline.ops.cpu` and `hopline.ops.gpu` hold faster kernels with the same results. Draws are equal bit for
bit; sums of floating-point numbers may differ by the order of summation. These functions also run where no
kernel does, for example on a GPU without Triton. Many of them synchronise with the device.

Graphs are in CSC form: node v has the in-edges indptr[v] .. indptr[v + 1] - 1, and indices[e] is the source
of edge e.

    indptr    [num_nodes + 1] int64
    indices   [num_edges]            int32 or int64
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hopline.ops.random import bounded, draw, draw_from, dropout_numbers, first_state, inside_unit
from hopline.ops.tree_slots import Slots


class Segments(NamedTuple):
    """Runs of the edge array. Every draw is over one of them, and knows nothing else of the graph.

    Here a segment is the whole row of a node. Whatever leaves edges out of a draw makes segments shorter.
    """

    starts: Tensor
    """[n] int64: the first position of each run."""
    stops: Tensor
    """[n] int64: one past its last position."""
    states: Tensor
    """[n] int64: the first state of each run's generator, as bits."""


def rows_of(indptr: Tensor, nodes: Tensor, draw_ids: Tensor, key: int) -> Segments:
    """The segments that are the rows of some nodes. A node of -1, an empty slot of a tree, has none.

    draw_ids: [n] int64: the ids that, with the key, decide the states.
    """
    has_row = nodes >= 0
    node = nodes.long().clamp(min=0)
    starts = torch.where(has_row, indptr[node], 0)
    stops = torch.where(has_row, indptr[node + 1], 0)
    return Segments(starts, stops, first_state(key, draw_ids))


class Neighbors(NamedTuple):
    """Sampled in-edges of a list of nodes, grouped by node."""

    indptr: Tensor
    """[num_nodes + 1] int64: the edges of the i-th node are indptr[i] .. indptr[i + 1] - 1."""
    ids: Tensor
    """[num_edges], dtype of the graph's indices: the source node of each edge."""
    edge_ids: Tensor
    """[num_edges] int64: the position of each edge in the graph's edge arrays."""


class WeightedNeighbors(NamedTuple):
    """In-edges of a list of nodes, drawn by weight and grouped by node."""

    indptr: Tensor
    """As in `Neighbors`."""
    ids: Tensor
    """As in `Neighbors`."""
    edge_ids: Tensor
    """As in `Neighbors`."""
    inclusion: Tensor
    """[num_edges] float64: the probability with which each edge is drawn, given the keys of the others."""


SIGN_BIT = -(1 << 63)
"""Flipped in all numbers, it makes the order of int64 that of unsigned numbers."""
SMALLEST_WEIGHT = 1e-300
"""Least weight above 0. The key of an edge of less might not be a finite number."""
LARGEST_WEIGHT = 1e300
"""Largest weight. The key of an edge of more might be 0."""
WRONG_WEIGHT = (
    f"a weight of a weighted draw is negative, NaN, infinite, or beyond {SMALLEST_WEIGHT:g} .. {LARGEST_WEIGHT:g}: "
    "give every edge a finite weight, 0 for edges that are never drawn"
)
"""The error for an edge that cannot be drawn by its weight."""


def row_entries(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, positions) of all entries of the rows `nodes` of a CSR structure, row after row.

    indptr: [n + 1] int64, the offsets of the n rows in `positions`. positions: int64, in the structure's
    arrays.
    """
    starts = indptr[nodes]
    counts = indptr[nodes + 1] - starts
    out_indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = torch.repeat_interleave(starts - out_indptr[:-1], counts)
    return out_indptr, torch.arange(int(out_indptr[-1]), device=nodes.device) + shift


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int,
    replace: bool = False,
    draw_ids: Tensor | None = None,
) -> Neighbors:
    """Up to `fanout` in-edges of each node, or all of them in order with -1.

    They are the first ones of a sequence that depends on the key and the node alone. So samples nest: a
    smaller fan-out takes a prefix of a larger one. Without replacement the sequence is a Fisher-Yates
    shuffle of the node's edges. With replacement it is one bounded draw after the other, and a node with
    in-edges gets exactly `fanout` of them.

    draw_ids: [n] int64, the ids that take the nodes' place in the draws (`random.draw_ids`).
    """
    if fanout < 0:
        out_indptr, edge_ids = row_entries(indptr, nodes)
        return Neighbors(out_indptr, indices[edge_ids], edge_ids)
    segments = rows_of(indptr, nodes, nodes if draw_ids is None else draw_ids, key)
    counts, drawn = _draw(segments, fanout, replace)
    is_drawn = torch.arange(drawn.size(1), device=nodes.device) < counts[:, None]
    edge_ids = drawn[is_drawn]
    return Neighbors(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), indices[edge_ids], edge_ids)


def sample_weighted(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor,
    nodes: Tensor,
    fanout: int,
    key: int,
    draw_ids: Tensor | None = None,
) -> WeightedNeighbors:
    """Up to `fanout` in-edges of each node by weight, without replacement, or all of them in order with -1.

    The next edge of a node is drawn with a chance like its weight among those that are left. To that end every edge
    gets a key, -log(u) / weight, where u is the number of its position in its node's sequence. Edges are drawn by
    ascending keys (Efraimidis and Spirakis, 2006), and on a tie by position. So samples nest, as in
    `sample_neighbors`. An edge of weight 0 is never drawn: a node may get fewer edges than the fan-out.

    weight: [num_edges] float32 or float64, 0 or from `SMALLEST_WEIGHT` to `LARGEST_WEIGHT`.
    """
    if fanout < 0:
        out_indptr, edge_ids = row_entries(indptr, nodes)
        return WeightedNeighbors(out_indptr, indices[edge_ids], edge_ids, all_included(edge_ids))
    segments = rows_of(indptr, nodes, nodes if draw_ids is None else draw_ids, key)
    out_indptr, edge_ids, limits = draw_weighted(segments, weight, fanout)
    return WeightedNeighbors(
        out_indptr, indices[edge_ids], edge_ids, inclusion_of(weight[edge_ids], limits, out_indptr)
    )


def draw_weighted(segments: Segments, weight: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr [n + 1], edge_ids, limits [n] float64) of the draws that `sample_weighted` makes from some segments.

    limits: the smallest key of each segment that is not drawn, infinite if there is none.
    """
    edge_ids, segment, place = _entries(segments)
    w = check_weights(weight[edge_ids])
    keys = -torch.log(inside_unit(draw_from(segments.states[segment], place))) / w  # infinite for a weight of 0
    order, rank = _by_key(keys, segment)
    is_limit = order[rank == fanout]
    limits = torch.full(segments.starts.shape, math.inf, dtype=torch.float64, device=weight.device)
    limits[segment[is_limit]] = keys[is_limit]
    drawn = order[(rank < fanout) & (w[order] > 0)]
    return _offsets(segment[drawn], segments.starts.numel()), edge_ids[drawn], limits


def check_weights(weight: Tensor) -> Tensor:
    """The weights as float64. Raises ValueError if one cannot be drawn by."""
    w = weight.double()
    if not bool(((w == 0) | ((w >= SMALLEST_WEIGHT) & (w <= LARGEST_WEIGHT))).all()):
        raise ValueError(WRONG_WEIGHT)
    return w


def sample_labor(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, copies: Tensor | None = None
) -> Neighbors:
    """Up to `fanout` in-edges of each node, those whose sources have the smallest numbers; all in order with -1.

    The number of a source depends on the key and the source alone, so that nodes with sources in common draw the same
    ones. A node's draws are as likely as those of `sample_neighbors`, and they nest.

    This is LABOR-0 (Balin and Catalyuerek, 2023) in its sequential form: exactly min(fanout, in-degree) edges. The
    published Poisson form draws every edge whose number is below fanout / in-degree, so that many in expectation.

    copies: [num_edges], of `edge_copies`. Copy j of an edge has number j of its source's sequence. None: there are no
    copies.
    """
    if fanout < 0:
        return sample_neighbors(indptr, indices, nodes, fanout, key)
    edge_ids, segment, _ = _entries(rows_of(indptr, nodes, nodes, key))
    numbers = draw(key, indices[edge_ids], 0 if copies is None else copies[edge_ids].long())
    order, rank = _by_key(numbers ^ SIGN_BIT, segment)  # as unsigned numbers
    drawn = order[rank < fanout]
    out_indptr = _offsets(segment[drawn], nodes.numel())
    return Neighbors(out_indptr, indices[edge_ids[drawn]], edge_ids[drawn])


def edge_copies(indptr: Tensor, indices: Tensor) -> Tensor | None:
    """[num_edges] int32: how many earlier in-edges of its node have the source of each edge. None if none has any."""
    segment = _destinations(indptr)
    order, rank = _by_key(indices, segment)
    is_first = torch.ones_like(rank, dtype=torch.bool)
    is_first[1:] = (indices[order].diff() != 0) | (segment.diff() != 0)
    run = is_first.long().cumsum(0) - 1  # which run of equal sources
    copies = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    copies[order] = (rank - rank[is_first][run]).int()
    return copies if bool(copies.any()) else None


class Children(NamedTuple):
    """Neighbours drawn for the slots of one hop. Two slots with the same node draw independently."""

    ids: Tensor
    """[num_slots, fanout], dtype of the graph's indices: the source nodes, then -1 where a slot has fewer."""
    counts: Tensor
    """[num_slots] int32: the number of neighbours of each slot. They fill its first columns."""
    edge_ids: Tensor
    """[num_slots, fanout] int64: positions in the graph's edge arrays, 0 where there is no neighbour."""


def sample_children(
    indptr: Tensor, indices: Tensor, nodes: Tensor, slots: Tensor, fanout: int, key: int, replace: bool = False
) -> Children:
    """Up to `fanout` in-edges of the node at each slot. As `sample_neighbors`, but keyed by the slot's id.

    nodes: [n], the node at each slot, -1 where a slot is empty. slots: [n] int64, the ids of the slots
    (`Slots.ids`).
    """
    counts, drawn = _draw(rows_of(indptr, nodes, slots, key), fanout, replace)
    is_drawn = torch.arange(fanout, device=nodes.device) < counts[:, None]
    edge_ids = torch.where(is_drawn, drawn, 0)
    # A graph without edges has no indices to read: all children are -1.
    ids = indices[edge_ids] if indices.numel() else edge_ids.to(indices.dtype)
    return Children(torch.where(is_drawn, ids, -1), counts.int(), edge_ids)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int,
    replace: bool = False,
    with_edges: bool = False,
    draw: Callable[..., Children] = sample_children,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`, hop by hop.

    nodes: [num_slots], dtype of the graph's indices, -1 where a slot is empty.
    counts: [slots of all hops but the last] int32, the number of draws of each slot.
    edge_ids: [num_slots - num_seeds] int64, the edge of each slot to its parent, 0 for an empty slot; None
    unless `with_edges`.
    draw: the function that draws one hop. A kernel may take the place of `sample_children`.
    """
    nodes = [seeds.to(indices.dtype)]
    counts = []
    edge_ids = []
    for hop, fanout in enumerate(slots.fanouts):
        parent_ids = slots.ids(seeds.device)[slots.offsets[hop] : slots.offsets[hop + 1]]
        children = draw(indptr, indices, nodes[-1], parent_ids, fanout, key, replace)
        nodes.append(children.ids.view(-1))
        counts.append(children.counts)
        edge_ids.append(children.edge_ids.view(-1))
    return torch.cat(nodes), torch.cat(counts), torch.cat(edge_ids) if with_edges else None


def _draw(segments: Segments, fanout: int, replace: bool) -> tuple[Tensor, Tensor]:
    """(counts [n], positions [n, fanout] int64): the draws of each segment, from its generator's first state.

    Without replacement they are the first of a Fisher-Yates shuffle, of which only the swaps are kept: swap j
    moved the value swap_value[:, j] to the position swap_target[:, j]. Positions from number counts[i] on are
    meaningless.
    """
    degrees = segments.stops - segments.starts
    counts = torch.where(degrees > 0, fanout, 0) if replace else degrees.clamp(max=fanout)
    picks = torch.zeros(degrees.numel(), fanout, dtype=torch.int64, device=degrees.device)
    swap_target = torch.full_like(picks, -1)
    swap_value = torch.full_like(picks, -1)
    for j in range(int(counts.max()) if counts.numel() else 0):
        raw = draw_from(segments.states, j)
        if replace:
            picks[:, j] = bounded(raw, degrees)
            continue

        target = j + bounded(raw, (degrees - j).clamp(min=1))
        value_at_target = target.clone()
        value_at_j = torch.full_like(target, j)
        for i in range(j):  # the latest swap into a position says what it holds
            value_at_target = torch.where(swap_target[:, i] == target, swap_value[:, i], value_at_target)
            value_at_j = torch.where(swap_target[:, i] == j, swap_value[:, i], value_at_j)
        picks[:, j] = value_at_target
        swap_target[:, j] = target
        swap_value[:, j] = value_at_j
    return counts, segments.starts[:, None] + picks


def _entries(segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """([m], [m], [m]) int64 for all edges of all segments: position of the edge, its segment, its place in there."""
    counts = segments.stops - segments.starts
    segment = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    first = counts.cumsum(0) - counts
    place = torch.arange(segment.numel(), device=counts.device) - first[segment]
    return segments.starts[segment] + place, segment, place


def _by_key(keys: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """(order, rank): the entries sorted by segment, key and position, and the rank of each in its segment."""
    order = torch.argsort(keys, stable=True)
    order = order[torch.argsort(segment[order], stable=True)]
    num_segments = int(segment[-1]) + 1 if segment.numel() else 0
    first = _offsets(segment, num_segments)[segment]  # segments are ascending, before and after
    return order, torch.arange(segment.numel(), device=keys.device) - first


def _offsets(groups: Tensor, num_groups: int) -> Tensor:
    """[num_groups + 1] int64: where each group begins and ends among ascending `groups`."""
    counts = torch.bincount(groups, minlength=num_groups)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def inclusion_of(weight: Tensor, limits: Tensor, indptr: Tensor) -> Tensor:
    """[num_edges] float64: the probability that the key of each drawn edge lies below the limit of its node.

    Divided by these probabilities, values at the drawn edges have a sum whose expectation is that over all edges of
    positive weight. For given keys of the others, an edge is drawn if its own key lies below the limit.

    weight: [num_edges], of the drawn edges. indptr: [n + 1]. limits: [n] float64: the smallest key of each node that
    is not drawn, infinite if all edges of positive weight are.
    """
    limit = torch.repeat_interleave(limits, indptr.diff(), output_size=weight.numel())
    return -torch.expm1(-weight.double() * limit)


def all_included(edge_ids: Tensor) -> Tensor:
    """[num_edges] float64: ones, for edges that are all taken."""
    return torch.ones(edge_ids.shape, dtype=torch.float64, device=edge_ids.device)


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, idx): global ids by local id, and the local id of each neighbour.

    ids: [num_distinct] int64, the distinct nodes: seeds first, then neighbours by first occurrence.
    idx: [len(neighbors)] int32, so that ids[idx] equals `neighbors`.
    """
    all_ids = torch.cat([seeds.long(), neighbors.long()])
    unique, inverse = torch.unique(all_ids, return_inverse=True)
    first_position = torch.full_like(unique, all_ids.numel())
    first_position.scatter_reduce_(0, inverse, torch.arange(all_ids.numel(), device=all_ids.device), "amin")
    order = torch.argsort(first_position)
    local_of = torch.empty_like(order)
    local_of[order] = torch.arange(order.numel(), device=order.device)
    return unique[order], local_of[inverse[seeds.numel() :]].int()


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids], for any dtype."""
    return rows[ids.long()]


def group_by_key(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(indptr, order): the edges grouped by key, in their old order within a group.

    indptr: [num_groups + 1] int64, the offsets of the groups in `order`. order: [num_edges] int64, edge
    positions.
    """
    counts = torch.bincount(keys.long(), minlength=num_groups)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return indptr, torch.argsort(keys, stable=True)


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """int64 positions, in `indices`, of the edges from a node to itself."""
    dst = _destinations(indptr)
    return (indices == dst).nonzero().view(-1)


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Sum, mean or max of the messages of each destination's edges, 0 for a destination without edges.

    Edge e of destination d, with indptr[d] <= e < indptr[d + 1], has the message
    weight[e] * rows[src_idx[e]]. The result is [num_dst, ...]. With `own` [num_dst] it is
    [num_dst, 2 * width]: rows[own] follow to the right.

    The gradient of max is torch's: the edges that reach the maximum share the gradient evenly. If the
    maximum is 0, the initial 0 of the output has a share too, which is lost.
    """
    if own is not None:
        reduced = reduce_edges(rows, indptr, src_idx, reduce, weight)
        return torch.cat([reduced, rows.index_select(0, own.long())], dim=1)

    num_dst = indptr.numel() - 1
    dst = _destinations(indptr)
    # Not rows[src_idx]: with several threads, its backward pass adds up gradients in any order.
    messages = rows.index_select(0, src_idx.long())
    if weight is not None:
        messages = messages * _one_per_row(weight, messages)
    out = messages.new_zeros(num_dst, *rows.shape[1:])
    if reduce == "max":
        index = _one_per_row(dst, messages).expand_as(messages)
        return out.scatter_reduce(0, index, messages, "amax", include_self=False)
    out = out.index_add(0, dst, messages)
    if reduce == "mean":
        out = out / _one_per_row(indptr.diff().clamp(min=1), out)
    return out


def check_shapes(rows: Tensor, indptr: Tensor, src_idx: Tensor, weight: Tensor | None, own: Tensor | None) -> None:
    """Raise ValueError if arguments of `reduce_edges` do not fit together. Kernels read them unchecked."""
    if weight is not None and weight.shape != src_idx.shape:
        raise ValueError(
            f"weight must hold one number per edge: expected shape {list(src_idx.shape)}, got {list(weight.shape)}"
        )
    if own is not None and rows.dim() != 2:
        raise ValueError(f"own needs rows that are a matrix: expected 2 dimensions, got shape {list(rows.shape)}")
    if own is not None and own.shape != (indptr.numel() - 1,):
        raise ValueError(
            f"own must hold one row id per destination: expected shape [{indptr.numel() - 1}], got {list(own.shape)}"
        )


def _one_per_row(values: Tensor, rows: Tensor) -> Tensor:
    """values [n] as [n, 1, ..., 1], so that values[i] broadcasts over rows[i]. rows: [n, ...]."""
    return values.view(-1, *[1] * (rows.dim() - 1))


def keyed_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Dropout whose mask depends on (key, node id, column) alone. ids: [n], one for each row of x [n, ...].

    A draw of 64 bits serves four columns, 16 bits each. A column is kept if its number is at least
    p * 65536, so `p` is rounded to a multiple of 1 / 65536.
    """
    threshold, scale = dropout_numbers(p)
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()  # half types are scaled in float32
    flat = exact.reshape(x.size(0), math.prod(x.shape[1:]))
    column = torch.arange(flat.size(1), device=x.device)
    raw = draw(key, ids[:, None], column // 4)
    lane = (raw >> (16 * (column % 4))) & 0xFFFF
    mask = (lane >= threshold).to(exact.dtype)
    return (flat * (mask * scale)).view_as(x).to(x.dtype)


def keyed_dropout_sparse(values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """[num_stored]: the values after `keyed_dropout` of rows in CSR form, which store only some columns.

    values, columns: [num_stored], row after row. indptr: [n + 1]. ids: [n], the node of each row.
    """
    threshold, scale = dropout_numbers(p)
    column = columns.long()
    raw = draw(key, ids[_destinations(indptr)], column // 4)
    is_kept = ((raw >> (16 * (column % 4))) & 0xFFFF) >= threshold
    return values * is_kept * scale


def _destinations(indptr: Tensor) -> Tensor:
    """[num_edges] int64: the destination of each edge."""
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=indptr.device), indptr.diff())


class SortedIdMap:
    """Map from global ids to local ids, in order of first occurrence. Reused batch after batch.

    It sorts, and needs no memory per node of the graph. One thread at a time may use it.
    """

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes = num_nodes
        self.device = device
        self.size = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, nodes: Tensor) -> Tensor:
        """[n] int32: the local id of each node. New nodes get the next free ids. Synchronises with the device."""
        if bool(((nodes < 0) | (nodes >= self.num_nodes)).any()):
            raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
        self._ids, idx = relabel(self.ids(), nodes)
        self.size = self._ids.numel()
        return idx

    def ids(self) -> Tensor:
        """[size] int64: the nodes added since the last `clear`, by local id."""
        return self._ids[: self.size]

    def clear(self) -> None:
        """Forget all nodes."""
        self.size = 0
