"""One batch of historical training: what it learns, and what it writes afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.batch_unit import autocast
from hopline.contract import Unit
from hopline.core.batch import Batch, Block
from hopline.methods.historical.regularise import spreads
from hopline.nn.gnn import GNN
from hopline.nn.norms import running_statistics
from hopline.tables.history import HaloBlock, Reader, report_ages
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork


@dataclass(frozen=True, eq=False)
class Later:
    """All in-edges of nodes outside a batch that have the batch's nodes among their sources."""

    block: Block
    src_idx: Tensor
    """Those of its sources that are the batch's nodes,"""
    own_idx: Tensor
    """and which of the batch's they are."""
    src_places: Tensor
    dst_places: Tensor
    """Of all its sources and destinations, on the host."""

    def some(self, dst: slice, block: Block, among: Tensor) -> Later:
        """Those of its destinations; block: their in-edges, whose sources are `among` all."""
        own = torch.full((self.block.num_src,), -1, device=among.device)
        own[self.src_idx] = self.own_idx
        own = own[among]
        src_idx = (own >= 0).nonzero().view(-1)
        return Later(block, src_idx, own[src_idx], self.src_places[among.cpu()], self.dst_places[dst])

    def to(self, device: torch.device) -> Later:
        return replace(
            self, block=self.block.to(device), src_idx=self.src_idx.to(device), own_idx=self.own_idx.to(device)
        )


@dataclass(frozen=True, eq=False)
class HistoricalBatch:
    """A batch, and what is needed to write its rows and to hear from its neighbours."""

    batch: Batch
    block: HaloBlock
    nodes: Tensor
    """[n] int64: the batch's own nodes, part by part."""
    later: Later | None
    """With compensation: the nodes outside the batch that read from it."""
    rows: Reader
    gradients: Reader
    """Where rows and gradients of nodes outside are read."""

    def forget(self) -> None:
        """What a step that failed has left: rows of its own nodes."""
        self.block.own.clear()


@dataclass(eq=False)
class HistoricalUnit(Unit):
    """One batch: its rows are pushed in `commit`, after the optimizer's step."""

    work: HistoricalWork
    made: HistoricalBatch | None
    """None where the other ranks have a batch at this turn and this one has not."""
    total: float | None = None
    """Seeds that the batches of all ranks at this turn stand for; by default those that are in them."""
    pushed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:  # type: ignore[override]
        return 0 if self.made is None else self.made.batch.num_seeds

    @property
    def total_size(self) -> float | None:
        return self.total

    @property
    def learns(self) -> bool:
        """Whether there are seeds, or others' messages."""
        return self.size > 0 or self.work.method.compensate

    def forward_backward(self, total: float) -> Tensor:
        work, job, made = self.work, self.work.job, self.made
        if made is None or not self.learns:
            self._forward_only()
            return torch.zeros((), device=job.device)
        ages = made.rows.ages(made.block.halo_places)
        report_ages(ages)
        self.work.drift.saw(ages)
        with autocast(job), trace.span("forward", job.device):
            with spreads(work.model, work.method.lipschitz > 0) as found:
                # A batch without seeds learns from others' messages only.
                loss = job.train_step(job.model, made.batch) if self.size else job.model(made.batch).sum()
            objective = loss * self.size
            if found:
                objective = objective + work.method.lipschitz * self.size * torch.stack(found).mean()
            if work.method.compensate:
                objective = objective + missing_messages(work, made)
        with trace.span("backward", job.device):
            (objective / total).backward()
        if work.method.compensate:
            self.pushed = {l: h.grad * total for l, h in made.block.own.items() if h.grad is not None}
        return loss.detach() * self.size

    def push_only(self) -> None:
        """Bring the tables up to date without learning anything."""
        self._forward_only()
        self.commit()

    def _forward_only(self) -> None:
        if self.made is not None:
            with torch.no_grad(), autocast(self.work.job):
                self.work.model(self.made.batch)

    def commit(self) -> None:
        self.work.commit(self.made, self.pushed)


def missing_messages(work: HistoricalWork, made: HistoricalBatch) -> Tensor:
    """A sum whose gradient at the batch's rows is what nodes outside would have sent back, by the tables."""
    total = torch.zeros((), device=work.job.device)
    later, own = made.later, made.block.own
    if later is None or not later.block.num_dst:
        return total
    for l in range(work.model.num_layers - 1):
        total = total + (own[l] * messages_back(work, made, later, l, own[l])).sum()
    return total


def messages_back(work: HistoricalWork, made: HistoricalBatch, later: Later, l: int, own: Tensor) -> Tensor:
    """What nodes outside send back to the batch's own rows after layer `l`, by the tables."""
    block, fresh = replace(later.block, key=made.batch.key), own.detach().requires_grad_()
    rows = made.rows.read(l, later.src_places, fresh).index_put((later.src_idx,), fresh[later.own_idx])
    with torch.enable_grad(), _norms_as_in_evaluation(work.model, l + 1):
        out = work.layer_at(l + 1, block, block.src_ids, rows)
    given = made.gradients.read(l + 1, later.dst_places, out)
    if not out.requires_grad:  # a layer that lets no gradient through
        return torch.zeros_like(fresh)
    (found,) = torch.autograd.grad(out, fresh, given, allow_unused=True)
    return torch.zeros_like(fresh) if found is None else found


def _norms_as_in_evaluation(model: GNN, l: int) -> AbstractContextManager[None]:
    """Nodes outside the batch must not enter its statistics."""
    return running_statistics([model.convs[l], model.norms[l]], only_if=True)
