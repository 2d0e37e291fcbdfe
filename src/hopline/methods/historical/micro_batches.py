"""Split a historical batch that would exceed the budget into micro-batches, with the gradients of the whole batch.

In every layer, a batch reads new embeddings of its own nodes and historical embeddings of its halo. A node of one
micro-batch may therefore read the new row of a node of another, so micro-batches cannot be trained one after the
other. The layer-wise engine (`hopline.layerwise`) takes all of them through a layer before any enters the next:

    forward, layer l = 0 ... last - 1:
        for each micro-batch:   own rows after l - 1, halo rows of the tables  ->  own rows after l
    backward, layer l = last ... 0:
        for each micro-batch:   compute layer l again, go back through it      ->  add to gradients after l - 1

Resident for the whole batch are its own rows after each layer and gradients at them. The edges and activations of
one layer exist for one micro-batch at a time. The price is that all layers but the last are computed twice.

A micro-batch is a *run*: consecutive nodes of the batch with all their in-edges. Runs are as long as the memory
allows, and end where a part of the graph ends if the parts are small enough.

The bytes of a layer are predicted from measurements (`LayerBytes`). Before the first split, a `Probe` measures the
layers on a few nodes.
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
"""Largest factor from one number of micro-batches to the next that is tried, until a batch fits. A rule of thumb."""
UNEVEN = 1.1
"""Largest weight of a run that ends with a part, as a multiple of its equal share. A rule of thumb."""
ENOUGH_NODES = 64
"""Nodes up to which a `Probe` measures the layers in any case, before a batch is split. A rule of thumb."""
MAP_BYTES_PER_NODE = 16
"""Bytes that building a micro-batch takes per source of the batch's block, for maps to local ids. A rule of thumb."""


# ---- where a batch is split, and the bytes of its layers


