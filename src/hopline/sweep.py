"""A sweep over all parts, layer by layer and back: exact rows, and exact gradients of the summed loss, for all nodes.

With tables of rows that are exact, going back over the layers gives the gradient at every layer boundary and, on the
way, that of all parameters: what one backward pass over the whole graph would give, in the memory of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hopline import trace
from hopline.batch import Batch
from hopline.halo import HaloBlock, Reader, RecordedBlock
from hopline.infer import evaluating
from hopline.nn.gnn import State
from hopline.ops import derive_key
from hopline.world import World

if TYPE_CHECKING:
    from hopline.history import HistoricalBatch, HistoricalWork


class _Given(nn.Module):
    """A model that puts out what was computed already: for a training step that only looks at the outputs."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, batch: Batch) -> Tensor:
        return self.scores


def fill(work: HistoricalWork, key: int | None = None) -> None:
    """Fill the tables of rows by an exact forward pass; each rank fills what it keeps.

    key: of the draws, where the pass is one of training; without, it is in evaluation mode.
    """
    world, histories = work.job.world, work.histories
    work.prepare()
    world.barrier()  # nobody reads any more
    with trace.span("refresh"), _mode(work, key), torch.no_grad(), work.encoding_once():
        for l in range(work.model.num_layers - 1):
            source = histories.snapshot(range(l)[-1:], work.swept_places)
            for made in work.all_batches(key):
                inputs = None if l == 0 else source.rows(l - 1, made.block.src_places)
                with drawn_again(key, l, made):
                    rows = work.layer_at(l, made.block, made.block.src_ids, inputs)
                histories.write(l, made.block.slabs, rows)
            world.barrier()  # the next layer reads what others wrote
    histories.stamp([_slab(work)], histories.step)
    world.barrier()


def _mode(work: HistoricalWork, key: int | None) -> AbstractContextManager[None]:
    return evaluating(work.model) if key is None else nullcontext()


@contextmanager
def drawn_again(key: int | None, l: int, made: HistoricalBatch) -> Iterator[None]:
    """Within, what convs draw by themselves (attention dropout) is the same each time for a layer and a batch."""
    if key is None:
        yield
        return
    device = made.block.src_ids.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive_key(key, l, made.block.slabs[0].start))
        yield


def _slab(work: HistoricalWork) -> slice:
    """The rows that this rank keeps."""
    return slice(work.owners.own.start, work.owners.own.stop)


def go_back(work: HistoricalWork, key: int | None = None, scale: float = 1.0, *, keep: bool = True) -> Tensor:
    """Add the gradient of `scale` times the summed loss to the parameters', for tables of rows that are exact.

    Each rank goes over what it keeps: the parameters' gradients are to be summed over ranks. Returns the summed loss of
    its nodes. key: as `fill` had it. keep: write the gradients at all rows into the tables of gradients.
    """
    model, position, swept, home = work.model, work.partition.position, work.swept_places, work.histories.home
    last = model.num_layers - 1
    weights = [p for p in work.job.module.parameters() if p.requires_grad]
    totals: dict[int, Tensor] = {
        l: torch.zeros(swept.numel(), *work.histories.tables[l].shape[1:], dtype=work.dtype, device=home)
        for l in range(last)
    }

    def add(l: int, places: Tensor, rows: Tensor | None) -> None:
        if rows is not None:
            if l not in totals:
                totals[l] = torch.zeros(swept.numel(), *rows.shape[1:], dtype=rows.dtype, device=home)
            totals[l].index_add_(0, torch.searchsorted(swept, places).to(home), rows.to(home))

    def collect(l: int) -> Tensor:
        """The gradient at the rows that this rank keeps."""
        rows = totals.pop(l) if work.job.world.size == 1 else work.owners.collect(swept, totals.pop(l))
        if keep:
            work.gradients.write(l, [_slab(work)], rows)
        return rows

    summed = torch.zeros((), dtype=torch.promote_types(work.dtype, torch.float32), device=work.job.device)
    with trace.span("refresh"), _mode(work, key), torch.enable_grad():
        source = work.histories.snapshot(range(last), swept)
        for made in work.all_batches(key):
            with drawn_again(key, last, made):
                loss, of_last, of_inputs, of_kept = _from_loss(work, made, source, weights, scale)
            summed += loss
            own = position[made.nodes]
            if keep:
                add(last, own, of_last)
            add(last - 1, made.block.src_places, of_inputs)
            for l, rows in of_kept.items():
                add(l, own, rows)
        if keep:
            collect(last)
        for l in range(last - 1, -1, -1):
            known = collect(l)
            for made in work.all_batches(key):
                places = made.block.src_places
                inputs = None if l == 0 else _leaf(work, source, l - 1, places)
                with drawn_again(key, l, made):
                    out = work.layer_at(l, made.block, made.block.src_ids, inputs)
                own = (position[made.nodes] - work.owners.own.start).to(home)
                given = known[own].to(out.device, out.dtype)
                out.backward(given, inputs=weights if inputs is None else [inputs, *weights])
                if inputs is not None:
                    add(l - 1, places, inputs.grad)
    work.job.world.barrier()
    return summed


