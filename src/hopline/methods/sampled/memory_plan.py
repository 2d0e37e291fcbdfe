"""The memory plan of `Sampled`: the fastest form of a run that keeps to a budget.

Forms differ in memory and time, but not in what is learnt. They are tried in this order, fastest first:

    tree                     a GPU samples, and holds graph and features; a captured step
    batches on the device    k batches prefetched, k halved down to 1
    batches on the host      the same, but batches wait on the host until their step runs; GPU only
    nothing prefetched       the training thread prepares each batch

Sizes of batches are known only by sampling. So the plan samples a few batches on the host, and adds a
margin. The peak of a step follows from sizes by the predictor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from hopline import ops
from hopline.budget.micro_batches import MicroBatchBytes, can_split
from hopline.budget.plan import CUTS, Budget, Item, Outline, OverBudget, Place, Plan, Price, with_evaluation
from hopline.budget.predictor import Predictor
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.core.graph import Graph
from hopline.data.placement import SHARE, DataBytes, make_layout
from hopline.data.placement_settings import Placement
from hopline.device.meter import library_bytes
from hopline.device.out_of_memory import state_bytes
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.settings import Sampled
from hopline.nn.layered import Layered
from hopline.ops import Slots
from hopline.pipeline.stages import resolve_threads
from hopline.util.config import plural
from hopline.util.host import num_cores

NUM_DRAWN_BATCHES = 3
"""Batches that are sampled to see how large they are."""
SIZE_MARGIN = 1.1
"""Assumed size of the largest batch, as a multiple of the sampled sizes."""
CAPTURE_WORKSPACE = "workspace of the recorded step"
"""Name of the plan's item for memory that CUDA's libraries allocate on the stream of a captured step."""
MAX_SEARCHED_NODES = 1 << 24
"""Most nodes of a graph for which `largest_seed_sizes` visits every node."""
MAX_FREE_BYTES = 1 << 50
"""Bytes that stand for a device without a limit, since infinity is not an integer."""


def plan(method: Sampled, outline: Outline, budget: Budget) -> Plan:
    """The plan of the fastest form in which whole batches fit, else of one in which micro-batches fit."""
    if method.weight is not None and budget.over_budget in CUTS:
        raise ValueError(
            f"over_budget={budget.over_budget} leaves drawn edges out, after which weight={method.weight} no longer "
            "knows with what probability an edge is in a batch: set over_budget=split"
        )
    forms = SampledForms(method, outline, outline.limits(budget), budget.over_budget)
    best = forms.best()
    return replace(best, price=forms.price_of(best))


@dataclass(eq=False)
class SampledForms:
    """The forms of one run of sampled training, as plans.

    They differ in memory and time, not in what is learnt.
    """

    method: Sampled
    outline: Outline
    limits: dict[Place, int | None]
    """By place: the bytes that the budget allows. None for no limit."""
    over_budget: OverBudget = "split"
    """The setting `Budget.over_budget`, which decides how small a step can be made."""

    @cached_property
    def batches(self) -> list[Batch]:
        """Up to `NUM_DRAWN_BATCHES` batches, on the host, since a GPU may have no memory for a single one."""
        return list(islice(draw_batches(self.method, self.outline, self.method.batch_size), NUM_DRAWN_BATCHES))

    @property
    def predictor(self) -> Predictor:
        """Predicts the peaks of steps with these fan-outs."""
        return self.outline.predictor(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a batch. A sampler of the user's tells it by its batches."""
        num_hops = self.method.num_hops(self.outline.model)
        return len(self.batches[0].blocks) if num_hops is None else num_hops

    def best(self) -> Plan:
        """The fastest plan that fits with whole batches.

        If there is none: the first that fits with batches on the host, whose steps then run in
        micro-batches. Else the plan without prefetching.
        """
        plans = list(self.plans())
        for plan in plans:
            if plan.fits and plan.step_bytes <= plan.limit_bytes:
                return plan
        for plan in plans:
            if plan.fits and plan.batches_on_host:
                return plan
        return plans[-1]

    def price_of(self, plan: Plan) -> Price | None:
        """The time that micro-batches cost. None if whole batches fit, or if no step was timed."""
        is_split = 0 < plan.limit_bytes < plan.step_bytes and self.over_budget in ("split", "resample")
        free_step_s = self.predictor.expected_s(Sizes.of(self._largest_batch))
        if not is_split or math.isnan(free_step_s):
            return None
        num_seeds = min(self.method.batch_size, self._num_seeds)
        num_at_once = max(1, int(num_seeds * plan.limit_bytes / plan.step_bytes))
        # Sampled anew, since micro-batches have nodes in common: together they have more than the batch.
        micro_batch = next(draw_batches(self.method, self.outline, num_at_once))
        micro_batch_s = self.predictor.expected_s(Sizes.of(micro_batch))
        return Price(
            step_s=num_seeds / num_at_once * micro_batch_s, free_step_s=free_step_s, free_step_bytes=plan.step_bytes
        )

    def plans(self) -> Iterator[Plan]:
        """The plans of all forms, fastest first."""
        tree = self.tree()
        if tree is not None:
            yield tree
        workers, max_look_ahead = resolve_threads(self.method.workers, self.method.look_ahead, num_cores())
        batches_on_host_choices = (False, True) if self._can_wait_on_host else (False,)
        if workers > 0:
            for batches_on_host in batches_on_host_choices:
                for look_ahead in _halvings(max_look_ahead):
                    yield self.plan(workers, look_ahead, batches_on_host)
        yield self.plan(workers=0, look_ahead=1, batches_on_host=self._can_wait_on_host)

    def plan(self, workers: int, look_ahead: int, batches_on_host: bool = False) -> Plan:
        """The plan with `look_ahead` prefetched batches, in blocks.

        batches_on_host: whether batches wait on the host, and move to the GPU when their step runs.
        """
        on_gpu = self.outline.compute_place == "device"
        # The batch that trains, and those that threads have prefetched.
        count = 1 + (look_ahead if workers else 0)
        name = f"{count} prepared {plural(count, 'batch')}"
        prepared = [Item(name, "host", count * self._batch_bytes)]
        if on_gpu and not batches_on_host:
            # One more on the device: a batch is freed only when the next one has arrived.
            prepared.append(Item(name, "device", (count + 1) * self._batch_bytes))

        method = replace(self.method, workers=workers, look_ahead=look_ahead)
        if on_gpu and method.layout == "auto":
            # Fixed now: the loader must not choose trees, wherever the data will be.
            method = replace(method, layout="block")
        return self._make_plan(
            method,
            prepared,
            step_bytes=self._whole_step_bytes(batches_on_host),
            min_step_bytes=self._min_step_bytes(batches_on_host),
            batches_on_host=batches_on_host,
        )

    @property
    def _can_wait_on_host(self) -> bool:
        """Whether batches for a GPU may wait on the host: no setting makes the GPU sample or hold data."""
        requested = self.outline.placement
        data_may_stay = {requested.graph, requested.features} <= {"auto", "host"} and requested.cache == "auto"
        return self.outline.compute_place == "device" and data_may_stay and self.method.layout != "tree"

    def tree(self) -> Plan | None:
        """The plan with trees. None if trees are not possible, or if the GPU cannot hold all data.

        With layout="tree" it is the plan even if the GPU cannot. Steps are never split: their shapes never
        change.
        """
        method = self.method
        outline = self.outline
        if method.layout == "block" or method.sampler is not None:
            return None
        allows_tree = -1 not in method.fanout_per_layer and isinstance(outline.model, Layered)
        if outline.compute_place == "host" or not allows_tree:
            return None

        step_bytes = self.predictor.costs.bound(tree_sizes(method.batch_size, method.fanout_per_layer))
        items = []
        if outline.device.type == "cuda":
            items.append(Item(CAPTURE_WORKSPACE, "device", library_bytes(outline.device)))

        plan = self._make_plan(method, items, step_bytes=step_bytes, min_step_bytes=step_bytes)
        placement = plan.placement
        has_all_data = placement is not None and {placement.graph, placement.features} == {"device"}
        return plan if has_all_data or method.layout == "tree" else None

    @cached_property
    def _batch_bytes(self) -> int:
        """The bytes of a prepared batch: the largest sampled one with a margin, and one more large seed.

        The seed matters for small batches, whose size may depend on a single node of high degree.
        """
        bytes_per_node_or_edge = max(batch.num_bytes / Sizes.of(batch).array.sum() for batch in self.batches)
        seed_bytes = bytes_per_node_or_edge * self._largest_seed_sizes.array.sum()
        return math.ceil(SIZE_MARGIN * self._largest_batch.num_bytes + seed_bytes)

    @property
    def _num_seeds(self) -> int:
        """The number of examples."""
        return len(self.outline.job.examples)

    @cached_property
    def _largest_seed_sizes(self) -> Sizes:
        """A bound for the sizes of a batch with one seed. For a sampler of the user's an estimate, by drawing."""
        if self.method.sampler is not None:
            return self._drawn_seed_sizes
        return largest_seed_sizes(
            self.method.fanout_per_layer,
            self.outline.data.graph,
            self.outline.train_ids,
            with_replacement=self.method.replace,
        ).with_outputs(self.outline.job.examples.max_per_seed)

    @property
    def _drawn_seed_sizes(self) -> Sizes:
        """The largest sizes of a few batches with one seed, those of high in-degree, and a margin."""
        outline = self.outline
        ids = outline.train_ids
        degrees = outline.data.graph.in_degrees(ids)
        hubs = ids[degrees.topk(min(NUM_DRAWN_BATCHES, ids.numel())).indices]
        drawn = [Sizes.of(batch) for batch in draw_batches(self.method, outline, 1, hubs)]
        nodes = [math.ceil(SIZE_MARGIN * max(counts)) for counts in zip(*(s.nodes for s in drawn), strict=True)]
        edges = [math.ceil(SIZE_MARGIN * max(counts)) for counts in zip(*(s.edges for s in drawn), strict=True)]
        return Sizes((*nodes[:-1], 1), tuple(edges)).with_outputs(outline.job.examples.max_per_seed)

    @cached_property
    def _largest_batch(self) -> Batch:
        """The sampled batch with the most bytes."""
        return max(self.batches, key=lambda batch: batch.num_bytes)

    def _whole_step_bytes(self, batches_on_host: bool) -> float:
        """The predicted peak of a step that is not split.

        A batch that waits on the host is copied for the step, and its copy counts too.
        """
        batch_copy = MicroBatchBytes.of(self._largest_batch, device=None) if batches_on_host else None
        peaks = []
        for batch in self.batches:
            # A sampler of the user's may repeat edges, or have some that are not in the graph.
            repeats_edges = self.method.replace or self.method.sampler is not None
            sizes = _with_margin(Sizes.of(batch), self.outline.data.graph, with_replacement=repeats_edges)
            peak_bytes = self.predictor.predict_peak(sizes)
            if batch_copy is not None:
                peak_bytes = peak_bytes + batch_copy.resident(sizes)
            peaks.append(peak_bytes)
        return max(peaks)

    def _min_step_bytes(self, batches_on_host: bool) -> float:
        """The predicted peak of the smallest step that `over_budget` can make of a batch.

        Cutting can go down to the seeds, without any edge. Splitting and sampling again end at micro-batches of one
        seed. If the model cannot be split, or the budget refuses, a step is the whole batch.
        """
        # The snapshot of gradients and buffers from which a step that runs out of memory is undone.
        snapshot_bytes = sum(state_bytes(self.outline.model))
        if self.over_budget in CUTS:
            num_seeds = min(self.method.batch_size, self._num_seeds)
            num_hops = self.num_blocks
            smallest = Sizes((num_seeds,) * (num_hops + 1), (0,) * num_hops)
        elif self.over_budget == "refuse" or not can_split(self.outline.model):
            return snapshot_bytes + self._whole_step_bytes(batches_on_host)
        else:
            smallest = self._largest_seed_sizes
        build_device = None if batches_on_host else self.outline.device  # None: built on the host, then copied
        micro_batch = MicroBatchBytes.of(self._largest_batch, build_device)
        peak_bytes = micro_batch.peak_with_step(smallest, self.predictor.predict_peak(smallest))
        # The map leads from the batch's nodes to their local ids in a micro-batch.
        return snapshot_bytes + SIZE_MARGIN * micro_batch.map_bytes + peak_bytes

    def _make_plan(
        self,
        method: Sampled,
        prepared: list[Item],
        *,
        step_bytes: float,
        min_step_bytes: float,
        batches_on_host: bool = False,
    ) -> Plan:
        """A plan, with as much of the data on the GPU as the other items leave memory for.

        method: as the plan's form wants it. prepared: items of this form, such as prefetched batches.
        """
        outline = self.outline
        compute_place = outline.compute_place
        items = [*outline.resident_items(), *outline.data_on_host(), *prepared]
        placement = None
        if batches_on_host:
            placement = replace(outline.placement, graph="host", features="host")
            # Labels go to the device all the same.
            items.append(Item("labels", "device", DataBytes.of(outline.data).labels))
        elif compute_place == "device":
            limit = self.limits[compute_place]
            resident_bytes = sum(item.num_bytes for item in items if item.place == compute_place)
            free_bytes = math.inf if limit is None else limit - resident_bytes
            data_items, placement = place_within(
                method, outline, free_bytes - with_evaluation(step_bytes, outline.async_evaluation)
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
            covers=f"batches of {{}} {plural(method.batch_size, 'seed')}",
            placement=placement,
            batches_on_host=batches_on_host,
            num_blocks=self.num_blocks,
        )


