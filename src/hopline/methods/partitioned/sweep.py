"""Sweeps over all parts: exact rows and gradients of all nodes, in the memory of one group of parts and its halo.

    forward     for each layer, for each group:  rows after layer l - 1   ->  table of layer l
    backward    for each layer, last first, for each group:
                compute the layer again from the tables, go back          ->  gradients after layer l - 1

The layer-wise engine runs both loops. It calls a group with its edges a *piece*. The price of the small memory is that
the backward sweep computes every layer a second time. Each rank sweeps over its own parts. Ranks read each other's
rows when a layer is complete, and sum the gradients at shared rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from hopline.core.row_handles import Rows
from hopline.device.snapshots import evaluating
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph
from hopline.methods.partitioned.parts import Group
from hopline.methods.partitioned.sweep_loss import make_sweep_loss

MAX_HELD_EDGES = 1 << 20
"""Most edges of a graph whose pieces stay on the device from one layer of a sweep to the next."""


class AllParts(LayerPlan[Group]):
    """The layer-wise engine's plan of a sweep: all nodes that this rank keeps, by groups of parts."""

    def __init__(self, partitioned: PartitionedGraph, key: int | None) -> None:
        self.partitioned = partitioned
        self.key = key
        has_memory = partitioned.spec.caches_blocks is not False
        self._is_small = has_memory and partitioned.job.data.num_edges <= MAX_HELD_EDGES
        # A piece has the same nodes at every layer, so the engine may keep their encoded rows.
        self.encodes_once = has_memory
        # By group: its piece, as long as the plan lives, which is one pass. Empty for a large graph.
        self._pieces: dict[Group, Piece] = {}

    def chunks_of(self, l: int) -> Sequence[Group]:
        return self.partitioned.parts.own_groups

    def piece(self, l: int, chunk: Group) -> Piece:
        """The group with its edges, on the device. In a small graph it is made once, for all layers."""
        if not self._is_small:
            return self._make_piece(chunk)
        if chunk not in self._pieces:
            self._pieces[chunk] = self._make_piece(chunk)
        return self._pieces[chunk]

    def _make_piece(self, group: Group) -> Piece:
        parts = self.partitioned.parts
        batches = self.partitioned.batches
        nodes = parts.nodes_of(group)
        row_ranges = parts.row_ranges_of(group)
        block = parts.block_of(group, nodes)
        halo = batches.halo_positions(group, block)
        batches.pin(group, block, halo)
        batch = batches.batch_of(replace(block, key=self.key, graph=batches.graph), nodes, self.key, inputs=False)
        positions = torch.cat([parts.partition.position[nodes], halo])
        # The number tells the engine which piece it is. The first position of a group belongs to no other group, and
        # is the same in every layer.
        return Piece(block=batch.blocks[-1], src=positions, dst=row_ranges, number=row_ranges[0].start, batch=batch)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.partitioned.batches.inputs_of(ids)


class Sweep:
    """A forward and a backward sweep over all nodes. Collective: each rank goes over the parts that it keeps.

    keeps_gradients: whether gradients at all rows are written into the tables of gradients.
    """

    def __init__(self, partitioned: PartitionedGraph, *, keeps_gradients: bool = False) -> None:
        self.partitioned = partitioned
        self.keeps_gradients = keeps_gradients

    @property
    def num_rows(self) -> int:
        """The number of rows that one pass over all layers computes, on all ranks."""
        return self.partitioned.job.data.num_nodes * self.partitioned.model.num_layers

    @property
    def num_edges(self) -> int:
        """The number of edges that one pass over all layers reads, on all ranks."""
        return self.partitioned.job.data.num_edges * self.partitioned.model.num_layers

    def forward(self, key: int | None = None) -> None:
        """Fill the tables by an exact forward pass. Each rank fills the rows that it keeps.

        key: of the random draws of a pass in training mode. None: evaluation mode.
        """
        partitioned = self.partitioned
        world = partitioned.job.world
        partitioned.prepare()
        world.barrier()  # no rank still reads the rows that are about to be overwritten
        mode = evaluating(partitioned.model) if key is None else nullcontext()
        with mode, torch.no_grad():
            self._layers(key).forward(range(partitioned.model.num_layers - 1))
        partitioned.histories.stamp([partitioned.own_row_range], partitioned.histories.step)
        world.barrier()

    def backward(self, key: int | None = None, scale: float = 1.0) -> Tensor:
        """Add the gradient of `scale` times the summed loss to the gradients of the parameters.

        The tables must be those of `forward` with the same weights and key. Each rank goes over its own nodes and
        returns their summed loss. The caller sums the parameters' gradients over ranks.
        """
        partitioned = self.partitioned
        objective = make_sweep_loss(partitioned.job, scale, key)
        mode = _evaluating_with_gradients(partitioned.model) if key is None else torch.enable_grad()
        with mode:
            self._layers(key).backward(objective)
        partitioned.job.world.barrier()
        return objective.loss_sum

    def _layers(self, key: int | None) -> Layers[Group]:
        """The engine of one pass. key: of the random draws; None in evaluation."""
        partitioned = self.partitioned
        positions = partitioned.swept_positions
        has_ranks = partitioned.job.world.size > 1

        def keep_gradients(l: int, rows: Tensor) -> None:
            partitioned.gradients.write(l, [partitioned.own_row_range], rows)

        def collect(rows: Tensor) -> tuple[Tensor, int]:
            """(gradients summed over ranks, of the rows that this rank keeps; the position of the first of them)."""
            return partitioned.owners.collect(positions, rows), partitioned.owners.own.start

        boundaries = Boundaries(
            partitioned.histories,
            device=partitioned.job.device,
            dtype=partitioned.dtype,
            reads=lambda l: positions if has_ranks else None,
            keep_gradients=keep_gradients if self.keeps_gradients else None,
            collect=collect if has_ranks else None,
        )
        return Layers(partitioned.model, AllParts(partitioned, key), boundaries, key=key)


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    # Jumping knowledge may use an LSTM. cuDNN's recurrent kernels have no backward pass in evaluation mode; torch's
    # own have one.
    with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield
