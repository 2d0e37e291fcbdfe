"""A memory plan: the limit of a step is the budget of a place less its resident bytes.

Numbers are small and round, so that each assertion can be checked by hand. Unless a test changes it: 1000 of 4000
bytes on the device are resident, and a step takes 2500.
"""

from __future__ import annotations

import math

import pytest
import torch

from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, DoesNotFit, Item, Plan
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.run.compare_methods import outline_of_run
from hopline.training.settings import TrainSettings
from hopline.util.config import format_size
from tests.support.helpers import dataset_of, randn, random_graph, stack_of

GIB = 1 << 30
ITEMS = (Item("weights", "device", 1000), Item("graph", "host", 5000), Item("history", "disk", 700))


def plan_of(**changes: object) -> Plan:
    """A plan for the device with some fields changed."""
    limits = {"device": 4000, "host": 6000, "disk": None}
    fields = {
        "method": Sampled(),
        "items": ITEMS,
        "limits": limits,
        "compute_place": "device",
        "step_bytes": 2500.0,
        "min_step_bytes": 100.0,
        "steps": 3,
        "count": 64,
        "covers": "batches of {} seeds",
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


def outline_of(optimizer: str = "adam") -> RunOutline:
    """The outline of a run on the CPU with a small model."""
    data = dataset_of(random_graph(100, 400), randn(100, 6))
    model = GNN(stack_of("sage-mean", 6, 8, 3)).double()
    return outline_of_run(model, data, TrainSettings(optimizer=optimizer))  # type: ignore[arg-type]


def test_the_limit_of_a_step_is_the_budget_less_the_resident_bytes():
    plan = plan_of().check()
    assert plan.limit_bytes == 3000
    assert plan.peak_bytes("device") == 3500
    assert plan.peak_bytes("host") == 5000
    assert plan.step_summary == "batches of 64 seeds, whole"
    assert plan.lines()[0] == "plan: device 3.4 KiB of 3.9 KiB: weights 1000 B, a step 2.4 KiB"


def test_a_step_above_the_limit_is_split_into_micro_batches():
    plan = plan_of(step_bytes=7000.0).check()
    assert plan.num_micro_batches == 3
    assert plan.peak_bytes("device") == 4000
    assert plan.step_summary == "batches of 64 seeds, in micro-batches (about 27 would fit at once)"


def test_a_refusal_names_the_budget_needed_and_the_largest_item():
    with pytest.raises(DoesNotFit, match=r"3\.9 KiB on the device.*budget=9\.77KiB.*8\.8"):
        plan_of(min_step_bytes=9000.0).check()
    limits = {"device": None, "host": 4000, "disk": 600}
    with pytest.raises(DoesNotFit, match=r"budget\.host=4\.89KiB, budget\.disk=700") as refused:
        plan_of(limits=limits).check()
    assert refused.value.smallest_bytes == {"host": 5000, "disk": 700}


def test_hidden_rows_of_evaluation_go_to_disk_where_the_host_is_full():
    on_host = {"compute_place": "host", "limits": {"device": None, "host": 9000, "disk": 5000}}
    assert plan_of(**on_host, hidden_bytes=1000).chunk_bytes == 3000
    tight = plan_of(**on_host, hidden_bytes=3000)
    assert tight.hidden_place == "disk"
    assert tight.chunk_bytes == 4000
    assert tight.smallest_bytes("disk") == 3700
    assert plan_of(limits=dict.fromkeys(("device", "host", "disk")), hidden_bytes=10 * GIB).chunk_bytes is None


def test_asynchronous_evaluation_shares_the_available_bytes_with_the_steps():
    alone = plan_of(step_bytes=1500.0)
    plan = plan_of(step_bytes=1500.0, async_evaluation=True)
    assert plan.limit_bytes + plan.evaluation_bytes == plan.available_bytes == alone.limit_bytes

    assert plan.chunk_bytes is not None
    assert 0 < plan.chunk_bytes <= plan.evaluation_bytes < plan.limit_bytes
    assert plan.peak_bytes("device") > alone.peak_bytes("device")
    assert plan.peak_bytes("device") <= (plan.limits["device"] or 0)
    assert plan.smallest_bytes("device") > alone.smallest_bytes("device")
    assert "asynchronous evaluation" in plan.lines()[0]


def test_on_a_cpu_the_device_budget_does_not_count():
    limits = outline_of().limits(Budget(device="2GiB", host="1GiB", disk="3GiB"))
    assert limits == {"device": None, "host": GIB, "disk": 3 * GIB}
    assert outline_of().limits(Budget()) == {"device": None, "host": None, "disk": None}


def test_an_outline_counts_weights_optimizer_and_data():
    outline = outline_of()
    weights = sum(p.numel() * 8 for p in outline.model.parameters())
    assert outline.resident_items() == [Item("weights", "host", weights), Item("optimizer", "host", 2 * weights)]
    assert outline_of("sgd").resident_items()[1].num_bytes == 0
    assert sum(item.num_bytes for item in outline.data_on_host()) == outline.data.num_bytes
    assert outline.dtype == torch.float64
    assert not math.isinf(outline.predictor(2).costs.fixed)
    assert format_size(outline.hidden_bytes()) == "12.5 KiB"
