"""Batches of historical training: the nodes of some parts, all their in-edges, and readers of the halo's rows.

All layers of a batch use one block. Its destinations are the batch's own nodes, and its sources are these and the
halo:

    sources:   | own nodes, part by part | halo                        |
    rows:      | computed in this step   | historical, from the tables |
"""

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


class HistoricalBatches(PartBatches):
    """Makes the batches of one work.

    One thread at a time: `_local_idx` is scratch memory.
    """

    work: HistoricalWork

    def __init__(self, work: HistoricalWork) -> None:
        super().__init__(work)
        # [num_nodes] scratch: the local id of each node of the batch at hand, -1 elsewhere. Allocated once, and reset
        # after each use only where it was written.
        self._local_idx = torch.full((self.data.num_nodes,), -1, dtype=torch.int64)

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
        work = self.work
        parts = work.parts
        nodes = parts.nodes_of(group)
        block = parts.block_of(group, nodes, key)
        positions = self.halo_positions(group, block)
        out_neighbors = self._index_out_neighbors(nodes, parts.out_neighbors_of(group, nodes, key))
        row_reader, gradient_reader = self._make_readers(positions, out_neighbors)
        self.pin(group, block, positions)  # for the moves to a GPU

        halo = Halo(
            row_ranges=parts.row_ranges_of(group),
            positions=positions,
            row_reader=row_reader,
            last=work.model.num_layers - 1,
            keeps_gradients=work.method.compensate,
            measures=work.method.lipschitz > 0,
        )
        batch = self.batch_of(replace(block, key=key, graph=self.graph, layer_hooks=halo), nodes, key)
        if self.on_gpu and out_neighbors is not None:
            out_neighbors = out_neighbors.to(self.device)
        return HistoricalBatch(
            batch=batch,
            halo=halo,
            nodes=nodes,
            out_neighbors=out_neighbors,
            row_reader=row_reader,
            gradient_reader=gradient_reader,
        )

    def _index_out_neighbors(self, nodes: Tensor, block: Block | None) -> OutNeighbors | None:
        """Find which sources of a block are nodes of the batch, and the positions of all its nodes in the tables.

        nodes: the batch's own nodes. block: in-edges of the out-neighbours, from `Groups.out_neighbors_of`.
        """
        if block is None:
            return None
        self._local_idx[nodes] = torch.arange(nodes.numel())
        local_idx = self._local_idx[block.src_ids]
        self._local_idx[nodes] = -1

        batch_src_idx = (local_idx >= 0).nonzero().view(-1)
        position = self.work.partition.position
        return OutNeighbors(
            block=replace(block, graph=self.graph),
            batch_src_idx=batch_src_idx,
            own_idx=local_idx[batch_src_idx],
            src_positions=position[block.src_ids],
            dst_positions=position[block.dst_ids],
        )

    def _make_readers(self, halo: Tensor, out_neighbors: OutNeighbors | None) -> tuple[RowReader, RowReader]:
        """(reader of rows, reader of gradients) of nodes outside a batch.

        On one host they read the tables. With several, rows of other hosts are fetched now, by an all-to-all, and
        read from that copy.

        halo: [n] int64 positions of the halo.
        """
        work = self.work
        # Rows are read after every layer but the last, gradients at the rows after every layer but the first.
        layers = range(work.model.num_layers)
        if not work.assignment.several_hosts:
            return work.histories.prefetch(layers[:-1], halo), work.gradients

        no_positions = halo[:0]
        src_positions = no_positions if out_neighbors is None else out_neighbors.src_positions
        dst_positions = no_positions if out_neighbors is None else out_neighbors.dst_positions
        row_reader = work.histories.begin_reading(layers[:-1], torch.cat([halo, src_positions]).unique())
        if not work.method.compensate:
            return row_reader, work.gradients
        return row_reader, work.gradients.begin_reading(layers[1:], dst_positions.unique())
