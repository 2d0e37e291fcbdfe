"""A historical batch that would take too much: layer by layer over micro-batches, with the same gradients.

In a batch the rows of its own nodes are fresh in every layer, so its micro-batches cannot be trained one after the
other. All of them go through a layer before any goes through the next, and back in the same way (`layerwise`). What is
kept of the whole batch is its own rows after each layer, and the gradients at them.

A micro-batch is a run of the batch's nodes, so many as fit, with all their in-edges. Runs end with parts of the graph
where these are small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.micro_batches import check_split, find_fewest, micro_batch_of, sizes_of
from hopline.budget.predictor import Predictor, costs_of
from hopline.core.batch import Batch, Block
from hopline.core.row_handles import Readable, Rows
from hopline.core.sizes import Sizes
from hopline.device.meter import Meter, meter_of
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.historical.batches import HistoricalBatch
from hopline.methods.historical.compensation import compensation_gradient
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.partitioned.sweep_loss import SummedLoss, SweepLoss, objective_of
from hopline.nn.gnn import GNN
from hopline.tables.history import report_ages
from hopline.units.batch_unit import autocast
from hopline.units.loss_at_outputs import LOSS_COPIES
from hopline.util import trace
from hopline.util.config import format_size

if TYPE_CHECKING:
    from hopline.contract import Guard
    from hopline.methods.historical.work import HistoricalWork


MAX_GROWTH = 1.4
"""By how much more pieces there are at the next attempt, at most."""
UNEVEN = 1.1
"""How much more than its share a piece may have, where it then ends with a part of the graph."""
ENOUGH_NODES = 64
"""Nodes at which layers are measured at least, before any batch is split."""
MAP_BYTES_PER_NODE = 16
"""Bytes per node of a batch while a micro-batch of it is made."""


# ---- where a batch is cut


def balanced_runs(weight: Tensor, ends: Sequence[int], num_micro_batches: int) -> list[slice]:
    """Runs of nodes of about equal weight, that end with the parts of a batch where these are small enough.

    weight: [num_nodes]; ends: of the parts, ascending.
    """
    upto = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    share, cuts, start = float(upto[-1]) / num_micro_batches, [0], 0
    for stop in ends:
        if float(upto[stop] - upto[cuts[-1]]) > UNEVEN * share:
            cuts.append(start)
        here = float(upto[stop] - upto[start])
        if here > UNEVEN * share:
            count = math.ceil(here / share)
            inner = upto[start] + here / count * torch.arange(1, count, dtype=torch.float64)
            cuts += [*torch.searchsorted(upto, inner.to(upto.dtype)).tolist(), stop]
        start = stop
    cuts = sorted({*cuts, ends[-1]})
    return [slice(a, b) for a, b in pairwise(cuts)]


def runs_to_fit(
    block: Block, ends: Sequence[int], bytes_of: Callable[[Sizes], float], limit: float
) -> tuple[list[slice], float]:
    """(a block's destinations in few runs that take no more than `limit` bytes each, what the largest takes)."""
    alone, weight = _as_batch(block), block.part.indptr.cpu().diff() + 1
    num_micro_batches = max(1, math.ceil(bytes_of(Sizes.of(alone)) / limit)) if limit > 0 else block.num_dst

    def worst(runs: list[slice]) -> float:
        return max(map(bytes_of, sizes_of(alone, [_positions(run) for run in runs])))

    cut = partial(balanced_runs, weight, ends)
    runs, taken = find_fewest(cut, worst, limit, first=num_micro_batches, most=block.num_dst, grow=MAX_GROWTH)
    if taken <= limit:
        return runs, taken
    raise ValueError(
        f"one node of a batch takes {format_size(taken)} and {format_size(max(0, limit))} are left beside the "
        f"batch's own rows: give the budget {format_size(taken - limit)} more, or make parts_per_batch smaller"
    )


def _positions(run: slice) -> Tensor:
    return torch.arange(run.start, run.stop)


def typical_run(hist_batch: HistoricalBatch, count: int, with_seeds: bool) -> slice:
    """So many of a batch's nodes in a row, with as many edges as such runs usually have, or with a loss."""
    indptr, seeds = hist_batch.block.part.indptr.cpu(), hist_batch.batch.output_idx
    start = int((indptr[count:] - indptr[:-count]).median(dim=0).indices)
    if with_seeds and seeds is not None and seeds.numel():
        start = min(max(0, int(seeds[seeds.numel() // 2]) - count // 2), hist_batch.block.num_dst - count)
    return slice(start, start + count)


def _as_batch(block: Block) -> Batch:
    """A block as a batch of all its destinations, without rows, and without the halo that completes these."""
    return Batch(block.dst_ids, (replace(block, layer_hooks=None),), None, None)


def at_layer(model: GNN, sizes: Sizes, l: int) -> Sizes:
    """What a block of these sizes has where layer `l` is computed alone."""
    (src, dst), (edges,) = sizes.nodes, sizes.edges
    nodes = [0] * (model.num_layers + 1)
    nodes[l], nodes[l + 1] = src, dst
    nodes[0] += dst if l and model.encodes else 0  # initial rows are made again
    return Sizes(tuple(nodes), tuple(edges if i == l else 0 for i in range(model.num_layers)))


class LayerBytes:
    """What the layers of a model take one at a time, each learnt apart from what it took."""

    def __init__(self, model: GNN, x: Readable | None) -> None:
        costs = costs_of(model, x, model.num_layers)
        self.model, self.predictors = model, [Predictor(costs) for _ in range(model.num_layers)]

    @property
    def is_sure(self) -> bool:
        return all(predictor.is_sure for predictor in self.predictors)

    def predict_peak(self, l: int, sizes: Sizes) -> float:
        """Bytes that layer `l` at a block of these sizes will not exceed, there and back."""
        return self.predictors[l].predict_peak(at_layer(self.model, sizes, l))

    def together(self, sizes: Sizes) -> float:
        """The same for all layers of a batch at once, of which none keeps more than it has alone."""
        own = sizes.nodes[-1]
        return sum(self.predict_peak(l, Sizes((sizes.nodes[l], own), (e,))) for l, e in enumerate(sizes.edges))

    def learn(self, l: int, sizes: Sizes, peak_bytes: int) -> None:
        self.predictors[l].observe(at_layer(self.model, sizes, l), peak_bytes)


def whole_sizes(hist_batch: HistoricalBatch) -> Sizes:
    """Of a batch at once: the layers of its own nodes, and of those that send to it."""
    nodes, edges = list(Sizes.of(hist_batch.batch).nodes), list(Sizes.of(hist_batch.batch).edges)
    last = len(edges) - 1
    beside = [(hist_batch.out_neighbors.block, 1, last + 1)] if hist_batch.out_neighbors is not None else []
    for block, first, stop in beside:
        for l in range(first, stop):
            nodes[l], edges[l] = nodes[l] + block.num_src, edges[l] + block.num_edges
        nodes[stop] += block.num_dst
    return Sizes(tuple(nodes), tuple(edges))


def check_micro_batches(model: GNN) -> None:
    """Refuse, by name, a model for which a batch in pieces is not the batch."""
    check_split(model, instead="make parts_per_batch smaller")
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        if drops and name.startswith("encoder."):
            raise ValueError(
                f"{name} draws anew wherever a node's row is encoded, so no batch can be split: use input_dropout= or "
                "dropout= of hl.nn.GNN, or make parts_per_batch smaller"
            )


# ---- micro-batches


@dataclass(frozen=True, eq=False)
class Edges:
    """All in-edges of a piece's nodes; sources that are the batch's own stand before those of the halo."""

    block: Block
    near_idx: Tensor
    """The former among the batch's own nodes,"""
    halo_idx: Tensor
    """and the latter in the halo; on the host."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some of a batch's own nodes, in a row."""

    hist_batch: HistoricalBatch
    number: int
    run: slice
    """Which of the batch's own nodes they are."""

    def edges(self) -> Edges:
        """Made anew, so that they are there for one layer of one micro-batch at a time."""
        whole = self.hist_batch.block
        piece = micro_batch_of(_as_batch(whole), _positions(self.run))
        (block,), is_halo = piece.blocks, piece.input_idx >= whole.num_dst
        order = is_halo.long().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        src_idx = place[block.part.src_idx.long()].to(block.part.src_idx.dtype)
        block = replace(block, src_ids=block.src_ids[order], parts=(replace(block.part, src_idx=src_idx),))
        near, far = piece.input_idx[order].split([order.numel() - int(is_halo.sum()), int(is_halo.sum())])
        return Edges(block, near, (far - whole.num_dst).cpu())

    def batch(self, edges: Edges) -> Batch:
        """Its seeds, with their labels and rows."""
        whole, block = self.hist_batch.batch, edges.block
        seed_idx = self._seed_idx
        chosen = (seed_idx >= 0).nonzero().view(-1)

        def rows(of: Rows | Tensor) -> Rows | Tensor:
            if isinstance(of, Tensor):
                halo_idx = edges.halo_idx.to(of.device) + self.hist_batch.block.num_dst
                return ops.gather_rows(of, torch.cat([edges.near_idx, halo_idx]))
            return Rows(of.table, block.src_ids)

        return replace(
            whole,
            seeds=whole.seeds[chosen],
            blocks=(block,) * len(whole.blocks),
            x=None if whole.x is None else rows(whole.x),
            y=None if whole.y is None else whole.y[chosen],
            tables={name: rows(of) for name, of in whole.tables.items()},
            output_idx=seed_idx[chosen],
        )

    @property
    def _seed_idx(self) -> Tensor:
        """Where the batch's seeds are in the piece, -1 for those that are not."""
        seeds = self.hist_batch.batch.output_idx
        assert seeds is not None
        return torch.where((seeds >= self.run.start) & (seeds < self.run.stop), seeds - self.run.start, -1)

    @property
    def has_seeds(self) -> bool:
        return bool((self._seed_idx >= 0).any())


@dataclass(frozen=True, eq=False)
class Runs:
    """A block in runs of its destinations: (run, its edges, which of the block's sources they have)."""

    block: Block
    runs: Sequence[slice]

    def __iter__(self) -> Iterator[tuple[slice, Block, Tensor]]:
        for run in self.runs:
            piece = micro_batch_of(_as_batch(self.block), _positions(run))
            yield run, piece.blocks[0], piece.input_idx


# ---- a batch, layer by layer over its micro-batches


class BatchPlan(LayerPlan[MicroBatch]):
    """The nodes of one batch."""

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch) -> None:
        self.work, self.hist_batch, self.last = work, hist_batch, work.model.num_layers - 1
        self.key = hist_batch.batch.key if isinstance(hist_batch.batch.key, int) else None

    def chunks_of(self, l: int) -> Sequence[MicroBatch]:
        return ()

    def piece(self, l: int, chunk: MicroBatch) -> Piece:
        edges = chunk.edges()
        batch = chunk.batch(edges) if l == self.last else None
        return Piece(edges.block, edges, chunk.run, chunk.number, batch, chunk)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.work.batches.inputs_of(ids)


class Probe:
    """Some nodes of a batch, more and more of them, to learn what they take: rows and gradients are zeros."""

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch) -> None:
        plan = BatchPlan(work, hist_batch)
        self.work, self.hist_batch, self.plan = work, hist_batch, plan
        self.layers = Layers(work.model, plan, ZeroRows(work), key=plan.key)

    def teach(self, layers: LayerBytes, target_bytes: float) -> None:
        """Until they are sure, and twice as many nodes might take more than `target_bytes`."""
        before = [(p, p.grad) for p in self.work.job.module.parameters()]
        count, most, first, taken = 1, self.hist_batch.block.num_dst, 0, 0
        # What a layer takes for itself, whatever the nodes, does not grow.
        while count <= most and (first + 3 * (taken - first) < target_bytes or count < ENOUGH_NODES):
            for l in range(self.work.model.num_layers):
                taken = max(taken, self._measure(l, count, layers))
            first, count = first or taken, 2 * count
        for p, grad in before:
            p.grad = grad

    def _measure(self, l: int, count: int, layers: LayerBytes) -> int:
        """What a layer takes at so many nodes; it is learnt."""
        job, last = self.work.job, l == self.plan.last
        some = MicroBatch(self.hist_batch, 0, typical_run(self.hist_batch, count, with_seeds=last))
        objective = SummedLoss(job, 1.0) if job.usual_loss else FixedGradients(job, 1.0)
        job.module.zero_grad(set_to_none=True)  # as at the beginning of a step
        with meter_of(job.device) as meter, autocast(job):
            piece = self.plan.piece(l, some)
            with self.layers.same_draws(l, piece):
                if last:
                    self.layers.from_loss(piece, objective)
                else:
                    self.layers.through_layer(l, piece)
        if not last or some.has_seeds:
            layers.learn(l, Sizes.of_blocks((piece.block,)), meter.peak_bytes)
        return meter.peak_bytes


class FixedGradients(SweepLoss):
    """Gradients that come from a loss over all seeds; while layers are measured, zeros."""

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * torch.zeros_like(outputs)).sum()


class ZeroRows(Boundaries):
    """Rows and gradients of zeros, in the memory that those of a batch would take."""

    def __init__(self, work: HistoricalWork) -> None:
        super().__init__(work.histories, device=work.job.device, dtype=work.dtype)
        self.row_of = work.row_of

    def read(self, l: int, at: Edges | slice) -> Tensor:
        row = self.row_of[l]
        return row.new_zeros(at.block.num_src if isinstance(at, Edges) else at.stop - at.start, *row.shape[1:])

    def gradient(self, l: int, at: Edges | slice) -> Tensor:
        return self.read(l, at)

    def add(self, l: int, at: Edges | slice, rows: Tensor | None) -> None:
        """Nobody reads it."""


class MicroBatches(BatchPlan):
    """One batch in pieces that keep to the guard's limit."""

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch, guard: Guard) -> None:
        super().__init__(work, hist_batch)
        assert self.key is not None or not work.model.training, "what is drawn must be drawn again"
        self.guard = guard
        self.compensates = work.method.compensate
        self.resident_bytes = self._find_resident_bytes()
        self.worst_bytes = 0.0
        if (room := guard.target_bytes - self.resident_bytes) <= 0:
            raise ValueError(
                f"the rows of a batch's {hist_batch.block.num_dst} nodes and their gradients take "
                f"{format_size(self.resident_bytes)}, and {format_size(guard.target_bytes)} are left for a step: give "
                f"the "
                f"budget {format_size(-room)} more and something for the layers, or make parts_per_batch smaller"
            )
        if not work.layer_bytes.is_sure:
            Probe(work, hist_batch).teach(work.layer_bytes, room)
        ends = torch.tensor([slab.stop - slab.start for slab in hist_batch.halo.row_ranges]).cumsum(0).tolist()
        runs = self._runs(hist_batch.block, ends, range(self.last + 1))
        self.all = [MicroBatch(hist_batch, number, run) for number, run in enumerate(runs)]
        self.out_neighbors: Iterable[tuple[slice, Block, Tensor]] = ()
        if hist_batch.out_neighbors is not None and hist_batch.out_neighbors.block.num_dst:
            block = hist_batch.out_neighbors.block
            self.out_neighbors = Runs(block, self._runs(block, [block.num_dst], range(1, self.last + 1)))
        self.rows: dict[int, Tensor] = hist_batch.halo.rows
        """By layer, the batch's own rows."""
        self.totals: dict[int, Tensor] = {}
        """By layer, the gradients at them."""
        self.meter: Meter | None = None
        self.taken: dict[int, tuple[int, Sizes]] = {}
        """By layer, what its largest piece took."""

    def _find_resident_bytes(self) -> int:
        """Of the whole batch: rows and gradients."""
        work, own = self.work, self.hist_batch.block.num_dst
        *hidden, last = [row.nbytes for row in work.row_of]
        most = max(hidden, default=0)
        num_bytes = own * (sum(hidden) + sum(sorted(hidden)[0 if self.keeps_all else -2 :]))
        num_bytes += own * (last + 2 * most) if self.compensates else 0
        num_bytes += 0 if work.job.usual_loss else LOSS_COPIES * last * self.hist_batch.batch.num_seeds
        return num_bytes + MAP_BYTES_PER_NODE * self.hist_batch.block.num_src + self.guard.overhead_bytes()

    @property
    def keeps_all(self) -> bool:
        """Whether gradients after all layers are there at once."""
        return self.work.model.keeps_jk or self.compensates

    def _predict_peak(self, sizes: Sizes, layers: Sequence[int]) -> float:
        return max((self.work.layer_bytes.predict_peak(l, sizes) for l in layers), default=0.0)

    def _runs(self, block: Block, ends: Sequence[int], layers: Sequence[int]) -> list[slice]:
        room = self.guard.target_bytes - self.resident_bytes
        runs, worst = runs_to_fit(block, ends, lambda sizes: self._predict_peak(sizes, layers), room)
        self.worst_bytes = max(self.worst_bytes, worst)
        return runs

    @property
    def predicted_bytes(self) -> float:
        return self.resident_bytes + self.worst_bytes

    def chunks_of(self, l: int) -> Sequence[MicroBatch]:
        if l < self.last or not self.hist_batch.batch.num_seeds or self.work.method.lipschitz:
            return self.all
        return [piece for piece in self.all if piece.has_seeds]  # other nodes' last rows are of no use

    def piece(self, l: int, chunk: MicroBatch) -> Piece:
        if self.meter is not None:
            self.meter.lap()  # from now on this piece is measured: the one before it is gone
        return super().piece(l, chunk)

    def backward_done(self, l: int, piece: Piece) -> None:
        sizes, learns = Sizes.of_blocks((piece.block,)), l < self.last or piece.chunk.has_seeds
        if self.meter is not None and learns and self.meter.lap_bytes > self.taken.get(l, (0, sizes))[0]:
            self.taken[l] = self.meter.lap_bytes, sizes

    # ---- a step

    def forward(self) -> None:
        """Fill the batch's own rows after all layers but the last."""
        with torch.no_grad(), autocast(self.work.job), trace.span("forward", self.work.job.device):
            self._layers(1.0).forward(range(self.last))

    def backward(self, total: float) -> Tensor:
        """Add the gradient of the batch's share of the mean loss over `total` examples; returns its summed loss."""
        size, own, method = self.hist_batch.batch.num_seeds, self.hist_batch.block.num_dst, self.work.method
        penalty = method.lipschitz * size / (total * own * max(1, self.last))
        objective = objective_of(self.work.job, 1 / total, self.key, lambda seeds, y: self.hist_batch.batch)
        with autocast(self.work.job), trace.span("backward", self.work.job.device):
            self._layers(1 / total).backward(objective, penalty)
        if not size:  # as after a backward pass of a loss that is zero
            for p in self.work.job.module.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        return objective.loss_sum

    def _layers(self, scale: float) -> Layers[MicroBatch]:
        return Layers(self.work.model, self, BatchRows(self, scale), key=self.key)


class BatchRows(Boundaries):
    """Rows of a batch's own nodes beside the stored ones of its halo, and gradients at the former.

    scale: of the gradients.
    """

    def __init__(self, batches: MicroBatches, scale: float) -> None:
        work = batches.work
        super().__init__(work.histories, device=work.job.device, dtype=work.dtype)
        self.batches, self.hist_batch, self.last, self.scale = batches, batches.hist_batch, batches.last, scale
        self.own, self.totals = batches.rows, batches.totals

    @property
    def wants_last(self) -> bool:
        return self.batches.compensates

    def begin(self, layers: Sequence[int]) -> None:
        """Nothing of it is on other hosts: stored rows were asked for when the batch was made."""
        if len(layers) == self.last and not self.totals and torch.is_grad_enabled():
            for l in layers if self.batches.keeps_all else layers[-1:]:
                self._new_total(l)

    def handle(self, l: int, piece: Piece) -> Tensor:
        return self.read(l, piece.src)

    def read(self, l: int, at: Edges | slice) -> Tensor:
        if isinstance(at, slice):
            return self.own[l][at].to(self.dtype, copy=True)
        near = ops.gather_rows(self.own[l], at.near_idx)
        if not at.halo_idx.numel():
            return near.to(self.dtype)
        halo = self.hist_batch.row_reader.read_subset(l, self.hist_batch.halo.positions, at.halo_idx, near)
        return torch.cat([near, halo]).to(self.dtype)

    def write(self, l: int, piece: Piece, rows: Tensor) -> None:
        if l not in self.own:
            self.own[l] = rows.new_empty(self.hist_batch.block.num_dst, *rows.shape[1:])
        self.own[l][piece.dst] = rows

    def complete(self, l: int) -> None:
        """Nobody else reads them."""

    def _new_total(self, l: int) -> None:
        self.totals[l] = torch.zeros_like(self.own[l], dtype=self.dtype)

    def add(self, l: int, at: Edges | slice, rows: Tensor | None) -> None:
        if rows is None:
            return
        if l == self.last and l not in self.totals:
            self.totals[l] = rows.new_zeros(self.hist_batch.block.num_dst, *rows.shape[1:])
        if isinstance(at, slice):
            self.totals[l][at] += rows
        else:  # the halo's rows are constants
            self.totals[l].index_add_(0, at.near_idx, rows[: at.near_idx.numel()])

    def gradients_complete(self, l: int) -> None:
        batches, hist_batch = self.batches, self.hist_batch
        if l < self.last and hist_batch.out_neighbors is not None:
            for run, block, among in batches.out_neighbors:
                out_neighbors = hist_batch.out_neighbors.narrow(run, block, among)
                sent = compensation_gradient(batches.work, hist_batch, out_neighbors, l, self.own[l])
                self.totals[l].add_(sent, alpha=self.scale)
                del out_neighbors, sent
        if not batches.keeps_all:
            self.totals.pop(l + 1, None)
            if 0 < l < self.last:
                self._new_total(l - 1)

    def gradient(self, l: int, at: Edges | slice) -> Tensor:
        assert isinstance(at, slice)
        return self.totals[l][at]


@dataclass(eq=False)
class GuardedHistoricalUnit(HistoricalUnit):
    """One batch within the guard's limit: at once where it fits, else in pieces."""

    def forward_backward(self, total: float) -> Tensor:
        if self.hist_batch is None or not self.has_gradient:
            return super().forward_backward(total)
        return self.guard.step(HistoricalStep(self, self.hist_batch, total))

    def _forward_only(self) -> None:
        if self.hist_batch is not None and self.guard.must_split(
            step := HistoricalStep(self, self.hist_batch, total=1)
        ):
            step.cut().forward()
        else:
            super()._forward_only()

    @property
    def guard(self) -> Guard:
        assert self.work.guard is not None
        return self.work.guard


@dataclass(eq=False)
class HistoricalStep:
    """The step of one batch, for a guard: a `SplittableStep`."""

    unit: GuardedHistoricalUnit
    hist_batch: HistoricalBatch
    total: float
    smaller_by: str = "parts_per_batch"

    def sizes(self) -> Sizes:
        return whole_sizes(self.hist_batch)

    def bound_bytes(self) -> float:
        return self.unit.work.layer_bytes.together(self.sizes())

    def run_whole(self) -> Tensor:
        return HistoricalUnit.forward_backward(self.unit, self.total)

    def cut(self) -> MicroBatches:
        work, guard = self.unit.work, self.unit.guard
        check_micro_batches(work.model)
        micro_batches = MicroBatches(work, self.hist_batch, guard)
        guard.note_split(len(micro_batches.all))
        return micro_batches

    def run_in_micro_batches(self, meter: Meter, set_predicted_bytes: Callable[[float], None]) -> Tensor:
        work, hist_batch, micro_batches = self.unit.work, self.hist_batch, self.cut()
        set_predicted_bytes(micro_batches.predicted_bytes)
        ages = hist_batch.row_reader.ages(hist_batch.halo.positions)
        report_ages(ages)
        work.drift.observe_ages(ages)
        micro_batches.meter = meter
        micro_batches.forward()
        loss = micro_batches.backward(self.total)
        micro_batches.meter = None
        for l, (peak_bytes, of_piece) in micro_batches.taken.items():
            work.layer_bytes.learn(l, of_piece, peak_bytes)
        if work.method.compensate:
            self.unit.row_gradients = {l: rows.mul_(self.total) for l, rows in sorted(micro_batches.totals.items())}
        return loss

    def reset(self) -> None:
        self.hist_batch.halo.reset()
