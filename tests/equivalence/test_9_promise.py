"""Identity 9: measured peak <= predicted peak. A plan holds, or is refused before anything runs.

Random graphs, batches and budgets (`Triple`). Every plan that is made is run and measured. A plan is not refused for
nothing: of the budgets in which single seeds fit, only some are refused.

Whole runs of all methods, on graphs with hubs, are drawn by `tests/budget/random_budgets.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hopline as hl
from hopline.budget.guard import guard_of
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, DoesNotFit, Plan
from hopline.contract import Job
from hopline.core.batch_sizes import Sizes
from hopline.core.examples import Examples
from hopline.device.meter import meter_of
from hopline.methods.plan_within import plan_of
from hopline.methods.sampled.memory_plan import draw_batches
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.nn.whole_module import as_batch_model
from hopline.units.batch_unit import BatchUnit
from hopline.units.own_threads import own_threads
from tests.budget.random_budgets import draw_case, run_case, table_lines
from tests.support.helpers import dataset_of, own_task, randn, random_graph, stack_of, usual_task

CONVS = ("sage-mean", "gcn", "gat", "gin")
FEW = 25
MANY = 1000


@dataclass(frozen=True)
class Triple:
    """A graph, a batch and a budget."""

    num_nodes: int
    mean_degree: int
    seed: int
    conv: str
    width: int
    fanouts: tuple[int, ...]
    batch_size: int
    share: float
    """The budget: 0 is half of what a step of one seed needs, and 1 is 1.2 times what a whole step needs."""


TRIPLES = st.builds(
    Triple,
    num_nodes=st.integers(10, 120),
    mean_degree=st.integers(1, 12),
    seed=st.integers(0, 1 << 20),
    conv=st.sampled_from(CONVS),
    width=st.integers(1, 48),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5, 10]), min_size=1, max_size=3).map(tuple),
    batch_size=st.integers(1, 64),
    share=st.sampled_from([n / 20 for n in range(21)]),
)


def outline_of(triple: Triple) -> RunOutline:
    """The outline of a run of a triple."""
    graph = random_graph(triple.num_nodes, triple.mean_degree * triple.num_nodes, seed=triple.seed)
    data = dataset_of(graph, randn(triple.num_nodes, 7, dtype=torch.float32))
    torch.manual_seed(triple.seed)
    widths = [7, *[triple.width] * (len(triple.fanouts) - 1), 3]
    model = GNN(stack_of(triple.conv, *widths), dropout=0.5).float()
    train_step = usual_task(3).loss
    ids = data.splits["train"]
    return RunOutline(
        job=Job(data=data, model=as_batch_model(model), module=model, examples=Examples(ids), task=own_task(train_step))
    )


def one_seed_bytes(outline: RunOutline, method: Sampled) -> int:
    """The measured peak of the largest step of a single seed, among the three largest samples."""
    job = outline.job
    peak_bytes = 0
    batches = sorted(draw_batches(method, outline, 1), key=lambda batch: float(Sizes.of(batch).array.sum()))
    with own_threads(job):
        for batch in batches[-3:]:
            with meter_of("cpu") as meter:
                BatchUnit(job, batch).forward_backward(1)
            job.module.zero_grad(set_to_none=True)
            peak_bytes = max(peak_bytes, meter.peak_bytes)
    return peak_bytes


def holds(plan: Plan, budget: Budget, outline: RunOutline) -> bool:
    """Whether an epoch keeps to the plan: resident bytes and steps within the budget, batches within their share."""
    job = outline.job
    guard = guard_of(plan, budget, job, outline)
    assert guard is not None
    guard.measure_every = 1
    work = plan.method.bind(job).guarded(guard, plan)
    peak_bytes = 0
    largest_batch_bytes = 0
    with own_threads(job), closing(work.units(1)) as units:  # type: ignore[type-var]
        for unit in units:
            largest_batch_bytes = max(largest_batch_bytes, unit.batch.num_bytes)
            unit.forward_backward(unit.total_size)
            job.module.zero_grad(set_to_none=True)
    record = guard.take_record()
    peak_bytes = plan.resident_bytes("host") + max(record["after"], default=0)
    prepared = next(item for item in plan.items if "prepared" in item.name).num_bytes
    limit = plan.limits["host"]
    assert limit is not None
    return peak_bytes <= limit and largest_batch_bytes <= prepared and record["over"] == 0


def check(triple: Triple) -> tuple[bool, bool]:
    """(whether single seeds fit the budget, whether the plan was refused). A plan that is made must hold."""
    outline = outline_of(triple)
    method = Sampled(fanouts=triple.fanouts, batch_size=triple.batch_size, workers=0)
    unlimited = plan_of(method, outline_of(triple), Budget())
    needed_bytes = unlimited.resident_bytes("host") + one_seed_bytes(outline, method)
    budget_bytes = int(
        needed_bytes / 2
        + triple.share * (1.2 * (unlimited.resident_bytes("host") + unlimited.step_bytes) - needed_bytes / 2)
    )
    budget = Budget(host=str(max(1, budget_bytes)))
    is_possible = budget_bytes >= needed_bytes
    plan = plan_of(method, outline, budget)
    if plan.smallest_bytes("host") > budget_bytes:
        with pytest.raises(DoesNotFit):
            plan.check()
        return is_possible, True
    assert holds(plan, budget, outline), triple
    return is_possible, False


def share_not_refused(number: int) -> float:
    """The share of possible budgets that are not refused; every plan that is made is run."""
    checked: list[tuple[bool, bool]] = []

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(TRIPLES)
    def run(triple: Triple) -> None:
        checked.append(check(triple))

    run()
    refusals = [is_refused for is_possible, is_refused in checked if is_possible]
    assert len(refusals) > number / 10
    print(f"{number} plans, {len(refusals)} of them possible, {sum(refusals)} of these refused")
    return 1 - sum(refusals) / max(1, len(refusals))


def test_a_plan_holds_or_is_refused():
    assert share_not_refused(FEW) >= 0.65  # 25 triples do not tell more; a thousand reach 0.8


# ---- whole runs of all methods, on graphs with hubs

QUICK = (4, 8, 16, 18, 32, 47)
"""Seeds of cases of all methods and models that take little time."""


def broken_promises(seeds: Iterable[int]) -> list[str]:
    """The cases in which a step took more than the limit or than predicted, or the least budget did not suffice.

    `Historical` keeps to the limit only: its prediction may be missed by a little, and a run may still be refused when
    its first batch is split, with a larger budget by name.
    """
    outcomes = [run_case(draw_case(seed)) for seed in seeds]
    print("\n".join(table_lines(outcomes)))
    assert len({type(outcome.case.method) for outcome in outcomes if not outcome.error}) == 3
    return [
        f"{outcome.line} {outcome.error}"
        for outcome in outcomes
        if outcome.verdict == "over"
        or (outcome.verdict == "above" and not isinstance(outcome.case.method, hl.Historical))
        or (outcome.error and outcome.case.share >= 1 and not isinstance(outcome.case.method, hl.Historical))
    ]


def test_random_budgets_are_kept_or_refused():
    assert broken_promises(QUICK) == []


@pytest.mark.extended
def test_two_hundred_budgets_are_kept_or_refused():
    assert broken_promises(range(200)) == []


@pytest.mark.extended
def test_a_thousand_plans_hold_or_are_refused():
    assert share_not_refused(MANY) >= 0.8