def balanced_runs(weight: Tensor, ends: Sequence[int], num_micro_batches: int) -> list[slice]:
    """Runs of consecutive nodes that cover a batch, of about equal weight.

    Small parts are joined while the run stays within `UNEVEN` times its equal share. A part above that is split by
    itself into runs of equal weight.

    weight: [num_nodes], the cost of each node. ends: for each part, the position behind its last node, ascending.
    """
    upto = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    share, cuts, start = float(upto[-1]) / num_micro_batches, [0], 0
    for stop in ends:
        # With this part the run would be too heavy: end it before the part.
        if float(upto[stop] - upto[cuts[-1]]) > UNEVEN * share:
            cuts.append(start)
        here = float(upto[stop] - upto[start])
        # The part is too heavy even for a run of its own: split it where its cumulative weight passes equal steps.
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
    """Split a block's destinations into few runs within `limit` bytes. Returns (runs, bytes of the largest run).

    ends: where its parts end, see `balanced_runs`. bytes_of: the predicted peak of a run, by its sizes.

    Raises:
        ValueError: A single node does not fit.
    """
    # A node's cost: its in-edges, and its own row.
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
    """A run of `count` nodes of a batch, for a measurement.

    Its number of edges is the median over all such runs. with_seeds: it lies around the middle seed instead, so that
    it has a loss.
    """
    indptr, seeds = hist_batch.block.part.indptr.cpu(), hist_batch.batch.output_idx
    start = int((indptr[count:] - indptr[:-count]).median(dim=0).indices)
    if with_seeds and seeds is not None and seeds.numel():
        start = min(max(0, int(seeds[seeds.numel() // 2]) - count // 2), hist_batch.block.num_dst - count)
    return slice(start, start + count)


def _as_batch(block: Block) -> Batch:
    """A block as a batch of one layer: all its destinations are seeds, without input rows or layer hooks."""
    return Batch(block.dst_ids, (replace(block, layer_hooks=None),), None, None)


def at_layer(model: GNN, sizes: Sizes, l: int) -> Sizes:
    """The sizes of a step that computes only layer `l` at a block. sizes: of the block, one layer."""
    (src, dst), (edges,) = sizes.nodes, sizes.edges
    nodes = [0] * (model.num_layers + 1)
    nodes[l], nodes[l + 1] = src, dst
    nodes[0] += dst if l and model.encodes else 0  # the destinations are encoded again, for initial residuals
    return Sizes(tuple(nodes), tuple(edges if i == l else 0 for i in range(model.num_layers)))


class LayerBytes:
    """Predicts the bytes of single layers of a model.

    Each layer has a predictor of its own, which learns from the measured peaks of that layer. The work owns it and
    keeps it over all batches.
    """

    def __init__(self, model: GNN, x: Readable | None) -> None:
        costs = costs_of(model, x, model.num_layers)
        self.model, self.predictors = model, [Predictor(costs) for _ in range(model.num_layers)]

    @property
    def is_sure(self) -> bool:
        """Whether the predictors of all layers have enough measurements."""
        return all(predictor.is_sure for predictor in self.predictors)

    def predict_peak(self, l: int, sizes: Sizes) -> float:
        """The predicted peak, in bytes, of layer `l` at a block of these sizes, forward and backward."""
        return self.predictors[l].predict_peak(at_layer(self.model, sizes, l))

    def together(self, sizes: Sizes) -> float:
        """The predicted peak, in bytes, of a whole batch that is not split. sizes: over all layers.

        It is the sum over the layers, since no layer keeps more for the backward pass than its peak when run alone.
        """
        own = sizes.nodes[-1]
        return sum(self.predict_peak(l, Sizes((sizes.nodes[l], own), (e,))) for l, e in enumerate(sizes.edges))

    def learn(self, l: int, sizes: Sizes, peak_bytes: int) -> None:
        """Add a measurement: layer `l` at a block of these sizes had this peak."""
        self.predictors[l].observe(at_layer(self.model, sizes, l), peak_bytes)


def whole_sizes(hist_batch: HistoricalBatch) -> Sizes:
    """The sizes of a batch that is not split: the layers of its own nodes, and those that compensation computes."""
    nodes, edges = list(Sizes.of(hist_batch.batch).nodes), list(Sizes.of(hist_batch.batch).edges)
    last = len(edges) - 1
    beside = [(hist_batch.out_neighbors.block, 1, last + 1)] if hist_batch.out_neighbors is not None else []
    # Compensation computes every layer but the first at the out-neighbours too.
    for block, first, stop in beside:
        for l in range(first, stop):
            nodes[l], edges[l] = nodes[l] + block.num_src, edges[l] + block.num_edges
        nodes[stop] += block.num_dst
    return Sizes(tuple(nodes), tuple(edges))


def check_micro_batches(model: GNN) -> None:
    """Refuse a model for which micro-batches would not give the gradients of the batch.

    Raises:
        ValueError: A module needs the whole batch, as a batch norm does. Or an encoder has dropout: a node that two
            micro-batches encode would get two masks.
    """
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
    """All in-edges of a micro-batch's nodes. Sources are ordered: the batch's own nodes first, then the halo."""

    block: Block
    near_idx: Tensor
    """[num_near] int64: for the first sources of `block`, which of the batch's own nodes each is."""
    halo_idx: Tensor
    """[num_src - num_near] int64 on the host: for the other sources of `block`, which node of the halo each is."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Consecutive nodes of a batch. It holds no edges: `edges` builds them when their turn comes."""

    hist_batch: HistoricalBatch
    number: int
    """The micro-batch's number within the batch. Together with the layer it keys the draws of convs."""
    run: slice
    """The local ids of its nodes among the batch's own."""

    def edges(self) -> Edges:
        """Build all in-edges of the micro-batch's nodes.

        They are built again for every layer, so that memory holds those of one micro-batch at a time.
        """
        whole = self.hist_batch.block
        piece = micro_batch_of(_as_batch(whole), _positions(self.run))
        (block,), is_halo = piece.blocks, piece.input_idx >= whole.num_dst
        # Stable, so destinations, which are own nodes and come first, stay the first sources.
        order = is_halo.long().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        src_idx = place[block.part.src_idx.long()].to(block.part.src_idx.dtype)
        block = replace(block, src_ids=block.src_ids[order], parts=(replace(block.part, src_idx=src_idx),))
        near, far = piece.input_idx[order].split([order.numel() - int(is_halo.sum()), int(is_halo.sum())])
        return Edges(block, near, (far - whole.num_dst).cpu())

    def batch(self, edges: Edges) -> Batch:
        """The micro-batch as a batch for the loss: its seeds with their labels, and the rows of its sources."""
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
        """[num_seeds] int64: the local id in the micro-batch of each seed of the batch, -1 if it is in another."""
        seeds = self.hist_batch.batch.output_idx
        assert seeds is not None
        return torch.where((seeds >= self.run.start) & (seeds < self.run.stop), seeds - self.run.start, -1)

    @property
    def has_seeds(self) -> bool:
        """Whether any seed of the batch is in this micro-batch."""
        return bool((self._seed_idx >= 0).any())


@dataclass(frozen=True, eq=False)
class Runs:
    """A block, split by runs of its destinations. Each iteration builds one run's edges at a time.

    Yields (run, block of the run's in-edges, `among`). among: [num_src] int64, which source of the whole block each
    source of the run's block is.
    """

    block: Block
    runs: Sequence[slice]

    def __iter__(self) -> Iterator[tuple[slice, Block, Tensor]]:
        for run in self.runs:
            piece = micro_batch_of(_as_batch(self.block), _positions(run))
            yield run, piece.blocks[0], piece.input_idx


# ---- a batch, layer by layer over its micro-batches


class BatchPlan(LayerPlan[MicroBatch]):
    """The layer-wise engine's plan for one batch, whose pieces are micro-batches.

    It lists none, which is all that a `Probe` needs. `MicroBatches` lists those of a split batch.
    """

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
    """Measures the layers of a model on more and more nodes of a batch, so that a split can be predicted.

    Rows and gradients are zeros: only the peak of the memory counts. Gradients of the parameters are put back.
    """

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch) -> None:
        plan = BatchPlan(work, hist_batch)
        self.work, self.hist_batch, self.plan = work, hist_batch, plan
        self.layers = Layers(work.model, plan, ZeroRows(work), key=plan.key)

    def teach(self, layers: LayerBytes, target_bytes: float) -> None:
        """Measure all layers on 1, 2, 4, ... nodes, and let `layers` learn.

        Ends when the next round might exceed `target_bytes`, but not below `ENOUGH_NODES`, or when the batch has no
        more nodes.
        """
        before = [(p, p.grad) for p in self.work.job.module.parameters()]
        count, most, first, taken = 1, self.hist_batch.block.num_dst, 0, 0
        # `first`, the peak of the first round, stands for the bytes that a layer takes whatever the number of nodes.
        # Only the bytes above it grow. The next round has twice the nodes; a factor of three is a rule of thumb.
        while count <= most and (first + 3 * (taken - first) < target_bytes or count < ENOUGH_NODES):
            for l in range(self.work.model.num_layers):
                taken = max(taken, self._measure(l, count, layers))
            first, count = first or taken, 2 * count
        for p, grad in before:
            p.grad = grad

    def _measure(self, l: int, count: int, layers: LayerBytes) -> int:
        """Run layer `l` forward and backward on `count` nodes. Returns its peak in bytes, which `layers` learns."""
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
        # Without seeds the last layer has no loss to go back from, so its peak would be too low to learn from.
        if not last or some.has_seeds:
            layers.learn(l, Sizes.of_blocks((piece.block,)), meter.peak_bytes)
        return meter.peak_bytes


class FixedGradients(SweepLoss):
    """Stands for a loss of the user's own while layers are measured: gradients of zeros at the outputs.

    Such a loss is computed over all seeds of a batch at once, and a `Probe` has only some of them.
    """

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * torch.zeros_like(outputs)).sum()


class ZeroRows(Boundaries):
    """Rows and gradients of zeros, which take the memory that those of a batch would take."""

    def __init__(self, work: HistoricalWork) -> None:
        super().__init__(work.histories, device=work.job.device, dtype=work.dtype)
        self.row_of = work.row_of

    def read(self, l: int, at: Edges | slice) -> Tensor:
        row = self.row_of[l]
        return row.new_zeros(at.block.num_src if isinstance(at, Edges) else at.stop - at.start, *row.shape[1:])

    def gradient(self, l: int, at: Edges | slice) -> Tensor:
        return self.read(l, at)

    def add(self, l: int, at: Edges | slice, rows: Tensor | None) -> None:
        """Drop the gradient: nothing reads it."""


class MicroBatches(BatchPlan):
    """One batch, split into micro-batches that keep to the guard's limit.

    Owns the batch's rows and gradients between layers, for one step. Call `forward`, then `backward`, in the thread
    that trains.

    Raises:
        ValueError: The batch's own rows, or those and a single node, do not fit.
    """

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch, guard: Guard) -> None:
        super().__init__(work, hist_batch)
        # The backward pass computes layers again, and must draw the same dropout: that needs a key.
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
        """By layer, [num_own, ...]: the batch's own rows after it. The halo's recorder holds them, for the push."""
        self.totals: dict[int, Tensor] = {}
        """By layer, [num_own, ...]: the sum so far of the gradients at the batch's own rows."""
        self.meter: Meter | None = None
        self.taken: dict[int, tuple[int, Sizes]] = {}
        """By layer: the highest measured peak of a micro-batch, in bytes, and the sizes of that one."""

    def _find_resident_bytes(self) -> int:
        """The bytes that stay taken during the whole step: rows and gradients of all own nodes, and buffers."""
        work, own = self.work, self.hist_batch.block.num_dst
        *hidden, last = [row.nbytes for row in work.row_of]
        most = max(hidden, default=0)
        # Rows after all layers. Gradients after all layers too, or after two: one is read, the one before it written.
        num_bytes = own * (sum(hidden) + sum(sorted(hidden)[0 if self.keeps_all else -2 :]))
        num_bytes += own * (last + 2 * most) if self.compensates else 0
        # A loss of the user's own needs the outputs of all seeds at once.
        num_bytes += 0 if work.job.usual_loss else LOSS_COPIES * last * self.hist_batch.batch.num_seeds
        return num_bytes + MAP_BYTES_PER_NODE * self.hist_batch.block.num_src + self.guard.overhead_bytes()

    @property
    def keeps_all(self) -> bool:
        """Whether gradients after all layers stay in memory until the step ends.

        Jumping knowledge adds to all of them in the last layer; compensation writes them into tables.
        """
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
        """The predicted peak of the step."""
        return self.resident_bytes + self.worst_bytes

    def chunks_of(self, l: int) -> Sequence[MicroBatch]:
        if l < self.last or not self.hist_batch.batch.num_seeds or self.work.method.lipschitz:
            return self.all
        return [piece for piece in self.all if piece.has_seeds]  # no loss reads the last rows of other nodes

    def piece(self, l: int, chunk: MicroBatch) -> Piece:
        if self.meter is not None:
            self.meter.lap()  # starts the measurement of this micro-batch: the memory of the one before is free again
        return super().piece(l, chunk)

    def backward_done(self, l: int, piece: Piece) -> None:
        sizes, learns = Sizes.of_blocks((piece.block,)), l < self.last or piece.chunk.has_seeds
        if self.meter is not None and learns and self.meter.lap_bytes > self.taken.get(l, (0, sizes))[0]:
            self.taken[l] = self.meter.lap_bytes, sizes

    # ---- a step

    def forward(self) -> None:
        """Compute the batch's own rows after all layers but the last, without gradients."""
        with torch.no_grad(), autocast(self.work.job), trace.span("forward", self.work.job.device):
            self._layers(1.0).forward(range(self.last))

    def backward(self, total: float) -> Tensor:
        """Add the gradient of the batch's share of the mean loss over `total` examples. Returns its summed loss."""
        size, own, method = self.hist_batch.batch.num_seeds, self.hist_batch.block.num_dst, self.work.method
        penalty = method.lipschitz * size / (total * own * max(1, self.last))
        objective = objective_of(self.work.job, 1 / total, self.key, lambda seeds, y: self.hist_batch.batch)
        with autocast(self.work.job), trace.span("backward", self.work.job.device):
            self._layers(1 / total).backward(objective, penalty)
        # Without seeds, parameters that nothing reached get zeros, as after the backward pass of a loss of zero.
        if not size:
            for p in self.work.job.module.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        return objective.loss_sum

    def _layers(self, scale: float) -> Layers[MicroBatch]:
        return Layers(self.work.model, self, BatchRows(self, scale), key=self.key)


class BatchRows(Boundaries):
    """The rows that the engine reads between layers, and the gradients that it adds to.

    Rows of the batch's own nodes are those of this step, in memory. Rows of its halo are historical embeddings: they
    are constants, and get no gradient.

    scale: factor of the gradients that compensation adds, 1 / (examples of the step).
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
        """Allocate the gradients when the backward pass begins.

        Unlike in a sweep nothing is fetched from other hosts: that was done when the batch was made.
        """
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
        """Do nothing: no other rank reads these rows."""

    def _new_total(self, l: int) -> None:
        self.totals[l] = torch.zeros_like(self.own[l], dtype=self.dtype)

    def add(self, l: int, at: Edges | slice, rows: Tensor | None) -> None:
        if rows is None:
            return
        if l == self.last and l not in self.totals:
            self.totals[l] = rows.new_zeros(self.hist_batch.block.num_dst, *rows.shape[1:])
        if isinstance(at, slice):
            self.totals[l][at] += rows
        else:  # rows behind `near_idx` are the halo's, which are constants
            self.totals[l].index_add_(0, at.near_idx, rows[: at.near_idx.numel()])

    def gradients_complete(self, l: int) -> None:
        batches, hist_batch = self.batches, self.hist_batch
        if l < self.last and hist_batch.out_neighbors is not None:
            # Before the engine goes back through layer l: what out-neighbours would send to the rows after it.
            for run, block, among in batches.out_neighbors:
                out_neighbors = hist_batch.out_neighbors.narrow(run, block, among)
                sent = compensation_gradient(batches.work, hist_batch, out_neighbors, l, self.own[l])
                self.totals[l].add_(sent, alpha=self.scale)
                del out_neighbors, sent  # or the next run's would come on top of them
        # Two layers' gradients at a time, as `_find_resident_bytes` counts them.
        if not batches.keeps_all:
            self.totals.pop(l + 1, None)
            if 0 < l < self.last:
                self._new_total(l - 1)

    def gradient(self, l: int, at: Edges | slice) -> Tensor:
        assert isinstance(at, slice)
        return self.totals[l][at]


@dataclass(eq=False)
class GuardedHistoricalUnit(HistoricalUnit):
    """One batch within the guard's limit: whole if it fits, else in micro-batches."""

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
    """The step of one batch as a `SplittableStep`, which a guard runs whole or in micro-batches."""

    unit: GuardedHistoricalUnit
    hist_batch: HistoricalBatch
    total: float
    """Examples of the optimizer step, over all ranks."""
    smaller_by: str = "parts_per_batch"

    def sizes(self) -> Sizes:
        return whole_sizes(self.hist_batch)

    def bound_bytes(self) -> float:
        return self.unit.work.layer_bytes.together(self.sizes())

    def run_whole(self) -> Tensor:
        return HistoricalUnit.forward_backward(self.unit, self.total)

    def cut(self) -> MicroBatches:
        """Split the batch into micro-batches that fit, and tell the guard how many."""
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
        # Back from the mean over the step to the summed loss, whose gradients the tables hold.
        if work.method.compensate:
            self.unit.row_gradients = {l: rows.mul_(self.total) for l, rows in sorted(micro_batches.totals.items())}
        return loss

    def reset(self) -> None:
        self.hist_batch.halo.reset()
