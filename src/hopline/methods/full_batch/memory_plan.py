"""The memory plan of `FullBatch`: the parts that a sweep goes over, each small enough for the budget.

A sweep computes one layer at one part at a time, so its peak is that of the largest part. A part with a hub is far
larger than the mean. So the plan makes the partition, counts nodes, halo and edges of every part, and divides those
that are too large into runs of their nodes. No gradient changes beyond rounding. A single node with all its in-edges
is the smallest part: if that does not fit, the run is refused.

Ways other than a sweep keep the activations of all layers at all nodes of a rank. They cannot be made smaller, and
are predicted from steps on small graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hopline.budget.plan import Budget, Item, Outline, Plan, Price
from hopline.budget.predictor import Predictor, costs_of
from hopline.budget.probe import LARGE_STEP_BYTES, job_of
from hopline.core.batch_sizes import Sizes
from hopline.core.examples import Examples
from hopline.core.graph import Graph
from hopline.core.partition import Partition
from hopline.data.dataset import Dataset
from hopline.device.meter import meter_of
from hopline.device.snapshots import preserve_rng
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.full_batch.work import ShardedWork, choose_aggregation
from hopline.methods.partitioned.layer_bytes import LayerBytes, measured_layers
from hopline.methods.partitioned.memory_plan import (
    PARTITION_BYTES,
    layers_of,
    sizes_of_parts,
    table_items,
)
from hopline.methods.partitioned.partitioned_graph import partition_together
from hopline.nn.layered import Layered, row_widths
from hopline.shards.convs.patch_message_passing import FetchMode
from hopline.tables import TensorTable
from hopline.units.loss_at_outputs import LOSS_COPIES
from hopline.units.own_threads import own_threads
from hopline.util.config import plural

MAX_PARTS = 1 << 8
"""Most parts that a plan makes of a graph, or as many as the settings ask for. A rule of thumb: a step goes over all
of them for every layer."""
FIRST_NODES = 16
"""Nodes of the first small graph on which a step is measured."""


def plan(method: FullBatch, outline: Outline, budget: Budget) -> Plan:
    """The plan of a sweep over parts that fit, or of a step over shards.

    If no division fits, it is the plan of the finest one, and `Plan.fits` is false.
    """
    model = layers_of(outline, method)
    aggregation, _reason = choose_aggregation(method, outline.job, model)
    if aggregation == "sweep":
        return _plan_sweep(method, outline, budget, model)
    return _plan_shards(method, outline, budget, model, aggregation)


def _plan_without_step(
    method: FullBatch, outline: Outline, budget: Budget, num_shards: int, items: Sequence[Item] = ()
) -> Plan:
    """The plan before the bytes of a step are known: it says how many are left for one. items: besides a partition."""
    return outline.make_plan(
        method,
        budget,
        items=[Item("partition", "host", PARTITION_BYTES * outline.data.num_nodes), *items],
        step_bytes=0.0,
        min_step_bytes=0.0,
        steps=1,
        count=num_shards,
        covers="a graph in {} shards",
    )


# ---- a sweep


def _plan_sweep(method: FullBatch, outline: Outline, budget: Budget, model: Layered) -> Plan:
    data = outline.data
    *hidden_widths, _last = row_widths(model, data.num_features)[1:]
    row_bytes = data.num_nodes * outline.dtype.itemsize
    rows = table_items("rows", method.folder, sum(hidden_widths) * row_bytes, outline, method.tables)
    # Gradients at rows: those that a layer reads and those that it adds to, or with jumping knowledge all.
    gradient_widths = hidden_widths if model.keeps_rows else sorted(hidden_widths)[-2:]
    gradient_bytes = sum(gradient_widths) * row_bytes
    # They lie where the tables do. Beside mapped files they lie on the host.
    are_in_step = rows[0].place == outline.compute_place or outline.compute_place == "host"
    gradients = [] if are_in_step else [Item("gradients", "host", gradient_bytes)]

    partition = partition_together(
        data, method.num_shards, method.partition, seed=outline.job.seed, world=outline.job.world
    )
    sized = _plan_without_step(method, outline, budget, method.num_shards, [*rows, *gradients])
    # In memory during a step, besides one part: gradients at rows, and of the weights once more while they are added.
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    step_bytes = weight_bytes + (gradient_bytes if are_in_step else 0)
    # The usual loss is a mean over seeds, which a sweep computes part by part.
    if not outline.job.task.is_mean:
        step_bytes += LOSS_COPIES * _output_bytes(outline, model)
    layers = measured_layers(outline, partition, max_bytes=sized.limit_bytes - step_bytes)
    parts, part_bytes = _parts_within(sized.limit_bytes - step_bytes, data.graph, partition, layers)
    price = None
    instead = ""
    if parts.num_parts > method.num_shards:
        instead = f" (the budget allows no fewer; num_shards={method.num_shards})"
        requested = sizes_of_parts(data.graph, partition)
        price = Price(
            step_s=layers.sweep_s(sizes_of_parts(data.graph, parts)),
            free_step_s=layers.sweep_s(requested),
            free_step_bytes=step_bytes + max(map(layers.largest, requested)),
        )
    step_bytes += part_bytes
    return replace(
        sized,
        step_bytes=step_bytes,
        min_step_bytes=step_bytes,  # a step is not split any further
        partition=parts,
        count=parts.num_parts,
        covers=f"a graph in {{}} {plural(parts.num_parts, 'shard')}{instead}",
        price=price,
    )


def _parts_within(limit: float, graph: Graph, partition: Partition, layers: LayerBytes) -> tuple[Partition, float]:
    """(parts that take at most `limit` bytes each, the bytes of the largest); the finest ones if none fit."""
    degrees = graph.in_degrees().cpu()
    max_degree = int(degrees.max()) if degrees.numel() else 0
    # No part is smaller than its largest node with all in-edges.
    node_bytes = layers.largest(Sizes((1 + max_degree, 1), (max_degree,)))
    target_bytes = max(limit, node_bytes)
    max_parts = max(MAX_PARTS, partition.num_parts)
    while True:
        sizes = sizes_of_parts(graph, partition)
        part_bytes = torch.tensor([layers.largest(part) for part in sizes], dtype=torch.float64)
        num_runs = torch.where(partition.sizes > 1, (part_bytes / target_bytes).ceil(), 1).long().clamp(min=1)
        if not bool((num_runs > 1).any()) or partition.num_parts >= max_parts:
            return partition, float(part_bytes.max())
        # Runs of a part have halo nodes in common, so that bytes do not shrink with their number: little by little.
        num_runs = num_runs.clamp(max=max(2, max_parts // partition.num_parts))
        partition = partition.split(num_runs, weight=degrees + 1)


def _output_bytes(outline: Outline, model: Layered) -> int:
    """The bytes of the outputs of all training nodes: a loss of the user's own needs them at once."""
    width = max(row_widths(model, outline.data.num_features)[-1], outline.data.num_classes)
    return len(outline.job.examples) * width * outline.dtype.itemsize