def place_within(method: Sampled, outline: Outline, free_bytes: float) -> tuple[list[Item], Placement]:
    """(items, placement) of the data that goes to a GPU with `free_bytes` left for data."""
    sizes = DataBytes.of(outline.data)
    requested = method.placement(outline.placement)
    try:
        # `make_layout` gives data only SHARE of what is free. Here all of it is for data, so it gets more.
        layout = make_layout(sizes, int(max(0.0, min(free_bytes, MAX_FREE_BYTES)) / SHARE), requested)
    except ValueError:  # too little even for what a GPU needs to read pinned data: offsets and slots
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


def tree_sizes(num_seeds: int, fanouts: Sequence[int]) -> Sizes:
    """The sizes of a batch of trees, whose slots all count, empty ones too.

    The block that computes the slots of the hops 0 .. h reads those of the hops 0 .. h + 1. It has an edge for
    each of these but the seeds.
    """
    slots = Slots(num_seeds, tuple(fanouts))
    nodes = tuple(slots.up_to(hop) for hop in reversed(range(slots.num_hops + 1)))
    return Sizes(nodes, edges=tuple(num_src - num_seeds for num_src in nodes[:-1]))


def _halvings(count: int) -> Iterator[int]:
    """count, count // 2, ..., 1."""
    while count > 1:
        yield count
        count //= 2
    yield 1


