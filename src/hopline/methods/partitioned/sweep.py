"""Sweeps over all parts: exact rows and gradients of all nodes, in the memory of a part and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from hopline.core.row_handles import Rows
from hopline.inference import evaluating
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.partitioned.parts import Group
from hopline.methods.partitioned.sweep_loss import objective_of
from hopline.methods.partitioned.work import PartsWork

MAX_HELD_EDGES = 1 << 20
"""Up to that many edges, the pieces of a sweep are kept from one layer to the next."""


class AllParts(LayerPlan[Group]):
    """All nodes that this rank keeps, by groups of parts."""

    encodes_once = True

    def __init__(self, work: PartsWork, key: int | None) -> None:
        self.work, self.key = work, key
        self._held: dict[Group, Piece] | None = {} if work.job.data.num_edges <= MAX_HELD_EDGES else None

    def chunks_of(self, l: int) -> Sequence[Group]:
        return self.work.parts.sweep

    def piece(self, l: int, chunk: Group) -> Piece:
        """Few edges are not moved to a GPU again at every layer."""
        if self._held is None:
            return self._make_piece(chunk)
        if chunk not in self._held:
            self._held[chunk] = self._make_piece(chunk)
        return self._held[chunk]

    def _make_piece(self, group: Group) -> Piece:
        parts, batches = self.work.parts, self.work.batches
        nodes, row_ranges = parts.nodes_of(group), parts.row_ranges_of(group)
        block = parts.block_of(group, nodes, self.key)
        halo = batches.halo_positions(group, block)
        batches.pin(group, block, halo)
        batch = batches.batch_of(replace(block, key=self.key, graph=batches.graph), nodes, self.key, inputs=False)
        positions = torch.cat([self.work.partition.position[nodes], halo])
        return Piece(batch.blocks[-1], positions, row_ranges, row_ranges[0].start, batch)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.work.batches.inputs_of(ids)


def _layers(work: PartsWork, key: int | None, *, keep: bool = False) -> Layers[Group]:
    """A sweep over all parts. keep: write the gradients at all rows into the tables of gradients."""
    swept, several = work.swept_positions, work.job.world.size > 1
    rows = Boundaries(
        work.histories,
        device=work.job.device,
        dtype=work.dtype,
        reads=lambda l: swept if several else None,
        keep_gradients=(lambda l, rows: work.gradients.write(l, [work.own_row_range], rows)) if keep else None,
        collect=(lambda rows: (work.owners.collect(swept, rows), work.owners.own.start)) if several else None,
    )
    return Layers(work.model, AllParts(work, key), rows, key=key)


def forward_sweep(work: PartsWork, key: int | None = None) -> None:
    """Fill the tables of rows by an exact forward pass; each rank fills what it keeps.

    key: of the draws, where the pass is one of training; without, it is in evaluation mode.
    """
    work.prepare()
    work.job.world.barrier()  # nobody reads any more
    with _mode(work, key), torch.no_grad():
        _layers(work, key).forward(range(work.model.num_layers - 1))
    work.histories.stamp([work.own_row_range], work.histories.step)
    work.job.world.barrier()


def backward_sweep(work: PartsWork, key: int | None = None, scale: float = 1.0, *, keep: bool = True) -> Tensor:
    """Add the gradient of `scale` times the summed loss to the parameters', for tables of rows that are exact.

    Each rank goes over what it keeps: the parameters' gradients are to be summed over ranks. Returns the summed loss of
    its nodes. key: as `forward_sweep` had it. keep: write the gradients at all rows into the tables of gradients.
    """
    objective = objective_of(work.job, scale, key)
    with torch.enable_grad() if key is not None else _evaluating_with_gradients(work.model):
        _layers(work, key, keep=keep).backward(objective)
    work.job.world.barrier()
    return objective.loss_sum


def _mode(work: PartsWork, key: int | None) -> AbstractContextManager[None]:
    return evaluating(work.model) if key is None else nullcontext()


@contextmanager
def _evaluating_with_gradients(model: nn.Module) -> Iterator[None]:
    # cuDNN's recurrent kernels, an LSTM for jumping knowledge, cannot go back in evaluation mode. Torch's own can.
    with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield
