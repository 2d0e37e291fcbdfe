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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.micro_batches import batch_of_block, check_split, edges_of_run, find_fewest, sizes_of
from hopline.core.batch import Batch, Block
from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import Rows
from hopline.device.meter import Meter
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.methods.historical.batches import HistoricalBatch
from hopline.methods.historical.compensation import compensation_gradient
from hopline.methods.historical.step import HistoricalUnit
from hopline.methods.partitioned.layer_bytes import LayerBytes, ZeroRows, measure_layer
from hopline.methods.partitioned.memory_plan import ENOUGH_NODES, MAP_BYTES_PER_NODE
from hopline.methods.partitioned.sweep_loss import make_sweep_loss
from hopline.nn.layered import Layered
from hopline.units.batch_unit import autocast
from hopline.units.loss_at_outputs import LOSS_COPIES
from hopline.util import trace
from hopline.util.config import CHANGES_TRAINING, format_size

if TYPE_CHECKING:
    from hopline.contract import Guard
    from hopline.methods.historical.work import HistoricalWork


MAX_GROWTH = 1.4
"""Most by which the number of micro-batches is multiplied from one try to the next."""
UNEVEN = 1.1
"""Largest weight of a run that ends with a part, as a multiple of its equal share."""


# ---- where a batch is split, and the bytes of its layers


def balanced_runs(weight: Tensor, ends: Sequence[int], num_micro_batches: int) -> list[slice]:
    """Runs of consecutive nodes that cover a batch, of about equal weight.

    Small parts are joined while the run stays within `UNEVEN` times its equal share. A part above that is split by
    itself into runs of equal weight.

    weight: [num_nodes], the cost of each node. ends: for each part, the position behind its last node, ascending.
    """
    # [num_nodes + 1]: the weight of all nodes before each position.
    cumulative = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    share = float(cumulative[-1]) / num_micro_batches
    max_weight = UNEVEN * share

    boundaries = [0]
    start = 0
    for stop in ends:
        run_weight = float(cumulative[stop] - cumulative[boundaries[-1]])
        # With this part the run would be too heavy: end it before the part.
        if run_weight > max_weight:
            boundaries.append(start)
        part_weight = float(cumulative[stop] - cumulative[start])
        # The part is too heavy even for a run of its own: split it where its cumulative weight passes equal steps.
        if part_weight > max_weight:
            num_runs = math.ceil(part_weight / share)
            steps = cumulative[start] + part_weight / num_runs * torch.arange(1, num_runs, dtype=torch.float64)
            boundaries += torch.searchsorted(cumulative, steps.to(cumulative.dtype)).tolist()
            boundaries.append(stop)
        start = stop
    boundaries = sorted({*boundaries, ends[-1]})
    return [slice(start, stop) for start, stop in pairwise(boundaries)]


def runs_to_fit(
    block: Block, ends: Sequence[int], bytes_of: Callable[[Sizes], float], limit: float
) -> tuple[list[slice], float]:
    """Split a block's destinations into few runs within `limit` bytes. Returns (runs, bytes of the largest run).

    ends: where its parts end, see `balanced_runs`. bytes_of: the predicted peak of a run, by its sizes.
    """
    batch = batch_of_block(block)
    # A node's cost: its in-edges, and its own row.
    weight = block.part.indptr.cpu().diff() + 1
    if limit > 0:
        num_micro_batches = max(1, math.ceil(bytes_of(Sizes.of(batch)) / limit))
    else:
        num_micro_batches = block.num_dst  # nothing fits; the error names the bytes of a single node

    def largest_peak(runs: list[slice]) -> float:
        return max(map(bytes_of, sizes_of(batch, [torch.arange(run.start, run.stop) for run in runs])))

    runs, peak_bytes = find_fewest(
        partial(balanced_runs, weight, ends),
        largest_peak,
        limit,
        first_number=num_micro_batches,
        max_number=block.num_dst,
        max_growth=MAX_GROWTH,
    )
    if peak_bytes <= limit:
        return runs, peak_bytes
    raise ValueError(
        f"one node of a batch takes {format_size(peak_bytes)}, and the batch's own rows leave "
        f"{format_size(max(0, limit))}: give the budget {format_size(peak_bytes - limit)} more, or make "
        f"parts_per_batch smaller {CHANGES_TRAINING}"
    )


