"""Gradients from outside a batch: what nodes that read its rows would send back, by tables of gradients.

A batch's own loss reaches the nodes of the batch alone. With exact tables of rows and gradients, adding the messages of
the nodes outside makes the sum over all batches the gradient of the full batch (the idea of LMC).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.nn.gnn import GNN
from hopline.nn.norms import running_statistics

if TYPE_CHECKING:
    from hopline.methods.historical.batches import HistoricalBatch
    from hopline.methods.historical.work import HistoricalWork


@dataclass(frozen=True, eq=False)
class OutNeighbors:
    """All in-edges of nodes outside a batch that have the batch's nodes among their sources."""

    block: Block
    batch_src_idx: Tensor
    """Those of its sources that are the batch's nodes,"""
    own_idx: Tensor
    """and which of the batch's they are."""
    src_positions: Tensor
    dst_positions: Tensor
    """Of all its sources and destinations, on the host."""

    def narrow(self, dst: slice, block: Block, among: Tensor) -> OutNeighbors:
        """Those of its destinations; block: their in-edges, whose sources are `among` all."""
        own = torch.full((self.block.num_src,), -1, device=among.device)
        own[self.batch_src_idx] = self.own_idx
        own = own[among]
        batch_src_idx = (own >= 0).nonzero().view(-1)
        return OutNeighbors(
            block, batch_src_idx, own[batch_src_idx], self.src_positions[among.cpu()], self.dst_positions[dst]
        )

    def to(self, device: torch.device) -> OutNeighbors:
        return replace(
            self,
            block=self.block.to(device),
            batch_src_idx=self.batch_src_idx.to(device),
            own_idx=self.own_idx.to(device),
        )


def compensation_loss(work: HistoricalWork, hist_batch: HistoricalBatch) -> Tensor:
    """A sum whose gradient at the batch's rows is what nodes outside would have sent back, by the tables."""
    total = torch.zeros((), device=work.job.device)
    out_neighbors, own = hist_batch.out_neighbors, hist_batch.halo.rows
    if out_neighbors is None or not out_neighbors.block.num_dst:
        return total
    for l in range(work.model.num_layers - 1):
        total = total + (own[l] * compensation_gradient(work, hist_batch, out_neighbors, l, own[l])).sum()
    return total


def compensation_gradient(
    work: HistoricalWork, hist_batch: HistoricalBatch, out_neighbors: OutNeighbors, l: int, own: Tensor
) -> Tensor:
    """What nodes outside send back to the batch's own rows after layer `l`, by the tables."""
    block, fresh = replace(out_neighbors.block, key=hist_batch.batch.key), own.detach().requires_grad_()
    rows = hist_batch.row_reader.read(l, out_neighbors.src_positions, fresh).index_put(
        (out_neighbors.batch_src_idx,), fresh[out_neighbors.own_idx]
    )
    with torch.enable_grad(), _norms_as_in_evaluation(work.model, l + 1):
        out = work.layer_at(l + 1, block, rows)
    given = hist_batch.gradient_reader.read(l + 1, out_neighbors.dst_positions, out)
    if not out.requires_grad:  # a layer that lets no gradient through
        return torch.zeros_like(fresh)
    (found,) = torch.autograd.grad(out, fresh, given, allow_unused=True)
    return torch.zeros_like(fresh) if found is None else found


def _norms_as_in_evaluation(model: GNN, l: int) -> AbstractContextManager[None]:
    """Nodes outside the batch must not enter its statistics."""
    return running_statistics([model.convs[l], model.norms[l]], only_if=True)
