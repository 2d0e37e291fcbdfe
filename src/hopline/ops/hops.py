"""Sampling hop by hop in a graph of several relations, each with a CSC of its own: PyG's rule, in plain torch.

`sample_hops` defines what the kernels of `cpu/hops.py` compute, and runs on any device. A hop expands the nodes that
the hop before has reached, each of them once:

    rows of the hop before --rows of a CSC--> segments --times--> shorter segments --draw--> edges --> sources
                                                                                       new sources: the next rows

A node is a *row* of its type. Seeds come first: each has a row of its own, also a repeated one. Then come sources, in
the order in which they were reached. With `is_disjoint` every seed is an *example* with a tree of its own: a row is a
pair of an example and a node, held in one number of 64 bits.

The draws of a row are keyed by the relation's key and the row's number. So a repeated seed draws anew, and whether
another relation is sampled changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopline.ops import reference
from hopline.ops.random import draw_from, first_state, uniform
from hopline.ops.reference import Segments

NODE_BITS = 32
"""Bits of a node id beside an example, in `is_disjoint`. The other 31 are the example's."""
ALL_BITS = 63
"""Bits of a node id that stands alone: an int64 without its sign."""
LEVEL_BITS = 52
"""Bits of a random share. With one more, a share of a sum could be rounded up to the sum."""
UNSORTED = "Found invalid non-sorted temporal neighborhood"
"""The error for times that do not ascend within a row. pyg-lib's words, for which users search."""
BAD_IDS = "a node id, a seed or an edge is outside the graph: check the seeds, colptr and row"
"""The error for ids that would lead out of an array."""


class Relation(NamedTuple):
    """The edges from one node type to another, grouped by destination, and how they are drawn."""

    source: int
    """The number of the node type that is reached."""
    destination: int
    """The number of the node type that is expanded."""
    indptr: Tensor
    """[num_destinations + 1] int32 or int64: where the edges of each destination begin."""
    indices: Tensor
    """[num_edges] int32 or int64: the source of each edge."""
    fanouts: Sequence[int]
    """Draws per node, one number for each hop; -1 takes all edges."""
    key: int
    """Decides the draws."""
    times: Tensor | None = None
    """[num_edges] or [num_sources] int64, ascending along each row. Edges later than the example are left out."""
    are_node_times: bool = False
    """Whether `times` has one number per source, not per edge."""
    weight: Tensor | None = None
    """[num_edges] float32 or float64. Where a row has more edges than are drawn, they are drawn by it, never those of
    weight 0. With replacement they always are."""


class Edges(NamedTuple):
    """The sampled edges of one relation, hop by hop. All tensors are [num_sampled] int64."""

    sources: Tensor
    """Rows of the relation's source type."""
    destinations: Tensor
    """Rows of its destination type."""
    edge_ids: Tensor
    """Positions in the relation's edge arrays."""
    per_hop: list[int]
    """How many of them each hop has drawn."""


class Rows(NamedTuple):
    """The sampled nodes of one type, hop by hop."""

    nodes: Tensor
    """[num_rows] int64."""
    examples: Tensor
    """[num_rows] int64: the example of each row. All zero unless `is_disjoint`."""
    per_hop: list[int]
    """How many seeds there are, and how many new rows each hop has reached."""


class Drawn(NamedTuple):
    """Edges drawn for some rows of a type in one hop. All tensors are [num_drawn] int64."""

    edge_ids: Tensor
    """Positions in the relation's edge arrays."""
    destinations: Tensor
    """The rows that drew them."""
    sources: Tensor
    """The ids of their sources, with the example above the node's bits."""


class Draws(NamedTuple):
    """How edges are drawn, the same in all hops and relations."""

    replace: bool
    node_bits: int
    """NODE_BITS or ALL_BITS."""
    bounds: Tensor | None
    """[num_examples] int64, the latest time of each example. None if no relation has times."""
    only_last: bool
    """Whether relations with times take their latest edges. Of equal times, those that stand last."""


