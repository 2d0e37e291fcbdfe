"""Steps that keep to a budget.

Steps that can be cut are guarded: a `Guard` is asked before each one, measures it, and cuts a batch that would take too
much. All other steps are watched: a `Watch` measures them beside what the plan promised. `keep_to` chooses.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.micro_batches import (
    PieceBytes,
    check_split,
    cut_to_fit,
    groups_to_fit,
    piece_of,
    sizes_of,
    with_rows,
)
from hopline.budget.predictor import Predictor, Sizes, costs_of
from hopline.contract import Budget, Job, Outline, Plan, Unit, Work, units_from
from hopline.core.batch import Batch, Block
from hopline.core.sampler import NeighborSampler
from hopline.device.meter import NoMeter, meter_of, numbered
from hopline.device.out_of_memory import Before, attempt, gradient_bytes, state_bytes
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.work import SampledWork
from hopline.units.batch_unit import BatchUnit, autocast
from hopline.units.loss_on_pieces import LossAt, batch_of_seeds, loss_at
from hopline.util import trace
from hopline.util.config import format_size, parse_size

Redraw = Callable[[Tensor, int], tuple[Block, ...]]
"""(seeds, key) -> blocks drawn for them: `NeighborSampler.sample`."""
Step = Callable[[Batch], Tensor]
"""What is done with a batch, or with a piece of one."""
MOST_REDRAWS = 10
SHRINK, RECOVER = 0.8, 1.02
"""What is aimed at after memory ran out, as a share of what was promised; and by how much more after each good step."""


@dataclass
class Record:
    """What became of the batches of an epoch."""

    promised_bytes: float = 0.0
    """The largest promise made for a step that ran,"""
    peak_bytes: int = 0
    """and the most that one took."""
    before: list[float] = field(default_factory=list)
    """For each batch what it would have taken whole,"""
    after: list[int] = field(default_factory=list)
    """and what the largest of its pieces took; where it was not measured, what it was expected to."""
    over: int = 0
    """Pieces that took more than the limit."""
    split: int = 0
    pieces: int = 0
    resampled: int = 0
    cut: int = 0
    edges_cut: int = 0
    oom: int = 0
    """Times that memory ran out, and the batch went on in smaller pieces."""


@dataclass(eq=False)
class Guard:
    """Keeps the steps of one job within bytes: asks before each one, measures it, and learns.

    The first batches go by the bound, which is far above what they take, so they come in more pieces than later ones.
    """

    job: Job
    budget: Budget
    limit_bytes: int
    """What a step may take beyond all else that the run keeps: weights, optimizer, data, batches prepared ahead."""
    redraw: Redraw | None = None
    """How other edges are drawn for the same seeds, for over_budget=resample."""
    forward_only: bool = False
    """Whether steps are forward passes without gradients."""
    waits_on_host: bool = False
    """Whether batches come on the host, for a GPU, to which what runs of them is copied when its turn comes."""
    measure_every: int = 8
    """On a CPU, where it takes time, every so many-th whole batch is measured once steps are known; besides those that
    are expected to take more than any before them in an epoch, and all pieces."""
    predictor: Predictor | None = field(default=None, init=False)
    room_bytes: float = field(init=False)
    """What pieces are made for: the limit, and less for a while after memory ran out."""
    promised_bytes: float = field(default=0.0, init=False)
    """The largest promise made for a step that ran,"""
    peak_bytes: int = field(default=0, init=False)
    """and the most that one took."""

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(
                f"the budget leaves {format_size(max(0, self.limit_bytes))} for a step: give more, or make the model "
                "smaller"
            )
        self.room_bytes, self._failed_alone = self.limit_bytes, 0
        self._record, self._lock = Record(), threading.Lock()
        self._not_measured, self._most_measured = 0, 0.0

    @cached_property
    def inference(self) -> Guard:
        """The guard of sampled inference within the same bytes: what does not fit is split, as outputs are equal."""
        return Guard(self.job, replace(self.budget, over_budget="split"), self.limit_bytes, forward_only=True)

    def take_record(self) -> dict[str, Any]:
        """What happened since the last call."""
        record, self._record, self._most_measured = self._record, Record(), 0.0
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def unit(self, batch: Batch) -> Unit:
        return GuardedUnit(self.job, batch, self)

    # ---- how a batch runs

    def prepare(self, batch: Batch) -> Batch:
        """The batch with its groups, if it will be split: for threads that prepare batches, so that training need not.

        Only what leaves the gradients as they are is decided here: what was learnt by now depends on timing.
        """
        predictor, copied = self._predictor(Sizes.of(batch)), self.waits_on_host
        if self.budget.over_budget != "split" or not predictor.is_sure:
            return batch
        # What gradients take is left out: the thread that trains makes and frees them while this one runs.
        copies = PieceBytes.of(batch, None).kept(Sizes.of(batch)) if copied else 0
        if self.promise(batch) + copies <= self.room_bytes:
            return batch
        with suppress(ValueError):  # the training thread will meet the same, and say so
            batch = replace(batch, groups=tuple(self._groups(batch, copied=copied)))
        return batch

    def arrange(self, batch: Batch) -> Batch:
        """The batch as it may run: whole, in groups of its seeds, drawn anew or with fewer edges."""
        needed = self._bytes_of(batch, in_pieces=False)(Sizes.of(batch))
        if needed <= self.room_bytes:
            return replace(batch, groups=()) if batch.groups else batch
        match self.budget.over_budget:
            case "refuse":
                raise ValueError(
                    f"a batch may take {format_size(needed)}, and {format_size(self.room_bytes)} are left for a step: "
                    f"give the budget {format_size(needed - self.room_bytes)} more, make batch_size smaller, or set "
                    "over_budget=split"
                )
            case "cut":
                return self._cut(batch)
            case "resample" if (found := self._resampled(batch)) is not None:
                return found
        self._check_split()
        return batch if batch.groups else replace(batch, groups=tuple(self._groups(batch)))

    def run(self, batch: Batch, step: Step) -> list[tuple[Tensor | None, Tensor]]:
        """Give a batch to `step`, whole or in pieces within the limit: [(positions of seeds or None: all, result)]."""
        promised, given, done = self.promise(batch), batch, []
        with meter_of(self.job.device) as meter:
            batch = self.arrange(batch)
        largest, todo = meter.peak_bytes, deque[Tensor | None](batch.groups or (None,))
        by_bound = not self._predictor(Sizes.of(batch)).is_sure
        while todo:
            as_given = batch.blocks is given.blocks or self._is_elsewhere(batch)
            seed_idx, other_bytes = todo.popleft(), 0 if as_given else batch.num_bytes
            result, peak_bytes = self._try(batch, seed_idx, step, other_bytes)
            if result is None:
                batch, smaller = self._smaller(batch, seed_idx)
                todo.extendleft(reversed(smaller))
                continue
            done.append((seed_idx, result))
            largest = max(largest, peak_bytes)
            if by_bound and len(todo) > 1 and self._predictor(Sizes.of(batch)).is_sure:  # the rest by what was learnt
                by_bound, rest = False, torch.cat([group for group in todo if group is not None])
                todo = deque[Tensor | None](self._groups(batch, rest))
        if len(done) > 1:
            self.note_split(len(done))
        self.note_step(promised, largest)
        return done

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's output for the batch's seeds, on the host, by forward passes within the limit."""
        done = self.inference.run(batch, lambda piece: model(piece).cpu())
        if done[0][0] is None:
            return done[0][1]
        order = torch.cat([seed_idx for seed_idx, _ in done if seed_idx is not None])
        return torch.cat([rows for _, rows in done])[order.argsort()]

    def _try(self, batch: Batch, seed_idx: Tensor | None, step: Step, other_bytes: int) -> tuple[Tensor | None, int]:
        """(result, peak) of one piece; no result where it takes too much, and then nothing has changed.

        other_bytes: of the batch, where it is another one than was prepared.
        """
        bytes_of = self._bytes_of(batch, in_pieces=seed_idx is not None)
        promised, sizes = self.room_bytes, None
        measured = seed_idx is not None or self._is_measured(Sizes.of(batch))

        def made_and_run() -> Tensor | None:
            nonlocal promised, sizes
            piece = batch if seed_idx is None else piece_of(batch, seed_idx).batch()
            sizes = Sizes.of(piece)
            promised = bytes_of(sizes) + other_bytes
            if promised > self.room_bytes and seed_idx is not None and seed_idx.numel() > 1:
                return None  # more was learnt since it was found
            piece = piece.to(self.job.device)
            meter.lap()
            return step(piece)

        with meter_of(self.job.device) if measured else NoMeter() as meter:
            before = Before(self.job.module, self.job.device)
            result, ran_out = attempt(before, made_and_run)
        peak_bytes = before.gradient_bytes + other_bytes + meter.peak_bytes
        if result is not None and sizes is not None:
            if measured:
                self.learn(sizes, meter.lap_bytes)
            else:
                peak_bytes += int(self._predictor(sizes).expected(sizes))
            self.note_peak(promised, peak_bytes if measured else 0)
            self.note_good()
            self._failed_alone = 0
        elif ran_out:
            self.note_out_of_memory(promised)
        return result, peak_bytes

    def _is_measured(self, sizes: Sizes) -> bool:
        """Whether a whole batch is; one that is not is noted by what it is expected to take."""
        predictor = self._predictor(sizes)
        if self.job.device.type != "cpu" or not predictor.is_sure:
            return True
        expected, self._not_measured = predictor.expected(sizes), self._not_measured + 1
        if expected <= self._most_measured and self._not_measured < self.measure_every:
            return False
        self._most_measured, self._not_measured = max(expected, self._most_measured), 0
        return True

    def _smaller(self, batch: Batch, seed_idx: Tensor | None) -> tuple[Batch, Sequence[Tensor | None]]:
        """What goes on instead of some seeds that took too much."""
        if self.budget.over_budget == "refuse":
            raise ValueError("memory ran out in a step: make batch_size smaller, or set over_budget=split")
        if self.budget.over_budget == "cut":
            return self._cut(batch), [None]
        self._check_split()
        seeds = torch.arange(batch.num_seeds) if seed_idx is None else seed_idx
        if seeds.numel() > 1:
            self._failed_alone = 0
            return batch, self._groups(batch, seeds)
        self._failed_alone += 1
        if self._failed_alone > 1:  # once others may have taken the memory for a moment
            raise ValueError("memory ran out in a step of a single seed: make the fan-outs or the model smaller")
        return batch, [seeds]

    def _groups(self, batch: Batch, among: Tensor | None = None, copied: bool | None = None) -> list[Tensor]:
        """Seeds that run together: as few groups as are promised to fit, two at least."""
        predictor, bytes_of = self._predictor(Sizes.of(batch)), self._bytes_of(batch, in_pieces=True, copied=copied)
        together = Sizes.of(batch) if among is None else sizes_of(batch, [among])[0]

        def expected(sizes: Sizes) -> float:  # a promise for what is unlike all that was seen is far above it
            return bytes_of(sizes) - predictor.promise(sizes) + predictor.expected(sizes)

        options: dict[str, Any] = {"among": among, "first": max(2, math.ceil(expected(together) / self.room_bytes))}
        options |= {"most_bytes": self.limit_bytes if predictor.is_sure else math.inf, "least_of": expected}
        return groups_to_fit(batch, bytes_of, self.room_bytes, predictor.costs, **options)

    def _check_split(self) -> None:
        check_split(self.job.model, instead="make batch_size smaller" if self.forward_only else "set over_budget=cut")

    # ---- promises, and what became of them

    def beside_bytes(self, in_pieces: bool = False) -> int:
        """What is there beside a step: gradients from before, which the first of several pieces leaves, and buffers."""
        gradients, buffers = state_bytes(self.job.module)
        return buffers + (gradients if in_pieces and not self.forward_only else gradient_bytes(self.job.module))

    def _bytes_of(self, batch: Batch, in_pieces: bool, copied: bool | None = None) -> Callable[[Sizes], float]:
        """What a step of so many nodes and edges takes: of the batch itself, or of rows and indices taken from it.

        copied: whether from the host, if not by where the batch is now.
        """
        beside, copied = self.beside_bytes(in_pieces), self._is_elsewhere(batch) if copied is None else copied
        copies = PieceBytes.of(batch, None if copied else self.job.device) if in_pieces or copied else None

        def bytes_of(sizes: Sizes) -> float:
            step = self.promise_sizes(sizes)
            return beside + (step if copies is None else copies.with_step(sizes, step))

        return bytes_of

    def _is_elsewhere(self, batch: Batch) -> bool:
        """Whether a batch waits on the host for a GPU, where what runs of it is a copy."""
        return batch.seeds.device.type != self.job.device.type

    def promise(self, batch: Batch) -> float:
        return self.promise_sizes(Sizes.of(batch))

    def promise_sizes(self, sizes: Sizes) -> float:
        """Bytes that a step of so many nodes and edges will not exceed."""
        return self._predictor(sizes).promise(sizes)

    def observe_sizes(self, sizes: Sizes, promised_bytes: float, peak_bytes: int) -> None:
        """Learn from a step of so many nodes and edges."""
        self.learn(sizes, peak_bytes)
        self.note_peak(promised_bytes, peak_bytes)

    def learn(self, sizes: Sizes, peak_bytes: int) -> None:
        """What so many nodes and edges took, of a step or of a stretch of one."""
        self._predictor(sizes).observe(sizes, peak_bytes)

    def note_peak(self, promised_bytes: float, peak_bytes: int) -> None:
        """A step ran: what was promised, and what it took."""
        for record in (self, self._record):
            record.promised_bytes = max(record.promised_bytes, promised_bytes)
            record.peak_bytes = max(record.peak_bytes, peak_bytes)
        if peak_bytes > self.limit_bytes:
            self._count("over", "budget.steps_over")

    def note_good(self) -> None:
        """A step ran: what was made smaller after memory ran out may grow again."""
        self.room_bytes = min(self.limit_bytes, RECOVER * self.room_bytes)

    def note_out_of_memory(self, promised_bytes: float) -> None:
        """A step that was promised so much did not run: what comes instead is made smaller."""
        self._count("oom", "budget.out_of_memory")
        self.room_bytes = SHRINK * min(promised_bytes, self.room_bytes)

    def note_split(self, num_pieces: int) -> None:
        """A batch goes in pieces."""
        self._count("split", "budget.batches_split")
        self._count("pieces", "budget.pieces", num_pieces)

    def note_step(self, before_bytes: float, after_bytes: int) -> None:
        """A batch ran: what it would have taken whole, and what the largest of its pieces took."""
        self._record.before.append(before_bytes)
        self._record.after.append(after_bytes)

    def _count(self, name: str, counter: str, number: int = 1) -> None:
        setattr(self._record, name, getattr(self._record, name) + number)
        trace.count(counter, number)

    def _predictor(self, sizes: Sizes) -> Predictor:
        with self._lock:
            if self.predictor is None:
                costs = costs_of(self.job.model, self.job.data.tables.get("x"), len(sizes.edges))
                self.predictor = Predictor(costs.forward_only() if self.forward_only else costs)
            return self.predictor

    # ---- other edges

    def _cut(self, batch: Batch) -> Batch:
        key, bytes_of = ops.derive_key(_key_of(batch), MOST_REDRAWS + 1), self._bytes_of(batch, in_pieces=True)
        found = cut_to_fit(batch, bytes_of, self.room_bytes, self.budget.cut_by, key)
        self._count("cut", "budget.batches_cut")
        self._count("edges_cut", "budget.edges_cut", sum(Sizes.of(batch).edges) - sum(Sizes.of(found).edges))
        return found

    def _resampled(self, batch: Batch) -> Batch | None:
        """The first of some other samples that fits beside the batch; None where none does."""
        if self.redraw is None:
            raise ValueError("over_budget=resample is for sampled batches: set over_budget=split")
        bytes_of = self._bytes_of(batch, in_pieces=True)
        for number in range(MOST_REDRAWS):
            key = ops.derive_key(_key_of(batch), number)
            blocks = tuple(b.scaling_sums(batch.blocks[0].scale_sums) for b in self.redraw(batch.seeds, key))
            self._count("resampled", "budget.resampled")
            if bytes_of(Sizes.of_blocks(blocks)) <= self.room_bytes:
                return with_rows(replace(batch, blocks=blocks, key=key), self.job.data.tables)
        return None