def draw_batches(method: Sampled, outline: Outline, batch_size: int, examples: Tensor | None = None) -> Iterator[Batch]:
    """The batches of the first epoch, with `batch_size` seeds, in the layout "block".

    They stay on the host if the host samples. Each is prepared when it is asked for. examples: None for those of the
    job.
    """
    loader = Loader(
        data=outline.data,
        examples=outline.job.examples if examples is None else examples,
        method=replace(method, batch_size=batch_size, workers=0, look_ahead=1, layout="block", drop_last=False),
        seed=outline.job.seed,
        device=outline.device,
        model=outline.model,
        batches_on_host=True,
    )
    with closing(loader.epoch(1)) as batches:
        yield from batches


def _with_margin(sizes: Sizes, graph: Graph, *, with_replacement: bool) -> Sizes:
    """The sizes times `SIZE_MARGIN`, but no more than the graph has. The number of seeds stays.

    with_replacement: whether an edge may be drawn twice, so that a batch may have more edges than the graph.
    """
    *nodes, num_seeds = sizes.nodes
    nodes = [min(math.ceil(SIZE_MARGIN * num_nodes), graph.num_nodes) for num_nodes in nodes]
    edges = [math.ceil(SIZE_MARGIN * num_edges) for num_edges in sizes.edges]
    if not with_replacement:
        edges = [min(num_edges, graph.num_edges) for num_edges in edges]
    return Sizes((*nodes, num_seeds), tuple(edges))


