"""`ShardLayout`: what one shard of a graph holds, and which rows it wants of the others.

Nodes are numbered shard after shard, so every shard owns one range; a node's local row is its place in that range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hopline.core.batch import Part
from hopline.core.graph import Graph

if TYPE_CHECKING:
    from hopline.core.partition import Partition


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The in-edges of a shard's own nodes in one part per shard, in the order of the rounds in which rows travel.

    In round k a shard receives from shard (rank - k) % num_shards and sends to shard (rank + k) % num_shards.
    Round 0 is its own.
    """

    rank: int
    """Which shard this is."""
    num_shards: int
    """How many there are."""
    ptr: Tensor
    """[num_shards + 1] int64: shard s owns the reordered ids ptr[s] .. ptr[s + 1] - 1."""
    own_ids: Tensor
    """[num_own] int64: the graph's ids of the own nodes, by local row."""
    parts: tuple[Part, ...]
    """By round: the in-edges whose sources the sender owns. indptr is over the own nodes, src_idx into halos[k]."""
    halos: tuple[Tensor, ...]
    """By round: [n] int64, ascending: the sender's local rows that are wanted. halos[0] is all own rows, in order."""
    sends: tuple[Tensor, ...]
    """By round: [n] int64: the own local rows that the receiver wants, in the order of its halo."""
    degrees: Tensor
    """[num_own] int64: in-edges of the own nodes, over all parts."""
    virtual: bool = False
    """All shards in one process: the own nodes are all nodes, and part k has the sources that shard k owns."""
    reads: tuple[int, ...] | None = None
    """By round, how many rows of the halo the edges read, where that is not all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_shards:
            raise ValueError(
                f"there is no shard {self.rank} among {self.num_shards}: give a rank from 0 to {self.num_shards - 1}"
            )
        for name in ("parts", "halos", "sends"):
            num_entries = len(getattr(self, name))
            if num_entries != self.num_shards:
                raise ValueError(
                    f"ShardLayout.{name} needs one entry for each of the {self.num_shards} shards, not {num_entries}"
                )
        for k, part in enumerate(self.parts):
            if part.indptr.numel() != self.num_own + 1:
                raise ValueError(f"part {k} has {part.indptr.numel() - 1} destinations, the shard {self.num_own} nodes")

    @property
    def num_own(self) -> int:
        return self.own_ids.numel()

    @property
    def num_edges(self) -> int:
        return sum(part.num_edges for part in self.parts)

    def num_read(self, k: int) -> int:
        """How many source rows the edges of part k read."""
        return self.halos[k].numel() if self.reads is None else self.reads[k]

    def sender(self, k: int) -> int:
        """The shard whose rows arrive in round k."""
        return k if self.virtual else (self.rank - k) % self.num_shards

    def receiver(self, k: int) -> int:
        """The shard to which own rows go in round k."""
        return k if self.virtual else (self.rank + k) % self.num_shards

    def own_range(self, k: int) -> tuple[int, int]:
        """The own rows that are, in order, part k's source rows: (first, stop), empty where they are another's."""
        if self.virtual:
            return int(self.ptr[k]), int(self.ptr[k + 1])
        return (0, self.num_own) if k == 0 else (0, 0)

    @cached_property
    def edge_ids(self) -> Tensor:
        """[num_edges] int64: each edge's place in the graph's edge arrays, part after part."""
        ids = [part.edge_ids for part in self.parts]
        return torch.cat([i for i in ids if i is not None])

    def to(self, device: torch.device | str) -> ShardLayout:
        """The same layout with its edges, its degrees and what it sends on a device."""
        target = torch.device(device)
        return replace(
            self,
            parts=tuple(part.to(target) for part in self.parts),
            sends=tuple(rows.to(target) for rows in self.sends),
            degrees=self.degrees.to(target),
        )


def shard_layouts(graph: Graph, partition: Partition) -> list[ShardLayout]:
    """Every shard's layout, from a graph that is in memory."""
    pairs = _split_by_pair(graph, partition)
    num_shards = partition.num_parts
    order = partition.order
    ptr = partition.ptr
    layouts = []
    for p in range(num_shards):
        own_ids = order[ptr[p] : ptr[p + 1]]
        senders = [(p - k) % num_shards for k in range(num_shards)]
        receivers = [(p + k) % num_shards for k in range(num_shards)]
        layouts.append(
            ShardLayout(
                rank=p,
                num_shards=num_shards,
                ptr=ptr,
                own_ids=own_ids,
                parts=tuple(pairs[p][q].part for q in senders),
                halos=tuple(pairs[p][q].halo for q in senders),
                sends=tuple(pairs[q][p].halo for q in receivers),
                degrees=graph.in_degrees(own_ids),
            )
        )
    return layouts


