"""A sweep over parts that computes, layer by layer, only the rows that the training nodes need.

A node that is needed has all its in-edges, and degrees are those of the whole graph, so loss and gradients are those of
a sweep over all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Rows
from hopline.core.sampler import full_block, in_neighborhood
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.partitioned.sweep_loss import objective_of
from hopline.methods.partitioned.work import PartsWork

NeededChunk = tuple[int, Block, Tensor]
"""(part, all in-edges of its nodes whose rows are needed after a layer, places of their sources)."""


class NeededRows:
    """Which rows are needed after each layer, and the edges that lead to them; the same in every step."""

    def __init__(self, work: PartsWork) -> None:
        self.work, self.graph = work, work.job.data.graph
        needed = [work.job.train_ids.cpu()]
        for _ in range(work.model.num_layers - 1):
            needed.insert(0, in_neighborhood(self.graph, needed[0]))
        self.positions = [work.partition.position[nodes].sort().values for nodes in needed]
        """[n] int64 by layer, ascending: the places of the nodes whose rows are needed after it."""
        self._blocks: dict[tuple[int, int], tuple[Block, Tensor]] = {}

    @cached_property
    def num_rows(self) -> int:
        """Rows that one pass over the layers computes."""
        return sum(positions.numel() for positions in self.positions)

    @cached_property
    def num_edges(self) -> int:
        """Edges over which it does."""
        order = self.work.partition.order
        return sum(int(self.graph.in_degrees(order[positions]).sum()) for positions in self.positions)

    def blocks(self, l: int) -> Iterable[NeededChunk]:
        """(part, in-edges of its nodes that are needed after layer `l`, places of their sources)."""
        partition = self.work.partition
        bounds = torch.searchsorted(self.positions[l], partition.ptr)
        for part, positions in enumerate(self.positions[l].split(bounds.diff().tolist())):
            # What is needed later is part of what is needed earlier: as many nodes are the same nodes.
            known = (part, positions.numel())
            if positions.numel() and known not in self._blocks:
                block = full_block(self.work.parts.sampler, partition.order[positions])
                self._blocks[known] = block, partition.position[block.src_ids]
            if positions.numel():
                yield part, *self._blocks[known]

    def forward(self, key: int | None) -> None:
        """Fill the tables at the rows that are needed. key: of the draws."""
        with torch.no_grad():
            self._layers(key).forward(range(self.work.model.num_layers - 1))

    def backward(self, key: int | None, scale: float) -> Tensor:
        """Add the gradient of `scale` times the summed loss to the parameters'; returns that loss."""
        objective = objective_of(self.work.job, scale, key)
        with torch.enable_grad():
            self._layers(key).backward(objective)
        return objective.loss_sum

    def _layers(self, key: int | None) -> Layers[NeededChunk]:
        work, positions = self.work, self.positions
        rows = Boundaries(work.histories, device=work.job.device, dtype=work.dtype, reads=lambda l: positions[l])
        return Layers(work.model, NeededParts(self, key), rows, key=key)


class NeededParts(LayerPlan[NeededChunk]):
    """The nodes of each part whose rows are needed, which are others at every layer."""

    def __init__(self, needed: NeededRows, key: int | None) -> None:
        self.needed, self.work, self.key = needed, needed.work, key
        self.last = needed.work.model.num_layers - 1

    def chunks_of(self, l: int) -> list[NeededChunk]:
        return list(self.needed.blocks(l))

    def piece(self, l: int, chunk: NeededChunk) -> Piece:
        """With seeds and labels after the last layer alone."""
        (part, block, positions), batches = chunk, self.work.batches
        block = replace(block, key=self.key, graph=batches.graph)
        if l == self.last:
            batch = batches.batch_of(block, block.dst_ids, self.key, inputs=False)
        else:
            batch = batches.to_device(Batch(block.dst_ids, (block,), None, None, key=self.key))
        return Piece(batch.blocks[-1], positions, positions[: block.num_dst], part, batch)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.work.batches.inputs_of(ids)
