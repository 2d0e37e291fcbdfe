"""Compare the methods within one budget: their memory, the time of an epoch, and which to choose.

`hopline plan` prints the comparison, and `method=auto` takes its recommendation.

    each method  ->  plan within the budget  ->  a few timed steps of a copy of the model  ->  Candidate

The recommendation goes by the time of an optimizer step, since epochs have many steps (sampling), some
(parts) or one (full batch). It knows speed and memory alone, not how much a method learns from a step.

A comparison costs the steps that are timed. A method that goes over the whole graph in a step is timed on a
part of a large graph, and the time is scaled by edges.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from hopline.budget.guard import guard_of, limit_cuda_memory
from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import PLACES, Budget, Plan
from hopline.budget.probe import job_of
from hopline.contract import Job, Method, Work
from hopline.core.examples import Examples
from hopline.core.partition import Partition
from hopline.data.dataset import Dataset
from hopline.data.placement import place
from hopline.data.placement_settings import Placement
from hopline.device.meter import find_device
from hopline.device.snapshots import preserve_rng
from hopline.methods.plan_within import alternatives, learn, plan_or_raise, settings_to_type
from hopline.tables import TensorTable
from hopline.tasks.settings import TaskSettings
from hopline.training.settings import TrainSettings
from hopline.units.job import make_job
from hopline.units.own_threads import own_threads
from hopline.util.config import format_size, kind_of

NUM_TIMED_STEPS = 3
"""Steps that are timed for an estimate, after one step that warms up."""
MAX_TIMED_S = 5.0
"""Seconds after which no further step is timed, the step that warms up included."""
MAX_TIMED_EDGES = 1 << 23
"""Most edges of a graph on which a method that goes over the whole graph is timed.

On a larger graph, the method is timed on the graph's first nodes.
"""

REASON = "the fastest steps of those that fit; which method is more accurate is not known before training"
"""Why a method is recommended, and what the recommendation does not know."""


def outline_of_run(
    model: nn.Module,
    data: Dataset,
    settings: TrainSettings,
    placement: Placement | None = None,
    task: TaskSettings | None = None,
) -> RunOutline:
    """Return the outline from which a run without `train_step=` is planned."""
    device = find_device(settings.device)
    job = make_job(model, data, task=task, seed=settings.seed, device=device, bf16=settings.precision == "bf16")
    return RunOutline(
        job=job,
        optimizer=settings.optimizer,
        placement=placement or Placement(),
        async_evaluation=settings.evaluate == "async",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A method with its plan within a budget, or with the reason why there is none."""

    method: Method
    plan: Plan | None = None
    """The plan within the budget; None if the method does not fit."""
    refusal: str = ""
    """The reason why `plan` is None; else empty."""
    epoch_s: float = math.nan
    """Estimated seconds of an epoch; nan if no step was run."""

    @property
    def name(self) -> str:
        """The kind of the method, such as "full_batch"."""
        return kind_of(type(self.method))


def compare(method: Method | None, outline: RunOutline, budget: Budget) -> list[Candidate]:
    """Return a candidate for each kind of method, with the plan that a run of it has.

    A kind may have several forms, with tables in memory or on disk. The first form that fits is the
    candidate.

    method: the method of the run, with its settings; None to compare all with their default settings.
    """
    methods = alternatives(method, outline)
    if method is not None:
        methods = [method, *methods]
    candidates: dict[str, Candidate] = {}  # by kind
    for form in methods:
        earlier = candidates.get(kind_of(type(form)))
        if earlier is not None and earlier.plan is not None:
            continue
        candidate = _candidate(form, outline.forget(), budget)
        # If no form fits, the refusal of the first one is shown.
        if earlier is None or candidate.plan is not None:
            candidates[candidate.name] = candidate
    return list(candidates.values())


def _candidate(method: Method, outline: RunOutline, budget: Budget) -> Candidate:
    """A method with its plan and the time of an epoch, or a refusal.

    outline: one that has measured nothing. So the plan is that of a run, which knows nothing of other methods.
    """
    try:
        plan = plan_or_raise(method, outline, budget)
        if budget == Budget() and plan.num_blocks is not None:
            # A run without a budget has no plan. Measured steps predict less than the bound.
            learn(outline, plan.num_blocks)
            plan = plan_or_raise(method, outline, budget)
        epoch_s = _estimate_epoch_s(plan, budget, outline)
    except ValueError as error:  # the method does not fit, cannot train this model, or a guard refused a step
        return Candidate(method=method, refusal=str(error))
    if plan.price is not None:
        # The timed steps are the better estimate, and the ratio stays that of a run's plan.
        step_s = epoch_s / plan.steps
        free_step_s = step_s * plan.price.free_step_s / plan.price.step_s
        plan = replace(plan, price=replace(plan.price, step_s=step_s, free_step_s=free_step_s))
    return Candidate(method=method, plan=plan, epoch_s=epoch_s)


