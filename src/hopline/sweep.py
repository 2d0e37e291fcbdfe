"""A sweep over all parts, layer by layer and back: exact rows, and exact gradients of the summed loss, for all nodes.

With tables of rows that are exact, going back over the layers gives the gradient at every layer boundary and, on the
way, that of all parameters: what one backward pass over the whole graph would give, in the memory of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hopline import trace
from hopline.batch import Batch
from hopline.halo import Histories, RecordedBlock
from hopline.infer import evaluating
from hopline.nn.gnn import State

if TYPE_CHECKING:
    from hopline.history import HistoricalBatch, HistoricalWork


class _Given(nn.Module):
    """A model that puts out what was computed already: for a training step that only looks at the outputs."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, batch: Batch) -> Tensor:
        return self.scores


def fill(work: HistoricalWork) -> None:
    """Fill the tables of rows by an exact forward pass, in evaluation mode."""
    with trace.span("refresh"), evaluating(work.model), work.encoding_once():
        for l in range(work.model.num_layers - 1):
            for made in work.all_batches():
                work.histories.write(l, made.block.slabs, work.layer_at(l, made.block, made.block.src_ids))
    work.histories.written[:] = work.histories.step


def go_back(work: HistoricalWork) -> None:
    """Fill the tables of gradients, for tables of rows that are exact; gradients are added to the parameters' too."""
    model, position = work.model, work.partition.position
    last = model.num_layers - 1
    weights = [p for p in work.job.module.parameters() if p.requires_grad]
    totals: dict[int, Tensor] = {}

    def add(l: int, places: Tensor, rows: Tensor | None) -> None:
        if rows is not None:
            if l not in totals:
                totals[l] = torch.zeros(position.numel(), *rows.shape[1:], dtype=rows.dtype)
            totals[l].index_add_(0, places, rows)

    with trace.span("refresh"), evaluating(model), torch.enable_grad():
        for made in work.all_batches():
            of_last, of_inputs, of_kept = _from_loss(work, made, weights)
            add(last, position[made.nodes], of_last)
            add(last - 1, position[made.block.src_ids], of_inputs)
            for l, rows in of_kept.items():
                add(l, position[made.nodes], rows)
        for l in range(last - 1, -1, -1):
            for made in work.all_batches():
                inputs = None if l == 0 else _leaf(work.histories, l - 1, position[made.block.src_ids])
                out = work.layer_at(l, made.block, made.block.src_ids, inputs)
                given = totals[l][position[made.nodes]].to(out.dtype)
                out.backward(given, inputs=weights if inputs is None else [inputs, *weights])
                if inputs is not None:
                    add(l - 1, position[made.block.src_ids], inputs.grad)
    for l, rows in totals.items():
        work.gradients.table(l, rows)[:] = rows


def _from_loss(
    work: HistoricalWork, made: HistoricalBatch, weights: list[nn.Parameter]
) -> tuple[Tensor, Tensor | None, dict[int, Tensor | None]]:
    """Gradients of a batch's summed loss: at the last layer's rows, at its inputs, at what jumping knowledge keeps."""
    model, block, places = work.model, made.block, work.partition.position
    last = model.num_layers - 1
    inputs = _leaf(work.histories, last - 1, places[block.src_ids]) if last else None
    kept = {l: _leaf(work.histories, l, places[made.nodes]) for l in range(last)} if model.keeps_jk else {}
    state, recorded = work.state_of(last, block, block.src_ids, inputs), RecordedBlock(block, keeps_gradients=True)
    jk = torch.cat(list(kept.values()), dim=1) if kept else None
    ended = model.layer(last, State(state.h, state.x0, jk), recorded)
    out = recorded.own[last]
    if not made.batch.num_seeds:
        return torch.zeros_like(out), None, dict.fromkeys(kept)
    scores = model.decode(ended)[made.batch.output_idx]
    loss = work.job.train_step(_Given(scores), made.batch) * made.batch.num_seeds
    loss.backward(inputs=[out, *([inputs] if inputs is not None else []), *kept.values(), *weights])
    of_last = torch.zeros_like(out) if out.grad is None else out.grad
    return of_last, None if inputs is None else inputs.grad, {l: rows.grad for l, rows in kept.items()}


def _leaf(histories: Histories, l: int, places: Tensor) -> Tensor:
    return histories.tables[l][places].requires_grad_()


def measure_bias(work: HistoricalWork) -> dict[str, float]:
    """How far the tables and the gradient are from exact, relative to it: `embedding.LAYER` and `gradient`.

    The gradient is that of an epoch's batches at the weights of now, without dropout. It takes the memory of two more
    sets of tables and the time of some epochs.
    """
    weights = [p for p in work.job.module.parameters() if p.requires_grad]
    before = [p.grad for p in weights]
    exact = work.exact_twin()
    with evaluating(work.model), torch.enable_grad():
        with _collected(weights) as ours:
            for made in work.all_batches():
                work.unit(made).forward_backward(1)
        fill(exact)
        with _collected(weights) as theirs:
            go_back(exact)
    for p, grad in zip(weights, before, strict=True):
        p.grad = grad
    tables = work.histories.tables
    errors = {
        f"embedding.{l}": _error(tables[l].to(t.dtype), t) for l, t in exact.histories.tables.items() if l in tables
    }
    return errors | {"gradient": _error(ours[0], theirs[0])}


@contextmanager
def _collected(weights: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """The gradient that is made within, as one vector in a list that is filled at the end."""
    found: list[Tensor] = []
    for p in weights:
        p.grad = None
    yield found
    found.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in weights]))


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
