"""`ShardLayout`: the edges of one shard of a graph, and the rows that it reads from the others.

Nodes are numbered shard after shard: shard s owns the *positions* ptr[s] .. ptr[s + 1] - 1. A node's *local
row* is its position minus ptr[s].

A shard holds all in-edges of its own nodes. They are in one *part* per shard, by the owner of their
sources. The parts are in the order of the *rounds* in which the source rows arrive. For shard p of P:

    round k    part k: edges from shard (p - k) % P into shard p
               halos[k]: the rows that these edges read, which shard (p - k) % P sends
               sends[k]: the own rows that shard (p + k) % P reads, in the order of its halos[k]
    round 0    p's edges among its own nodes; halos[0] is all own rows

In one process, all shards may be *virtual*. Then one layout has all nodes as destinations, and part k has
the edges whose sources shard k owns. Nothing is sent, but rows are still read one part at a time.
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
    """The in-edges of a shard's own nodes, one part per round, and the rows that travel in each round."""

    rank: int
    num_shards: int
    ptr: Tensor
    """[num_shards + 1] int64: shard s owns the positions ptr[s] .. ptr[s + 1] - 1."""
    own_ids: Tensor
    """[num_own] int64: global ids of the own nodes, by local row."""
    parts: tuple[Part, ...]
    """By round: the edges whose sources the sender owns. indptr is over own nodes, src_idx into halos[k]."""
    halos: tuple[Tensor, ...]
    """By round: [n] int64, ascending, the sender's local rows that part k reads. halos[0]: all own rows."""
    sends: tuple[Tensor, ...]
    """By round: [n] int64, the own local rows that the receiver reads, in the order of its halo."""
    degrees: Tensor
    """[num_own] int64: in-edges of each own node, over all parts."""
    virtual: bool = False
    """Whether all shards are in this process: all nodes are own nodes, part k has shard k's sources."""
    reads: tuple[int, ...] | None = None
    """By round: how many rows of halos[k] the edges read; None means all. Only traffic counters use it.

    In a trimmed layer, halos of own rows keep rows that no edge reads."""

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
        """The number of source rows that part k reads."""
        return self.halos[k].numel() if self.reads is None else self.reads[k]

    def sender(self, k: int) -> int:
        """The shard whose rows arrive in round k."""
        return k if self.virtual else (self.rank - k) % self.num_shards

    def receiver(self, k: int) -> int:
        """The shard to which own rows go in round k."""
        return k if self.virtual else (self.rank + k) % self.num_shards

    def own_range(self, k: int) -> tuple[int, int]:
        """(first, stop) of the own rows that part k reads. (0, 0): it reads rows of another shard."""
        if self.virtual:
            return int(self.ptr[k]), int(self.ptr[k + 1])
        return (0, self.num_own) if k == 0 else (0, 0)

    @cached_property
    def edge_ids(self) -> Tensor:
        """[num_edges] int64: each edge's position in the graph's edge arrays, part after part."""
        ids = [part.edge_ids for part in self.parts]
        return torch.cat([i for i in ids if i is not None])

    def to(self, device: torch.device | str) -> ShardLayout:
        """A copy with `parts`, `sends` and `degrees` on a device. Ids and halos stay on the host."""
        target = torch.device(device)
        return replace(
            self,
            parts=tuple(part.to(target) for part in self.parts),
            sends=tuple(rows.to(target) for rows in self.sends),
            degrees=self.degrees.to(target),
        )


def shard_layouts(graph: Graph, partition: Partition) -> list[ShardLayout]:
    """The layouts of all shards, of a graph that is in memory."""
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
    """The layout of virtual shards: own nodes are all nodes, in the partition's order."""
    return _layout_in_one_process(graph, partition.position[graph.edge_index()], partition.ptr, partition.order)


def contiguous_layout(graph: Graph, ptr: Tensor) -> ShardLayout:
    """The layout of virtual shards of a graph whose nodes are already numbered shard after shard.

    ptr: [num_shards + 1] int64: shard s owns the nodes ptr[s] .. ptr[s + 1] - 1.
    """
    return _layout_in_one_process(graph, graph.edge_index(), ptr, torch.arange(graph.num_nodes))


def _layout_in_one_process(graph: Graph, edge_positions: Tensor, ptr: Tensor, own_ids: Tensor) -> ShardLayout:
    """The layout of virtual shards.

    edge_positions: [2, num_edges] int64, positions of the sources and destinations of the graph's edges.
    own_ids: [num_nodes] int64, the global id at each position.
    """
    src, dst = edge_positions
    num_shards = ptr.numel() - 1
    owner = torch.bucketize(src, ptr[1:], right=True)
    parts = []
    for k in range(num_shards):
        edges = (owner == k).nonzero().view(-1)
        edges = edges[torch.argsort(dst[edges], stable=True)]
        parts.append(_make_part(graph, edges, src[edges] - ptr[k], dst[edges], graph.num_nodes))
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
    """The edges from one shard q into one shard p."""

    part: Part
    """The edges; src_idx is into `halo`."""
    halo: Tensor
    """[n] int64, ascending: the local rows of q that the edges read. If p is q, all rows."""


def _split_by_pair(graph: Graph, partition: Partition) -> list[list[_Pair]]:
    """[p][q]: the edges from shard q into shard p."""
    src, dst = graph.edge_index()
    num_shards = partition.num_parts
    ptr = partition.ptr
    pair = partition.part_of[dst].long() * num_shards + partition.part_of[src]
    src = partition.position[src]
    dst = partition.position[dst]

    # One sort for all pairs: by pair, then by destination, then, since it is stable, in the graph's order.
    order = torch.argsort(pair * graph.num_nodes + dst, stable=True)
    stops = torch.bincount(pair, minlength=num_shards * num_shards).cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    pairs: list[list[_Pair]] = [[] for _ in range(num_shards)]
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        p, q = divmod(number, num_shards)
        edges = order[start:stop]
        rows = src[edges] - ptr[q]
        num_own = int(ptr[p + 1] - ptr[p])
        if p == q:  # own rows need not be selected or sent
            halo = torch.arange(num_own)
            src_idx = rows
        else:
            halo, src_idx = torch.unique(rows, return_inverse=True)
        pairs[p].append(_Pair(_make_part(graph, edges, src_idx, dst[edges] - ptr[p], num_own), halo))
    return pairs


def _make_part(graph: Graph, edges: Tensor, src_idx: Tensor, dst: Tensor, num_dst: int) -> Part:
    """A part of the graph's edges [n] int64, sorted by destination, with these sources and destinations."""
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
    return Part(indptr, src_idx.int(), {name: rows[edges] for name, rows in graph.edge.items()}, edges)