def recommend(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate with the fastest optimizer steps; None if no candidate fits."""

    def step_s(candidate: Candidate) -> float:
        # Per step and not per epoch: methods differ in the number of steps of an epoch.
        assert candidate.plan is not None
        return math.inf if math.isnan(candidate.epoch_s) else candidate.epoch_s / candidate.plan.steps

    fitting = [candidate for candidate in candidates if candidate.plan is not None]
    return min(fitting, key=step_s, default=None)


def choose(outline: RunOutline, budget: Budget) -> tuple[Method, str]:
    """Return the method that `method=auto` takes, and a line that says why.

    Raises:
        ValueError: No method fits.
    """
    candidates = compare(None, outline, budget)
    best = recommend(candidates)
    if best is None or best.plan is None:
        reasons = "; ".join(candidate.refusal for candidate in candidates)
        raise ValueError(f"no method fits this budget: {reasons}")
    others = []
    for candidate in candidates:
        if candidate is not best:
            verdict = f"{candidate.epoch_s:.2g} s" if candidate.plan else "does not fit"
            others.append(f"{candidate.name} {verdict}")
    times = f"an epoch takes about {best.epoch_s:.2g} s ({', '.join(others)})"
    return best.method, f"{settings_to_type(best.method)}: {times}; {REASON}"


# ---- time of an epoch


def _estimate_epoch_s(plan: Plan, budget: Budget, outline: RunOutline) -> float:
    """Estimate the seconds of an epoch from a few steps, on a copy of the model."""
    scale = 1.0
    if plan.method.grows_with_graph:
        outline, scale = _shrink(outline)
    if plan.partition is not None and scale > 1:
        # Parts of about as many edges as those of the plan, which are parts of the whole graph.
        num_parts = math.ceil(plan.partition.num_parts / scale)
        num_nodes = outline.data.num_nodes
        part_of = (torch.arange(num_nodes) * num_parts // num_nodes).int()
        plan = replace(plan, partition=Partition(part_of, num_parts, "range"))
    if outline.device.type == "cuda":
        placement = plan.placement or plan.method.placement(outline.placement)
        data = place(outline.data, placement, outline.device)
        outline = replace(outline, job=replace(outline.job, data=data))

    job = job_of(outline)
    with TemporaryDirectory() as folder, limit_cuda_memory(budget, job.device):
        work = plan.method.for_timing(Path(folder)).bind(job)
        guard = guard_of(plan, budget, job, outline)
        if guard is not None:
            work = work.guarded(guard, plan)
        durations_s = _time_steps(work, job)
    return scale * plan.steps * sum(durations_s) / len(durations_s)


def _time_steps(work: Work, job: Job) -> list[float]:
    """Seconds of each timed step: forward, backward and the writing of state, without the optimizer.

    A step is a unit of `work`. The first one warms up, and is left out unless it is the only one.
    """
    epochs = (work.units(epoch) for epoch in count(1))
    durations_s: list[float] = []
    with preserve_rng(job.device), own_threads(job):
        # The chain has no name, so the end of the loop frees it. That closes the work's iterator, which must
        # happen within this context.
        for unit in islice(chain.from_iterable(epochs), 1 + NUM_TIMED_STEPS):
            start_s = time.perf_counter()
            total = unit.size if unit.total_size is None else unit.total_size
            unit.forward_backward(total or 1)  # of the mean loss over `total` examples
            unit.commit()
            job.module.zero_grad(set_to_none=True)
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            durations_s.append(time.perf_counter() - start_s)
            if sum(durations_s) > MAX_TIMED_S:
                break
    return durations_s[1:] or durations_s


def _shrink(outline: RunOutline) -> tuple[RunOutline, float]:
    """(the run on the first nodes of its graph, edges of the whole graph per edge of that part).

    A graph of at most `MAX_TIMED_EDGES` edges is used as it is, with the ratio 1.
    """
    data = outline.data
    if data.num_edges <= MAX_TIMED_EDGES:
        return outline, 1.0
    num_nodes = max(1, int(torch.searchsorted(data.graph.indptr, MAX_TIMED_EDGES)))
    part = first_nodes(data, num_nodes)
    examples = Examples(outline.train_ids[outline.train_ids < num_nodes])
    if not len(examples):
        # A step needs a training node, with a label: the first node may have none.
        y = outline.job.examples.labels(data.y, torch.zeros(1, dtype=torch.int64))
        examples = Examples(torch.zeros(1, dtype=torch.int64), y)
    job = replace(outline.job, data=part, examples=examples)
    return replace(outline, job=job), data.num_edges / max(1, part.num_edges)


def first_nodes(data: Dataset, num_nodes: int) -> Dataset:
    """Return a dataset of the first nodes and the edges between them, in memory."""
    graph = data.graph
    num_in_edges = int(graph.indptr[num_nodes])
    is_inside = graph.indices[:num_in_edges] < num_nodes
    # [num_in_edges + 1] int64. Entry e counts the edges from inside among the first e edges, so that the
    # entries at the old offsets are the new offsets.
    num_inside_before = torch.cat([is_inside.new_zeros(1, dtype=torch.int64), is_inside.cumsum(0)])
    indptr = num_inside_before[graph.indptr[: num_nodes + 1]]
    indices = graph.indices[:num_in_edges][is_inside]
    edge_arrays = {name: rows[:num_in_edges][is_inside] for name, rows in graph.edge.items()}

    ids = torch.arange(num_nodes)
    return replace(
        data,
        graph=graph.with_arrays(indptr, indices, edge_arrays),
        tables={name: TensorTable(table.read(ids)) for name, table in data.tables.items()},
        y=None if data.y is None else data.y[:num_nodes],
        splits={name: nodes[nodes < num_nodes] for name, nodes in data.splits.items()},
        alternatives=(),
        folder=None,
    )


def table_of(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Return a table row per candidate.

    A row has the method, its peaks on the device, on the host and on disk, the time of an epoch, the steps
    of an epoch, and how a step fits the budget or why it does not.
    """
    rows = []
    for candidate in candidates:
        plan = candidate.plan
        if plan is None:
            # In place of three peaks, the time and the steps.
            rows.append([candidate.name, *["-"] * 5, candidate.refusal])
            continue
        peaks = []
        for memory in PLACES:
            peak_bytes = plan.peak_bytes(memory)
            peaks.append(format_size(peak_bytes) if peak_bytes else "-")
        epoch = "-" if math.isnan(candidate.epoch_s) else f"{candidate.epoch_s:.3g} s"
        rows.append([candidate.name, *peaks, epoch, str(plan.steps), plan.step_summary])
    return rows
