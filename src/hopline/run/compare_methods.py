"""Methods side by side under one budget: what each would take, how long an epoch lasts, and which to choose."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hopline.batch_unit import own_threads
from hopline.budget.guard import capped, keep_to
from hopline.budget.memory_plan import PLACES, DoesNotFit, Outline, Place, Plan
from hopline.budget.probe import job_of, learn, plan_of
from hopline.budget.settings import Budget
from hopline.contract import Job, Method, Unit, Work
from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.placement import place
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled, usual_fanouts
from hopline.nn.gnn import GNN
from hopline.tables import TensorTable
from hopline.util.config import format_size, kind_of, parse_size

TIMED, LONG_S = 3, 5.0
"""Steps that are timed, after one that is not, and the seconds after which no other is."""
MOST_EDGES = 1 << 23
"""Of the graph on which methods that go over all of it are timed; larger ones are timed on a part of theirs."""
MOST_TRIED = 5
"""Budgets that are tried before one is named."""
FOLDER = Path("tables")
"""Where tables that do not fit in memory would be kept."""


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


def plan_within(method: Method, outline: Outline, budget: Budget) -> Plan:
    """The method's plan; if it does not fit, an error that names a method that would."""
    try:
        return _checked(method, outline, budget)
    except DoesNotFit as error:
        names = [_typed(other) for other in alternatives(method, outline) if _fits(other, outline, budget)]
        tip = f"with this budget {names[0]} fits" if names else "no other method fits this budget either"
        raise DoesNotFit(f"{error}; {tip}", error.smallest_bytes) from None


def _checked(method: Method, outline: Outline, budget: Budget) -> Plan:
    """The method's plan; if it does not fit, an error with a budget that was tried and does."""
    plan = _best_known(method, outline, budget)
    if plan.fits:
        return plan
    by_host = outline.home == "host" and budget.host is not None
    by_host = by_host and parse_size(budget.host or 0) == budget.bytes_on(outline.device)
    smallest = _smallest_that_does(method, outline, budget, plan.missing)
    raise plan.refusal(smallest, "budget.host" if by_host else "budget")


def _smallest_that_does(
    method: Method, outline: Outline, budget: Budget, smallest: dict[Place, int]
) -> dict[Place, int]:
    """Limits by which the method fits, from those that it seems to need: tried as one who types them would find it, who
    knows nothing of the steps measured here."""
    found: dict[Place, int] | None = None
    for _ in range(MOST_TRIED):
        anew = replace(outline, predictors={})
        tried = _best_known(method, anew, _raised(budget, smallest, outline))
        if not tried.fits:
            if found is not None:
                break
            smallest = {place: max(smallest.get(place, 0), tried.missing.get(place, 0)) for place in PLACES}
            smallest = {place: size for place, size in smallest.items() if size}
            continue
        if not anew.predictor(_num_blocks(method, anew)).is_sure:
            learn(anew, _num_blocks(method, anew), tried.limit_bytes)
        found, smallest = smallest, plan_of(method, anew, budget).missing  # which may be less, by what was learnt
        if not any(size < found.get(place, 0) for place, size in smallest.items()):
            break
    return smallest if found is None else found


def _best_known(method: Method, outline: Outline, budget: Budget) -> Plan:
    """The plan, for which steps were measured if it does not fit by the bound: within what would fit by that."""
    plan = plan_of(method, outline, budget)
    num_blocks = _num_blocks(method, outline)
    if plan.fits or outline.predictor(num_blocks).is_sure:
        return plan
    learn(outline, num_blocks, plan_of(method, outline, _raised(budget, plan.missing, outline)).limit_bytes)
    return plan_of(method, outline, budget)


def _num_blocks(method: Method, outline: Outline) -> int:
    return len(method.fanout_per_layer) if isinstance(method, Sampled) else getattr(outline.model, "num_layers", 3)


def _raised(budget: Budget, smallest: Mapping[Place, int], outline: Outline) -> Budget:
    """The budget with limits that are at least these; on a CPU the device's is the host's."""
    found = {place: str(size) for place, size in smallest.items()}
    if "host" in found and outline.home == "host":
        found["device"] = found["host"]
    return replace(budget, **found)


def _fits(method: Method, outline: Outline, budget: Budget) -> bool:
    try:
        return plan_of(method, outline, budget).fits
    except ValueError:  # the model is not one for it
        return False


