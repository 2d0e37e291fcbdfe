"""Methods side by side under one budget: what each would take, how long an epoch lasts, and which to choose."""

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
from hopline.budget.probe import job_of
from hopline.contract import PLACES, Budget, Job, Method, Plan, Work, units_from
from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.placement import place
from hopline.data.placement_settings import Placement
from hopline.device.meter import find_device
from hopline.device.snapshots import preserve_rng
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.plan_within import alternatives, learn, plan_or_raise
from hopline.methods.sampled.settings import Sampled
from hopline.tables import TensorTable
from hopline.training.settings import TrainSettings
from hopline.units.batch_unit import own_threads
from hopline.units.job import make_job
from hopline.util.config import format_size, kind_of

TIMED, LONG_S = 3, 5.0
"""Steps that are timed, after one that is not, and the seconds after which no other is."""
MAX_TIMED_EDGES = 1 << 23
"""Of the graph on which methods that go over all of it are timed; larger ones are timed on a part of theirs."""


def outline_of_run(
    model: nn.Module, data: Dataset, settings: TrainSettings, placement: Placement | None = None
) -> RunOutline:
    """What a run with the usual loss is planned from."""
    device = find_device(settings.device)
    job = make_job(model, data, seed=settings.seed, device=device, bf16=settings.precision == "bf16")
    beside = settings.evaluate == "async"
    return RunOutline(
        job=job, optimizer=settings.optimizer, placement=placement or Placement(), async_evaluation=beside
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A method, as far as it keeps to a budget."""

    method: Method
    plan: Plan | None = None
    """None if it does not fit;"""
    refusal: str = ""
    """this is why."""
    seconds: float = math.nan
    """Of an epoch, by a few steps; nan where none was run."""

    @property
    def name(self) -> str:
        return kind_of(type(self.method))


def _plan(method: Method, outline: RunOutline, budget: Budget) -> Candidate:
    try:
        return Candidate(method=method, plan=plan_or_raise(method, outline, budget))
    except ValueError as error:  # it does not fit, or the model is not one for it
        return Candidate(method=method, refusal=str(error))


def compare(method: Method | None, outline: RunOutline, budget: Budget, *, probe: bool = True) -> list[Candidate]:
    """The method and all others: each as it fits, in memory if it can, with the seconds of an epoch if `probe`."""
    if probe:
        blocks = {len(method.fanout_per_layer)} if isinstance(method, Sampled) else set()
        for num_blocks in blocks | {getattr(outline.model, "num_layers", 3)}:
            learn(outline, num_blocks)
    found: dict[str, Candidate] = {}
    for one in [*([] if method is None else [method]), *alternatives(method, outline)]:
        before = found.get(kind_of(type(one)))
        if before is None or before.plan is None:
            planned = _plan(one, outline, budget)
            found[planned.name] = planned if planned.plan is not None or before is None else before
    return [_with_seconds(candidate, budget, outline) if probe else candidate for candidate in found.values()]


def _with_seconds(candidate: Candidate, budget: Budget, outline: RunOutline) -> Candidate:
    if candidate.plan is None:
        return candidate
    try:
        return replace(candidate, seconds=_seconds(candidate.plan, budget, outline))
    except ValueError as error:  # a step of it was refused
        return replace(candidate, plan=None, refusal=str(error))


def recommend(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one whose optimizer steps are the fastest: epochs are of a few, of many, or of one step."""

    def lasts(candidate: Candidate) -> float:
        assert candidate.plan is not None
        return math.inf if math.isnan(candidate.seconds) else candidate.seconds / candidate.plan.steps

    return min((c for c in candidates if c.plan is not None), key=lasts, default=None)


def choose(outline: RunOutline, budget: Budget) -> tuple[Method, str]:
    """What `method=auto` takes, and a line that says why."""
    found = compare(None, outline, budget)
    best = recommend(found)
    if best is None or best.plan is None:
        reasons = "; ".join(candidate.refusal for candidate in found)
        raise ValueError(f"no method fits this budget: {reasons}")
    beside = [f"{c.name} {c.seconds:.2g} s" if c.plan else f"{c.name} does not fit" for c in found if c is not best]
    sentence = f"method={best.name}: an epoch takes about {best.seconds:.2g} s ({', '.join(beside)})"
    return best.method, sentence


# ---- seconds


def _seconds(plan: Plan, budget: Budget, outline: RunOutline) -> float:
    """Of an epoch, by some steps of a copy of the model."""
    outline, scale = _smaller(outline) if not isinstance(plan.method, Sampled) else (outline, 1.0)
    if outline.device.type == "cuda":
        data = place(outline.data, plan.placement or plan.method.placement(outline.placement), outline.device)
        outline = replace(outline, job=replace(outline.job, data=data))
    method, job = plan.method, job_of(outline)
    if isinstance(method, Historical):
        method = replace(method, warm_up=False)
    with TemporaryDirectory() as folder:
        if isinstance(method, Historical | FullBatch) and method.folder is not None:
            method = replace(method, folder=Path(folder))
        with limit_cuda_memory(budget, job.device):
            work, guard = method.bind(job), guard_of(plan, budget, job, outline)
            lasted = _time_steps(work if guard is None else work.guarded(guard, plan), job)
    return scale * plan.steps * sum(lasted) / len(lasted)


def _time_steps(work: Work, job: Job) -> list[float]:
    """Seconds of some steps."""
    epochs, lasted = (units_from(work, epoch) for epoch in count(1)), []
    with preserve_rng(job.device), own_threads(job):
        for unit in islice(chain.from_iterable(epochs), 1 + TIMED):
            began = time.perf_counter()
            unit.forward_backward((unit.size if unit.total_size is None else unit.total_size) or 1)
            unit.commit()
            job.module.zero_grad(set_to_none=True)
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            lasted.append(time.perf_counter() - began)
            if sum(lasted) > LONG_S:
                break
    return lasted[1:] or lasted


def _smaller(outline: RunOutline) -> tuple[RunOutline, float]:
    """The run on the first nodes of its graph, and by how much the whole of it is larger."""
    data = outline.data
    if data.num_edges <= MAX_TIMED_EDGES:
        return outline, 1.0
    num_nodes = max(1, int(torch.searchsorted(data.graph.indptr, MAX_TIMED_EDGES)))
    part = first_nodes(data, num_nodes)
    ids = outline.train_ids[outline.train_ids < num_nodes]
    ids = ids if ids.numel() else torch.zeros(1, dtype=torch.int64)
    job = replace(outline.job, data=part, train_ids=ids)
    return replace(outline, job=job), data.num_edges / max(1, part.num_edges)


def first_nodes(data: Dataset, num_nodes: int) -> Dataset:
    """The first nodes of a dataset and the edges between them, in memory."""
    graph = data.graph
    stop = int(graph.indptr[num_nodes])
    inside = graph.indices[:stop] < num_nodes
    indptr = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])[graph.indptr[: num_nodes + 1]]
    edge = {name: rows[:stop][inside] for name, rows in graph.edge.items()}
    ids = torch.arange(num_nodes)
    tables = {name: TensorTable(table.read(ids)) for name, table in data.tables.items()}
    splits = {name: nodes[nodes < num_nodes] for name, nodes in data.splits.items()}
    y = None if data.y is None else data.y[:num_nodes]
    new = Graph(indptr, graph.indices[:stop][inside], edge)
    return replace(data, graph=new, tables=tables, y=y, splits=splits, alternatives=(), folder=None)


def table_of(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Rows for people: method, settings, peaks, time, steps, and what becomes of a step."""
    rows = []
    for candidate in candidates:
        plan = candidate.plan
        if plan is None:
            rows.append([candidate.name, *["-"] * 5, candidate.refusal])
            continue
        peaks = [format_size(plan.peak_bytes(place)) if plan.peak_bytes(place) else "-" for place in PLACES]
        seconds = "-" if math.isnan(candidate.seconds) else f"{candidate.seconds:.3g} s"
        rows.append([candidate.name, *peaks, seconds, str(plan.steps), plan.whole])
    return rows
