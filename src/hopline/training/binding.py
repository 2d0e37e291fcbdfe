"""Binds a method to a job: with the data placed where it is read fastest, and within a budget by a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopline.budget.guard import BudgetGuard, guard_of
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, Plan
from hopline.contract import Job, Method, Work
from hopline.data.placement_settings import Placement
from hopline.methods.plan_within import plan_within
from hopline.shards.data import ShardedData


@dataclass(frozen=True, eq=False, kw_only=True)
class Bound:
    """A method that is bound to a job."""

    method: Method
    """As a plan may have changed it."""
    job: Job
    """With the data placed."""
    work: Work
    plan: Plan | None = None
    guard: BudgetGuard | None = None
    """Keeps steps to the plan. None without a budget, or where the plan sets no limit for a step."""


def bind(
    method: Method, job: Job, placement: Placement, budget: Budget | None, *, optimizer: str, async_evaluation: bool
) -> Bound:
    """Place the data and bind the method. With a budget, a plan decides on the placement and on settings of the method.

    optimizer: its name, or "own" for one of the user's.
    """
    if budget is None:
        placed_job = _place(job, method, placement)
        return Bound(method=method, job=placed_job, work=_bind_method(method, placed_job))
    outline = RunOutline(job=job, optimizer=optimizer, placement=placement, async_evaluation=async_evaluation)
    plan = plan_within(method, outline, budget)
    placed_job = _place(job, plan.method, plan.placement or placement)
    guard = guard_of(plan, budget, placed_job, outline)
    work = _bind_method(plan.method, placed_job)
    if guard is not None:
        work = work.guarded(guard, plan)
    return Bound(method=plan.method, job=placed_job, work=work, plan=plan, guard=guard)


def _place(job: Job, method: Method, placement: Placement) -> Job:
    """The job with its data where a GPU reads them fastest.

    Shards stay where they are. So does data that is on a GPU already, unless the user asks for a placement.
    """
    if job.device.type != "cuda" or isinstance(job.data, ShardedData):
        return job
    is_placed = job.data.graph.device.type == "cuda"
    if is_placed and placement == Placement():
        return job
    return replace(job, data=method.place(job.data, placement, job.device))


def _bind_method(method: Method, job: Job) -> Work:
    work = method.bind(job)
    if not isinstance(work, Work):
        raise ValueError(
            f"{type(method).__name__}.bind returned a {type(work).__name__}: derive its class from hl.extend.Work, "
            "with units(self, epoch, done=0, examples=0)"
        )
    return work