def _key_of(batch: Batch) -> int:
    return 0 if batch.key is None else int(batch.key)


@dataclass
class GuardedUnit(Unit):
    """One batch through the job's training step, in as many pieces as the budget asks for."""

    job: Job
    batch: Batch
    guard: Guard

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_seeds

    @property
    def total_size(self) -> float | None:
        return self.batch.total_seeds

    def forward_backward(self, total: float) -> Tensor:
        if not self.size:
            return BatchUnit(self.job, self.batch).forward_backward(total)
        if not self.job.usual_loss:
            return self._own_loss(total)
        done = self.guard.run(self.batch, lambda piece: BatchUnit(self.job, piece).forward_backward(total))
        return torch.stack([loss for _, loss in done]).sum()

    def _own_loss(self, total: float) -> Tensor:
        """The same, for a loss of the user's own, which is over all seeds of a batch that goes in pieces."""
        job, batch = self.job, self.guard.arrange(self.batch)
        found = self._loss_at_once(batch, total) if batch.groups else None
        ordered = batch.seeds.sort()

        def step(piece: Batch) -> Tensor:
            nonlocal found
            if piece.num_seeds == batch.num_seeds:
                return BatchUnit(job, piece).forward_backward(total)
            if found is None:  # memory ran out for the whole batch
                found = self._loss_at_once(batch, total)
            at = ordered.indices[torch.searchsorted(ordered.values, piece.seeds.to(batch.seeds.device))]
            with autocast(job), trace.span("forward", job.device):
                outputs = job.model(piece)
            with trace.span("backward", job.device):
                (outputs * found.given[at.to(outputs.device)]).sum().backward()
            return torch.zeros_like(found.summed)

        done = self.guard.run(batch, step)
        if found is None:
            return done[0][1]
        found.add_to_parameters()
        return found.summed

    def _loss_at_once(self, batch: Batch, total: float) -> LossAt:
        """By a forward pass before the one with gradients, within the limit too."""
        job = self.job
        before = _random_state(job.device)
        with torch.no_grad(), autocast(job), trace.span("forward", job.device):
            outputs = self.guard.outputs(job.model, batch).to(job.device)
        if not torch.equal(before, _random_state(job.device)):
            raise ValueError(
                "a loss of your own over a batch in pieces needs the same outputs twice, and a part of the model draws "
                "random numbers by itself, as attention dropout does: set its dropout to 0, or make batch_size smaller"
            )
        whole = batch_of_seeds(job, batch.seeds.to(job.device), _to(batch.y, job.device), batch.key)
        with autocast(job):
            return loss_at(job, whole, outputs, 1 / total)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _random_state(device: torch.device) -> Tensor:
    """Of the generators that a model on the device draws from."""
    on_host = torch.get_rng_state()
    return on_host if device.type == "cpu" else torch.cat([on_host, torch.cuda.get_rng_state(device)])


