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

NUM_DRAWN_BATCHES = 3
"""Batches that are drawn to see how large they are,"""
SIZE_MARGIN = 1.1
"""and by how much others may be larger."""
CAPTURE_WORKSPACE = "workspace of the recorded step"
MAX_SEARCHED_NODES = 1 << 24
"""Nodes of the largest graph in which the seed with most around it is looked for."""
MAX_FREE_BYTES = 1 << 50
"""Bytes of a device without a limit."""


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
        return list(islice(draw_batches(self.method, self.outline, self.method.batch_size), NUM_DRAWN_BATCHES))

    @property
    def predictor(self) -> Predictor:
        return self.outline.predictor(len(self.method.fanout_per_layer))

    def best(self) -> Plan:
        """The fastest that keeps to the limits with whole batches, or else with pieces, or the smallest."""
        plans = list(self.plans())
        for plan in plans:
            if plan.fits and plan.step_bytes <= plan.limit_bytes:
                return plan
        for plan in plans:
            if plan.fits and plan.batches_on_host:
                return plan
        return plans[-1]

    def plans(self) -> Iterator[Plan]:
        tree = self.tree()
        if tree is not None:
            yield tree
        workers, max_look_ahead = resolve_workers(self.method, num_cores())
        if workers:
            for batches_on_host in (False, True) if self._can_wait_on_host else (False,):
                for look_ahead in _halvings(max_look_ahead):
                    yield self.plan(workers, look_ahead, batches_on_host)
        yield self.plan(0, 1, self._can_wait_on_host)

    def plan(self, workers: int, look_ahead: int, batches_on_host: bool = False) -> Plan:
        """So many batches ahead: where steps are, or on the host until their turn comes."""
        on_gpu = self.outline.compute_place == "device"
        count = 1 + look_ahead if workers else 1
        name = "1 prepared batch" if count == 1 else f"{count} prepared batches"
        prepared = [Item(name, "host", count * self._batch_bytes)]
        if on_gpu and not batches_on_host:
            # the batch before goes when the next one has come
            prepared.append(Item(name, "device", (count + 1) * self._batch_bytes))

        method = replace(self.method, workers=workers, look_ahead=look_ahead)
        if on_gpu and method.layout == "auto":
            method = replace(method, layout="block")  # as was planned, wherever the data will be
        return self._make_plan(
            method,
            prepared,
            step_bytes=self._whole_step_bytes(batches_on_host),
            min_step_bytes=self._min_step_bytes(batches_on_host),
            batches_on_host=batches_on_host,
        )

    @property
    def _can_wait_on_host(self) -> bool:
        """Whether it is the host that makes batches, for a GPU, or may be."""
        requested = self.outline.placement
        data_may_stay = {requested.graph, requested.features} <= {"auto", "host"} and requested.cache == "auto"
        return self.outline.compute_place == "device" and data_may_stay and self.method.layout != "tree"

    def tree(self) -> Plan | None:
        """On a GPU that has room for everything: shapes that never change, so there is nothing to cut."""
        method = self.method
        outline = self.outline
        allows_tree = method.layout != "block" and -1 not in method.fanout_per_layer and isinstance(outline.model, GNN)
        if outline.compute_place == "host" or not allows_tree:
            return None

        nodes = [method.batch_size]
        for fanout in method.fanout_per_layer:
            nodes.append(nodes[-1] * (1 + fanout))
        edges = [outer - inner for inner, outer in pairwise(nodes)]
        step_bytes = self.predictor.costs.bound(Sizes(tuple(reversed(nodes)), tuple(reversed(edges))))
        items = []
        if outline.device.type == "cuda":
            items.append(Item(CAPTURE_WORKSPACE, "device", library_bytes(outline.device)))

        plan = self._make_plan(method, items, step_bytes=step_bytes, min_step_bytes=step_bytes)
        placement = plan.placement
        has_all_data = placement is not None and {placement.graph, placement.features} == {"device"}
        return plan if has_all_data or method.layout == "tree" else None

    @cached_property
    def _batch_bytes(self) -> int:
        """Of a prepared batch: others may be larger, and the smaller a batch, the more does a single seed matter."""
        bytes_per_size = max(batch.num_bytes / Sizes.of(batch).array.sum() for batch in self.batches)
        seed_bytes = bytes_per_size * self._largest_seed_sizes.array.sum()
        return math.ceil(SIZE_MARGIN * self._largest_batch.num_bytes + seed_bytes)

    @property
    def _num_seeds(self) -> int:
        return self.outline.train_ids.numel()

    @cached_property
    def _largest_seed_sizes(self) -> Sizes:
        return largest_seed_sizes(self.method.fanout_per_layer, self.outline.data.graph, self.outline.train_ids)

    @cached_property
    def _largest_batch(self) -> Batch:
        return max(self.batches, key=lambda batch: batch.num_bytes)

    def _whole_step_bytes(self, batches_on_host: bool) -> float:
        """The step of a whole batch; one that waited elsewhere is copied for it."""
        copy_bytes = MicroBatchBytes.of(self._largest_batch, None) if batches_on_host else None
        peaks = []
        for batch in self.batches:
            sizes = _with_margin(Sizes.of(batch), self.outline.data.graph)
            peak_bytes = self.predictor.predict_peak(sizes)
            if copy_bytes is not None:
                peak_bytes = peak_bytes + copy_bytes.resident(sizes)
            peaks.append(peak_bytes)
        return max(peaks)

    def _min_step_bytes(self, batches_on_host: bool) -> float:
        """A step that is as small as what may be done with a batch makes it: of a single seed in a piece of its own, of
        all seeds without an edge, or of the whole batch."""
        snapshot_bytes = sum(state_bytes(self.outline.model))
        if self.over_budget in CUTS:
            num_seeds = min(self.method.batch_size, self._num_seeds)
            num_hops = len(self.method.fanout_per_layer)
            smallest = Sizes((num_seeds,) * (num_hops + 1), (0,) * num_hops)
        elif self.over_budget == "refuse" or not can_split(self.outline.model):
            return snapshot_bytes + self._whole_step_bytes(batches_on_host)
        else:
            smallest = self._largest_seed_sizes
        micro_batch = MicroBatchBytes.of(self._largest_batch, None if batches_on_host else self.outline.device)
        peak_bytes = micro_batch.peak_with_step(smallest, self.predictor.predict_peak(smallest))
        return snapshot_bytes + SIZE_MARGIN * micro_batch.maps + peak_bytes

    def _make_plan(
        self,
        method: Sampled,
        prepared: list[Item],
        *,
        step_bytes: float,
        min_step_bytes: float,
        batches_on_host: bool = False,
    ) -> Plan:
        outline = self.outline
        compute_place = outline.compute_place
        items = [*outline.resident_items(), *outline.data_on_host(), *prepared]
        placement = None
        if batches_on_host:
            placement = replace(outline.placement, graph="host", features="host")
            items.append(Item("labels", "device", DataBytes.of(outline.data).labels))  # which go there all the same
        elif compute_place == "device":
            limit = self.limits[compute_place]
            resident_bytes = sum(item.num_bytes for item in items if item.place == compute_place)
            free_bytes = math.inf if limit is None else limit - resident_bytes
            data_items, placement = place_within(
                outline, free_bytes - with_evaluation(step_bytes, outline.async_evaluation)
            )
            items += data_items
        return Plan(
            method=method,
            items=tuple(items),
            limits=self.limits,
            compute_place=compute_place,
            async_evaluation=outline.async_evaluation,
            hidden_bytes=outline.hidden_bytes(),
            step_bytes=step_bytes,
            min_step_bytes=min_step_bytes,
            steps=-(-self._num_seeds // method.batch_size),
            count=method.batch_size,
            covers="batches of {} seeds",
            placement=placement,
            batches_on_host=batches_on_host,
            num_blocks=len(self.method.fanout_per_layer),
        )


def place_within(outline: Outline, free_bytes: float) -> tuple[list[Item], Placement]:
    """What of the data goes to a GPU with so many bytes to spare."""
    sizes = DataBytes.of(outline.data)
    requested = outline.placement
    try:
        layout = make_layout(sizes, int(max(0.0, min(free_bytes, MAX_FREE_BYTES)) / SHARE), requested)
    except ValueError:  # not even what a GPU needs to read the host's memory
        return [], replace(requested, graph="host", features="host", cache="auto")

    graph_bytes = {"device": sizes.graph, "pinned": sizes.indptr, "host": 0}[layout.graph]
    cache_bytes = min(layout.cache, sizes.features)
    feature_bytes = {"device": sizes.features, "pinned": cache_bytes + sizes.hot_slots, "host": 0}[layout.features]
    label_bytes = sizes.labels if layout.labels else 0
    items = [
        Item("graph", "device", graph_bytes),
        Item("features", "device", feature_bytes),
        Item("labels", "device", label_bytes),
    ]
    cache = str(cache_bytes) if layout.features == "pinned" else "auto"
    return items, replace(requested, graph=layout.graph, features=layout.features, cache=cache)


def _halvings(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count //= 2
    yield 1


def draw_batches(method: Sampled, outline: Outline, batch_size: int) -> Iterator[Batch]:
    """Batches as training would draw them, one after the other; on the host where that is where they are made."""
    loader = Loader(
        data=outline.data,
        ids=outline.train_ids,
        method=replace(method, batch_size=batch_size, workers=0, look_ahead=1, layout="block", drop_last=False),
        seed=outline.job.seed,
        device=outline.device,
        model=outline.model,
        batches_on_host=True,
    )
    with closing(loader.epoch(1)) as batches:
        yield from batches


def _with_margin(sizes: Sizes, graph: Graph) -> Sizes:
    """Sizes that other batches hardly exceed."""
    *nodes, num_seeds = sizes.nodes
    nodes = [min(math.ceil(SIZE_MARGIN * num_nodes), graph.num_nodes) for num_nodes in nodes]
    edges = [min(math.ceil(SIZE_MARGIN * num_edges), graph.num_edges) for num_edges in sizes.edges]
    return Sizes((*nodes, num_seeds), tuple(edges))


def largest_seed_sizes(fanouts: Sequence[int], graph: Graph, train_ids: Tensor) -> Sizes:
    """More than is drawn for any one seed: the largest numbers of nodes and edges, hop by hop, whatever the draws."""
    degrees = graph.in_degrees().clamp(max=graph.num_edges)
    max_draws = [degrees if fanout < 0 else degrees.clamp(max=fanout) for fanout in fanouts]
    if graph.num_nodes > MAX_SEARCHED_NODES:
        nodes = [1]
        edges = []
        for hop_draws in max_draws:
            edges.append(min(nodes[-1] * int(hop_draws.max()), int(hop_draws.sum())))
            nodes.append(min(nodes[-1] + edges[-1], graph.num_nodes))
        return Sizes(tuple(reversed(nodes)), tuple(reversed(edges)))

    # What is drawn for a node has no more around it than the sum over all its neighbours, and no more than the largest
    # of them as often as is drawn. A column for each hop's nodes and one for its edges, from the outermost hop inwards.
    around = torch.zeros(graph.num_nodes, 0, dtype=torch.float64, device=degrees.device)
    for hop in reversed(range(len(fanouts))):
        outer_draws = [max_draws[hop + 1].double()] if hop + 1 < len(fanouts) else []
        around = torch.stack([torch.ones_like(around.sum(1)), *outer_draws, *around.T], 1)
        total = ops.reduce_edges(around, graph.indptr, graph.indices, "sum")
        largest = ops.reduce_edges(around, graph.indptr, graph.indices, "max") * max_draws[hop][:, None]
        around = around + torch.minimum(total, largest)

    seeds = train_ids.to(around.device)
    largest_columns = around[seeds].amax(0).tolist()
    nodes = [1]
    for num_nodes in largest_columns[::2]:
        nodes.append(min(int(num_nodes), graph.num_nodes))
    edges = [int(max_draws[0][seeds].max())]
    for num_edges, hop_draws in zip(largest_columns[1::2], max_draws[1:], strict=True):
        edges.append(min(int(num_edges), int(hop_draws.sum())))
    return Sizes(tuple(reversed(nodes)), tuple(reversed(edges)))
