"""The bytes of single layers at pieces of a graph, predicted from measurements.

A sweep, and a historical batch in micro-batches, compute one layer at one piece at a time. `LayerBytes` predicts the
peak of a layer from the sizes of a piece. `measure_layers` teaches it before a sweep: with a copy of the model, zeros
for rows, and pieces of a few nodes. The node with the most in-edges is always among them, since a run computes it in
any case. So what no piece can be smaller than is measured, and not extrapolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hopline.budget.plan import Outline
from hopline.budget.predictor import Predictor, costs_of
from hopline.budget.probe import LARGE_STEP_BYTES, job_of, seconds_since
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.core.partition import Partition
from hopline.core.row_handles import Readable
from hopline.core.sampler import full_block
from hopline.device.meter import meter_of
from hopline.device.out_of_memory import free_memory, is_out_of_memory
from hopline.device.snapshots import preserve_rng
from hopline.layerwise.engine import Boundaries, Layers, Piece
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph, PartsSpec
from hopline.methods.partitioned.sweep import AllParts
from hopline.methods.partitioned.sweep_loss import SummedLoss, SweepLoss
from hopline.nn.layered import Layered
from hopline.tables.layers import as_positions
from hopline.units.batch_unit import autocast
from hopline.units.own_threads import own_threads

FORWARD_SHARE = 1 / 3
"""Time of a layer's forward pass as a share of forward and backward."""


def at_layer(model: Layered, sizes: Sizes, l: int) -> Sizes:
    """The sizes of a step that computes only layer `l` at a block. sizes: of the block, one layer."""
    num_src, num_dst = sizes.nodes
    nodes = [0] * (model.num_layers + 1)
    nodes[l] = num_src
    nodes[l + 1] = num_dst
    if l > 0 and model.encodes:
        nodes[0] += num_dst  # the destinations are encoded again, for initial residuals
    (num_edges,) = sizes.edges
    edges = [0] * model.num_layers
    edges[l] = num_edges
    return Sizes(tuple(nodes), tuple(edges))


class LayerBytes:
    """Predicts the bytes of single layers of a model.

    Each layer has a predictor of its own, which learns from the measured peaks of that layer.
    """

    def __init__(self, model: Layered, x: Readable | None) -> None:
        costs = costs_of(model, x, model.num_layers)
        self.model = model
        self.predictors = [Predictor(costs) for _ in range(model.num_layers)]

    @property
    def is_sure(self) -> bool:
        return all(predictor.is_sure for predictor in self.predictors)

    def predict_peak(self, l: int, sizes: Sizes) -> float:
        """The predicted peak, in bytes, of layer `l` at a block of these sizes, forward and backward."""
        return self.predictors[l].predict_peak(at_layer(self.model, sizes, l))

    def largest(self, sizes: Sizes) -> float:
        return max(self.predict_peak(l, sizes) for l in range(self.model.num_layers))

    def together(self, sizes: Sizes) -> float:
        """The predicted peak, in bytes, of a whole batch that is not split. sizes: over all layers.

        It is the sum over the layers, since no layer keeps more for the backward pass than its peak when run alone.
        """
        num_own = sizes.nodes[-1]
        peaks = []
        for l, num_edges in enumerate(sizes.edges):
            peaks.append(self.predict_peak(l, Sizes((sizes.nodes[l], num_own), (num_edges,))))
        return sum(peaks)

    def sweep_s(self, pieces: Sequence[Sizes]) -> float:
        """Expected seconds of a sweep over pieces of these sizes. nan if no layer was timed.

        A sweep computes every layer but the last twice: before the loss, and once more to go back.
        """
        last = self.model.num_layers - 1
        seconds = 0.0
        for l, predictor in enumerate(self.predictors):
            num_passes = 1.0 if l == last else 1 + FORWARD_SHARE
            seconds += num_passes * sum(predictor.expected_s(at_layer(self.model, sizes, l)) for sizes in pieces)
        return seconds

    def learn(self, l: int, sizes: Sizes, peak_bytes: int, seconds: float | None = None) -> None:
        """Add a measurement: layer `l` at a block of these sizes had this peak and, if it was timed, took `seconds`."""
        self.predictors[l].observe(at_layer(self.model, sizes, l), peak_bytes, seconds)


class FixedGradients(SweepLoss):
    """Stands for a loss of the user's own while layers are measured: gradients of zeros at the outputs.

    Such a loss is computed over all seeds of a batch at once, and a `Probe` has only some of them.
    """

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        return (outputs * torch.zeros_like(outputs)).sum()


# ---- measurements before a sweep


class ZeroRows(Boundaries):
    """Rows and gradients of zeros, which take the memory that those of a step take.

    num_rows_at: the number of rows at `Piece.src` or `Piece.dst`. By default these are positions, as in a sweep.
    """

    def __init__(
        self,
        partitioned: PartitionedGraph,
        num_rows_at: Callable[[Any], int] = lambda at: as_positions(at).numel(),
    ) -> None:
        super().__init__(partitioned.histories, device=partitioned.job.device, dtype=partitioned.dtype)
        self.num_rows_at = num_rows_at
        self.example_rows = partitioned.example_rows

    def read(self, l: int, at: Any) -> Tensor:
        row = self.example_rows[l]
        return row.new_zeros(self.num_rows_at(at), *row.shape[1:], dtype=self.dtype)

    def gradient(self, l: int, at: Any) -> Tensor:
        return self.read(l, at)

    def add(self, l: int, at: Any, rows: Tensor | None) -> None:
        """Drop the gradient: nothing reads it."""