# ---- a step over shards


def _plan_shards(method: FullBatch, outline: Outline, budget: Budget, model: Layered, mode: FetchMode) -> Plan:
    data = outline.data
    num_ranks = outline.job.world.size
    sized = _plan_without_step(method, outline, budget, num_ranks if num_ranks > 1 else method.num_shards)
    if "shards" not in outline.learnt:
        outline.learnt["shards"] = _measured_shards(method, outline, model, mode, sized.limit_bytes)
    # Of several ranks each has its share of the nodes, and the halo of these.
    num_nodes = math.ceil(data.num_nodes / num_ranks)
    num_edges = math.ceil(data.num_edges / num_ranks)
    step_bytes = outline.learnt["shards"].predict_peak(_whole_sizes(num_nodes, num_edges, model.num_layers))
    return replace(sized, step_bytes=step_bytes, min_step_bytes=step_bytes)


def _measured_shards(method: FullBatch, outline: Outline, model: Layered, mode: FetchMode, limit: float) -> Predictor:
    """A predictor of steps over all nodes of a graph, by steps of a copy of the model on small graphs.

    It ends with the graph itself, or before a graph that is expected to take more than `limit`.
    """
    job = replace(job_of(outline), world=type(outline.job.world).alone())
    assert isinstance(job.model, Layered)
    predictor = Predictor(costs_of(model, outline.data.tables.get("x"), model.num_layers))
    num_nodes = outline.data.num_nodes
    count = min(FIRST_NODES, num_nodes)
    with preserve_rng(job.device), own_threads(job):
        while True:
            data = _shrink(outline.data, count)
            sizes = _whole_sizes(count, data.num_edges, model.num_layers)
            is_large = predictor.num_seen and predictor.expected_bytes(sizes) > min(limit, LARGE_STEP_BYTES)
            if is_large and predictor.is_sure:
                return predictor
            small_job = replace(job, data=data, examples=Examples(data.splits["train"]))
            small_method = replace(method, num_shards=min(method.num_shards, count), partition="range")
            work = ShardedWork(small_job, job.model, small_method, mode)
            job.module.zero_grad(set_to_none=True)
            for unit in work.units(1):
                with meter_of(job.device) as meter:
                    unit.forward_backward(unit.size)
                predictor.observe(sizes, meter.peak_bytes)
            if count == num_nodes and predictor.is_sure:
                return predictor
            count = min(2 * count, num_nodes)


def _whole_sizes(num_nodes: int, num_edges: int, num_layers: int) -> Sizes:
    return Sizes((num_nodes,) * (num_layers + 1), (num_edges,) * num_layers)


def _shrink(data: Dataset, num_nodes: int) -> Dataset:
    """A dataset of the first nodes, with as many in-edges as they have, from sources among them.

    Only its sizes are those of a part of the graph: sources are taken modulo the number of nodes.
    """
    ids = torch.arange(num_nodes)
    train = data.splits["train"]
    indptr = data.graph.indptr[: num_nodes + 1].cpu()
    num_edges = int(indptr[-1])
    edge = {name: rows[:num_edges].cpu() for name, rows in data.graph.edge.items()}
    graph = data.graph.with_arrays(indptr, data.graph.indices[:num_edges].cpu() % num_nodes, edge)
    tables = {name: TensorTable(table.read(ids)) for name, table in data.tables.items()}
    y = None if data.y is None else data.y[:num_nodes].cpu()
    return replace(
        data,
        graph=graph,
        tables=tables,
        y=y,
        splits={"train": train[train < num_nodes]},
        alternatives=(),
        folder=None,
    )
