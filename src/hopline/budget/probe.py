"""Plans of the library's methods: what each takes, and the form of it that keeps to a budget."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import singledispatch

import torch
from torch import nn

from hopline.budget.memory_plan import Item, Outline, Place, Plan, limits_of
from hopline.budget.micro_batches import can_split, fewest
from hopline.budget.predictor import Predictor, Sizes
from hopline.budget.settings import Budget
from hopline.contract import Job, Method
from hopline.core.graph import Graph
from hopline.device.meter import meter_of
from hopline.device.out_of_memory import free_memory, is_out_of_memory
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.historical.work import DTYPES
from hopline.methods.sampled.memory_plan import SampledForms, drawn
from hopline.methods.sampled.settings import Sampled
from hopline.nn.gnn import GNN, out_width
from hopline.nn.whole_module import as_walkable
from hopline.units.batch_unit import BatchUnit, own_threads
from hopline.units.loss_on_pieces import LOSS_COPIES

MOST_SHARDS = 1 << 14
PROBED_FANOUT, MOST_PROBED, LONG_S = 10, 1024, 0.3
"""Fan-outs and most seeds of the steps by which a model is learnt, and the seconds after which one is the last."""
UNEVEN = 1.1
"""By how much a part may be larger than the mean."""


@singledispatch
def plan_of(method: Method, outline: Outline, budget: Budget) -> Plan:
    """How a method keeps to a budget; `Plan.check` raises `DoesNotFit` if it cannot. Register your own methods."""
    raise ValueError(
        f"{type(method).__name__} has no plan, so it cannot keep to a budget: leave out budget=, or register one with "
        "hopline.budget.probe.plan_of.register"
    )


# ---- sampled batches


@plan_of.register
def _sampled(method: Sampled, outline: Outline, budget: Budget) -> Plan:
    """As many batches ahead as leave room for a whole one; where there is none, a batch goes in pieces."""
    forms = SampledForms(method, outline, limits_of(budget, outline), budget.over_budget)
    return _surely(forms.best, outline, len(method.fanout_per_layer))


def _surely(best: Callable[[], Plan], outline: Outline, num_blocks: int) -> Plan:
    """The plan by what is known; where that is a bound only and does not fit, a few steps are measured first."""
    plan = best()
    if plan.step_bytes > plan.limit_bytes > 0 and not outline.predictor(num_blocks).is_sure:
        learn(outline, num_blocks, plan.limit_bytes)
        plan = best()
    return plan


def learn(outline: Outline, num_blocks: int, limit: float = math.inf) -> Predictor:
    """The predictor, taught by steps of a copy of the model: from one seed on to more, none above the limit as far as
    is known, and none that takes long."""
    predictor, job, size = outline.predictor(num_blocks), job_of(outline), 1
    method = Sampled(fanouts=(PROBED_FANOUT,) * num_blocks)
    with torch.random.fork_rng([outline.device] if outline.device.type == "cuda" else []), own_threads(job):
        while True:
            try:
                batch = next(drawn(method, outline, size))
                sizes, began = Sizes.of(batch), time.perf_counter()
                if predictor.num_seen and predictor.expected(sizes) > limit:
                    break
                batch = batch.to(outline.device)
                with meter_of(outline.device) as meter:
                    BatchUnit(job, batch).forward_backward(batch.num_seeds)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break  # what is known was too good, and stays all that is known
            job.module.zero_grad(set_to_none=True)
            predictor.observe(sizes, meter.peak_bytes)
            lasted = time.perf_counter() - began > LONG_S or size >= min(MOST_PROBED, outline.train_ids.numel())
            if predictor.is_sure and lasted:
                break
            size = min(2 * size, outline.train_ids.numel())
    free_memory(outline.device)
    return predictor


def job_of(outline: Outline) -> Job:
    """The job with a copy of the model, so that it leaves no trace in it."""
    module: nn.Module = copy.deepcopy(outline.job.module)
    return replace(outline.job, model=as_walkable(module), module=module.train(), say=lambda text: None)


# ---- parts


@plan_of.register
def _historical(method: Historical, outline: Outline, budget: Budget) -> Plan:
    """The parts as they are; a batch that takes too much goes in pieces over one snapshot of the tables."""
    model, data = _layers_of(outline, method), outline.data
    storage, widths = DTYPES[method.storage] or outline.dtype, _widths(model, data.num_features)
    rows = sum(widths[1:-1]) + (sum(widths[1:]) if method.compensate else 0)
    limits = limits_of(budget, outline)
    share = min(1.0, UNEVEN * method.parts_per_batch / method.num_parts)
    sizes = _part_sizes(data.graph, share, model.num_layers)
    own, hub = sizes.nodes[-1], int(data.graph.in_degrees().max()) if data.num_nodes else 0
    between = 2 * own * sum(widths[1:]) * outline.dtype.itemsize
    one = Sizes((*[1 + hub] * model.num_layers, 1), (hub,) * model.num_layers)
    prepared = _block_bytes(data.graph, data.graph.num_edges if method.groups == "fixed" else sizes.edges[0])
    fixed = [*outline.kept(), *outline.data_on_host(), Item("prepared batch", "host", prepared)]
    tables = _table_items("history", method.folder, rows * data.num_nodes * storage.itemsize, outline, method.tables)

    cuts = budget.over_budget == "split" and can_split(model)

    def made() -> Plan:
        predictor = outline.predictor(model.num_layers)
        return Plan(
            method=method,
            items=(*fixed, *tables),
            limits=limits,
            home=outline.home,
            beside=outline.beside,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=predictor.promise(sizes),
            least_bytes=predictor.promise(one) + between if cuts else predictor.promise(sizes),
            steps=-(-method.num_parts // method.parts_per_batch),
            count=method.parts_per_batch,
            covers=f"batches of {{}} of {method.num_parts} parts",
            predictor=predictor,
        )

    return _surely(made, outline, model.num_layers)


@plan_of.register
def _full_batch(method: FullBatch, outline: Outline, budget: Budget) -> Plan:
    """As few shards as fit, and no fewer than were asked for: the gradients are those of one."""
    model, data = _layers_of(outline, method), outline.data
    widths, limits = _widths(model, data.num_features), limits_of(budget, outline)
    rows = 2 * sum(widths[1:-1]) * data.num_nodes * outline.dtype.itemsize  # those of a sweep, and their gradients
    fixed = [*outline.kept(), *outline.data_on_host()]
    fixed += _table_items("rows and gradients", method.folder, rows, outline, method.tables)
    loss_bytes = 0 if outline.job.usual_loss else LOSS_COPIES * _output_bytes(outline, model)

    def form(num_shards: int) -> Plan:
        sizes = _part_sizes(data.graph, min(1.0, UNEVEN / num_shards), model.num_layers)
        step = max(map(outline.predictor(model.num_layers).promise, _by_layer(sizes))) + loss_bytes
        return Plan(
            method=replace(method, num_shards=num_shards),
            items=(*fixed, Item("prepared shard", "host", _block_bytes(data.graph, sizes.edges[0]))),
            limits=limits,
            home=outline.home,
            beside=outline.beside,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=step,
            least_bytes=step,
            steps=1,
            count=num_shards,
            covers="a graph in {} shards",
        )

    def excess(plans: list[Plan]) -> float:
        # Any excess doubles the shards: what a step takes for itself does not shrink with them.
        return math.inf if plans[0].step_bytes > plans[0].limit_bytes else 0.0

    def best() -> Plan:
        first = min(method.num_shards, data.num_nodes)
        most = max(first, min(data.num_nodes, MOST_SHARDS))
        plans, _ = fewest(lambda num_shards: [form(num_shards)], excess, 1.0, first=first, most=most, grow=2)
        return plans[0]

    return _surely(best, outline, model.num_layers)


def _output_bytes(outline: Outline, model: GNN) -> int:
    """Of all training nodes, whose outputs are there at once for a loss of the user's own."""
    width = max(_widths(model, outline.data.num_features)[-1], outline.data.num_classes)
    return outline.train_ids.numel() * width * outline.dtype.itemsize