class RowMap:
    """The rows of one node type: a map from ids to consecutive numbers."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self._ids.numel()

    def ids(self, start: int = 0) -> Tensor:
        """[size - start] int64: the ids from row `start` on."""
        return self._ids[start:]

    def add_each(self, ids: Tensor) -> None:
        """Give every id a row of its own, also a repeated one. `add` finds its first row."""
        self._ids = torch.cat([self._ids, ids])

    def add(self, ids: Tensor) -> Tensor:
        """[n] int64: the row of each id. New ids get the next rows, in order of first occurrence."""
        every = torch.cat([self._ids, ids])
        position = torch.arange(every.numel(), device=every.device)
        unique, inverse = torch.unique(every, return_inverse=True)
        first = torch.full_like(unique, every.numel()).scatter_reduce_(0, inverse, position, "amin")[inverse]
        is_new = (first == position) & (position >= self.size)
        row_at = torch.where(is_new, self.size + is_new.cumsum(0) - 1, position)
        self._ids = torch.cat([self._ids, every[is_new]])
        return row_at[first[every.numel() - ids.numel() :]]


def draw_edges(relation: Relation, ids: Tensor, first_row: int, fanout: int, draws: Draws) -> Drawn:
    """The edges that rows first_row .. first_row + n - 1 of the destination type draw in one hop.

    ids: [n] int64, their ids. Raises ValueError for ids outside the graph, and for times that do not ascend.
    """
    rows = torch.arange(first_row, first_row + ids.numel(), device=ids.device)
    nodes = ids & ((1 << draws.node_bits) - 1)
    num_nodes = relation.indptr.numel() - 1
    _expect(bool(((nodes >= 0) & (nodes < num_nodes)).all()), BAD_IDS)
    starts = relation.indptr.long()[nodes]
    stops = relation.indptr.long()[nodes + 1]
    _expect(bool(((starts >= 0) & (starts <= stops) & (stops <= relation.indices.numel())).all()), BAD_IDS)
    bounds = None
    if relation.times is not None and draws.bounds is not None:
        bounds = draws.bounds[ids >> draws.node_bits]
        stops = _stop_in_time(relation, starts, stops, bounds)
        if draws.only_last and fanout >= 0:
            starts = torch.maximum(starts, stops - fanout)
    segments = Segments(starts, stops, first_state(relation.key, rows))
    counts, edge_ids = _draw(segments, fanout, draws.replace, relation.weight)
    if bounds is not None:
        _expect(bool((_times(relation, edge_ids) <= bounds.repeat_interleave(counts)).all()), UNSORTED)
    sources = relation.indices.long()[edge_ids]
    _expect(bool(((sources >> draws.node_bits) == 0).all()), BAD_IDS)
    examples = (ids >> draws.node_bits) << draws.node_bits
    return Drawn(edge_ids, rows.repeat_interleave(counts), examples.repeat_interleave(counts) | sources)


def _draw(segments: Segments, fanout: int, replace: bool, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(counts [n], edge_ids): the draws of each segment. Where all edges are taken, they are in order."""
    degrees = segments.stops - segments.starts
    longest = int(degrees.max()) if degrees.numel() else 0
    if fanout < 0 or (longest <= fanout and not replace):
        positions = segments.starts[:, None] + torch.arange(longest, device=degrees.device)
        counts = degrees
    elif weight is None:
        counts, positions = reference._draw(segments, fanout, replace)
    elif replace:
        return _draw_weighted_repeated(segments, weight, fanout)
    else:
        is_cut = degrees > fanout
        indptr, drawn, _ = reference.draw_weighted(Segments(*(field[is_cut] for field in segments)), weight, fanout)
        counts = degrees.clone()
        counts[is_cut] = indptr.diff()
        row = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
        place = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
        edge_ids = segments.starts[row] + place
        edge_ids[is_cut[row]] = drawn
        return counts, edge_ids
    return counts, positions[torch.arange(positions.size(1), device=degrees.device) < counts[:, None]]


