"""Batches of historical training: the edges of some parts, and where rows of their neighbours are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.core.batch import Batch, Block
from hopline.methods.historical.compensation import OutNeighbors
from hopline.methods.historical.halo import Halo
from hopline.methods.partitioned.batches import PartBatches
from hopline.methods.partitioned.parts import Group
from hopline.tables.history import RowReader

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork


@dataclass(frozen=True, eq=False)
class HistoricalBatch:
    """A batch, and what is needed to write its rows and to hear from its neighbours."""

    batch: Batch
    halo: Halo
    """Reads stored rows between layers, and records the batch's own."""
    nodes: Tensor
    """[n] int64: the batch's own nodes, part by part."""
    out_neighbors: OutNeighbors | None
    """With compensation: the nodes outside the batch that read from it."""
    row_reader: RowReader
    gradient_reader: RowReader
    """Where rows and gradients of nodes outside are read."""

    @property
    def block(self) -> Block:
        """All in-edges of the batch's nodes."""
        return self.batch.blocks[0]


class HistoricalBatches(PartBatches):
    """Makes the batches of one work."""

    work: HistoricalWork

    def __init__(self, work: HistoricalWork) -> None:
        super().__init__(work)
        self._local_idx = torch.full((self.data.num_nodes,), -1, dtype=torch.int64)

    def make(self, group: Group, key: int | None) -> HistoricalBatch | None:
        """All in-edges of the group's nodes; None for a group of no parts.

        Rows of the halo are asked for now, from other hosts by all ranks together.
        """
        if not group:
            self._readers(torch.empty(0, dtype=torch.int64), None)
            return None
        work, parts = self.work, self.work.parts
        nodes = parts.nodes_of(group)
        block = parts.block_of(group, nodes, key)
        positions = self.halo_positions(group, block)
        out_neighbors = self._find_out_neighbors(nodes, parts.readers_of(group, nodes, key))
        row_reader, gradients = self._readers(positions, out_neighbors)
        self.pin(group, block, positions)
        halo = Halo(
            parts.row_ranges_of(group), positions, row_reader, work.model.num_layers - 1,
            keeps_gradients=work.method.compensate, measures=work.method.lipschitz > 0,
        )  # fmt: skip
        batch = self.batch_of(replace(block, key=key, graph=self.graph, layer_hooks=halo), nodes, key)
        if self.on_gpu:
            out_neighbors = None if out_neighbors is None else out_neighbors.to(self.device)
        return HistoricalBatch(batch, halo, nodes, out_neighbors, row_reader, gradients)

    def _find_out_neighbors(self, nodes: Tensor, block: Block | None) -> OutNeighbors | None:
        if block is None:
            return None
        self._local_idx[nodes] = torch.arange(nodes.numel())
        own = self._local_idx[block.src_ids]
        self._local_idx[nodes] = -1
        position, src_idx = self.work.partition.position, (own >= 0).nonzero().view(-1)
        block = replace(block, graph=self.graph)
        return OutNeighbors(block, src_idx, own[src_idx], position[block.src_ids], position[block.dst_ids])

    def _readers(self, halo: Tensor, out_neighbors: OutNeighbors | None) -> tuple[RowReader, RowReader]:
        """Where a batch finds rows and gradients of other nodes: in the tables, or in a copy of what is far away."""
        work = self.work
        layers = range(work.model.num_layers)
        if not work.shares.several_hosts:
            return work.histories.prefetch(layers[:-1], halo), work.gradients
        src, dst = (
            (halo[:0], halo[:0])
            if out_neighbors is None
            else (out_neighbors.src_positions, out_neighbors.dst_positions)
        )
        rows = work.histories.begin_reading(layers[:-1], torch.cat([halo, src]).unique())
        if not work.method.compensate:
            return rows, work.gradients
        return rows, work.gradients.begin_reading(layers[1:], dst.unique())