def virtual_layout(graph: Graph, partition: Partition) -> ShardLayout:
    """All shards in one process: one part for each, with all nodes, in the partition's order, as destinations."""
    return _layout_in_one_process(graph, partition.position[graph.edge_index()], partition.ptr, partition.order)


def contiguous_layout(graph: Graph, ptr: Tensor) -> ShardLayout:
    """All shards in one process, of a graph whose nodes are numbered shard after shard already."""
    return _layout_in_one_process(graph, graph.edge_index(), ptr, torch.arange(graph.num_nodes))


def _layout_in_one_process(graph: Graph, edge_positions: Tensor, ptr: Tensor, own_ids: Tensor) -> ShardLayout:
    """ends: [2, num_edges] reordered ids at both ends of the graph's edges."""
    src, dst = edge_positions
    num_shards = ptr.numel() - 1
    owner = torch.bucketize(src, ptr[1:], right=True)
    parts = []
    for p in range(num_shards):
        edges = (owner == p).nonzero().view(-1)
        edges = edges[torch.argsort(dst[edges], stable=True)]
        parts.append(_make_part(graph, edges, src[edges] - ptr[p], dst[edges], graph.num_nodes))
    all_rows = tuple(torch.arange(n) for n in ptr.diff().tolist())
    return ShardLayout(
        rank=0,
        num_shards=num_shards,
        ptr=ptr,
        own_ids=own_ids,
        parts=tuple(parts),
        halos=all_rows,
        sends=all_rows,
        degrees=graph.in_degrees(own_ids),
        virtual=True,
    )


class _Pair(NamedTuple):
    part: Part
    halo: Tensor


def _split_by_pair(graph: Graph, partition: Partition) -> list[list[_Pair]]:
    """[p][q]: the edges from shard q into shard p, and the rows of q that they read."""
    src, dst = graph.edge_index()
    num_shards = partition.num_parts
    ptr = partition.ptr
    pair = partition.part_of[dst].long() * num_shards + partition.part_of[src]
    src = partition.position[src]
    dst = partition.position[dst]

    order = torch.argsort(pair * graph.num_nodes + dst, stable=True)
    stops = torch.bincount(pair, minlength=num_shards * num_shards).cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    pairs: list[list[_Pair]] = [[] for _ in range(num_shards)]
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        p, q = divmod(number, num_shards)
        edges = order[start:stop]
        rows = src[edges] - ptr[q]
        num_own = int(ptr[p + 1] - ptr[p])
        halo, src_idx = torch.unique(rows, return_inverse=True)
        if p == q:
            halo = torch.arange(num_own)
            src_idx = rows
        pairs[p].append(_Pair(_make_part(graph, edges, src_idx, dst[edges] - ptr[p], num_own), halo))
    return pairs


def _make_part(graph: Graph, edges: Tensor, src_idx: Tensor, dst: Tensor, num_dst: int) -> Part:
    """Edges of the graph, sorted by destination, as a part."""
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
    return Part(indptr, src_idx.int(), {name: rows[edges] for name, rows in graph.edge.items()}, edges)
