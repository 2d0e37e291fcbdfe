"""Plans within a budget, for every method: measured where the bound is too loose, refused with what would fit.

Claims: `learn` changes nothing that training sees; the budget that a refusal names suffices; a tighter budget first
prefetches less, then splits; rows and tables count in the place where they are.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_geometric.nn import GCNConv

from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, DoesNotFit, Item, OverBudget
from hopline.contract import Job, Method
from hopline.core.examples import Examples
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.partitioned.memory_plan import table_items
from hopline.methods.plan_within import learn, plan_of
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.units.batch_unit import BatchUnit
from hopline.util.config import parse_size
from tests.support.helpers import dataset_of, own_task, randn, random_graph, stack_of, usual_task

METHODS: list[Method] = [
    Sampled(fanouts=(5, 5), batch_size=200),
    Historical(num_parts=8, parts_per_batch=2, partition="range"),
    FullBatch(num_shards=2, partition="range"),
]


def outline_of(**options: Any) -> RunOutline:
    """The outline of a run on the CPU: 1000 nodes, two SAGE layers. options: of the model."""
    data = dataset_of(random_graph(1000, 8000), randn(1000, 6))
    model = GNN(stack_of("sage-mean", 6, 32, 3), **options).double()
    step = usual_task(3).loss
    job = Job(
        data=data,
        model=as_batch_model(model),
        module=model,
        examples=Examples(data.splits["train"]),
        task=own_task(step),
    )
    return RunOutline(job=job)


def test_learn_changes_neither_model_nor_gradients_nor_random_state():
    outline = outline_of(norm="batch", dropout=0.5)
    before = copy.deepcopy(outline.job.module.state_dict())
    random_state = torch.random.get_rng_state()
    predictor = learn(outline, 2)
    assert predictor.is_sure
    assert predictor is outline.predictor(2)
    assert all(torch.equal(t, outline.job.module.state_dict()[name]) for name, t in before.items())
    assert all(p.grad is None for p in outline.job.module.parameters())
    assert torch.equal(random_state, torch.random.get_rng_state())


def test_learn_stops_at_the_first_step_that_is_out_of_memory(monkeypatch: pytest.MonkeyPatch):
    forward_backward = BatchUnit.forward_backward
    max_seeds = 4

    def fail_above_max_seeds(self: BatchUnit, total: int) -> torch.Tensor:
        if self.size > max_seeds:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_backward(self, total)

    monkeypatch.setattr(BatchUnit, "forward_backward", fail_above_max_seeds)
    assert learn(outline_of(), 2).num_seen == 3, "with 1, 2 and 4 seeds"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_smallest_budget_that_a_refusal_names_suffices(method: Method):
    outline = outline_of()
    with pytest.raises(DoesNotFit, match="at least budget=") as refused:
        plan_of(method, outline, Budget(host="1KiB")).check()
    smallest = refused.value.smallest_bytes["host"]
    assert plan_of(method, outline, Budget(host=str(smallest))).check().peak_bytes("host") <= smallest
    named_budget = str(refused.value).split("budget=")[1].split(" ")[0]
    assert smallest <= parse_size(named_budget) <= 1.02 * smallest


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_without_a_limit_the_plan_keeps_the_settings_of_the_method(method: Method):
    plan = plan_of(method, outline_of(), Budget()).check()
    assert plan.num_micro_batches == 1
    assert plan.chunk_bytes is None
    left_to_the_plan = {"workers": "auto", "look_ahead": "auto"} if isinstance(method, Sampled) else {}
    assert vars(plan.method) | left_to_the_plan == vars(method)


def test_a_tighter_budget_prefetches_less_and_then_splits_batches():
    outline = outline_of()
    method = METHODS[0]
    learn(outline, 2)
    unlimited = plan_of(method, outline, Budget())
    budgets = [unlimited.peak_bytes("host"), unlimited.peak_bytes("host") - 1000, unlimited.resident_bytes("host")]
    plans = [plan_of(method, outline, Budget(host=str(n))).check() for n in budgets]
    look_aheads = [plan.method.look_ahead for plan in plans]  # type: ignore[attr-defined]
    assert look_aheads[0] > look_aheads[1] >= look_aheads[2]

    smallest = plan_of(method, outline, Budget(host=str(plans[1].smallest_bytes("host"))))
    assert plans[1].num_micro_batches == 1
    assert smallest.num_micro_batches > 1


def test_full_batch_takes_as_many_shards_as_it_needs():
    outline = outline_of()
    unlimited = plan_of(METHODS[2], outline, Budget())
    tight = plan_of(
        METHODS[2], outline, Budget(host=str(unlimited.resident_bytes("host") + int(0.9 * unlimited.step_bytes)))
    ).check()
    assert tight.partition is not None
    assert tight.partition.num_parts > 2
    assert tight.step_bytes <= tight.limit_bytes


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_plan_says_what_the_budget_costs_and_which_would_cost_nothing(method: Method):
    outline = outline_of()
    learn(outline, 2)
    whole = plan_of(method, outline, Budget())
    limit = whole.resident_bytes("host") + int(0.6 * whole.step_bytes)
    if isinstance(method, Sampled):  # a plan without prefetching leaves more for a step
        limit = whole.smallest_bytes("host")
    plan = plan_of(method, outline, Budget(host=str(limit)))
    assert plan.price is not None
    assert 0 < plan.price.free_step_s < plan.price.step_s < 60
    assert re.search(
        r"plan: an epoch takes about [\d.e+-]+ s, without a budget about [\d.e+-]+ s", "\n".join(plan.lines())
    )

    cheap, dear = (
        replace(plan, price=replace(plan.price, step_s=times * plan.price.free_step_s), budget_key="budget.host")
        for times in (9, 280)
    )
    assert cheap.price_warning == ""
    assert dear.lines()[-1] == dear.price_warning
    assert "280 times as long" in dear.price_warning
    (named,) = re.findall(r"budget\.host=(\S+) would cost no time", dear.price_warning)
    assert plan_of(method, outline, Budget(host=named)).price is None
    assert whole.price is None


def test_full_batch_knows_the_part_with_the_hub():
    outline = outline_of()
    plan = plan_of(METHODS[2], outline, Budget(host="1KiB"))
    assert plan.partition is not None
    degree = int(outline.data.graph.in_degrees().max())
    assert plan.partition.sizes[plan.partition.part_of[0]] == 1, "the hub is a part of its own"
    assert plan.step_bytes > degree * 6 * 8, "and its sources' rows count"


def test_tables_in_files_count_on_the_disk():
    method = Historical(num_parts=8, parts_per_batch=2, partition="range", folder=Path("tables"))
    plan = plan_of(method, outline_of(), Budget(disk="1KiB"))
    assert plan.resident_bytes("disk") == 1000 * 32 * 8
    with pytest.raises(DoesNotFit, match=r"budget\.disk=250"):
        plan.check()


def test_a_custom_method_without_a_plan_is_refused_with_what_to_define():
    class Mine(Method):
        def bind(self, job: Job) -> Any: ...

    with pytest.raises(ValueError, match=r"Mine\.plan\(outline, budget\)"):
        plan_of(Mine(), outline_of(), Budget())


def test_historical_refuses_a_model_without_layers_and_sampled_plans_it():
    outline = outline_of()
    module = GCNConv(6, 3).double()
    module_outline = RunOutline(job=Job(**{**vars(outline.job), "model": Whole(module), "module": module}))
    with pytest.raises(ValueError, match=r"GCNConv .*leave out budget="):
        plan_of(METHODS[1], module_outline, Budget())
    assert plan_of(METHODS[0], module_outline, Budget()).check().hidden_bytes == 0


def test_hidden_rows_go_to_disk_where_the_host_budget_is_tight():
    outline = outline_of()
    learn(outline, 2)
    data = outline.data
    unlimited = plan_of(METHODS[0], outline, Budget())
    assert unlimited.hidden_place == "host"
    assert unlimited.hidden_bytes == 2 * 32 * 8 * data.num_nodes

    tight = plan_of(METHODS[0], outline, Budget(host=str(unlimited.smallest_bytes("host")), disk="1MiB"))
    assert tight.hidden_place == "disk"
    assert tight.chunk_bytes == int(tight.limit_bytes)


@pytest.mark.parametrize(
    ("device", "method", "expected"),
    [
        ("cuda", Historical(tables="host"), {"history": "host", "pinned buffers": "host"}),
        ("cuda", FullBatch(folder=Path("rows")), {"history": "disk", "pinned buffers": "host"}),
        ("cuda", Historical(tables="pinned"), {"history": "host"}),
        ("cuda", FullBatch(tables="pinned", folder=Path("rows")), {"history": "host"}),
        ("cuda", Historical(tables="device"), {"history": "device"}),
        ("cpu", Historical(tables="host"), {"history": "host"}),
    ],
    ids=str,
)
def test_pinned_buffers_of_tables_that_a_gpu_cannot_read_are_in_the_plan(
    device: str, method: Historical | FullBatch, expected: dict[str, str]
):
    outline = outline_of()
    on_device = RunOutline(job=replace(outline.job, device=torch.device(device)))
    items = table_items("history", method.folder, 1000, on_device, method.tables)
    assert {item.name: item.place for item in items} == expected
    # Pinned buffers: 4 of 32 MiB.
    assert sum(item.num_bytes for item in items) == 1000 + ((128 << 20) if len(items) > 1 else 0)


@pytest.mark.parametrize("tables", ["auto", "device", "pinned", "host"])
def test_tables_of_several_ranks_are_on_the_host_whatever_the_setting(tables: str):
    job = outline_of().job
    two_ranks: Any = SimpleNamespace(size=2)
    outline = RunOutline(job=replace(job, device=torch.device("cuda"), world=two_ranks))
    assert table_items("history", None, 1000, outline, tables) == [Item("history", "host", 1000)]


def test_the_smallest_step_is_that_of_the_seeds_alone_whichever_edges_are_cut():
    outline = outline_of()
    ways: tuple[OverBudget, ...] = ("cut", "cut_by_degree", "cut_by_pagerank", "refuse")
    min_step_bytes = {
        how: plan_of(METHODS[0], outline, Budget(host="1GiB", over_budget=how)).min_step_bytes for how in ways
    }
    assert min_step_bytes["cut"] == min_step_bytes["cut_by_degree"] == min_step_bytes["cut_by_pagerank"]
    assert min_step_bytes["cut"] < min_step_bytes["refuse"]
