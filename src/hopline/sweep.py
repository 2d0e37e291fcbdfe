"""Exact gradients at the layer boundaries of all nodes, by a sweep over all parts, layer by layer and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hopline import trace
from hopline.batch import Batch
from hopline.halo import RecordedBlock
from hopline.historical import HistoricalBatch, HistoricalWork
from hopline.infer import evaluating
from hopline.nn.gnn import State


class _Given(nn.Module):
    """A model that puts out what was computed already: for a training step that only looks at the outputs."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, batch: Batch) -> Tensor:
        return self.scores


def refresh_gradients(work: HistoricalWork) -> None:
    """Fill the tables of gradients of the summed loss, exactly for tables of rows that are; in evaluation mode."""
    model, position = work.model, work.partition.position
    last = model.num_layers - 1
    totals: dict[int, Tensor] = {}

    def add(l: int, places: Tensor, rows: Tensor) -> None:
        if l not in totals:
            totals[l] = torch.zeros(position.numel(), *rows.shape[1:], dtype=rows.dtype)
        totals[l].index_add_(0, places, rows)

    with trace.span("refresh"), evaluating(model), torch.enable_grad():
        for made in work.all_batches():
            own = position[made.nodes]
            of_last, of_inputs, of_kept = _from_loss(work, made)
            add(last, own, of_last)
            for l, rows in of_kept.items():
                add(l, own, rows)
            if last:
                add(last - 1, position[made.block.src_ids], of_inputs)
        for l in range(last - 1, 0, -1):
            for made in work.all_batches():
                inputs = work.histories.tables[l - 1][position[made.block.src_ids]].requires_grad_()
                out = work.layer_at(l, made.block, made.block.src_ids, inputs)
                (rows,) = torch.autograd.grad(out, inputs, totals[l][position[made.nodes]].to(out.dtype))
                add(l - 1, position[made.block.src_ids], rows)
    for l, rows in totals.items():
        work.gradients.table(l, rows)[:] = rows


def _from_loss(work: HistoricalWork, made: HistoricalBatch) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Gradients of a batch's summed loss: at the last layer's rows, at its inputs, at what jumping knowledge keeps."""
    model, job, block = work.model, work.job, made.block
    last, places = model.num_layers - 1, work.partition.position
    inputs = torch.empty(0) if last == 0 else work.histories.tables[last - 1][places[block.src_ids]].requires_grad_()
    kept = {}
    if model.keeps_jk:
        kept = {l: work.histories.tables[l][places[made.nodes]].requires_grad_() for l in range(last)}
    state = work.state_of(last, block, block.src_ids, inputs if last else None)
    recorded = RecordedBlock(block)
    jk = torch.cat(list(kept.values()), dim=1) if kept else None
    ended = model.layer(last, State(state.h, state.x0, jk), recorded)
    out = recorded.own[last]
    if not made.batch.num_seeds:
        return torch.zeros_like(out), torch.zeros_like(inputs), {l: torch.zeros_like(rows) for l, rows in kept.items()}
    scores = model.decode(ended)[made.batch.output_idx]
    loss = job.train_step(_Given(scores), made.batch) * made.batch.num_seeds
    wanted = [out, *([inputs] if last else []), *kept.values()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]
    return found[0], found[1] if last else inputs, dict(zip(kept, found[1 + (last > 0) :], strict=True))
