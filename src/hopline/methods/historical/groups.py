"""The batches of an epoch: groups of parts, in an order drawn by the epoch, and their edges.

A batch is a *group* of `parts_per_batch` parts. With groups="redrawn" each epoch draws which parts meet; with "fixed"
it only draws the order of the groups, so their blocks can be cached. A *turn* is one group per rank, all trained in
the same optimizer step.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block
from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.core.sampler import full_block
from hopline.methods.historical.edge_dropout import drop_edges
from hopline.methods.partitioned.parts import Group, Parts, without_halo
from hopline.methods.partitioned.rank_histories import PartAssignment

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical


class Groups(Parts):
    """The parts of a graph, grouped into batches. Caches the blocks of groups that come again."""

    def __init__(
        self, graph: Graph, partition: Partition, method: Historical, assignment: PartAssignment, seed: int
    ) -> None:
        super().__init__(
            graph=graph,
            partition=partition,
            assignment=assignment,
            per_group=method.parts_per_batch,
            caches_blocks=True if method.groups == "fixed" else None,
            edge_ids=method.edge_dropout > 0,
        )
        self.method = method
        self.seed = seed
        self._cached_out_neighbors: dict[Group, Block] = {}
        """By group: in-edges of the nodes that read from it, before edges are dropped."""

    # ---- the batches of an epoch

    @cached_property
    def num_groups(self) -> int:
        """The number of batches that cover all parts once, over all ranks."""
        num_parts_by_host = [len(self.assignment.parts_of_host(host)) for host in self._hosts]
        return sum(math.ceil(num_parts / self.per_group) for num_parts in num_parts_by_host)

    @property
    def _hosts(self) -> range:
        """The numbers of all hosts. `assignment.hosts` has the host of each rank."""
        return range(max(self.assignment.hosts) + 1)

    def turns_of(self, epoch: int) -> list[tuple[Group, ...]]:
        """The groups of an epoch, by turn and rank. A rank trains parts that its host keeps; () if none are left.

        On one host the ranks take the groups of the epoch in order: at turn s, rank r of R takes group s * R + r.
        """
        groups_by_host = [iter(self._draw_groups(epoch, host)) for host in self._hosts]
        max_batches = self.method.max_batches
        turns: list[tuple[Group, ...]] = []
        while True:
            turn = tuple(next(groups_by_host[host], ()) for host in self.assignment.hosts)
            # `max_batches` counts batches over all ranks, so the last turn may have fewer batches than ranks.
            if max_batches is not None:
                num_remaining = max_batches - len(turns) * len(turn)
                turn = tuple(group if rank < num_remaining else () for rank, group in enumerate(turn))
            if not any(turn):
                return turns
            turns.append(turn)

    def _draw_groups(self, epoch: int, host: int) -> list[Group]:
        """The groups that one host trains in an epoch, in order. All ranks draw the same."""
        key = ops.derive_key(self.seed, epoch)
        # Host 0 has the key of the epoch itself, as a single host has.
        if host:
            key = ops.derive_key(key, host)
        parts = torch.tensor(self.assignment.parts_of_host(host))
        if self.method.groups == "redrawn":
            parts = parts[ops.permutation(key, parts.numel())]
        groups = [tuple(sorted(group.tolist())) for group in parts.split(self.per_group)]
        if self.method.groups == "fixed":
            groups = [groups[i] for i in ops.permutation(key, len(groups)).tolist()]
        return groups

    def groups_of(self, epoch: int) -> list[Group]:
        """The non-empty groups of an epoch, over all ranks, in order."""
        return [group for turn in self.turns_of(epoch) for group in turn if group]

    # ---- edges

    def block_of(self, group: Group, nodes: Tensor, key: int | None) -> Block:
        """All in-edges of the group's nodes, without those that edge dropout draws by `key`.

        The cached block is whole: edges are dropped from it anew in every step.
        """
        return self._drop_edges(super().block_of(group, nodes, key), key)

    def _new_block(self, nodes: Tensor) -> Block:
        block = super()._new_block(nodes)
        return without_halo(block) if self.method.halo == "drop" else block

    def out_neighbors_of(self, group: Group, nodes: Tensor, key: int | None) -> Block | None:
        """All in-edges of the out-neighbours outside the group, less dropped ones. None without compensation."""
        if not self.method.compensate:
            return None
        block = self._cached_out_neighbors.get(group)
        if block is None:
            block = full_block(self.sampler, self._find_out_neighbors(nodes))
            if self._caches_block(group):
                self._cached_out_neighbors[group] = block
        return self._drop_edges(block, key)

    def _drop_edges(self, block: Block, key: int | None) -> Block:
        share = self.method.edge_dropout
        return drop_edges(block, share, key) if share and key is not None else block

    def has_fixed_edges(self, group: Group) -> bool:
        """Whether the group's edges are the same every time, which edge dropout prevents."""
        return super().has_fixed_edges(group) and not self.method.edge_dropout

    def _find_out_neighbors(self, nodes: Tensor) -> Tensor:
        """[n] int64, ascending: the nodes outside the batch that have an in-edge from one of `nodes`."""
        indptr, destinations = self._out_edges
        _, out_edges = ops.row_entries(indptr, nodes)
        is_out_neighbor = torch.zeros(self.graph.num_nodes, dtype=torch.bool)
        is_out_neighbor[destinations[out_edges]] = True
        is_out_neighbor[nodes] = False
        return is_out_neighbor.nonzero().view(-1)

    @cached_property
    def _out_edges(self) -> tuple[Tensor, Tensor]:
        """The graph by out-edges: ([num_nodes + 1] int64 indptr, [num_edges] int64 destination of each edge).

        Built when compensation first asks, since the graph itself is stored by in-edges.
        """
        indptr, edges = ops.group_by_key(self.graph.indices, self.graph.num_nodes)
        return indptr, torch.searchsorted(self.graph.indptr, edges, right=True) - 1