def typical_run(hist_batch: HistoricalBatch, count: int, with_seeds: bool) -> slice:
    """A run of `count` nodes of a batch, for a measurement.

    Its number of edges is the median over all such runs. with_seeds: it lies around the middle seed instead, so that
    it has a loss.
    """
    seeds = hist_batch.batch.output_idx
    if with_seeds and seeds is not None and seeds.numel():
        middle_seed = int(seeds[seeds.numel() // 2])
        last_start = hist_batch.block.num_dst - count
        start = min(max(0, middle_seed - count // 2), last_start)
    else:
        indptr = hist_batch.block.part.indptr.cpu()
        num_edges = indptr[count:] - indptr[:-count]
        start = int(num_edges.median(dim=0).indices)
    return slice(start, start + count)


def whole_sizes(hist_batch: HistoricalBatch) -> Sizes:
    """The sizes of a batch that is not split: the layers of its own nodes, and those that compensation computes."""
    sizes = Sizes.of(hist_batch.batch)
    if hist_batch.out_neighbors is None:
        return sizes
    # Compensation computes every layer but the first at the out-neighbours too.
    nodes = list(sizes.nodes)
    edges = list(sizes.edges)
    block = hist_batch.out_neighbors.block
    for l in range(1, len(edges)):
        nodes[l] += block.num_src
        edges[l] += block.num_edges
    nodes[-1] += block.num_dst
    return Sizes(tuple(nodes), tuple(edges))


def check_micro_batches(model: Layered) -> None:
    """Refuse a model for which micro-batches would not give the gradients of the batch."""
    check_split(model, instead=f"make parts_per_batch smaller {CHANGES_TRAINING}")
    for name, module in model.named_modules():
        has_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        if has_dropout and name.startswith("encoder."):
            raise ValueError(
                f"{name} draws anew wherever a node's row is encoded, so no batch can be split: use input_dropout= or "
                f"dropout= of hl.nn.GNN, or make parts_per_batch smaller {CHANGES_TRAINING}"
            )


# ---- micro-batches


@dataclass(frozen=True, eq=False)
class LayerEdges:
    """All in-edges of a micro-batch's nodes. Sources are ordered: the batch's own nodes first, then the halo."""

    block: Block
    own_idx: Tensor
    """[num_own_src] int64: for the first sources of `block`, which of the batch's own nodes each is."""
    halo_idx: Tensor
    """[num_src - num_own_src] int64 on the host: for the other sources of `block`, which node of the halo each is."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Consecutive nodes of a batch. It holds no edges: `edges` builds them when their turn comes."""

    hist_batch: HistoricalBatch
    number: int
    """The micro-batch's number within the batch. Together with the layer it keys the draws of convs."""
    run: slice
    """The local ids of its nodes among the batch's own."""

    def edges(self) -> LayerEdges:
        """Build all in-edges of the micro-batch's nodes.

        They are built again for every layer, so that memory holds those of one micro-batch at a time.
        """
        whole = self.hist_batch.block
        block, whole_src_idx = edges_of_run(whole, self.run)
        is_halo = whole_src_idx >= whole.num_dst

        # Stable, so destinations, which are own nodes and come first, stay the first sources.
        order = is_halo.long().argsort(stable=True)
        new_idx = torch.empty_like(order)
        new_idx[order] = torch.arange(order.numel(), device=order.device)
        src_idx = new_idx[block.part.src_idx.long()].to(block.part.src_idx.dtype)
        block = replace(block, src_ids=block.src_ids[order], parts=(replace(block.part, src_idx=src_idx),))

        num_halo = int(is_halo.sum())
        own_idx, halo_idx = whole_src_idx[order].split([order.numel() - num_halo, num_halo])
        return LayerEdges(block, own_idx, (halo_idx - whole.num_dst).cpu())

    def batch(self, edges: LayerEdges) -> Batch:
        """The micro-batch as a batch for the loss: its seeds with their labels, and the rows of its sources."""
        whole = self.hist_batch.batch
        local_idx = self._local_idx
        examples = (local_idx >= 0).nonzero().view(-1)  # which examples of the batch are in this micro-batch
        in_run = edges.block.dst_ids
        seeds = in_run[torch.zeros_like(in_run, dtype=torch.bool).index_fill_(0, local_idx[examples], True)]

        def source_rows(whole_rows: Rows | Tensor) -> Rows | Tensor:
            if isinstance(whole_rows, Rows):
                return Rows(whole_rows.table, edges.block.src_ids)
            halo_idx = edges.halo_idx.to(whole_rows.device) + self.hist_batch.block.num_dst
            return ops.gather_rows(whole_rows, torch.cat([edges.own_idx, halo_idx]))

        return replace(
            whole,
            seeds=seeds,
            blocks=(edges.block,) * len(whole.blocks),
            x=None if whole.x is None else source_rows(whole.x),
            y=None if whole.y is None else whole.y[examples],
            tables={name: source_rows(rows) for name, rows in whole.tables.items()},
            output_idx=local_idx[examples],
        )

    @property
    def _local_idx(self) -> Tensor:
        """[num_examples] int64: the local id in the micro-batch of each example's node, -1 if it is in another."""
        nodes = self.hist_batch.batch.output_idx
        assert nodes is not None
        is_in_run = (nodes >= self.run.start) & (nodes < self.run.stop)
        return torch.where(is_in_run, nodes - self.run.start, -1)

    @property
    def has_seeds(self) -> bool:
        return bool((self._local_idx >= 0).any())


# ---- a batch, layer by layer over its micro-batches


class BatchPlan(LayerPlan[MicroBatch]):
    """The layer-wise engine's plan for one batch, whose pieces are micro-batches.

    Here `chunks_of` lists none, because a `Probe` makes its micro-batches itself. `MicroBatches` lists those of a split
    batch.
    """

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch) -> None:
        self.work = work
        self.hist_batch = hist_batch
        self.last = work.model.num_layers - 1
        # None in evaluation. Only captured steps have a tensor as key, and historical steps are not captured.
        self.key = hist_batch.batch.key if isinstance(hist_batch.batch.key, int) else None

    def chunks_of(self, l: int) -> Sequence[MicroBatch]:
        return ()

    def piece(self, l: int, chunk: MicroBatch) -> Piece:
        edges = chunk.edges()
        batch = chunk.batch(edges) if l == self.last else None
        return Piece(block=edges.block, src=edges, dst=chunk.run, number=chunk.number, batch=batch, chunk=chunk)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return self.work.partitioned.batches.inputs_of(ids)


class Probe:
    """Measures the layers of a model on more and more nodes of a batch, so that a split can be predicted.

    Rows and gradients are zeros: only the peak of the memory counts. Gradients of the parameters are put back.
    """

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch) -> None:
        self.work = work
        self.hist_batch = hist_batch
        self.plan = BatchPlan(work, hist_batch)
        self.layers = Layers(work.model, self.plan, ZeroRows(work.partitioned, _num_rows), key=self.plan.key)

    def teach(self, layers: LayerBytes, target_bytes: float) -> None:
        """Measure all layers on 1, 2, 4, ... nodes, and let `layers` learn.

        Ends when the next round might exceed `target_bytes`, but not below `ENOUGH_NODES`, or when the batch has no
        more nodes.
        """
        gradients = [(p, p.grad) for p in self.work.job.module.parameters()]
        count = 1
        first_peak = 0
        peak_bytes = 0
        # The node with the most in-edges, which no split makes smaller: measured, and not extrapolated.
        hub = int(self.hist_batch.block.part.indptr.cpu().diff().argmax())
        runs = [typical_run(self.hist_batch, 1, with_seeds=False), slice(hub, hub + 1)]
        for l in range(self.work.model.num_layers):
            for run in runs:
                self._measure(l, run, layers)
        while count <= self.hist_batch.block.num_dst:
            # The peak of the first round stands for the bytes that a layer takes whatever the number of nodes. Only
            # the bytes above it grow. The next round has twice the nodes; a factor of three is a rule of thumb.
            next_peak = first_peak + 3 * (peak_bytes - first_peak)
            if next_peak >= target_bytes and count >= ENOUGH_NODES:
                break
            for l in range(self.work.model.num_layers):
                is_last = l == self.plan.last
                run = typical_run(self.hist_batch, count, with_seeds=is_last)
                peak_bytes = max(peak_bytes, self._measure(l, run, layers))
            first_peak = first_peak or peak_bytes
            count *= 2
        for p, gradient in gradients:
            p.grad = gradient

    def _measure(self, l: int, run: slice, layers: LayerBytes) -> int:
        """Run layer `l` forward and backward on a run of nodes. Returns its peak in bytes, which `layers` learns."""
        micro_batch = MicroBatch(self.hist_batch, 0, run)
        is_last = l == self.plan.last

        def make_piece() -> Piece:
            piece = self.plan.piece(l, micro_batch)
            lacks_seeds = is_last and not micro_batch.has_seeds
            return replace(piece, batch=self._with_seeds(piece)) if lacks_seeds else piece

        # Without seeds the last layer has no loss to go back from, so its peak would be too low to learn from.
        has_loss = not is_last or self.hist_batch.batch.num_seeds > 0
        return measure_layer(self.layers, l, make_piece, self.work.job, layers if has_loss else None)

    def _with_seeds(self, piece: Piece) -> Batch:
        """The batch of a piece without seeds, with all its nodes as seeds of the same label.

        So the hub is measured in the last layer too, whether it is a training node or not.
        """
        assert piece.batch is not None
        seeds = self.hist_batch.batch
        if not seeds.num_seeds:
            return piece.batch
        num_nodes = piece.block.num_dst
        y = None if seeds.y is None else seeds.y[:1].expand(num_nodes, *seeds.y.shape[1:]).contiguous()
        output_idx = torch.arange(num_nodes, device=piece.block.dst_ids.device)
        return replace(piece.batch, seeds=piece.block.dst_ids, y=y, output_idx=output_idx)


def _num_rows(at: LayerEdges | slice) -> int:
    return at.block.num_src if isinstance(at, LayerEdges) else at.stop - at.start


class LayerPeak(NamedTuple):
    """A measurement of one layer at one micro-batch."""

    peak_bytes: int
    sizes: Sizes


class MicroBatches(BatchPlan):
    """One batch, split into micro-batches that keep to the guard's limit.

    Owns the batch's rows and gradients between layers, for one step. Call `forward`, then `backward`, in the thread
    that trains.
    """

    def __init__(self, work: HistoricalWork, hist_batch: HistoricalBatch, guard: Guard) -> None:
        super().__init__(work, hist_batch)
        # The backward pass computes layers again, and must draw the same dropout: that needs a key.
        assert self.key is not None or not work.model.training, "what is drawn must be drawn again"
        self.guard = guard
        self.compensates = work.method.compensate
        self.resident_bytes = self._find_resident_bytes()
        self.max_run_bytes = 0.0
        self.limit_bytes = guard.target_bytes - self.resident_bytes
        if self.limit_bytes <= 0:
            raise ValueError(
                f"the rows of a batch's {hist_batch.block.num_dst} nodes and their gradients take "
                f"{format_size(self.resident_bytes)}, and {format_size(guard.target_bytes)} are left for a step: give "
                f"the budget {format_size(-self.limit_bytes)} more and something for the layers, or make "
                f"parts_per_batch smaller {CHANGES_TRAINING}"
            )
        if not work.layer_bytes.is_sure:
            Probe(work, hist_batch).teach(work.layer_bytes, self.limit_bytes)

        part_sizes = [row_range.stop - row_range.start for row_range in hist_batch.halo.row_ranges]
        ends = torch.tensor(part_sizes).cumsum(0).tolist()
        runs = self._find_runs(hist_batch.block, ends, range(self.last + 1))
        self.all = [MicroBatch(hist_batch, number, run) for number, run in enumerate(runs)]
        self.out_neighbor_runs: list[slice] = []
        """Runs of the out-neighbours, which compensation computes one after the other."""
        if hist_batch.out_neighbors is not None and hist_batch.out_neighbors.block.num_dst:
            block = hist_batch.out_neighbors.block
            self.out_neighbor_runs = self._find_runs(block, [block.num_dst], range(1, self.last + 1))

        self.rows: dict[int, Tensor] = hist_batch.halo.rows
        """By layer, [num_own, ...]: the batch's own rows after it. The halo's recorder holds them, for the push."""
        self.totals: dict[int, Tensor] = {}
        """By layer, [num_own, ...]: the sum so far of the gradients at the batch's own rows."""
        self.meter: Meter | None = None
        self.highest_peaks: dict[int, LayerPeak] = {}
        """By layer: the highest measured peak of a micro-batch."""

    def _find_resident_bytes(self) -> int:
        """The bytes that stay taken during the whole step: rows and gradients of all own nodes, and buffers."""
        num_own = self.hist_batch.block.num_dst
        # Bytes of one row after each layer.
        *hidden, last = [row.nbytes for row in self.work.partitioned.example_rows]
        # Rows after all layers but the last. Gradients after these too, or after two: one is read, the one before it
        # written.
        gradients = hidden if self.keeps_all else sorted(hidden)[-2:]
        num_bytes = num_own * (sum(hidden) + sum(gradients))
        # Compensation keeps gradients after the last layer too. Its own backward pass makes tensors of all own rows.
        if self.compensates:
            num_bytes += num_own * (last + 2 * max(hidden, default=0))
        # A loss of the user's own needs the outputs of all seeds at once.
        if not self.work.job.task.is_mean:
            num_bytes += LOSS_COPIES * last * self.hist_batch.batch.num_examples
        return num_bytes + MAP_BYTES_PER_NODE * self.hist_batch.block.num_src + self.guard.overhead_bytes()

    @property
    def keeps_all(self) -> bool:
        """Whether gradients after all layers stay until the step ends: for jumping knowledge, and for compensation."""
        return self.work.model.keeps_rows or self.compensates

    def _find_runs(self, block: Block, ends: Sequence[int], layers: Sequence[int]) -> list[slice]:
        """Split the destinations of a block into runs that fit in all of `layers`. ends: see `balanced_runs`."""

        def predict_peak(sizes: Sizes) -> float:
            return max((self.work.layer_bytes.predict_peak(l, sizes) for l in layers), default=0.0)

        runs, peak_bytes = runs_to_fit(block, ends, predict_peak, self.limit_bytes)
        self.max_run_bytes = max(self.max_run_bytes, peak_bytes)
        return runs

    @property
    def predicted_bytes(self) -> float:
        return self.resident_bytes + self.max_run_bytes

    def chunks_of(self, l: int) -> Sequence[MicroBatch]:
        # The last layer is computed only at micro-batches with seeds: no loss reads the last rows of others. There are
        # two exceptions. The penalty of `lipschitz` is over all nodes. And a batch without seeds, which compensation
        # trains, must still get gradients (zeros) after the last layer, which are pushed.
        if l < self.last or not self.hist_batch.batch.num_seeds or self.work.method.lipschitz:
            return self.all
        return [micro_batch for micro_batch in self.all if micro_batch.has_seeds]

    def piece(self, l: int, chunk: MicroBatch) -> Piece:
        if self.meter is not None:
            self.meter.lap()  # starts the measurement of this micro-batch: the memory of the one before is free again
        return super().piece(l, chunk)

    def on_piece_backward(self, l: int, piece: Piece) -> None:
        # Without seeds the last layer has no loss to go back from, so its peak would be too low to learn from.
        is_whole_pass = l < self.last or piece.chunk.has_seeds
        if self.meter is None or not is_whole_pass:
            return
        highest = self.highest_peaks.get(l)
        highest_bytes = 0 if highest is None else highest.peak_bytes
        if self.meter.lap_bytes > highest_bytes:
            self.highest_peaks[l] = LayerPeak(self.meter.lap_bytes, Sizes.of_blocks((piece.block,)))

    # ---- a step

    def forward(self) -> None:
        """Compute the batch's own rows after all layers but the last, without gradients."""
        with torch.no_grad(), autocast(self.work.job), trace.span("forward", self.work.job.device):
            self._layers(scale=1.0).forward(range(self.last))

    def backward(self, total: float) -> Tensor:
        """Add the gradient of the batch's share of the mean loss over `total` examples. Returns its summed loss."""
        num_seeds = self.hist_batch.batch.num_seeds
        weight = self.work.job.weight_of(self.hist_batch.batch)
        num_own = self.hist_batch.block.num_dst
        # The penalty in `HistoricalUnit` is a mean over own nodes and over layers but the first, which has none. The
        # engine wants it per layer and node.
        penalty = self.work.method.lipschitz * weight / (total * num_own * max(1, self.last))

        def whole_batch(nodes: Tensor, labels: Tensor | None) -> Batch:
            # It has these examples and labels already.
            return self.hist_batch.batch

        objective = make_sweep_loss(self.work.job, 1 / total, self.key, whole_batch)
        with autocast(self.work.job), trace.span("backward", self.work.job.device):
            self._layers(scale=1 / total).backward(objective, penalty)
        # Without seeds, parameters that nothing reached get zeros, as after the backward pass of a loss of zero.
        if not num_seeds:
            for p in self.work.job.module.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        return objective.loss_sum

    def _layers(self, scale: float) -> Layers[MicroBatch]:
        """The engine for this batch. scale: of `BatchRows`, which only a backward pass uses."""
        return Layers(self.work.model, self, BatchRows(self, scale), key=self.key)


class BatchRows(Boundaries):
    """The rows that the engine reads between layers, and the gradients that it adds to.

    Rows of the batch's own nodes are those of this step, in memory. Rows of its halo are historical embeddings: they
    are constants, and get no gradient.

    scale: factor of the gradients that compensation adds, 1 / (examples of the step).
    """

    def __init__(self, batches: MicroBatches, scale: float) -> None:
        work = batches.work
        super().__init__(work.partitioned.histories, device=work.job.device, dtype=work.partitioned.dtype)
        self.batches = batches
        self.hist_batch = batches.hist_batch
        self.last = batches.last
        self.scale = scale
        self.own_rows = batches.rows
        self.totals = batches.totals

    @property
    def wants_last(self) -> bool:
        return self.batches.compensates

    def begin(self, layers: Sequence[int]) -> None:
        """Allocate the gradients when the backward pass begins.

        The engine calls it before a layer of the forward pass too, without autograd: then it does nothing. Unlike in
        a sweep nothing is fetched from other hosts: that was done when the batch was made.
        """
        is_backward = len(layers) == self.last and torch.is_grad_enabled()
        if is_backward and not self.totals:
            first_layers = layers if self.batches.keeps_all else layers[-1:]
            for l in first_layers:
                self._new_total(l)

    def handle(self, l: int, piece: Piece) -> Tensor:
        return self.read(l, piece.src)

    def read(self, l: int, at: LayerEdges | slice) -> Tensor:
        if isinstance(at, slice):
            return self.own_rows[l][at].to(self.dtype, copy=True)
        own_src_rows = ops.gather_rows(self.own_rows[l], at.own_idx)
        if not at.halo_idx.numel():
            return own_src_rows.to(self.dtype)
        halo_rows = self.hist_batch.row_reader.read_subset(l, self.hist_batch.halo.positions, at.halo_idx, own_src_rows)
        return torch.cat([own_src_rows, halo_rows]).to(self.dtype)

    def write(self, l: int, piece: Piece, rows: Tensor) -> None:
        if l not in self.own_rows:
            self.own_rows[l] = rows.new_empty(self.hist_batch.block.num_dst, *rows.shape[1:])
        self.own_rows[l][piece.dst] = rows

    def complete(self, l: int) -> None:
        """Do nothing: no other rank reads these rows."""

    def _new_total(self, l: int) -> None:
        self.totals[l] = torch.zeros_like(self.own_rows[l], dtype=self.dtype)

    def add(self, l: int, at: LayerEdges | slice, rows: Tensor | None) -> None:
        if rows is None:
            return
        if l == self.last and l not in self.totals:
            self.totals[l] = rows.new_zeros(self.hist_batch.block.num_dst, *rows.shape[1:])
        if isinstance(at, slice):
            self.totals[l][at] += rows
        else:  # rows behind `own_idx` are the halo's, which are constants
            self.totals[l].index_add_(0, at.own_idx, rows[: at.own_idx.numel()])

    def gradients_complete(self, l: int) -> None:
        batches = self.batches
        partitioned = batches.work.partitioned
        hist_batch = self.hist_batch
        if l < self.last and hist_batch.out_neighbors is not None:
            # Before the engine goes back through layer l: what out-neighbours would send to the rows after it.
            for run in batches.out_neighbor_runs:
                out_neighbors = hist_batch.out_neighbors.narrow(run)
                gradient = compensation_gradient(partitioned, hist_batch, out_neighbors, l, self.own_rows[l])
                self.totals[l].add_(gradient, alpha=self.scale)
                del out_neighbors, gradient  # or the next run's would come on top of them
        # Two layers' gradients at a time, as `_find_resident_bytes` counts them.
        if not batches.keeps_all:
            self.totals.pop(l + 1, None)
            if 0 < l < self.last:
                self._new_total(l - 1)

    def gradient(self, l: int, at: LayerEdges | slice) -> Tensor:
        assert isinstance(at, slice)
        return self.totals[l][at]


@dataclass(eq=False)
class GuardedHistoricalUnit(HistoricalUnit):
    """One batch within the guard's limit: whole if it fits, else in micro-batches.

    It is the `SplittableStep` that the guard runs.
    """

    smaller_by: str = "parts_per_batch"
    step_total: float = 1.0
    """Examples of the optimizer step, over all ranks, in `forward_backward`."""

    def forward_backward(self, total: float) -> Tensor:
        if self.hist_batch is None or not self.has_gradient:
            return super().forward_backward(total)
        self.step_total = total
        return self.guard.step(self)

    def _forward_only(self) -> None:
        if self.hist_batch is not None and self.guard.must_split(self):
            self.split().forward()
        else:
            super()._forward_only()

    @property
    def guard(self) -> Guard:
        assert self.work.guard is not None
        return self.work.guard

    @property
    def _batch(self) -> HistoricalBatch:
        assert self.hist_batch is not None
        return self.hist_batch

    def sizes(self) -> Sizes:
        return whole_sizes(self._batch)

    def bound_bytes(self) -> float:
        return self.work.layer_bytes.together(self.sizes())

    def run_whole(self) -> Tensor:
        return super().forward_backward(self.step_total)

    def split(self) -> MicroBatches:
        """Split the batch into micro-batches that fit, and tell the guard how many."""
        check_micro_batches(self.work.model)
        micro_batches = MicroBatches(self.work, self._batch, self.guard)
        self.guard.note_split(len(micro_batches.all))
        return micro_batches

    def run_in_micro_batches(self, meter: Meter, set_predicted_bytes: Callable[[float], None]) -> Tensor:
        work = self.work
        micro_batches = self.split()
        set_predicted_bytes(micro_batches.predicted_bytes)
        self.report_ages(self._batch)

        micro_batches.meter = meter
        micro_batches.forward()
        loss = micro_batches.backward(self.step_total)
        micro_batches.meter = None
        for l, highest in micro_batches.highest_peaks.items():
            work.layer_bytes.learn(l, highest.sizes, highest.peak_bytes)

        # Back from the mean over the step to the summed loss, whose gradients the tables hold.
        if work.method.compensate:
            self.row_gradients = {l: rows.mul_(self.step_total) for l, rows in sorted(micro_batches.totals.items())}
        return loss

    def reset(self) -> None:
        self._batch.halo.reset()
