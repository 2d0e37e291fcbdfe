"""The memory plan of `Sampled`: with less and less memory it keeps batches on the host, then splits them.

The outline of a GPU run needs no GPU: what CUDA itself takes is set to zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hopline.budget.memory_plan import RunOutline
from hopline.budget.micro_batches import MicroBatchBytes
from hopline.budget.plan import Place, Plan
from hopline.contract import Job
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.core.examples import Examples
from hopline.core.tree_layout import TreeSampler
from hopline.data.placement_settings import Placement
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.memory_plan import SampledForms, draw_batches, largest_seed_sizes, tree_sizes
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.nn.whole_module import as_batch_model
from tests.support.helpers import dataset_of, graph_of, own_task, randn, random_graph, stack_of, usual_task

METHOD = Sampled(fanouts=(5, 5), batch_size=200, workers=2, look_ahead=4)


def outline_of(num_nodes: int = 1000, num_edges: int = 8000, **options: Any) -> RunOutline:
    """The outline of a run on the CPU."""
    data = dataset_of(random_graph(num_nodes, num_edges), randn(num_nodes, 6))
    model = GNN(stack_of("sage-mean", 6, 32, 3)).double()
    step = usual_task(3).loss
    ids = data.splits["train"]
    job = Job(data=data, model=as_batch_model(model), module=model, examples=Examples(ids), task=own_task(step))
    return RunOutline(job=job, **options)


@pytest.fixture
def gpu_outline(monkeypatch: pytest.MonkeyPatch) -> RunOutline:
    """The outline of a run on a GPU. Its plan needs no GPU, once the bytes of CUDA itself are set to zero."""
    for module in ("budget.memory_plan", "methods.sampled.memory_plan"):
        monkeypatch.setattr(f"hopline.{module}.library_bytes", lambda device: 0)
    monkeypatch.setattr(RunOutline, "_other_bytes", 0)
    outline = outline_of()
    return replace(outline, job=replace(outline.job, device=torch.device("cuda", 0)))


def forms_of(
    outline: RunOutline, limits: dict[Place, int | None] | None = None, method: Sampled = METHOD
) -> SampledForms:
    """The forms of a run within limits; a place without one is unlimited."""
    free: dict[Place, int | None] = {"device": None, "host": None, "disk": None}
    return SampledForms(method, outline, free | (limits or {}))


def describe_plan(plan: Plan) -> tuple[bool, int, bool]:
    """(whether batches wait on the host, batches that are prefetched, whether a step runs whole)."""
    assert isinstance(plan.method, Sampled)
    return plan.batches_on_host, plan.method.look_ahead * plan.method.workers, plan.step_bytes <= plan.limit_bytes  # type: ignore[operator]


def test_batches_are_drawn_on_the_host_for_a_gpu_too(gpu_outline: RunOutline):
    batches = list(draw_batches(METHOD, gpu_outline, 300))
    expected = list(draw_batches(METHOD, outline_of(), 300))
    for ours, theirs in zip(batches, expected, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert isinstance(ours.x, torch.Tensor), "rows that a GPU is to have count"
        assert torch.equal(ours.x, gpu_outline.data.x.read(ours.input_ids))


def test_a_tighter_gpu_budget_keeps_batches_on_the_host_and_then_splits_them(gpu_outline: RunOutline):
    gpu_outline = replace(gpu_outline, placement=Placement(graph="host", features="host"))
    on_device, on_host = (forms_of(gpu_outline).plan(2, 4, batches_on_host) for batches_on_host in (False, True))
    batches = {item.place: item.num_bytes for item in on_device.items if item.name == "5 prepared batches"}
    assert batches["device"] == 6 / 5 * batches["host"]
    assert on_host.resident_bytes("device") == on_device.resident_bytes("device") - batches["device"]
    assert on_host.step_bytes > on_device.step_bytes, "with a copy of the batch"
    assert on_host.resident_bytes("host") == on_device.resident_bytes("host")

    limits = [on_device.peak_bytes("device"), on_host.peak_bytes("device"), on_host.smallest_bytes("device")]
    assert limits == sorted(limits, reverse=True)

    described = [describe_plan(forms_of(gpu_outline, {"device": limit}).best()) for limit in limits]
    assert described == [(False, 8, True), (True, 8, True), (True, 8, False)]
    assert not forms_of(gpu_outline, {"device": limits[-1] - 1}).best().fits


def test_batches_on_the_host_keep_to_the_budget_of_the_host(gpu_outline: RunOutline):
    device = forms_of(gpu_outline).plan(2, 4, True).smallest_bytes("device")
    for look_ahead, workers in ((4, 2), (2, 2), (1, 2), (1, 0)):
        smallest = forms_of(gpu_outline).plan(workers, look_ahead, True)
        limits: dict[Place, int | None] = {"device": device, "host": smallest.resident_bytes("host")}
        plan = forms_of(gpu_outline, limits).best()
        assert plan.fits
        assert describe_plan(plan) == (True, look_ahead * workers, False)


@pytest.mark.parametrize(
    ("placement", "layout"),
    [
        (Placement(features="pinned"), "auto"),
        (Placement(graph="device"), "auto"),
        (Placement(cache="1MiB"), "auto"),
        (Placement(), "tree"),
    ],
)
def test_batches_made_on_the_gpu_do_not_wait_on_the_host(gpu_outline: RunOutline, placement: Placement, layout: Any):
    gpu_forms = forms_of(replace(gpu_outline, placement=placement), method=replace(METHOD, layout=layout))
    assert not any(plan.batches_on_host for plan in gpu_forms.plans())
    assert forms_of(gpu_outline).best().placement is not None


@pytest.mark.parametrize("fanouts", [(3,), (15, 10, 5), (1, 4)])
def test_trees_without_an_empty_slot_have_the_sizes_of_the_plan(fanouts: tuple[int, ...]):
    nodes = torch.arange(20)
    graph = graph_of(nodes.repeat(20), nodes.repeat_interleave(20), 20)  # every node has 20 in-edges
    blocks = TreeSampler(graph, fanouts).sample(torch.arange(7), 1)
    sizes = tree_sizes(7, fanouts)
    assert sizes.nodes == (*(block.num_src for block in blocks), 7)
    assert sizes.edges == tuple(block.num_edges for block in blocks)


def test_on_a_cpu_no_plan_has_batches_on_host():
    assert not any(plan.batches_on_host for plan in forms_of(outline_of()).plans())


def test_with_batches_on_host_a_loader_moves_no_batch(gpu_outline: RunOutline):
    data = gpu_outline.data
    job = gpu_outline.job
    loader = Loader(data, job.train_ids, METHOD, 0, job.device, job.model, batches_on_host=True)
    on_cpu = Loader(data, job.train_ids, METHOD, 0, torch.device("cpu"), None)
    for batch, expected in zip(loader.epoch(1), on_cpu.epoch(1), strict=True):
        assert_same(batch, expected)

    micro_batch_bytes = MicroBatchBytes.of(expected, None)
    sizes = Sizes.of(expected)
    assert (
        micro_batch_bytes.while_built(sizes)
        == micro_batch_bytes.resident(sizes)
        < MicroBatchBytes.of(expected, job.device).while_built(sizes)
    )
    assert micro_batch_bytes.resident(sizes) >= expected.num_bytes


def assert_same(batch: Batch, expected: Batch) -> None:
    """Rows, labels and sources of two batches are equal."""
    assert isinstance(batch.x, torch.Tensor)
    assert isinstance(expected.x, torch.Tensor)
    assert torch.equal(batch.x, expected.x)
    assert torch.equal(batch.labels, expected.labels)
    assert all(torch.equal(a.src_ids, b.src_ids) for a, b in zip(batch.blocks, expected.blocks, strict=True))


@pytest.mark.parametrize("fanouts", [(3,), (2, 3), (-1, 2), (3, -1, 2), (-1, -1)])
def test_no_seed_draws_more_than_the_bound(fanouts: tuple[int, ...]):
    outline = outline_of(200, 900)
    bound = largest_seed_sizes(fanouts, outline.data.graph, outline.train_ids).array
    sizes = torch.stack(
        [torch.from_numpy(Sizes.of(b).array) for b in draw_batches(Sampled(fanouts=fanouts), outline, 1)]
    )
    assert (sizes.amax(0) <= torch.from_numpy(bound)).all()


@pytest.mark.parametrize("fanouts", [(9,), (2, 9), (9, 9, 2)])
@pytest.mark.parametrize("max_searched_nodes", [1, 1 << 24], ids=["by degrees alone", "node by node"])
def test_no_seed_draws_more_than_the_bound_with_replacement(
    fanouts: tuple[int, ...], max_searched_nodes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hopline.methods.sampled.memory_plan.MAX_SEARCHED_NODES", max_searched_nodes)
    outline = outline_of(200, 300)  # few in-edges, so that most nodes draw an edge several times
    method = Sampled(fanouts=fanouts, replace=True)
    bound = largest_seed_sizes(fanouts, outline.data.graph, outline.train_ids, with_replacement=True).array
    for batch in draw_batches(method, outline, 1):
        assert (Sizes.of(batch).array <= bound).all()


def test_a_plan_with_replacement_counts_more_edges_than_the_graph_has():
    outline = outline_of(100, 100)
    method = replace(METHOD, fanouts=(50, 50), replace=True)
    forms = forms_of(outline, method=method)
    drawn_sizes = Sizes.of(forms.batches[0])
    assert drawn_sizes.edges[0] > outline.data.graph.num_edges
    assert forms.plan(0, 1).step_bytes >= outline.predictor(2).predict_peak(drawn_sizes)


def test_the_bound_is_exact_where_nothing_is_shared(monkeypatch: pytest.MonkeyPatch):
    # A chain of stars: node 0 hears from 1 .. 4, of which each hears from three more.
    src = torch.arange(1, 17)
    dst = torch.cat([torch.zeros(4, dtype=torch.int64), torch.arange(1, 5).repeat_interleave(3)])
    graph = graph_of(src, dst, 17)
    seeds = torch.tensor([0, 5])
    sizes = largest_seed_sizes((-1, -1), graph, seeds)
    assert sizes.nodes == (17, 5, 1)
    assert sizes.edges == (16, 4)

    monkeypatch.setattr("hopline.methods.sampled.memory_plan.MAX_SEARCHED_NODES", 1)  # the bound by degrees alone
    sizes_by_degrees = largest_seed_sizes((-1, -1), graph, seeds)
    assert all(a >= b for a, b in zip(sizes_by_degrees.array, sizes.array, strict=True))