# ---- work that keeps to a plan


def keep_to(plan: Plan, budget: Budget, work: Work, job: Job, outline: Outline) -> Work:
    """The same work, within what the plan leaves for a step."""
    if plan.limit_bytes == math.inf:
        return work
    limit = int(plan.limit_bytes)
    if not hasattr(work, "guard"):
        return WatchedWork(work, Watch(job.device, limit, plan.step_bytes))
    sampler = getattr(work.loader, "sampler", None) if isinstance(work, SampledWork) else None
    guard = Guard(job, budget, limit, sampler.sample if isinstance(sampler, NeighborSampler) else None)
    guard.predictor = None if plan.num_blocks is None else outline.predictor(plan.num_blocks)
    work.guard = guard  # type: ignore[attr-defined]
    if isinstance(work, SampledWork) and isinstance(work.loader, Loader):
        work.loader.waits_on_host = guard.waits_on_host = plan.waits_on_host
    return work


@contextmanager
def capped(budget: Budget | None, device: torch.device) -> Iterator[None]:
    """Within, CUDA gives this process no more than a budget has for the device."""
    if budget is None or budget.device is None or device.type != "cuda":
        yield
        return
    device = numbered(device)
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, parse_size(budget.device) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


# ---- steps that cannot be cut


@dataclass(eq=False)
class Watch:
    """Measures steps that cannot be cut; what it finds is handed out as a guard does."""

    device: torch.device
    limit_bytes: int
    promised_bytes: float
    """What every step was planned to take at most."""

    def __post_init__(self) -> None:
        self._record = Record()

    def take_record(self) -> dict[str, Any]:
        """What happened since the last call."""
        record, self._record = self._record, Record()
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def observe(self, peak_bytes: int) -> None:
        record = self._record
        record.promised_bytes = self.promised_bytes
        record.peak_bytes = max(record.peak_bytes, peak_bytes)
        record.before.append(self.promised_bytes)
        record.after.append(peak_bytes)
        record.over += peak_bytes > self.limit_bytes


class WatchedWork:
    """Work whose steps are measured; in all else it is the work itself."""

    def __init__(self, work: Work, watch: Watch) -> None:
        self.work, self.guard = work, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        with closing(units_from(self.work, epoch, done, examples)) as units:
            for unit in units:
                yield WatchedUnit(unit, self.guard)


@dataclass(eq=False)
class WatchedUnit(Unit):
    """A unit whose bytes are measured."""

    unit: Unit
    watch: Watch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.unit.size

    @property
    def total_size(self) -> float | None:
        return self.unit.total_size

    def forward_backward(self, total: float) -> Tensor:
        with meter_of(self.watch.device) as meter:
            loss = self.unit.forward_backward(total)
        self.watch.observe(meter.peak_bytes)
        return loss

    def commit(self) -> None:
        self.unit.commit()
