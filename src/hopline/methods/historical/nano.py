"""A historical batch that would take too much: layer by layer over pieces of its nodes, with the same gradients.

In a batch the rows of its own nodes are fresh in every layer, so its pieces cannot be trained one after the other. All
of them go through a layer before any goes through the next, and back in the same way (`sweep.py`). What is kept of the
whole batch is its own rows after each layer, and the gradients at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.batch_unit import autocast
from hopline.budget.predictor import Sizes
from hopline.core.batch import Batch, Block
from hopline.device.meter import Meter, meter_of
from hopline.device.out_of_memory import Before, attempt
from hopline.methods.historical.nano_pieces import (
    LayerBytes,
    NanoPiece,
    Runs,
    check_pieces,
    runs_to_fit,
    usual_run,
    whole_sizes,
)
from hopline.methods.historical.step import HistoricalBatch, HistoricalUnit, messages_back
from hopline.methods.partitioned.sweep import Swept, backward, drawn_again, forward, from_loss, through_layer
from hopline.methods.partitioned.sweep_loss import LOSS_COPIES, LossByPiece
from hopline.tables.history import report_ages
from hopline.util import trace
from hopline.util.config import format_size

if TYPE_CHECKING:
    from hopline.budget.guard import Guard
    from hopline.methods.historical.work import HistoricalWork

ENOUGH_NODES = 64
"""Nodes at which layers are measured at least, before any batch is split."""
OF_A_MAP = 16
"""Bytes per node of a batch while a piece of it is made."""


class Probe(Swept[NanoPiece]):
    """Some nodes of a batch, more and more of them, to learn what they take: rows and gradients are zeros."""

    def __init__(self, work: HistoricalWork, made: HistoricalBatch) -> None:
        super().__init__(work, made.batch.key if isinstance(made.batch.key, int) else None)
        self.made = made

    def teach(self, layers: LayerBytes, room_bytes: float) -> None:
        """Until they are sure, and twice as many nodes might take more than `room_bytes`."""
        before = [(p, p.grad) for p in self.work.job.module.parameters()]
        count, most, first, taken = 1, self.made.block.num_dst, 0, 0
        # What a layer takes for itself, whatever the nodes, does not grow.
        while count <= most and (first + 3 * (taken - first) < room_bytes or count < ENOUGH_NODES):
            for l in range(self.work.model.num_layers):
                taken = max(taken, self._measure(l, count, layers))
            first, count = first or taken, 2 * count
        for p, grad in before:
            p.grad = grad

    def _measure(self, l: int, count: int, layers: LayerBytes) -> int:
        """What a layer takes at so many nodes; it is learnt."""
        last = l == self.work.model.num_layers - 1
        piece = NanoPiece(self.made, 0, usual_run(self.made, count, with_seeds=last))
        self.work.job.module.zero_grad(set_to_none=True)  # as at the beginning of a step
        with meter_of(self.work.job.device) as meter, autocast(self.work.job), drawn_again(self, l, piece):
            if last:
                from_loss(self, piece, self._loss, 0.0)
            else:
                through_layer(self, l, piece, 0.0)
        if not last or piece.has_seeds:
            layers.learn(l, Sizes.of_blocks((piece.block,)), meter.peak_bytes)
        return meter.peak_bytes

    def _loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        """What a piece is given: its share of the usual loss, or gradients that come from a loss over all seeds."""
        job = self.work.job
        if job.usual_loss:
            return LossByPiece(job, 1.0, torch.zeros((), device=job.device))(batch, outputs)
        return (outputs * torch.zeros_like(outputs)).sum()

    def pieces(self, l: int) -> Iterable[NanoPiece]:
        return ()

    def number(self, piece: NanoPiece) -> int:
        return piece.number

    def _zeros(self, l: int, num_rows: int) -> Tensor:
        row = self.work.row_of[l]
        return row.new_zeros(num_rows, *row.shape[1:])

    def inputs(self, l: int, piece: NanoPiece) -> Tensor:
        return self._zeros(l, piece.block.num_src)

    def own(self, l: int, piece: NanoPiece) -> Tensor:
        return self._zeros(l, piece.block.num_dst)

    def gradient(self, l: int, piece: NanoPiece) -> Tensor:
        return self._zeros(l, piece.block.num_dst)

    def put(self, l: int, piece: NanoPiece, rows: Tensor) -> None: ...
    def end(self, l: int) -> None: ...
    def turn(self) -> None: ...
    def add(self, l: int, piece: NanoPiece, rows: Tensor | None, *, own: bool = False) -> None: ...
    def gathered(self, l: int) -> None: ...


class Nano(Swept[NanoPiece]):
    """One batch in pieces that keep to the guard's limit."""

    def __init__(self, work: HistoricalWork, made: HistoricalBatch, guard: Guard) -> None:
        super().__init__(work, made.batch.key if isinstance(made.batch.key, int) else None)
        assert self.key is not None or not work.model.training, "what is drawn must be drawn again"
        self.made, self.guard, self.last = made, guard, work.model.num_layers - 1
        self.compensates = work.method.compensate
        self.kept_bytes = self._kept_bytes()
        self.worst_bytes = 0.0
        if (room := guard.room_bytes - self.kept_bytes) <= 0:
            raise ValueError(
                f"the rows of a batch's {made.block.num_dst} nodes and their gradients take "
                f"{format_size(self.kept_bytes)}, and {format_size(guard.room_bytes)} are left for a step: give the "
                f"budget {format_size(-room)} more and something for the layers, or make parts_per_batch smaller"
            )
        if not work.layer_bytes.is_sure:
            Probe(work, made).teach(work.layer_bytes, room)
        ends = torch.tensor([slab.stop - slab.start for slab in made.block.slabs]).cumsum(0).tolist()
        runs = self._runs(made.block, ends, range(self.last + 1))
        self.all = [NanoPiece(made, number, run) for number, run in enumerate(runs)]
        self.later: Iterable[tuple[slice, Block, Tensor]] = ()
        if made.later is not None and made.later.block.num_dst:
            block = made.later.block
            self.later = Runs(block, self._runs(block, [block.num_dst], range(1, self.last + 1)))
        self.rows: dict[int, Tensor] = made.block.own
        """By layer, the batch's own rows."""
        self.totals: dict[int, Tensor] = {}
        """By layer, the gradients at them."""
        self.meter: Meter | None = None
        self.taken: dict[int, tuple[int, Sizes]] = {}
        """By layer, what its largest piece took."""

    def _kept_bytes(self) -> int:
        """Of the whole batch: rows and gradients."""
        work, own = self.work, self.made.block.num_dst
        *hidden, last = [row.nbytes for row in work.row_of]
        most = max(hidden, default=0)
        num_bytes = own * (sum(hidden) + sum(sorted(hidden)[0 if self._keeps_all else -2 :]))
        num_bytes += own * (last + 2 * most) if self.compensates else 0
        num_bytes += 0 if work.job.usual_loss else LOSS_COPIES * last * self.made.batch.num_seeds
        return num_bytes + OF_A_MAP * self.made.block.num_src + self.guard.beside_bytes()

    @property
    def _keeps_all(self) -> bool:
        """Whether gradients after all layers are there at once."""
        return self.work.model.keeps_jk or self.compensates

    def _promise(self, sizes: Sizes, layers: Sequence[int]) -> float:
        return max((self.work.layer_bytes.promise(l, sizes) for l in layers), default=0.0)

    def _runs(self, block: Block, ends: Sequence[int], layers: Sequence[int]) -> list[slice]:
        room = self.guard.room_bytes - self.kept_bytes
        runs, worst = runs_to_fit(block, ends, lambda sizes: self._promise(sizes, layers), room)
        self.worst_bytes = max(self.worst_bytes, worst)
        return runs

    @property
    def promised_bytes(self) -> float:
        return self.kept_bytes + self.worst_bytes

    # ---- what is swept

    def pieces(self, l: int) -> Iterable[NanoPiece]:
        if l < self.last or not self.made.batch.num_seeds or self.work.method.lipschitz:
            return self.all
        return [piece for piece in self.all if piece.has_seeds]  # other nodes' last rows are of no use

    def number(self, piece: NanoPiece) -> int:
        return piece.number

    def inputs(self, l: int, piece: NanoPiece) -> Tensor:
        made, edges = self.made, piece.edges
        near = ops.gather_rows(self.rows[l], edges.near_idx)
        if not edges.halo_idx.numel():
            return near.to(self.work.dtype)
        halo = made.rows.read_some(l, made.block.halo_places, edges.halo_idx, near)
        return torch.cat([near, halo]).to(self.work.dtype)

    def own(self, l: int, piece: NanoPiece) -> Tensor:
        return self.rows[l][piece.run].to(self.work.dtype, copy=True)

    def put(self, l: int, piece: NanoPiece, rows: Tensor) -> None:
        if l not in self.rows:
            self.rows[l] = rows.new_empty(self.made.block.num_dst, *rows.shape[1:])
        self.rows[l][piece.run] = rows
        piece.let_go()

    def end(self, l: int) -> None: ...

    def turn(self) -> None:
        for l in range(self.last) if self._keeps_all else range(self.last)[-1:]:
            self._new_total(l)
        self._lap()

    def _new_total(self, l: int) -> None:
        self.totals[l] = torch.zeros_like(self.rows[l], dtype=self.work.dtype)

    def add(self, l: int, piece: NanoPiece, rows: Tensor | None, *, own: bool = False) -> None:
        if rows is None or (l == self.last and not self.compensates):
            return
        if l == self.last and l not in self.totals:
            self.totals[l] = rows.new_zeros(self.made.block.num_dst, *rows.shape[1:])
        if own:
            self.totals[l][piece.run] += rows
        else:
            near_idx = piece.edges.near_idx  # the halo's rows are constants
            self.totals[l].index_add_(0, near_idx, rows[: near_idx.numel()])

    def gathered(self, l: int) -> None:
        if l < self.last and self.made.later is not None:
            for run, block, among in self.later:
                later = self.made.later.some(run, block, among)
                sent = messages_back(self.work, self.made, later, l, self.rows[l])
                self.totals[l].add_(sent, alpha=self.scale)
                del later, sent
        if not self._keeps_all:
            self.totals.pop(l + 1, None)
            if 0 < l < self.last:
                self._new_total(l - 1)
        self._lap()

    def gradient(self, l: int, piece: NanoPiece) -> Tensor:
        return self.totals[l][piece.run]

    def loss_batch(self, seeds: Tensor, y: Tensor | None) -> Batch:
        return self.made.batch

    def went_back(self, l: int, piece: NanoPiece) -> None:
        sizes, learns = Sizes.of_blocks((piece.block,)), l < self.last or piece.has_seeds
        piece.let_go()
        if self.meter is not None and learns and self.meter.lap_bytes > self.taken.get(l, (0, sizes))[0]:
            self.taken[l] = self.meter.lap_bytes, sizes
        self._lap()

    def _lap(self) -> None:
        if self.meter is not None:
            self.meter.lap()

    # ---- a step

    def forward(self) -> None:
        with torch.no_grad(), autocast(self.work.job), trace.span("forward", self.work.job.device):
            forward(self)

    def backward(self, total: float) -> Tensor:
        """Add the gradient of the batch's share of the mean loss over `total` examples; returns its summed loss."""
        size, own, method = self.made.batch.num_seeds, self.made.block.num_dst, self.work.method
        self.scale = 1 / total
        penalty = method.lipschitz * size / (total * own * max(1, self.last))
        with autocast(self.work.job), trace.span("backward", self.work.job.device):
            loss = backward(self, self.scale, penalty)
        if not size:  # as after a backward pass of a loss that is zero
            for p in self.work.job.module.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        return loss


