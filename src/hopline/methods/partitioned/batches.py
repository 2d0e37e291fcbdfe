"""Batches of historical training: the edges of some parts, and where rows of their neighbours are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, Block
from hopline.core.graph import Graph
from hopline.core.row_handles import Rows
from hopline.device import pinned
from hopline.methods.historical.compensation import Later
from hopline.methods.historical.step import HistoricalBatch
from hopline.methods.partitioned.groups import Group
from hopline.pipeline.transfer import Mover
from hopline.tables.history import HaloBlock, Reader

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork

LOOK_AHEAD = 2
"""Batches whose tensors may be on their way to a GPU."""


class HistoricalBatches:
    """Makes the batches of one work; for a GPU on the host, from where they are moved while it computes."""

    def __init__(self, work: HistoricalWork) -> None:
        self.work, self.device, self.data = work, work.job.device, work.job.data
        self.mover = Mover(self.device, LOOK_AHEAD)
        self.is_training = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        self.is_training[work.job.train_ids.cpu()] = True
        graph = work.parts.graph
        # Degrees are asked where the batch is; edges stay on the host.
        self.graph = Graph(graph.indptr.to(self.device), graph.indices, graph.edge) if self.on_gpu else graph
        self._places: dict[Group, Tensor] = {}
        self._place = torch.full((self.data.num_nodes,), -1, dtype=torch.int64)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def make(self, group: Group, key: int | None, *, pull: bool = True, inputs: bool = True) -> HistoricalBatch | None:
        """All in-edges of the group's nodes; None for a group of no parts.

        pull: rows of the halo are asked for now, from other hosts by all ranks together; without, they are not read.
        inputs: the batch has its nodes' features and other tables.
        """
        if not group:
            self._readers(torch.empty(0, dtype=torch.int64), None, pull)
            return None
        work, parts = self.work, self.work.parts
        nodes = parts.nodes_of(group)
        found = parts.blocks_of(group, nodes, key)
        places = self._halo_places(group, found.block)
        later = self._later(nodes, found.later)
        rows, gradients = self._readers(places, later, pull)
        if self.on_gpu and parts.keeps(group):
            for tensor in (*found.block.tensors(), places):
                if tensor is not None and tensor.numel() and not pinned.is_registered(tensor):
                    pinned.register(tensor)  # what cannot be goes through the mover's buffers
        plain, last = replace(found.block, key=key, graph=self.graph), work.model.num_layers - 1
        block = HaloBlock(plain, parts.slabs_of(group), places, rows, last, work.method.compensate)
        batch = self.batch_of(block, nodes, key, inputs=inputs)
        if self.on_gpu:
            later = None if later is None else later.to(self.device)
        (block, *_) = batch.blocks
        assert isinstance(block, HaloBlock)
        return HistoricalBatch(batch, block, nodes, later, rows, gradients)

    def _halo_places(self, group: Group, block: Block) -> Tensor:
        if group in self._places:
            return self._places[group]
        places = self.work.partition.position[block.src_ids[block.num_dst :]]
        if self.work.parts.keeps(group):
            self._places[group] = places
        return places

    def batch_of(self, block: Block, nodes: Tensor, key: int | None, *, inputs: bool = True) -> Batch:
        """A block's nodes, where the model is; the seeds are those that train."""
        data = self.data
        output_idx = self.is_training[nodes].nonzero().view(-1)
        seeds = nodes[output_idx]
        handles = {name: Rows(table, block.src_ids) for name, table in data.tables.items()} if inputs else {}
        y = None if data.y is None or data.y.device != seeds.device else ops.gather_rows(data.y, seeds)
        x, blocks = handles.pop("x", None), (block,) * self.work.model.num_layers
        return self.moved(Batch(seeds, blocks, x, y, handles, key, seeds.numel(), output_idx))

    def moved(self, batch: Batch) -> Batch:
        """Where the model is; rows that a GPU does not reach itself are read first."""
        if not self.on_gpu:
            return batch
        handles = {} if batch.x is None else {"x": batch.x}
        handles |= batch.tables
        read = {n: r.read() for n, r in handles.items() if isinstance(r, Rows) and r.table.tiers(self.device) is None}
        moved = self.mover.ready(self.mover.move(replace(batch, x=read.pop("x", None), tables=read)))
        ids = moved.input_ids
        near = {n: Rows(r.table, ids) for n, r in handles.items() if isinstance(r, Rows) and n not in moved.tables}
        x = near.pop("x", None) if moved.x is None else moved.x
        near.pop("x", None)
        y = moved.y if self.data.y is None or moved.y is not None else ops.gather_rows(self.data.y, moved.seeds)
        return replace(moved, x=x, y=y, tables={**moved.tables, **near})

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        """Input rows of some nodes, for the model."""
        table = self.data.x
        if not self.on_gpu or table.tiers(self.device) is not None:
            return Rows(table, ids)
        return table.read(ids.cpu()).to(self.device)

    def _later(self, nodes: Tensor, block: Block | None) -> Later | None:
        if block is None:
            return None
        self._place[nodes] = torch.arange(nodes.numel())
        own = self._place[block.src_ids]
        self._place[nodes] = -1
        position, src_idx = self.work.partition.position, (own >= 0).nonzero().view(-1)
        block = replace(block, graph=self.graph)
        return Later(block, src_idx, own[src_idx], position[block.src_ids], position[block.dst_ids])

    def _readers(self, halo: Tensor, later: Later | None, pull: bool) -> tuple[Reader, Reader]:
        """Where a batch finds rows and gradients of other nodes: in the tables, or in a copy of what is far away."""
        work = self.work
        layers = range(work.model.num_layers)
        if not pull:
            return work.histories, work.gradients
        if not work.shares.several_hosts:
            return work.histories.ahead(layers[:-1], halo), work.gradients
        src, dst = (halo[:0], halo[:0]) if later is None else (later.src_places, later.dst_places)
        rows = work.histories.snapshot(layers[:-1], torch.cat([halo, src]).unique())
        return rows, work.gradients.snapshot(layers[1:], dst.unique()) if work.method.compensate else work.gradients