def alternatives(method: Method | None, outline: Outline) -> list[Method]:
    """The library's other methods, each with its usual settings."""
    found: list[Method] = []
    num_nodes, layers = outline.data.num_nodes, getattr(outline.model, "num_layers", 3)
    if isinstance(outline.model, GNN):
        cut = "metis" if importlib.util.find_spec("pymetis") else "streaming"
        parts = Historical(partition=cut).for_graph(num_nodes)
        whole = FullBatch(num_shards=1, partition=cut)
        found = [parts, whole, replace(parts, folder=FOLDER), replace(whole, folder=FOLDER)]
    found.insert(0, Sampled(fanouts=usual_fanouts(layers)))
    return [other for other in found if type(other) is not type(method)]


def _typed(method: Method) -> str:
    """How a method is asked for."""
    folder = getattr(method, "folder", None)
    return f"method={kind_of(type(method))}" + ("" if folder is None else f" method.folder={folder}")


def _planned(method: Method, outline: Outline, budget: Budget) -> Candidate:
    try:
        return Candidate(method=method, plan=_checked(method, outline, budget))
    except ValueError as error:  # it does not fit, or the model is not one for it
        return Candidate(method=method, refusal=str(error))


def compare(method: Method | None, outline: Outline, budget: Budget, *, probe: bool = True) -> list[Candidate]:
    """The method and all others: each as it fits, in memory if it can, with the seconds of an epoch if `probe`."""
    if probe:
        blocks = {len(method.fanout_per_layer)} if isinstance(method, Sampled) else set()
        for num_blocks in blocks | {getattr(outline.model, "num_layers", 3)}:
            learn(outline, num_blocks)
    found: dict[str, Candidate] = {}
    for one in [*([] if method is None else [method]), *alternatives(method, outline)]:
        before = found.get(kind_of(type(one)))
        if before is None or before.plan is None:
            planned = _planned(one, outline, budget)
            found[planned.name] = planned if planned.plan is not None or before is None else before
    return [_with_seconds(candidate, budget, outline) if probe else candidate for candidate in found.values()]


def _with_seconds(candidate: Candidate, budget: Budget, outline: Outline) -> Candidate:
    if candidate.plan is None:
        return candidate
    try:
        return replace(candidate, seconds=_seconds(candidate.plan, budget, outline))
    except ValueError as error:  # a step of it was refused
        return replace(candidate, plan=None, refusal=str(error))


def recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one whose optimizer steps are the fastest: epochs are of a few, of many, or of one step."""

    def lasts(candidate: Candidate) -> float:
        assert candidate.plan is not None
        return math.inf if math.isnan(candidate.seconds) else candidate.seconds / candidate.plan.steps

    return min((c for c in candidates if c.plan is not None), key=lasts, default=None)


def choose(outline: Outline, budget: Budget) -> tuple[Method, str]:
    """What `method=auto` takes, and a line that says why."""
    found = compare(None, outline, budget)
    best = recommended(found)
    if best is None or best.plan is None:
        reasons = "; ".join(candidate.refusal for candidate in found)
        raise ValueError(f"no method fits this budget: {reasons}")
    beside = [f"{c.name} {c.seconds:.2g} s" if c.plan else f"{c.name} does not fit" for c in found if c is not best]
    sentence = f"method={best.name}: an epoch takes about {best.seconds:.2g} s ({', '.join(beside)})"
    return best.method, sentence


# ---- seconds


def _seconds(plan: Plan, budget: Budget, outline: Outline) -> float:
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
        with capped(budget, job.device):
            lasted = _timed(keep_to(plan, budget, method.bind(job), job), job)
    return scale * plan.steps * sum(lasted) / len(lasted)


def _timed(work: Work, job: Job) -> list[float]:
    """Seconds of some steps."""
    epochs, lasted = (work.units(epoch) for epoch in count(1)), []
    with torch.random.fork_rng([job.device] if job.device.type == "cuda" else []), own_threads(job):
        for unit in islice(chain.from_iterable(map(_closing, epochs)), 1 + TIMED):
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


def _closing(units: Iterator[Unit]) -> Iterator[Unit]:
    try:
        yield from units
    finally:
        close = getattr(units, "close", None)
        if close is not None:
            close()


def _smaller(outline: Outline) -> tuple[Outline, float]:
    """The run on the first nodes of its graph, and by how much the whole of it is larger."""
    data = outline.data
    if data.num_edges <= MOST_EDGES:
        return outline, 1.0
    num_nodes = max(1, int(torch.searchsorted(data.graph.indptr, MOST_EDGES)))
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
