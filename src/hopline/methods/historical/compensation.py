"""Compensation: the gradient that out-neighbours outside a batch would send back to its rows.

The loss of a batch reaches only the nodes of the batch. In a full batch, every out-neighbour of a batch node would
send a gradient back too. Compensation computes that missing gradient from two kinds of tables: historical embeddings,
and gradients of the loss at them, stored by earlier steps. With exact tables, the gradients of all batches add up to
that of the full batch. The idea is that of LMC (local message compensation, ICLR 2023).

The price is a table of gradients for every layer. In each step, every layer but the first also runs forward and
backward over all in-edges of the out-neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.budget.micro_batches import edges_of_run
from hopline.core.batch import Block
from hopline.nn.layered import ENCODED
from hopline.nn.norms import running_statistics

if TYPE_CHECKING:
    from hopline.methods.historical.batches import HistoricalBatch
    from hopline.methods.partitioned.partitioned_graph import PartitionedGraph


@dataclass(frozen=True, eq=False)
class OutNeighbors:
    """Nodes outside a batch that read rows of the batch, with all their in-edges."""

    block: Block
    """Destinations: the out-neighbours. Sources: all their in-neighbours, nodes of the batch included."""
    batch_src_idx: Tensor
    """[k] int64: which sources of `block` are nodes of the batch."""
    own_idx: Tensor
    """[k] int64: the local id, among the batch's own nodes, of each source that `batch_src_idx` names."""
    src_positions: Tensor
    """[num_src] int64 on the host: positions of all sources in the tables of historical embeddings."""
    dst_positions: Tensor
    """[num_dst] int64 on the host: positions of all destinations in the tables of gradients."""

    def narrow(self, dst: slice) -> OutNeighbors:
        """The out-neighbours at some destinations only, for a batch in micro-batches."""
        block, whole_src_idx = edges_of_run(self.block, dst)
        # [num_src]: the local id of each source among the batch's own nodes, -1 for nodes outside the batch.
        local_idx = torch.full((self.block.num_src,), -1, device=whole_src_idx.device)
        local_idx[self.batch_src_idx] = self.own_idx
        local_idx = local_idx[whole_src_idx]
        batch_src_idx = (local_idx >= 0).nonzero().view(-1)
        return OutNeighbors(
            block=block,
            batch_src_idx=batch_src_idx,
            own_idx=local_idx[batch_src_idx],
            src_positions=self.src_positions[whole_src_idx.cpu()],
            dst_positions=self.dst_positions[dst],
        )

    def to(self, device: torch.device) -> OutNeighbors:
        return replace(
            self,
            block=self.block.to(device),
            batch_src_idx=self.batch_src_idx.to(device),
            own_idx=self.own_idx.to(device),
        )


def compensation_loss(partitioned: PartitionedGraph, hist_batch: HistoricalBatch) -> Tensor:
    """A scalar whose gradient at the batch's own rows is what out-neighbours outside would send back.

    Let L be the summed loss over the whole graph, h_j the row of a batch node j after layer l, and h'_i the row of
    node i after layer l + 1. By the chain rule

        dL/dh_j  =  sum over out-neighbours i of j   (dh'_i / dh_j)^T  dL/dh'_i

    Autograd computes the terms of those i that are in the batch. `compensation_gradient` computes g_j, the sum over
    the i outside, with dL/dh'_i from the tables. With g held constant, the scalar

        sum over j   <h_j, g_j>

    has the gradient g_j at h_j. Adding it to the loss lets one backward pass do both.
    """
    loss = torch.zeros((), device=partitioned.job.device)
    out_neighbors = hist_batch.out_neighbors
    if out_neighbors is None or not out_neighbors.block.num_dst:
        return loss
    for l in range(partitioned.model.num_layers - 1):
        # `halo` appends the halo's rows between layers, and records the batch's own.
        own_rows = hist_batch.halo.rows[l]
        gradient = compensation_gradient(partitioned, hist_batch, out_neighbors, l, own_rows)
        loss = loss + (own_rows * gradient).sum()
    return loss


def compensation_gradient(
    partitioned: PartitionedGraph, hist_batch: HistoricalBatch, out_neighbors: OutNeighbors, l: int, own_rows: Tensor
) -> Tensor:
    """[num_own, ...]: what out-neighbours outside send back to the batch's own rows after layer `l`.

    Computes layer l + 1 at the out-neighbours, from the batch's own rows and historical embeddings of other sources.
    Then runs backward through that layer, from the gradients that the tables hold for the out-neighbours. Gradients
    of the parameters do not change.

    own_rows: the batch's own rows after layer `l`.
    """
    # A leaf, cut off from the graph of the loss: this backward pass must end at the own rows.
    leaf = own_rows.detach().requires_grad_()
    # One expression, so that the rows from the tables are freed before the layer runs.
    inputs = hist_batch.row_reader.read(l, out_neighbors.src_positions, like=leaf).index_put(
        (out_neighbors.batch_src_idx,), leaf[out_neighbors.own_idx]
    )

    # By layer: historical embeddings of the out-neighbours themselves, where the layer reads rows of earlier layers.
    own_positions = out_neighbors.src_positions[: out_neighbors.block.num_dst]
    earlier = [k for k in partitioned.model.reads(l + 1).own if k != ENCODED]
    own = {k: hist_batch.row_reader.read(k, own_positions, like=leaf) for k in earlier}

    # The batch's key, so that dropout is drawn as in the batch's own layers.
    block = replace(out_neighbors.block, key=hist_batch.batch.key)
    # Batch norms use their running statistics: a step's own statistics must not include nodes outside its batch.
    with torch.enable_grad(), running_statistics(partitioned.model.modules_of(l + 1)):
        outputs = partitioned.layer_at(l + 1, block, inputs, own)

    output_gradients = hist_batch.gradient_reader.read(l + 1, out_neighbors.dst_positions, like=outputs)
    # A layer may let no gradient through at all, or not read these rows.
    if not outputs.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(outputs, leaf, output_gradients, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient
