"""The forms of sampled training that keep to a budget: how many batches are ahead, and where they wait."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

import torch
from torch import Tensor

from hopline import ops
from hopline.budget.micro_batches import MicroBatchBytes, can_split
from hopline.budget.predictor import Predictor
from hopline.contract import CUTS, Budget, Item, Outline, OverBudget, Place, Plan, with_evaluation
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.sizes import Sizes
from hopline.data.placement import SHARE, DataBytes, make_layout
from hopline.data.placement_settings import Placement
from hopline.device.meter import library_bytes
from hopline.device.out_of_memory import state_bytes
from hopline.methods.sampled.loader import Loader, resolve_workers
from hopline.methods.sampled.settings import Sampled
from hopline.nn.gnn import GNN
from hopline.util.host import num_cores

DRAWN = 3
"""Batches that are drawn to see how large they are,"""
SIZE_MARGIN = 1.1
"""and by how much others may be larger."""
RECORDED = "workspace of the recorded step"
MAX_SEARCHED_NODES = 1 << 24
"""Nodes of the largest graph in which the seed with most around it is looked for."""


def plan(method: Sampled, outline: Outline, budget: Budget) -> Plan:
    """As many batches ahead as leave room for a whole one; where there is none, a batch goes in pieces."""
    return SampledForms(method, outline, outline.limits(budget), budget.over_budget).best()


@dataclass(eq=False)
class SampledForms:
    """The forms of sampled training that differ in what they take, and in nothing that is learnt."""

    method: Sampled
    outline: Outline
    limits: dict[Place, int | None]
    over_budget: OverBudget = "split"

    @cached_property
    def batches(self) -> list[Batch]:
        """Some, on the host: a GPU may not have room for a single one."""
        return list(islice(draw_batches(self.method, self.outline, self.method.batch_size), DRAWN))

    @property
    def predictor(self) -> Predictor:
        return self.outline.predictor(len(self.method.fanout_per_layer))

    def best(self) -> Plan:
        """The fastest that keeps to the limits with whole batches, or else with pieces, or the smallest."""
        plans = list(self.plans())
        whole = next((plan for plan in plans if plan.fits and plan.step_bytes <= plan.limit_bytes), None)
        return whole or next((plan for plan in plans if plan.fits and plan.batches_on_host), plans[-1])

    def plans(self) -> Iterator[Plan]:
        tree = self.tree()
        if tree is not None:
            yield tree
        workers, ahead = resolve_workers(self.method, num_cores())
        for batches_on_host in (False, True) if self._can_wait else (False,):
            for look_ahead in _halvings(ahead) if workers else ():
                yield self.plan(workers, look_ahead, batches_on_host)
        yield self.plan(0, 1, self._can_wait)

    def plan(self, workers: int, look_ahead: int, batches_on_host: bool = False) -> Plan:
        """So many batches ahead: where steps are, or on the host until their turn comes."""
        count, size = (1 + look_ahead if workers else 1), self._batch_bytes
        name = f"{count} prepared batch{'es' * (count > 1)}"
        prepared = [Item(name, "host", count * size)]
        if (
            self.outline.compute_place == "device" and not batches_on_host
        ):  # the batch before goes when the next one has come
            prepared.append(Item(name, "device", (count + 1) * size))
        method = replace(self.method, workers=workers, look_ahead=look_ahead)
        if self.outline.compute_place == "device" and method.layout == "auto":
            method = replace(method, layout="block")  # as was planned, wherever the data will be
        return self._make_plan(
            method, prepared, self._whole(batches_on_host), self._least(batches_on_host), batches_on_host
        )

    @property
    def _can_wait(self) -> bool:
        """Whether it is the host that makes batches, for a GPU, or may be."""
        wanted = self.outline.placement
        by_host = {wanted.graph, wanted.features} <= {"auto", "host"} and wanted.cache == "auto"
        return self.outline.compute_place == "device" and by_host and self.method.layout != "tree"

    def tree(self) -> Plan | None:
        """On a GPU that has room for everything: shapes that never change, so there is nothing to cut."""
        method, outline = self.method, self.outline
        possible = method.layout != "block" and -1 not in method.fanout_per_layer and isinstance(outline.model, GNN)
        if outline.compute_place == "host" or not possible:
            return None
        nodes = [method.batch_size]
        for fanout in method.fanout_per_layer:
            nodes.append(nodes[-1] * (1 + fanout))
        edges = [outer - inner for inner, outer in pairwise(nodes)]
        step = self.predictor.costs.bound(Sizes(tuple(reversed(nodes)), tuple(reversed(edges))))
        recorded = [] if outline.device.type != "cuda" else [Item(RECORDED, "device", library_bytes(outline.device))]
        plan = self._make_plan(method, recorded, step, step)
        all_there = plan.placement is not None and {plan.placement.graph, plan.placement.features} == {"device"}
        return plan if all_there or method.layout == "tree" else None

    @cached_property
    def _batch_bytes(self) -> int:
        """Of a prepared batch: others may be larger, and the smaller a batch, the more does a single seed matter."""
        rate = max(batch.num_bytes / Sizes.of(batch).array.sum() for batch in self.batches)
        return math.ceil(SIZE_MARGIN * self._largest.num_bytes + rate * self._largest_seed_sizes.array.sum())

    @property
    def _num_seeds(self) -> int:
        return self.outline.train_ids.numel()

    @cached_property
    def _largest_seed_sizes(self) -> Sizes:
        return largest_seed_sizes(self.method.fanout_per_layer, self.outline.data.graph, self.outline.train_ids)

    @cached_property
    def _largest(self) -> Batch:
        return max(self.batches, key=lambda batch: batch.num_bytes)

    def _whole(self, batches_on_host: bool) -> float:
        """The step of a whole batch; one that waited elsewhere is copied for it."""
        sizes = [_with_margin(Sizes.of(batch), self.outline.data.graph) for batch in self.batches]
        copies = MicroBatchBytes.of(self._largest, None) if batches_on_host else None
        return max(self.predictor.predict_peak(s) + (0 if copies is None else copies.resident(s)) for s in sizes)

    def _least(self, batches_on_host: bool) -> float:
        """A step that is as small as what may be done with a batch makes it: of a single seed in a piece of its own, of
        all seeds without an edge, or of the whole batch."""
        beside, num_seeds = sum(state_bytes(self.outline.model)), min(self.method.batch_size, self._num_seeds)
        if self.over_budget in CUTS:
            num_hops = len(self.method.fanout_per_layer)
            seed = Sizes((num_seeds,) * (num_hops + 1), (0,) * num_hops)
        elif self.over_budget == "refuse" or not can_split(self.outline.model):
            return beside + self._whole(batches_on_host)
        else:
            seed = self._largest_seed_sizes
        copies = MicroBatchBytes.of(self._largest, None if batches_on_host else self.outline.device)
        return beside + SIZE_MARGIN * copies.maps + copies.peak_with_step(seed, self.predictor.predict_peak(seed))

    def _make_plan(
        self, method: Sampled, prepared: list[Item], step: float, one: float, batches_on_host: bool = False
    ) -> Plan:
        outline, home = self.outline, self.outline.compute_place
        items, placement, limit = (
            [*outline.resident_items(), *outline.data_on_host(), *prepared],
            None,
            self.limits[home],
        )
        room = math.inf if limit is None else limit - sum(item.num_bytes for item in items if item.place == home)
        if batches_on_host:
            placement = replace(outline.placement, graph="host", features="host")
            items.append(Item("labels", "device", DataBytes.of(outline.data).labels))  # which go there all the same
        elif home == "device":
            placed, placement = place_within(outline, room - with_evaluation(step, outline.async_evaluation))
            items += placed
        size = method.batch_size
        return Plan(
            method=method,
            items=tuple(items),
            limits=self.limits,
            compute_place=home,
            async_evaluation=outline.async_evaluation,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=step,
            min_step_bytes=one,
            steps=-(-self._num_seeds // size),
            count=size,
            covers="batches of {} seeds",
            placement=placement,
            batches_on_host=batches_on_host,
            num_blocks=len(self.method.fanout_per_layer),
        )


def place_within(outline: Outline, room: float) -> tuple[list[Item], Placement]:
    """What of the data goes to a GPU with so many bytes to spare."""
    sizes, wanted = DataBytes.of(outline.data), outline.placement
    try:
        found = make_layout(sizes, int(max(0.0, min(room, 1 << 50)) / SHARE), wanted)
    except ValueError:  # not even what a GPU needs to read the host's memory
        return [], replace(wanted, graph="host", features="host", cache="auto")
    graph = {"device": sizes.graph, "pinned": sizes.indptr, "host": 0}[found.graph]
    cache = min(found.cache, sizes.features)
    rows = {"device": sizes.features, "pinned": cache + sizes.hot_slots, "host": 0}[found.features]
    items = [Item("graph", "device", graph), Item("features", "device", rows)]
    items.append(Item("labels", "device", sizes.labels if found.labels else 0))
    kept = str(cache) if found.features == "pinned" else "auto"
    return items, replace(wanted, graph=found.graph, features=found.features, cache=kept)


def _halvings(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count //= 2
    yield 1


def draw_batches(method: Sampled, outline: Outline, batch_size: int) -> Iterator[Batch]:
    """Batches as training would draw them, one after the other; on the host where that is where they are made."""
    alone = replace(method, batch_size=batch_size, workers=0, look_ahead=1, layout="block", drop_last=False)
    given = outline.data, outline.train_ids, alone, outline.job.seed, outline.device, outline.model
    loader = Loader(*given, batches_on_host=True)
    with closing(loader.epoch(1)) as batches:
        yield from batches


def _with_margin(sizes: Sizes, graph: Graph) -> Sizes:
    """Sizes that other batches hardly exceed."""
    nodes = [min(math.ceil(SIZE_MARGIN * n), graph.num_nodes) for n in sizes.nodes[:-1]]
    return Sizes(
        (*nodes, sizes.nodes[-1]), tuple(min(math.ceil(SIZE_MARGIN * e), graph.num_edges) for e in sizes.edges)
    )


def largest_seed_sizes(fanouts: Sequence[int], graph: Graph, train_ids: Tensor) -> Sizes:
    """More than is drawn for any one seed: the largest numbers of nodes and edges, hop by hop, whatever the draws."""
    degrees = graph.in_degrees().clamp(max=graph.num_edges)
    bounds = [degrees if f < 0 else degrees.clamp(max=f) for f in fanouts]
    if graph.num_nodes > MAX_SEARCHED_NODES:
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
