"""Plans of the library's methods: what each takes, and the form of it that keeps to a budget."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from itertools import islice, pairwise

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.batch import Batch, Block
from hopline.budget import Budget
from hopline.cores import num_cores
from hopline.full_batch import FullBatch
from hopline.graph import Graph
from hopline.historical import Historical
from hopline.history import DTYPES
from hopline.loader import Loader, resolve_workers
from hopline.measure import own_threads
from hopline.meter import meter_of
from hopline.methods import Sampled
from hopline.nn.gnn import GNN, out_width
from hopline.nn.whole import as_walkable
from hopline.placement import SHARE, Placement, make_plan
from hopline.placement import Sizes as PlacedSizes
from hopline.plan import Item, Outline, Place, Plan, limits_of, with_evaluation
from hopline.predict import Predictor, Sizes
from hopline.rescue import free_memory, is_out_of_memory, state_bytes
from hopline.split import PieceBytes
from hopline.work import BatchUnit, Job, Method

DRAWN = 3
"""Batches that are drawn to see how large they are,"""
SWING = 1.1
"""and by how much others may be larger."""
MOST_NODES = 1 << 24
"""Nodes of the largest graph in which the seed with most around it is looked for."""
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
        "hopline.planning.plan_of.register"
    )


# ---- sampled batches


@plan_of.register
def _sampled(method: Sampled, outline: Outline, budget: Budget) -> Plan:
    """As many batches ahead as leave room for a whole one; where there is none, a batch goes in pieces."""
    batches = list(islice(drawn(method, outline, method.batch_size), DRAWN))
    return _surely(
        SampledForms(method, outline, limits_of(budget, outline), batches).best, outline, len(method.fanouts)
    )


def _surely(best: Callable[[], Plan], outline: Outline, num_blocks: int) -> Plan:
    """The plan by what is known; where that is a bound only and does not fit, a few steps are measured first."""
    plan = best()
    if plan.step_bytes > plan.limit_bytes > 0 and not outline.predictor(num_blocks).is_sure:
        learn(outline, num_blocks, plan.limit_bytes)
        plan = best()
    return plan


@dataclass(eq=False)
class SampledForms:
    """The forms of sampled training that differ in what they take, and in nothing that is learnt."""

    method: Sampled
    outline: Outline
    limits: dict[Place, int | None]
    batches: Sequence[Batch]

    @property
    def predictor(self) -> Predictor:
        return self.outline.predictor(len(self.method.fanouts))

    def best(self) -> Plan:
        """The fastest that keeps to the limits with whole batches, or the smallest."""
        found = next((plan for plan in self.plans() if plan.step_bytes <= plan.limit_bytes), None)
        return self.plan(0, 1) if found is None else found

    def plans(self) -> Iterator[Plan]:
        tree = self.tree()
        if tree is not None:
            yield tree
        workers, ahead = resolve_workers(self.method, num_cores())
        for look_ahead in _halved(ahead) if workers else ():
            yield self.plan(workers, look_ahead)
        yield self.plan(0, 1)

    def plan(self, workers: int, look_ahead: int) -> Plan:
        """So many batches ahead."""
        count, size = (1 + look_ahead if workers else 1), self._batch_bytes
        name = f"{count} prepared batch{'es' * (count > 1)}"
        prepared = [Item(name, "host", count * size)]
        if self.outline.home == "device":  # the batch before goes when the next one has come
            prepared.append(Item(name, "device", (count + 1) * size))
        whole = max(self.predictor.promise(_swung(Sizes.of(b), self.outline.data.graph)) for b in self.batches)
        method = replace(self.method, workers=workers, look_ahead=look_ahead)
        if self.outline.home == "device" and method.layout == "auto":
            method = replace(method, layout="block")  # as was planned, wherever the data will be
        return self._made(method, prepared, whole, self._one)

    def tree(self) -> Plan | None:
        """On a GPU that has room for everything: shapes that never change, so there is nothing to cut."""
        method, outline = self.method, self.outline
        possible = method.layout != "block" and -1 not in method.fanouts and isinstance(outline.model, GNN)
        if outline.home == "host" or not possible:
            return None
        nodes = [method.batch_size]
        for fanout in method.fanouts:
            nodes.append(nodes[-1] * (1 + fanout))
        edges = [outer - inner for inner, outer in pairwise(nodes)]
        step = self.predictor.costs.bound(Sizes(tuple(reversed(nodes)), tuple(reversed(edges))))
        plan = self._made(method, [], step, step)
        all_there = plan.placement is not None and {plan.placement.graph, plan.placement.features} == {"device"}
        return plan if all_there or method.layout == "tree" else None

    @cached_property
    def _batch_bytes(self) -> int:
        """Of a prepared batch: others may be larger, and the smaller a batch, the more does a single seed matter."""
        largest = max(batch.num_bytes for batch in self.batches)
        rate = max(batch.num_bytes / Sizes.of(batch).array.sum() for batch in self.batches)
        return math.ceil(SWING * largest + rate * self._largest_seed.array.sum())

    @cached_property
    def _largest_seed(self) -> Sizes:
        return largest_seed(self.method.fanouts, self.outline.data.graph, self.outline.train_ids)

    @property
    def _one(self) -> float:
        """The step of a single seed, in a piece of its own."""
        largest, seed = max(self.batches, key=lambda batch: batch.num_bytes), self._largest_seed
        if type(largest.blocks[0]) is not Block:  # which is not split
            return self.predictor.promise(seed)
        beside, copies = sum(state_bytes(self.outline.model)), PieceBytes.of(largest, self.outline.device)
        return beside + SWING * copies.maps + copies.with_step(seed, self.predictor.promise(seed))

    def _made(self, method: Sampled, prepared: list[Item], step: float, one: float) -> Plan:
        outline, home = self.outline, self.outline.home
        items, placement, limit = [*outline.kept(), *outline.data_on_host(), *prepared], None, self.limits[home]
        room = math.inf if limit is None else limit - sum(item.num_bytes for item in items if item.place == home)
        if home == "device":
            placed, placement = placed_within(outline, room - with_evaluation(step, outline.beside))
            items += placed
        size = method.batch_size
        return Plan(
            method=method,
            items=tuple(items),
            limits=self.limits,
            home=home,
            beside=outline.beside,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=step,
            least_bytes=one,
            steps=-(-outline.train_ids.numel() // size),
            count=size,
            covers="batches of {} seeds",
            placement=placement,
            predictor=self.predictor,
        )


def placed_within(outline: Outline, room: float) -> tuple[list[Item], Placement]:
    """What of the data goes to a GPU with so many bytes to spare."""
    sizes, wanted = PlacedSizes.of(outline.data), outline.placement
    try:
        found = make_plan(sizes, int(max(0.0, min(room, 1 << 50)) / SHARE), wanted)
    except ValueError:  # not even what a GPU needs to read the host's memory
        return [], replace(wanted, graph="host", features="host", cache="auto")
    graph = {"device": sizes.graph, "pinned": sizes.indptr, "host": 0}[found.graph]
    cache = min(found.cache, sizes.features)
    rows = {"device": sizes.features, "pinned": cache + sizes.places, "host": 0}[found.features]
    items = [Item("graph", "device", graph), Item("features", "device", rows)]
    items.append(Item("labels", "device", sizes.labels if found.labels else 0))
    kept = str(cache) if found.features == "pinned" else "auto"
    return items, replace(wanted, graph=found.graph, features=found.features, cache=kept)


def _halved(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count //= 2
    yield 1


def drawn(method: Sampled, outline: Outline, batch_size: int) -> Iterator[Batch]:
    """Batches as training would draw them, one after the other."""
    alone = replace(method, batch_size=batch_size, workers=0, look_ahead=1, layout="block", drop_last=False)
    loader = Loader(outline.data, outline.train_ids, alone, outline.job.seed, outline.device, outline.model)
    with closing(loader.epoch(1)) as batches:
        yield from batches


def _swung(sizes: Sizes, graph: Graph) -> Sizes:
    """Sizes that other batches hardly exceed."""
    nodes = [min(math.ceil(SWING * n), graph.num_nodes) for n in sizes.nodes[:-1]]
    return Sizes((*nodes, sizes.nodes[-1]), tuple(min(math.ceil(SWING * e), graph.num_edges) for e in sizes.edges))


def largest_seed(fanouts: Sequence[int], graph: Graph, train_ids: Tensor) -> Sizes:
    """More than is drawn for any one seed: the largest numbers of nodes and edges, hop by hop, whatever the draws."""
    degrees = graph.in_degrees().clamp(max=graph.num_edges)
    bounds = [degrees if f < 0 else degrees.clamp(max=f) for f in fanouts]
    if graph.num_nodes > MOST_NODES:
        nodes, edges = [1], []
        for taken in bounds:
            edges.append(min(nodes[-1] * int(taken.max()), int(taken.sum())))
            nodes.append(min(nodes[-1] + edges[-1], graph.num_nodes))
        return Sizes(tuple(reversed(nodes)), tuple(reversed(edges)))
    # What is drawn for a node has no more around it than the sum over all its neighbours, and no more than the largest
    # of them as often as is drawn. A column for each hop's nodes and one for its edges, from the outermost hop inwards.
    around = torch.zeros(graph.num_nodes, 0, dtype=torch.float64, device=degrees.device)
    for hop in reversed(range(len(fanouts))):
        outer = [bounds[hop + 1].double()] if hop + 1 < len(fanouts) else []
        around = torch.stack([torch.ones_like(around.sum(1)), *outer, *around.T], 1)
        total = ops.reduce_edges(around, graph.indptr, graph.indices, "sum")
        largest = ops.reduce_edges(around, graph.indptr, graph.indices, "max") * bounds[hop][:, None]
        around = around + torch.minimum(total, largest)
    at = train_ids.to(around.device)
    most = around[at].amax(0).tolist()
    nodes = [1, *[min(int(n), graph.num_nodes) for n in most[::2]]]
    first = int(bounds[0][at].max())
    edges = [first, *[min(int(n), int(b.sum())) for n, b in zip(most[1::2], bounds[1:], strict=True)]]
    return Sizes(tuple(reversed(nodes)), tuple(reversed(edges)))


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
            least_bytes=predictor.promise(one) + between,
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

    def form(num_shards: int) -> Plan:
        sizes = _part_sizes(data.graph, min(1.0, UNEVEN / num_shards), model.num_layers)
        step = max(map(outline.predictor(model.num_layers).promise, _by_layer(sizes)))
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

    def best() -> Plan:
        count, most = min(method.num_shards, data.num_nodes), min(data.num_nodes, MOST_SHARDS)
        while (plan := form(count)).step_bytes > plan.limit_bytes and count < most:
            count = min(2 * count, most)
        return plan

    return _surely(best, outline, model.num_layers)


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