def _draw_weighted_repeated(segments: Segments, weight: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """(counts, edge_ids) with replacement: draw j is the first edge at which the sum of weights exceeds a level.

    The level is a random share of the sum over the segment. A segment without weights above 0 has no draws.
    """
    counts = torch.zeros_like(segments.starts)
    drawn = [counts[:0]]
    position = torch.arange(fanout, device=counts.device)
    for i, (start, stop, state) in enumerate(zip(*(field.tolist() for field in segments), strict=True)):
        sums = reference.check_weights(weight[start:stop]).cumsum(0)
        if stop > start and sums[-1] > 0:
            _expect(bool(sums[-1].isfinite()), reference.WRONG_WEIGHT)
            levels = uniform(draw_from(torch.full_like(position, state), position), LEVEL_BITS) * sums[-1]
            drawn.append(start + torch.searchsorted(sums, levels, right=True))
            counts[i] = fanout
    return counts, torch.cat(drawn)


def _expect(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)


def _times(relation: Relation, edge_ids: Tensor) -> Tensor:
    """The time of each edge."""
    assert relation.times is not None
    if not relation.are_node_times:
        return relation.times[edge_ids]
    sources = relation.indices.long()[edge_ids]
    _expect(bool(((sources >= 0) & (sources < relation.times.numel())).all()), BAD_IDS)
    return relation.times[sources]


def _stop_in_time(relation: Relation, starts: Tensor, stops: Tensor, bounds: Tensor) -> Tensor:
    """[n]: one past the last edge of each row whose time is not after its bound, by binary search."""
    low = starts.clone()
    high = stops.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        is_open = low < high
        is_early = torch.zeros_like(is_open)
        is_early[is_open] = _times(relation, middle[is_open]) <= bounds[is_open]
        low = torch.where(is_open & is_early, middle + 1, low)
        high = torch.where(is_open & ~is_early, middle, high)
    some = low > starts
    _expect(bool((_times(relation, starts[some]) <= _times(relation, low[some] - 1)).all()), UNSORTED)
    return low


def sample_hops(
    relations: Sequence[Relation],
    seeds: Sequence[tuple[int, Tensor]],
    num_types: int,
    replace: bool = False,
    is_disjoint: bool = False,
    bounds: Tensor | None = None,
    only_last: bool = False,
    draw: Callable[[Relation, Tensor, int, int, Draws], Drawn] = draw_edges,
    new_map: Callable[[torch.device], Any] = RowMap,
) -> tuple[list[Rows], list[Edges]]:
    """(rows by type, edges by relation) sampled around seeds.

    seeds: (type, [n] int64) for each type that has some. They number the examples, from the first pair on.
    bounds, only_last: as in `Draws`.
    draw, new_map: Kernels may take the place of `draw_edges` and `RowMap`.
    """
    draws = Draws(replace, NODE_BITS if is_disjoint else ALL_BITS, bounds, only_last)
    device = seeds[0][1].device if seeds else torch.device("cpu")
    maps = [new_map(device) for _ in range(num_types)]
    num_examples = 0
    for kind, ids in seeds:
        _expect(ids.numel() == 0 or bool(((ids >> draws.node_bits) == 0).all()), BAD_IDS)
        if is_disjoint:
            examples = torch.arange(num_examples, num_examples + ids.numel(), device=device)
            ids = (examples << NODE_BITS) | ids
            num_examples += ids.numel()
        maps[kind].add_each(ids)
    _expect(num_examples < 1 << (ALL_BITS - NODE_BITS), "a batch may have at most 2**31 disjoint seeds")
    # Kernels read one bound per example, and one weight per edge, unchecked.
    _expect(bounds is None or bounds.numel() == num_examples, f"give one bound for each of {num_examples} examples")
    for relation in relations:
        num_weights = relation.indices.numel() if relation.weight is None else relation.weight.numel()
        _expect(num_weights == relation.indices.numel(), "give one weight for each edge")

    rows_per_hop = [[rows.size] for rows in maps]
    drawn_of: list[list[tuple[Tensor, Drawn]]] = [[] for _ in relations]
    """By relation, (rows of the sources, edges) of each hop that drew some."""
    edges_per_hop: list[list[int]] = [[] for _ in relations]
    begin = [0] * num_types
    for hop in range(max((len(relation.fanouts) for relation in relations), default=0)):
        end = [rows.size for rows in maps]
        frontier = [rows.ids(start) for rows, start in zip(maps, begin, strict=True)]
        for number, relation in enumerate(relations):
            fanout = relation.fanouts[hop]
            ids = frontier[relation.destination]
            if fanout == 0 or ids.numel() == 0:
                edges_per_hop[number].append(0)
                continue
            drawn = draw(relation, ids, begin[relation.destination], fanout, draws)
            sources = maps[relation.source].add(drawn.sources).long()
            drawn_of[number].append((sources, drawn))
            edges_per_hop[number].append(drawn.edge_ids.numel())
        begin = end
        for counts, rows, start in zip(rows_per_hop, maps, end, strict=True):
            counts.append(rows.size - start)

    all_rows = []
    for rows, counts in zip(maps, rows_per_hop, strict=True):
        ids = rows.ids()
        examples = ids >> draws.node_bits if is_disjoint else torch.zeros_like(ids)
        all_rows.append(Rows(ids & ((1 << draws.node_bits) - 1), examples, counts))
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    all_edges = []
    for hops, counts in zip(drawn_of, edges_per_hop, strict=True):
        sources = torch.cat([nothing, *(sources for sources, _ in hops)])
        destinations = torch.cat([nothing, *(drawn.destinations for _, drawn in hops)])
        edge_ids = torch.cat([nothing, *(drawn.edge_ids for _, drawn in hops)])
        all_edges.append(Edges(sources, destinations, edge_ids, counts))
    return all_rows, all_edges
