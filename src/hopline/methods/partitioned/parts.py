"""The parts of a graph: their nodes, the blocks of their in-edges, and the groups that a rank sweeps over."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hopline.core.batch import Block, edges_where
from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.core.sampler import NeighborSampler, full_block
from hopline.methods.partitioned.rank_histories import PartAssignment

MAX_CACHED_EDGES = 1 << 25
"""Blocks of a graph with at most this many edges are cached from one sweep to the next."""

Group = tuple[int, ...]
"""Numbers of the parts that are computed together, ascending. () if a rank has none."""


class Parts:
    """The parts of a graph, in groups that are computed together. Caches their blocks.

    per_group: parts of a group. has_halo: whether blocks have the edges from other parts. edge_ids: whether blocks name
    their edges by global edge ids. caches_blocks: whether blocks are cached, however many edges they have. None: those
    that come again are, in a graph of few edges.
    """

    def __init__(
        self,
        graph: Graph,
        partition: Partition,
        assignment: PartAssignment,
        *,
        per_group: int = 1,
        has_halo: bool = True,
        edge_ids: bool = False,
        caches_blocks: bool | None = None,
    ) -> None:
        self.graph = graph
        self.partition = partition
        self.has_halo = has_halo
        self.caches_blocks = caches_blocks
        self.sampler = NeighborSampler(graph, (-1,), edge_ids=edge_ids)
        own_parts = assignment.parts[assignment.rank]
        self.own_groups = [tuple(own_parts[i : i + per_group]) for i in range(0, len(own_parts), per_group)]
        """The groups that this rank computes in a sweep over all parts, in order."""
        self._sweep_groups = frozenset(self.own_groups)
        self._cached_blocks: dict[Group, Block] = {}

    def row_ranges_of(self, group: Group) -> list[slice]:
        """Row ranges of the group's nodes in the tables, one per part."""
        ptr = self.partition.ptr
        return [slice(int(ptr[part]), int(ptr[part + 1])) for part in group]

    def nodes_of(self, group: Group) -> Tensor:
        """[n] int64 on the host: global ids of the group's nodes, part by part."""
        return torch.cat([self.partition.order[row_range] for row_range in self.row_ranges_of(group)])

    def block_of(self, group: Group, nodes: Tensor) -> Block:
        """All in-edges of the group's nodes. Sources are the group's nodes, then the halo if there is one.

        nodes: those of `nodes_of`.
        """
        if group in self._cached_blocks:
            return self._cached_blocks[group]
        block = full_block(self.sampler, nodes)
        if not self.has_halo:
            block = without_halo(block)
        if self.caches_block(group):
            self._cached_blocks[group] = block
        return block

    def caches_block(self, group: Group) -> bool:
        """Whether `block_of` returns the same block every time. Callers then pin it, or cache what they derive."""
        if self.caches_blocks is not None:
            return self.caches_blocks
        # Groups of a sweep come again in the next sweep. Those that are drawn for an epoch may not.
        comes_again = group in self._sweep_groups
        is_small = self.graph.num_edges <= MAX_CACHED_EDGES
        return comes_again and is_small


def without_halo(block: Block) -> Block:
    """The block without its halo: only destinations as sources, and only edges among them."""
    # A part of a block is a set of its edges, and not a part of the graph.
    inner = edges_where(block.part, block.part.src_idx < block.num_dst)
    return replace(block, src_ids=block.src_ids[: block.num_dst], parts=(inner,))