def _by_layer(sizes: Sizes) -> Iterator[Sizes]:
    """What a sweep has at once: one layer."""
    for l, edges in enumerate(sizes.edges):
        nodes = [n if l <= i <= l + 1 else 0 for i, n in enumerate(sizes.nodes)]
        yield Sizes(tuple(nodes), tuple(edges if i == l else 0 for i in range(len(sizes.edges))))


def _layers_of(outline: Outline, method: Method) -> GNN:
    if not isinstance(outline.model, GNN):
        raise ValueError(
            f"{type(method).__name__} needs a model made of layers, and {type(outline.model.module).__name__} is not: "
            "use hl.nn.GNN, or a PyG model such as GCN"
        )
    return outline.model


def _widths(model: GNN, num_features: int) -> list[int]:
    """Of the rows before the first layer, and after each."""
    widths = [num_features if model.encoder is None else out_width(model.encoder)]
    for conv in model.convs:
        widths.append(out_width(conv) if any(True for _ in conv.parameters()) else widths[-1])
    return widths


def _part_sizes(graph: Graph, share: float, num_layers: int) -> Sizes:
    """Of a batch with a share of all nodes and their in-edges, whose other sources are all different."""
    own, edges = math.ceil(share * graph.num_nodes), math.ceil(share * graph.num_edges)
    sources = min(own + edges, graph.num_nodes)
    return Sizes((*[sources] * num_layers, own), (edges,) * num_layers)


def _block_bytes(graph: Graph, num_edges: int) -> int:
    """Of the edges of a batch: their sources, and rows of edge arrays."""
    arrays = sum(array[:0].element_size() * array.shape[1:].numel() for array in graph.edge.values())
    return num_edges * (12 + arrays) + 24 * min(graph.num_nodes, num_edges)


def _table_items(name: str, folder: object, num_bytes: int, outline: Outline, wanted: str) -> list[Item]:
    place: Place = "disk" if folder is not None else "host"
    if outline.home == "device" and wanted == "device":
        place = "device"
    return [Item(name, place, num_bytes)]