def largest_seed_sizes(
    fanouts: Sequence[int], graph: Graph, train_ids: Tensor, *, with_replacement: bool = False
) -> Sizes:
    """An upper bound for the sizes of a batch with one seed, for any training node and any draws.

    In a large graph, the bound multiplies the largest number of draws of each hop. Otherwise it is computed
    for every node, from the last hop back to the first. Let c_h(v) be the most draws at node v in hop h. Let
    F_h(v) be a bound for v itself and all nodes and edges that are drawn around it from hop h on. Then

        F_h(v) = F_{h+1}(v) + min(sum of F_{h+1}(u) over all in-neighbours u of v,
                                  c_h(v) * max of F_{h+1}(u) over these u)

    since v itself draws again in hop h + 1, and so do the c_h(v) in-neighbours that hop h has drawn.
    """
    degrees = graph.in_degrees()
    if with_replacement:  # a node with any in-edge draws `fanout` times, some edges more than once
        max_draws = [torch.where(degrees > 0, fanout, 0) for fanout in fanouts]
    else:
        max_draws = [degrees if fanout < 0 else degrees.clamp(max=fanout) for fanout in fanouts]
    if graph.num_nodes > MAX_SEARCHED_NODES:
        nodes = [1]
        edges = []
        for hop_draws in max_draws:
            edges.append(min(nodes[-1] * int(hop_draws.max()), int(hop_draws.sum())))
            nodes.append(min(nodes[-1] + edges[-1], graph.num_nodes))
        return Sizes(tuple(reversed(nodes)), tuple(reversed(edges)))

    # [num_nodes, k]: F of the docstring. Columns alternate, from the seeds outwards: nodes up to a hop,
    # edges of the next hop, nodes up to that one, and so on.
    around = torch.zeros(graph.num_nodes, 0, dtype=torch.float64, device=degrees.device)
    for hop in reversed(range(len(fanouts))):
        # In front, the columns of v alone: one node, and its draws in the next hop.
        next_draws = [max_draws[hop + 1].double()] if hop + 1 < len(fanouts) else []
        around = torch.stack([around.new_ones(graph.num_nodes), *next_draws, *around.T], 1)
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
