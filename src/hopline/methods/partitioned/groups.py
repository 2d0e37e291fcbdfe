"""Which parts of a graph meet in a batch, which rank trains and keeps them, and the blocks of their edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, edges_where
from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.core.sampler import NeighborSampler, full_block
from hopline.methods.historical.regularise import drop_edges
from hopline.tables.history_ranks import Shares

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical

KEPT_EDGES = 1 << 25
"""Up to that many edges the blocks of a sweep over all parts are kept from one to the next."""

Group = tuple[int, ...]
"""Parts of one batch; () where a rank has none."""


@dataclass(frozen=True, eq=False)
class GroupBlocks:
    """The edges of a group of parts."""

    block: Block
    """All in-edges of the group's nodes; behind these stands the halo."""
    later: Block | None = None
    """All in-edges of nodes outside that read from the group, where these are asked."""


class Parts:
    """The parts of a graph as batches."""

    def __init__(self, graph: Graph, partition: Partition, method: Historical, shares: Shares, seed: int) -> None:
        self.graph, self.partition, self.method, self.shares, self.seed = graph, partition, method, shares, seed
        self.sampler = NeighborSampler(graph, (-1,), edge_ids=method.edge_dropout > 0)
        own, size = shares.parts[shares.rank], method.parts_per_batch
        self.sweep = [tuple(own[i : i + size]) for i in range(0, len(own), size)]
        """The batches of this rank in a sweep over all parts."""
        self._swept = frozenset(self.sweep)
        self._kept: dict[Group, GroupBlocks] = {}

    @cached_property
    def num_groups(self) -> int:
        """Batches that all parts make together, over all ranks."""
        hosts = range(max(self.shares.hosts) + 1)
        return sum(-(-len(self.shares.parts_of_host(host)) // self.method.parts_per_batch) for host in hosts)

    def turns_of(self, epoch: int) -> list[tuple[Group, ...]]:
        """The parts that each rank trains, turn after turn: parts that its host keeps.

        On one host the ranks take the groups of the epoch in order: at turn s, rank r of R takes group s * R + r.
        """
        groups = [iter(self._drawn(epoch, host)) for host in range(max(self.shares.hosts) + 1)]
        turns: list[tuple[Group, ...]] = []
        while any(turn := tuple(next(groups[host], ()) for host in self.shares.hosts)):
            first, most = len(turns) * len(turn), self.method.max_batches
            if most is not None:
                turn = tuple(group if first + i < most else () for i, group in enumerate(turn))
            if not any(turn):
                break
            turns.append(turn)
        return turns

    def _drawn(self, epoch: int, host: int) -> list[Group]:
        """The groups of an epoch among the parts of a host, in order."""
        parts, key = torch.tensor(self.shares.parts_of_host(host)), ops.derive_key(self.seed, epoch)
        key = ops.derive_key(key, host) if host else key
        if self.method.groups == "redrawn":
            parts = parts[ops.permutation(key, parts.numel())]
        groups = [tuple(sorted(group.tolist())) for group in parts.split(self.method.parts_per_batch)]
        if self.method.groups == "fixed":
            groups = [groups[i] for i in ops.permutation(key, len(groups)).tolist()]
        return groups

    def groups_of(self, epoch: int) -> list[Group]:
        """The parts of each batch of an epoch, over all ranks, in order."""
        return [group for turn in self.turns_of(epoch) for group in turn if group]

    def slabs_of(self, group: Group) -> list[slice]:
        """Where the group's nodes are in the order of the partition."""
        ptr = self.partition.ptr
        return [slice(int(ptr[part]), int(ptr[part + 1])) for part in group]

    def nodes_of(self, group: Group) -> Tensor:
        """The group's nodes, part by part."""
        return torch.cat([self.partition.order[slab] for slab in self.slabs_of(group)])

    def blocks_of(self, group: Group, nodes: Tensor, key: int | None) -> GroupBlocks:
        """The edges of a group, without those that are dropped by `key`."""
        whole = self._whole_blocks_of(group, nodes)
        if not self.method.edge_dropout or key is None:
            return whole

        def some(block: Block) -> Block:
            return drop_edges(block, self.method.edge_dropout, key)

        return GroupBlocks(some(whole.block), None if whole.later is None else some(whole.later))

    def _whole_blocks_of(self, group: Group, nodes: Tensor) -> GroupBlocks:
        if group in self._kept:
            return self._kept[group]
        block = full_block(self.sampler, nodes)
        if self.method.halo == "drop":
            block = without_halo(block)
        later = full_block(self.sampler, self._readers_of(nodes)) if self.method.compensate else None
        made = GroupBlocks(block, later)
        if self._keeps_whole(group):
            self._kept[group] = made
        return made

    def keeps(self, group: Group) -> bool:
        """Whether the group's blocks are the same ones every time."""
        return self._keeps_whole(group) and not self.method.edge_dropout

    def _keeps_whole(self, group: Group) -> bool:
        return self.method.groups == "fixed" or (group in self._swept and self.graph.num_edges <= KEPT_EDGES)

    def _readers_of(self, nodes: Tensor) -> Tensor:
        """Nodes outside the batch that have an in-edge from inside."""
        graph = self.graph
        if not hasattr(self, "_out"):
            indptr, edges = ops.group_edges(graph.indices, graph.num_nodes)
            self._out = indptr, torch.searchsorted(graph.indptr, edges, right=True) - 1
        indptr, readers = self._out
        _, positions = ops.row_positions(indptr, nodes)
        found = torch.zeros(graph.num_nodes, dtype=torch.bool)
        found[readers[positions]] = True
        found[nodes] = False
        return found.nonzero().view(-1)


def without_halo(block: Block) -> Block:
    """The edges among a block's destinations alone, and no other sources."""
    inner = edges_where(block.part, block.part.src_idx < block.num_dst)
    return replace(block, src_ids=block.src_ids[: block.num_dst], parts=(inner,))
