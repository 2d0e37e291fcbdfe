"""Batches of historical training: the nodes of some parts, all their in-edges, and readers of the halo's rows.

All layers of a batch use one block. Its destinations are the batch's own nodes, and its sources are these and the
halo:

    sources:   | own nodes, part by part | halo                        |
    rows:      | computed in this step   | historical, from the tables |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, Block
from hopline.core.sampler import full_block
from hopline.methods.historical.compensation import OutNeighbors
from hopline.methods.historical.edge_dropout import drop_edges
from hopline.methods.historical.halo import Halo
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.methods.partitioned.parts import Group
from hopline.tables.history import RowReader

if TYPE_CHECKING:
    from hopline.methods.historical.settings import Historical


@dataclass(frozen=True, eq=False)
class HistoricalBatch:
    """A batch with its halo, and the readers of tables that it needs."""

    batch: Batch
    halo: Halo
    """Reads historical embeddings of the halo between layers, and records the batch's own rows for the push."""
    nodes: Tensor
    """[n] int64 on the host: global ids of the batch's own nodes, part by part."""
    out_neighbors: OutNeighbors | None
    """The nodes outside the batch that read its rows. None without compensation."""
    row_reader: RowReader
    """Reads historical embeddings of nodes outside the batch."""
    gradient_reader: RowReader
    """Reads stored gradients at rows of nodes outside the batch, for compensation."""

    @property
    def block(self) -> Block:
        """All in-edges of the batch's nodes. Every layer uses this block."""
        return self.batch.blocks[0]


class HistoricalBatches:
    """Makes the batches of one work.

    One thread at a time: `_local_idx` is scratch memory.
    """

    def __init__(self, method: Historical, partitioned: PartitionedGraph) -> None:
        self.method = method
        self.partitioned = partitioned
        self.data = partitioned.job.data
        # [num_nodes] scratch: the local id of each node of the batch at hand, -1 elsewhere. Allocated once, and reset
        # after each use only where it was written.
        self._local_idx = torch.full((self.data.num_nodes,), -1, dtype=torch.int64)
        self._out_neighbor_blocks: dict[Group, Block] = {}
        """By group, for those with a cached block: in-edges of the nodes that read from it."""

    def make(self, group: Group, key: int | None) -> HistoricalBatch | None:
        """The batch of a group of parts, on the model's device. None for an empty group.

        Collective with several hosts: the ranks fetch rows of their halos from each other. So a rank without parts
        calls it too. On a GPU the halo's rows may begin to move now.

        key: of the batch's random draws. None: no draws.
        """
        if not group:
            # Other ranks may need rows from this host: take part in the all-to-all, asking for nothing.
            self._make_readers(torch.empty(0, dtype=torch.int64), None)
            return None
        method = self.method
        parts = self.partitioned.parts
        part_batches = self.partitioned.batches
        nodes = parts.nodes_of(group)
        block = parts.block_of(group, nodes)
        positions = part_batches.halo_positions(group, block)
        out_neighbors = self._find_out_neighbors(group, nodes, key) if method.compensate else None
        row_reader, gradient_reader = self._make_readers(positions, out_neighbors)
        if method.edge_dropout:  # from the cached block, anew in every step
            block = self._drop_edges(block, key)
        else:
            part_batches.pin(group, block, positions)  # for the moves to a GPU

        halo = Halo(
            row_ranges=parts.row_ranges_of(group),
            positions=positions,
            row_reader=row_reader,
            last=self.partitioned.model.num_layers - 1,
            keeps_gradients=method.compensate,
            measures=method.lipschitz > 0,
        )
        block = replace(block, key=key, graph=part_batches.graph, layer_hooks=halo)
        if part_batches.on_gpu and out_neighbors is not None:
            out_neighbors = out_neighbors.to(part_batches.device)
        return HistoricalBatch(
            batch=part_batches.batch_of(block, nodes, key),
            halo=halo,
            nodes=nodes,
            out_neighbors=out_neighbors,
            row_reader=row_reader,
            gradient_reader=gradient_reader,
        )

    def _drop_edges(self, block: Block, key: int | None) -> Block:
        share = self.method.edge_dropout
        return drop_edges(block, share, key) if share and key is not None else block

    # ---- the nodes outside that read from a batch

    def _find_out_neighbors(self, group: Group, nodes: Tensor, key: int | None) -> OutNeighbors:
        """The nodes outside the group that have an in-edge from it, with all their in-edges but dropped ones."""
        parts = self.partitioned.parts
        block = self._out_neighbor_blocks.get(group)
        if block is None:
            block = full_block(parts.sampler, self._find_readers(nodes))
            if parts.caches_block(group):
                self._out_neighbor_blocks[group] = block
        block = self._drop_edges(block, key)

        self._local_idx[nodes] = torch.arange(nodes.numel())
        local_idx = self._local_idx[block.src_ids]
        self._local_idx[nodes] = -1
        batch_src_idx = (local_idx >= 0).nonzero().view(-1)
        position = parts.partition.position
        return OutNeighbors(
            block=replace(block, graph=self.partitioned.batches.graph),
            batch_src_idx=batch_src_idx,
            own_idx=local_idx[batch_src_idx],
            src_positions=position[block.src_ids],
            dst_positions=position[block.dst_ids],
        )

    def _find_readers(self, nodes: Tensor) -> Tensor:
        """[n] int64, ascending: the nodes outside the batch that have an in-edge from one of `nodes`."""
        indptr, destinations = self._out_edges
        _, out_edges = ops.row_entries(indptr, nodes)
        is_reader = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        is_reader[destinations[out_edges]] = True
        is_reader[nodes] = False
        return is_reader.nonzero().view(-1)

    @cached_property
    def _out_edges(self) -> tuple[Tensor, Tensor]:
        """The graph by out-edges: ([num_nodes + 1] int64 indptr, [num_edges] int64 destinations). For compensation."""
        graph = self.data.graph
        indptr, edges = ops.group_by_key(graph.indices, graph.num_nodes)
        return indptr, torch.searchsorted(graph.indptr, edges, right=True) - 1

    # ---- rows outside

    def _make_readers(self, halo: Tensor, out_neighbors: OutNeighbors | None) -> tuple[RowReader, RowReader]:
        """(reader of rows, reader of gradients) of nodes outside a batch.

        On one host they read the tables. With several, rows of other hosts are fetched now, by an all-to-all, and
        read from that copy.

        halo: [n] int64 positions of the halo.
        """
        histories = self.partitioned.histories
        gradients = self.partitioned.gradients
        # Rows are read after every layer but the last, gradients at the rows after every layer but the first.
        layers = range(self.partitioned.model.num_layers)
        if not self.partitioned.assignment.several_hosts:
            return histories.prefetch(layers[:-1], halo), gradients

        no_positions = halo[:0]
        src_positions = no_positions if out_neighbors is None else out_neighbors.src_positions
        dst_positions = no_positions if out_neighbors is None else out_neighbors.dst_positions
        row_reader = histories.begin_reading(layers[:-1], torch.cat([halo, src_positions]).unique())
        if not self.method.compensate:
            return row_reader, gradients
        return row_reader, gradients.begin_reading(layers[1:], dst_positions.unique())
