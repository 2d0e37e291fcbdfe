"""Batches of the nodes of parts, built on the host and moved to the model's device.

    host: block, labels, rows that a GPU cannot read itself  ->  mover, while the GPU computes  ->  device: batch

Tables that the GPU reads itself (device or pinned memory) are not moved: the batch gets handles to their rows.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hopline import ops
from hopline.contract import Job
from hopline.core.batch import Batch, Block
from hopline.core.examples import ExampleIndex
from hopline.core.row_handles import Rows
from hopline.device import pinned
from hopline.methods.partitioned.parts import Group, Parts
from hopline.pipeline.transfer import Mover

LOOK_AHEAD = 2
"""Most batches whose tensors are in transfer to a GPU at once."""


class PartBatches:
    """Makes batches of the nodes of parts, on the model's device.

    Owns the mover, and caches the positions of halos that come again.

    num_layers: blocks of a batch, one for each layer of the model.
    """

    def __init__(self, job: Job, parts: Parts, num_layers: int) -> None:
        self.parts = parts
        self.num_layers = num_layers
        self.device = job.device
        self.data = job.data
        self.mover = Mover(self.device, LOOK_AHEAD)
        self.index = ExampleIndex(job.examples, self.data.num_nodes)
        graph = parts.graph
        # Convs read degrees on the batch's device, which therefore gets a copy of `indptr`. Edges stay on the host.
        indptr = graph.indptr.to(self.device)
        self.graph = graph.with_arrays(indptr, graph.indices, graph.edge) if self.on_gpu else graph
        self._halo_positions: dict[Group, Tensor] = {}
        """By group, for those with a cached block: the positions of its halo."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def halo_positions(self, group: Group, block: Block) -> Tensor:
        """[n] int64 on the host: positions in the tables of the halo, the sources behind the group's own nodes."""
        if group in self._halo_positions:
            return self._halo_positions[group]
        positions = self.parts.partition.position[block.src_ids[block.num_dst :]]
        if self.parts.caches_block(group):
            self._halo_positions[group] = positions
        return positions

    def pin(self, group: Group, block: Block, positions: Tensor) -> None:
        """Pin the tensors of a cached block, since they move to a GPU again and again.

        Tensors that cannot be pinned go through the mover's buffers.
        """
        if self.on_gpu and self.parts.caches_block(group):
            for tensor in (*block.tensors(), positions):
                if tensor is not None and tensor.numel() and not pinned.is_registered(tensor):
                    pinned.register(tensor)

    def batch_of(self, block: Block, nodes: Tensor, key: int | None, *, inputs: bool = True) -> Batch:
        """The batch of a block's nodes, on the model's device. Its seeds are those nodes that train.

        nodes: [n] int64 on the host: the block's destinations. key: of the random draws. inputs: whether the batch
        has features and other tables.
        """
        data = self.data
        found = self.index.find(nodes)
        seeds = nodes[found.seed_idx]
        examples = self.index.examples
        handles = {}
        if inputs:
            handles = {name: Rows(table, block.src_ids) for name, table in data.tables.items()}
        y = None
        if examples.y is not None:
            y = examples.y[found.numbers].cpu()
        # Labels on a GPU are read after the move, by `to_device`.
        elif data.y is not None and data.y.device == seeds.device:
            y = ops.gather_rows(data.y, nodes[found.output_idx])
        batch = Batch(
            seeds=seeds,
            blocks=(block,) * self.num_layers,
            x=handles.pop("x", None),
            y=y,
            tables=handles,
            key=key,
            total_seeds=found.output_idx.numel(),
            output_idx=found.output_idx,
        )
        return self.to_device(batch)

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the model's device. Rows of tables that a GPU cannot read are read on the host first.

        All other rows are handles. They do not move, but are made again with the ids on the device.
        """
        if not self.on_gpu:
            return batch
        inputs = dict(batch.tables) if batch.x is None else {"x": batch.x, **batch.tables}
        handles = {name: rows for name, rows in inputs.items() if isinstance(rows, Rows)}
        host_rows: dict[str, Rows | Tensor] = {}
        for name, handle in handles.items():
            if handle.table.tiers(self.device) is None:  # the GPU cannot read this table
                host_rows[name] = handle.read()
        x = host_rows.pop("x", None)
        moved = self.mover.ready(self.mover.move(replace(batch, x=x, tables=host_rows)))

        tables = dict(moved.tables)
        for name, handle in handles.items():
            if name != "x" and name not in tables:
                tables[name] = Rows(handle.table, moved.input_ids)
        x = moved.x
        if x is None and "x" in handles:
            x = Rows(handles["x"].table, moved.input_ids)
        y = moved.y
        if y is None and self.data.y is not None:
            y = ops.gather_rows(self.data.y, moved.example_ids)
        return replace(moved, x=x, y=y, tables=tables)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        """The features of some nodes for the model: a handle if its device can read the table, else the rows."""
        table = self.data.x
        if not self.on_gpu or table.tiers(self.device) is not None:
            return Rows(table, ids)
        return table.read(ids.cpu()).to(self.device)