def measure_layers(layers: LayerBytes, partitioned: PartitionedGraph, max_bytes: float) -> None:
    """Measure every layer at pieces of 1, 2, 4, ... nodes, and at the node with the most in-edges.

    It ends when a piece of twice the nodes might take more than `max_bytes`, and more than that node. Torch's random
    state is restored at the end.

    partitioned: of a copy of the model, whose gradients are dropped.
    """
    job = partitioned.job
    graph = job.data.graph
    by_degree = graph.in_degrees().argsort(stable=True)
    hub = by_degree[-1:]
    probe = _LayerProbe(layers, partitioned)
    with preserve_rng(job.device), own_threads(job):
        try:
            probe.measure(by_degree[:1])  # the first step of a predictor does not count
            allowed_bytes = max(max_bytes, probe.measure(hub))
            # Nodes of all degrees, from all over the graph.
            order = partitioned.partition.order
            count = 1
            while True:
                nodes = order[torch.linspace(0, order.numel() - 1, count).long()]
                peak_bytes = probe.measure(nodes)
                is_large = 2 * peak_bytes > min(allowed_bytes, LARGE_STEP_BYTES)
                if count == order.numel() or (is_large and layers.is_sure):
                    break
                count = min(2 * count, order.numel())
            probe.measure(torch.cat([hub, nodes[nodes != hub]]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    free_memory(job.device)


def measured_layers(outline: Outline, partition: Partition, max_bytes: float) -> LayerBytes:
    """Predicts the bytes of a layer at a part, by measurements of a copy of the model. Cached in the outline."""
    if "layers" not in outline.learnt:
        job = job_of(outline)
        assert isinstance(job.model, Layered)
        spec = PartsSpec(num_parts=partition.num_parts, partition="range", caches_blocks=False)
        layers = LayerBytes(job.model, outline.data.tables.get("x"))
        measure_layers(layers, PartitionedGraph(job, job.model, spec, partition), max_bytes)
        outline.learnt["layers"] = layers
    return outline.learnt["layers"]


class _LayerProbe:
    """Runs single layers forward and backward at some nodes, as a sweep does, and measures them."""

    def __init__(self, layers: LayerBytes, partitioned: PartitionedGraph) -> None:
        self.layers = layers
        self.partitioned = partitioned
        self.plan = AllParts(partitioned, key=1)
        self.engine: Layers[Any] = Layers(partitioned.model, self.plan, ZeroRows(partitioned), key=1)

    def measure(self, nodes: Tensor) -> int:
        """The peak of the largest layer at these nodes, in bytes. The layers learn from it."""
        job = self.partitioned.job
        make_piece = partial(self._piece, nodes)
        return max(measure_layer(self.engine, l, make_piece, job, self.layers) for l in range(self.engine.last + 1))

    def _piece(self, nodes: Tensor) -> Piece:
        """A piece of these nodes. All of them are seeds, with the label of a training node."""
        partitioned = self.partitioned
        data = partitioned.job.data
        batches = partitioned.batches
        block = replace(full_block(partitioned.parts.sampler, nodes), key=self.plan.key, graph=batches.graph)
        y = None
        if data.y is not None:
            label = partitioned.job.examples.labels(data.y, torch.zeros(1, dtype=torch.int64))
            y = label.expand(nodes.numel(), *data.y.shape[1:]).contiguous()
        batch = batches.to_device(
            Batch(
                seeds=nodes,
                blocks=(block,) * partitioned.model.num_layers,
                x=None,
                y=y,
                key=self.plan.key,
                total_seeds=nodes.numel(),
                output_idx=torch.arange(nodes.numel()),
            )
        )
        positions = partitioned.partition.position[block.src_ids]
        return Piece(block=batch.blocks[-1], src=positions, dst=positions[: nodes.numel()], batch=batch)


def measure_layer(
    engine: Layers[Any], l: int, make_piece: Callable[[], Piece], job: Job, layers: LayerBytes | None
) -> int:
    """Run layer `l` forward and backward at a piece. Returns its peak in bytes, with the piece's own.

    Gradients of the parameters are dropped before. layers: learn from it. None: nobody does.
    """
    # The usual loss; for one of the user's own, which needs all seeds at once, gradients of zeros.
    objective = SummedLoss(job, scale=1.0) if job.task.is_mean else FixedGradients(job, scale=1.0)
    job.module.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    with meter_of(job.device) as meter, autocast(job):
        piece = make_piece()
        with engine.same_draws(l, piece):
            if l == engine.last:
                engine.from_loss(piece, objective)
            else:
                engine.through_layer(l, piece)
    if layers is not None:
        layers.learn(l, Sizes.of_blocks((piece.block,)), meter.peak_bytes, seconds_since(start_s, job.device))
    return meter.peak_bytes
