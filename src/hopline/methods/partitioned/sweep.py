"""Sweeps over all parts: exact rows and gradients of all nodes, in the memory of one group of parts and its halo.

    forward_sweep    for each layer, for each group:  rows after layer l - 1   ->  table of layer l
    backward_sweep   for each layer, last first, for each group:
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
from hopline.inference import evaluating
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.partitioned.parts import Group
from hopline.methods.partitioned.sweep_loss import make_sweep_loss
from hopline.methods.partitioned.work import PartsWork

MAX_HELD_EDGES = 1 << 20
"""Most edges of a graph whose pieces stay on the device from one layer of a sweep to the next."""


class AllParts(LayerPlan[Group]):
    """The layer-wise engine's plan of a sweep: all nodes that this rank keeps, by groups of parts."""

    def __init__(self, work: PartsWork, key: int | None) -> None:
        self.work = work
        self.key = key
        self._is_small = work.spec.caches_blocks and work.job.data.num_edges <= MAX_HELD_EDGES
        # A piece has the same nodes at every layer, so the engine may keep their encoded rows.
        self.encodes_once = work.spec.caches_blocks
        # By group: its piece, as long as the plan lives, which is one pass. Empty for a large graph.
        self._pieces: dict[Group, Piece] = {}

    def chunks_of(self, l: int) -> Sequence[Group]:
        return self.work.parts.own_groups

    def piece(self, l: int, chunk: Group) -> Piece:
        """The group with its edges, on the device. In a small graph it is made once, for all layers."""
        if not self._is_small:
            return self._make_piece(chunk)
        if chunk not in self._pieces:
            self._pieces[chunk] = self._make_piece(chunk)
        return self._pieces[chunk]

    def _make_piece(self, group: Group) -> Piece:
        parts = self.work.parts
        batches = self.work.batches
        nodes = parts.nodes_of(group)
        row_ranges = parts.row_ranges_of(group)
        block = parts.block_of(group, nodes, self.key)
        halo = batches.halo_positions(group, block)
        batches.pin(group, block, halo)
        batch = batches.batch_of(replace(block, key=self.key, graph=batches.graph), nodes, self.key, inputs=False)
        positions = torch.cat([self.work.partition.position[nodes], halo])
        # The number tells the engine which piece it is. The first position of a group belongs to no other group, and
        # is the same in every layer.
        return Piece(block=batch.blocks[-1], src=positions, dst=row_ranges, number=row_ranges[0].start, batch=batch)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.work.batches.inputs_of(ids)


def _layers(work: PartsWork, key: int | None, *, keep: bool = False) -> Layers[Group]:
    """The engine of one sweep over all parts.

    key: of the random draws; None in evaluation. keep: whether gradients at all rows go into the tables of gradients.
    """
    positions = work.swept_positions
    has_ranks = work.job.world.size > 1

    def keep_gradients(l: int, rows: Tensor) -> None:
        work.gradients.write(l, [work.own_row_range], rows)

    def collect(rows: Tensor) -> tuple[Tensor, int]:
        """(gradients summed over ranks, of the rows that this rank keeps; the position of the first of them)."""
        return work.owners.collect(positions, rows), work.owners.own.start

    boundaries = Boundaries(
        work.histories,
        device=work.job.device,
        dtype=work.dtype,
        reads=lambda l: positions if has_ranks else None,
        keep_gradients=keep_gradients if keep else None,
        collect=collect if has_ranks else None,
    )
    return Layers(work.model, AllParts(work, key), boundaries, key=key)


def forward_sweep(work: PartsWork, key: int | None = None) -> None:
    """Fill the tables by an exact forward pass. Collective: each rank fills the rows that it keeps.

    key: of the random draws of a pass in training mode. None: evaluation mode.
    """
    work.prepare()
    work.job.world.barrier()  # no rank still reads the rows that are about to be overwritten
    mode = evaluating(work.model) if key is None else nullcontext()
    with mode, torch.no_grad():
        _layers(work, key).forward(range(work.model.num_layers - 1))
    work.histories.stamp([work.own_row_range], work.histories.step)
    work.job.world.barrier()


def backward_sweep(work: PartsWork, key: int | None = None, scale: float = 1.0, *, keep: bool = True) -> Tensor:
    """Add the gradient of `scale` times the summed loss to the gradients of the parameters.

    The tables must be those of a `forward_sweep` with the same weights and key. Collective: each rank goes over its
    own nodes and returns their summed loss. The caller sums the parameters' gradients over ranks.

    key: that of `forward_sweep`. keep: whether gradients at all rows are written into the tables of gradients.
    """
    objective = make_sweep_loss(work.job, scale, key)
    mode = _evaluating_with_gradients(work.model) if key is None else torch.enable_grad()
    with mode:
        _layers(work, key, keep=keep).backward(objective)
    work.job.world.barrier()
    return objective.loss_sum


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    # Jumping knowledge may use an LSTM. cuDNN's recurrent kernels have no backward pass in evaluation mode; torch's
    # own have one.
    with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield
