"""The parts of a graph: their nodes, the blocks of their edges, and which of them a rank sweeps over."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hopline.core.batch import Block, edges_where
from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.core.sampler import NeighborSampler, full_block
from hopline.tables.history_ranks import PartAssignment

MAX_KEPT_EDGES = 1 << 25
"""Up to that many edges the blocks of a sweep over all parts are kept from one to the next."""

Group = tuple[int, ...]
"""Parts that are computed together; () where a rank has none."""


class Parts:
    """The parts of a graph as pieces of a sweep.

    per_group: parts that are computed together. keeps_blocks: blocks are kept, however many edges they have.
    """

    def __init__(
        self,
        graph: Graph,
        partition: Partition,
        shares: PartAssignment,
        *,
        per_group: int = 1,
        keeps_blocks: bool = False,
        edge_ids: bool = False,
    ) -> None:
        self.graph, self.partition, self.shares = graph, partition, shares
        self.per_group, self.keeps_blocks = per_group, keeps_blocks
        self.sampler = NeighborSampler(graph, (-1,), edge_ids=edge_ids)
        own = shares.parts[shares.rank]
        self.sweep = [tuple(own[i : i + per_group]) for i in range(0, len(own), per_group)]
        """The groups of this rank in a sweep over all parts."""
        self._swept = frozenset(self.sweep)
        self._kept: dict[Group, Block] = {}

    def row_ranges_of(self, group: Group) -> list[slice]:
        """Where the group's nodes are in the order of the partition."""
        ptr = self.partition.ptr
        return [slice(int(ptr[part]), int(ptr[part + 1])) for part in group]

    def nodes_of(self, group: Group) -> Tensor:
        """The group's nodes, part by part."""
        return torch.cat([self.partition.order[slab] for slab in self.row_ranges_of(group)])

    def block_of(self, group: Group, nodes: Tensor, key: int | None) -> Block:
        """All in-edges of the group's nodes; sources of other parts, the halo, come behind them.

        key: of random draws, where a block has any.
        """
        if group in self._kept:
            return self._kept[group]
        block = self._new_block(nodes)
        if self._keeps_whole(group):
            self._kept[group] = block
        return block

    def _new_block(self, nodes: Tensor) -> Block:
        return full_block(self.sampler, nodes)

    def keeps(self, group: Group) -> bool:
        """Whether the group's edges are the same ones every time."""
        return self._keeps_whole(group)

    def _keeps_whole(self, group: Group) -> bool:
        return self.keeps_blocks or (group in self._swept and self.graph.num_edges <= MAX_KEPT_EDGES)


def without_halo(block: Block) -> Block:
    """The edges among a block's destinations alone, and no other sources."""
    inner = edges_where(block.part, block.part.src_idx < block.num_dst)
    return replace(block, src_ids=block.src_ids[: block.num_dst], parts=(inner,))
