"""A trimmed sweep: layer by layer over parts, only the rows that the training nodes need.

With L layers, the last one is needed at the training nodes only. A layer before it is needed at the nodes of the
next layer and at their in-neighbours:

    layer L - 1:  training nodes
    layer L - 2:  training nodes and their in-neighbours
    layer L - 3:  one hop more, and so on

Every needed node has all its in-edges, and degrees are those of the whole graph. So loss and gradients are those of a
sweep over all nodes. The needed rows are found once. Their blocks stay in host memory, if blocks are cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Rows
from hopline.core.sampler import full_block, in_neighborhood
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.methods.partitioned.sweep import Sweep


class NeededChunk(NamedTuple):
    """The nodes of one part that are needed after a layer."""

    part: int
    positions: Tensor
    """[n] int64 on the host, ascending: the table positions of the nodes."""


class NeededEdges(NamedTuple):
    """All in-edges of a chunk's nodes."""

    block: Block
    """Destinations: the needed nodes of the part."""
    src_positions: Tensor
    """[num_src] int64 on the host: table positions of the block's sources."""


class TrimmedSweep(Sweep):
    """A sweep over the rows that are needed after each layer, in one process and in training mode.

    These rows depend on the graph and the training nodes only, so all steps share one object.
    """

    def __init__(self, partitioned: PartitionedGraph) -> None:
        super().__init__(partitioned)
        self.graph = partitioned.job.data.graph
        needed = [partitioned.job.train_ids.cpu()]
        for _ in range(partitioned.model.num_layers - 1):
            needed.insert(0, in_neighborhood(self.graph, needed[0]))
        self.positions = [partitioned.partition.position[nodes].sort().values for nodes in needed]
        """By layer: [n] int64 on the host, ascending: positions of the nodes whose rows are needed after it."""
        self._edges: dict[tuple[int, int], NeededEdges] = {}
        """By (part, number of its nodes that are needed), if blocks are cached."""

    @cached_property
    def num_rows(self) -> int:
        return sum(positions.numel() for positions in self.positions)

    @cached_property
    def num_edges(self) -> int:
        order = self.partitioned.partition.order
        return sum(int(self.graph.in_degrees(order[positions]).sum()) for positions in self.positions)

    def chunks_of(self, l: int) -> list[NeededChunk]:
        bounds = torch.searchsorted(self.positions[l], self.partitioned.partition.ptr)
        by_part = self.positions[l].split(bounds.diff().tolist())
        return [NeededChunk(part, positions) for part, positions in enumerate(by_part) if positions.numel()]

    def edges_of(self, chunk: NeededChunk) -> NeededEdges:
        """All in-edges of a chunk's nodes."""
        # Layers that need the same nodes of a part share a block. Their number is key enough: the nodes needed
        # after a layer are among those needed after the layer before. So equal numbers mean the same nodes.
        key = (chunk.part, chunk.positions.numel())
        if key in self._edges:
            return self._edges[key]
        partition = self.partitioned.partition
        block = full_block(self.partitioned.parts.sampler, partition.order[chunk.positions])
        edges = NeededEdges(block, partition.position[block.src_ids])
        if self.partitioned.spec.caches_blocks:
            self._edges[key] = edges
        return edges

    def _layers(self, key: int | None) -> Layers[NeededChunk]:
        partitioned = self.partitioned
        boundaries = Boundaries(
            partitioned.histories,
            device=partitioned.job.device,
            dtype=partitioned.dtype,
            reads=lambda l: self.positions[l],
        )
        return Layers(partitioned.model, NeededParts(self, key), boundaries, key=key)


class NeededParts(LayerPlan[NeededChunk]):
    """The layer-wise engine's plan of a trimmed sweep: chunks are needed nodes by part, fewer at later layers."""

    def __init__(self, sweep: TrimmedSweep, key: int | None) -> None:
        self.sweep = sweep
        self.partitioned = sweep.partitioned
        self.key = key
        self.last = sweep.partitioned.model.num_layers - 1

    def chunks_of(self, l: int) -> list[NeededChunk]:
        return self.sweep.chunks_of(l)

    def piece(self, l: int, chunk: NeededChunk) -> Piece:
        """A chunk with its edges, on the model's device. At the last layer with training nodes and labels too."""
        batches = self.partitioned.batches
        edges = self.sweep.edges_of(chunk)
        block = replace(edges.block, key=self.key, graph=batches.graph)
        if l == self.last:
            batch = batches.batch_of(block, block.dst_ids, self.key, inputs=False)
        else:  # no loss at this layer: the batch only carries the block to the device
            batch = batches.to_device(Batch(block.dst_ids, (block,), x=None, y=None, key=self.key))
        return Piece(
            block=batch.blocks[-1],
            src=edges.src_positions,
            dst=chunk.positions,
            number=chunk.part,
            batch=batch,
        )

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.partitioned.batches.inputs_of(ids)