@dataclass(eq=False)
class GuardedHistoricalUnit(HistoricalUnit):
    """One batch within the guard's limit: at once where it fits, else in pieces."""

    def forward_backward(self, total: float) -> Tensor:
        guard, made, loss = self._guard, self.made, None
        if made is None or not self.learns:
            return super().forward_backward(total)
        job, needed = self.work.job, self._needed_bytes(made) + guard.beside_bytes()
        while loss is None:
            with meter_of(job.device) as meter:
                before, promised = Before(job.module, job.device), list[float]()
                step = self._at_once if needed <= guard.room_bytes else self._by_pieces
                loss, ran_out = attempt(before, partial(step, total, meter, promised))
            if ran_out:
                guard.note_out_of_memory(promised[-1] if promised else needed)
                made.forget()
        guard.note_good()
        peak_bytes = before.gradient_bytes + meter.peak_bytes
        guard.note_peak(promised[-1], peak_bytes)
        guard.note_step(needed, peak_bytes)
        return loss

    def _at_once(self, total: float, meter: Meter, promised: list[float]) -> Tensor:
        assert self.made is not None
        promised.append(self._needed_bytes(self.made) + self._guard.beside_bytes())
        meter.lap()
        loss = super().forward_backward(total)
        self._guard.learn(whole_sizes(self.made), meter.lap_bytes)
        return loss

    def _by_pieces(self, total: float, meter: Meter, promised: list[float]) -> Tensor:
        made = self.made
        assert made is not None
        nano = self._in_pieces(made, self._needed_bytes(made))
        promised.append(nano.promised_bytes)
        ages = made.rows.ages(made.block.halo_places)
        report_ages(ages)
        self.work.drift.saw(ages)
        nano.meter = meter
        nano.forward()
        loss = nano.backward(total)
        nano.meter = None
        for l, (peak_bytes, of_piece) in nano.taken.items():
            self.work.layer_bytes.learn(l, of_piece, peak_bytes)
        if self.work.method.compensate:
            self.pushed = {l: rows.mul_(total) for l, rows in sorted(nano.totals.items())}
        return loss

    def _forward_only(self) -> None:
        made, guard = self.made, self._guard
        if made is None or (needed := self._needed_bytes(made)) <= guard.room_bytes:
            super()._forward_only()
        else:
            self._in_pieces(made, needed).forward()

    @property
    def _guard(self) -> Guard:
        assert self.work.guard is not None
        return self.work.guard

    def _needed_bytes(self, made: HistoricalBatch) -> float:
        """By what batches took at once, or by what their layers took one at a time."""
        sizes = whole_sizes(made)
        return min(self._guard.promise_sizes(sizes), self.work.layer_bytes.together(sizes))

    def _in_pieces(self, made: HistoricalBatch, needed_bytes: float) -> Nano:
        guard = self._guard
        if (how := guard.budget.over_budget) != "split":
            raise ValueError(
                f"a batch may take {format_size(needed_bytes)}, and {format_size(guard.room_bytes)} are left for a "
                f"step: give the budget {format_size(needed_bytes - guard.room_bytes)} more, make parts_per_batch "
                f"smaller, or set over_budget=split instead of {how}"
            )
        check_pieces(self.work.model)
        nano = Nano(self.work, made, guard)
        guard.note_split(len(nano.all))
        return nano
