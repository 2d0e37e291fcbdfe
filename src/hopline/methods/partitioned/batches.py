"""Batches of the nodes of parts, moved to where the model is."""

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
from hopline.methods.partitioned.parts import Group
from hopline.pipeline.transfer import Mover

if TYPE_CHECKING:
    from hopline.methods.partitioned.work import PartsWork

LOOK_AHEAD = 2
"""Batches whose tensors may be on their way to a GPU."""


class PartBatches:
    """Makes batches of the nodes of parts; for a GPU on the host, from where they are moved while it computes."""

    def __init__(self, work: PartsWork) -> None:
        self.work, self.device, self.data = work, work.job.device, work.job.data
        self.mover = Mover(self.device, LOOK_AHEAD)
        self.is_training = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        self.is_training[work.job.train_ids.cpu()] = True
        graph = work.parts.graph
        # Degrees are asked where the batch is; edges stay on the host.
        self.graph = Graph(graph.indptr.to(self.device), graph.indices, graph.edge) if self.on_gpu else graph
        self._positions: dict[Group, Tensor] = {}

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def halo_positions(self, group: Group, block: Block) -> Tensor:
        """Places of the sources behind the group's own nodes, on the host."""
        if group in self._positions:
            return self._positions[group]
        positions = self.work.partition.position[block.src_ids[block.num_dst :]]
        if self.work.parts.keeps(group):
            self._positions[group] = positions
        return positions

    def pin(self, group: Group, block: Block, positions: Tensor) -> None:
        """Pin what is moved to a GPU again and again; what cannot be pinned goes through the mover's buffers."""
        if self.on_gpu and self.work.parts.keeps(group):
            for tensor in (*block.tensors(), positions):
                if tensor is not None and tensor.numel() and not pinned.is_registered(tensor):
                    pinned.register(tensor)

    def batch_of(self, block: Block, nodes: Tensor, key: int | None, *, inputs: bool = True) -> Batch:
        """A block's nodes, where the model is; the seeds are those that train. inputs: with features and tables."""
        data = self.data
        output_idx = self.is_training[nodes].nonzero().view(-1)
        seeds = nodes[output_idx]
        handles = {name: Rows(table, block.src_ids) for name, table in data.tables.items()} if inputs else {}
        y = None if data.y is None or data.y.device != seeds.device else ops.gather_rows(data.y, seeds)
        x, blocks = handles.pop("x", None), (block,) * self.work.model.num_layers
        return self.to_device(Batch(seeds, blocks, x, y, handles, key, seeds.numel(), output_idx))

    def to_device(self, batch: Batch) -> Batch:
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
        """Features of some nodes, for the model."""
        table = self.data.x
        if not self.on_gpu or table.tiers(self.device) is not None:
            return Rows(table, ids)
        return table.read(ids.cpu()).to(self.device)