def _from_loss(
    work: HistoricalWork, made: HistoricalBatch, source: Reader, weights: list[nn.Parameter], scale: float
) -> tuple[Tensor, Tensor, Tensor | None, dict[int, Tensor | None]]:
    """(summed loss of a batch, its gradients at the last layer's rows, its inputs, what jumping knowledge keeps)."""
    model, block = work.model, made.block
    last = model.num_layers - 1
    own = work.partition.position[made.nodes]
    inputs = _leaf(work, source, last - 1, block.src_places) if last else None
    kept = {l: _leaf(work, source, l, own) for l in range(last)} if model.keeps_jk else {}
    state, recorded = work.state_of(last, block, block.src_ids, inputs), RecordedBlock(block, keeps_gradients=True)
    jk = _jumped(work, block, kept) if model.keeps_jk else None
    ended = model.layer(last, State(state.h, state.x0, jk), recorded)
    out = recorded.own[last]
    if not made.batch.num_seeds:
        return torch.zeros((), device=out.device), torch.zeros_like(out), None, dict.fromkeys(kept)
    scores = model.decode(ended)[made.batch.output_idx]
    loss = work.job.train_step(_Given(scores), made.batch) * made.batch.num_seeds
    (loss * scale).backward(inputs=[out, *([inputs] if inputs is not None else []), *kept.values(), *weights])
    of_last = torch.zeros_like(out) if out.grad is None else out.grad
    return loss.detach(), of_last, None if inputs is None else inputs.grad, {l: rows.grad for l, rows in kept.items()}


def _jumped(work: HistoricalWork, block: HaloBlock, kept: dict[int, Tensor]) -> Tensor | None:
    """What jumping knowledge has of a batch's own nodes before the last layer."""
    model, keys = work.model, block.src_keys[: block.num_dst]
    rows = [model.dropped(rows, keys, block.key, l) for l, rows in kept.items()]
    if model.jk_encoder:
        encoded = model.encode(work.batches.inputs_of(block.dst_ids), keys, block.key).jk
        assert encoded is not None
        rows = [encoded, *rows]
    return torch.cat(rows, dim=1) if rows else None


def _leaf(work: HistoricalWork, source: Reader, l: int, places: Tensor) -> Tensor:
    return source.rows(l, places).to(work.job.device, work.dtype).requires_grad_()


def measure_bias(work: HistoricalWork) -> dict[str, float]:
    """How far the tables and the gradient are from exact, relative to it: `embedding.LAYER` and `gradient`.

    The gradient is that of an epoch's batches at the weights of now, without dropout. It takes the memory of two more
    sets of tables and the time of some epochs.
    """
    world = work.job.world
    weights = [p for p in work.job.module.parameters() if p.requires_grad]
    before = [p.grad for p in weights]
    exact = work.exact_twin()
    groups = work.parts.sweep
    with evaluating(work.model), torch.enable_grad():
        with _collected(weights, world) as ours:
            for i in range(work.parts.sweep_length):  # all ranks as often as the one with most
                made = work.batch(groups[i] if i < len(groups) else (), None)
                work.unit(made).forward_backward(1)
        fill(exact)
        with _collected(weights, world) as theirs:
            go_back(exact)
    for p, grad in zip(weights, before, strict=True):
        p.grad = grad
    own, errors = torch.arange(work.owners.own.start, work.owners.own.stop), {}
    for l in exact.histories.tables:
        if l in work.histories.tables:
            right = exact.histories.rows(l, own)
            wrong = work.histories.rows(l, own).to(right.dtype) - right
            missed, whole = world.sum([float(wrong.double().square().sum()), float(right.double().square().sum())])
            errors[f"embedding.{l}"] = (missed / max(whole, 1e-60)) ** 0.5
    return errors | {"gradient": float((ours[0] - theirs[0]).norm() / theirs[0].norm().clamp(min=1e-30))}


@contextmanager
def _collected(weights: list[nn.Parameter], world: World) -> Iterator[list[Tensor]]:
    """The gradient that is made within by all ranks, as one vector in a list that is filled at the end."""
    found: list[Tensor] = []
    for p in weights:
        p.grad = None
    yield found
    world.sum_gradients(weights)
    found.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in weights]))
