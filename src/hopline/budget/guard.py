"""Steps that keep to a budget.

A `Guard` is asked before each step, measures it, and cuts one that would take too much. There are three kinds of steps:

    run     a sampled batch    its pieces are independent: a piece that fails is made smaller, and tried alone
    step    a `SplittableStep`       its pieces need each other's rows: after out-of-memory all of it starts again
    watch   any other          cannot be cut: it is measured against what the plan promised

Promises, measurements and what is put back after out-of-memory are the same for the first two (`_attempt`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.ledger import Ledger
from hopline.budget.micro_batches import (
    MicroBatchBytes,
    check_split,
    cut_to_fit,
    groups_to_fit,
    micro_batch_of,
    sizes_of,
    with_rows,
)
from hopline.budget.predictor import Predictor, costs_of
from hopline.contract import CUTS, Budget, Job, Outline, Plan, Redraw, SplittableStep, Unit
from hopline.core.batch import Batch
from hopline.core.sizes import Sizes
from hopline.device.meter import Meter, NoMeter, meter_of, with_index
from hopline.device.out_of_memory import StepSnapshot, attempt, gradient_bytes, state_bytes
from hopline.units.batch_unit import BatchUnit, autocast
from hopline.units.loss_at_outputs import OutputLoss, batch_of_seeds, loss_at_outputs
from hopline.util import trace
from hopline.util.config import format_size, parse_size

Step = Callable[[Batch], Tensor]
"""What is done with a batch, or with a piece of one."""
MAX_REDRAWS = 10
SHRINK, RECOVER = 0.8, 1.02
"""What is aimed at after memory ran out, as a share of what was promised; and by how much more after each good step."""


@dataclass(eq=False)
class Guard:
    """Keeps the steps of one job within bytes: asks before each one, measures it, and learns.

    The first batches go by the bound, which is far above what they take, so they come in more pieces than later ones.
    """

    job: Job
    budget: Budget
    limit_bytes: int
    """What a step may take beyond all else that the run keeps: weights, optimizer, data, batches prepared ahead."""
    predictor: Predictor | None = None
    """What is known of steps; None: the bound by the model's widths, made with the first batch."""
    batches_on_host: bool = False
    """Whether batches come on the host, for a GPU, to which what runs of them is copied when its turn comes."""
    forward_only: bool = False
    """Whether steps are forward passes without gradients."""
    measure_every: int = 8
    """On a CPU, where it takes time, every so many-th whole batch is measured once steps are known; besides those that
    are expected to take more than any before them in an epoch, and all pieces."""
    target_bytes: float = field(init=False)
    """What pieces are made for: the limit, and less for a while after memory ran out."""
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(
                f"the budget leaves {format_size(max(0, self.limit_bytes))} for a step: give more, or make the model "
                "smaller"
            )
        self.target_bytes, self.ledger = self.limit_bytes, Ledger(self.limit_bytes)
        self._lock = threading.Lock()
        self._failed_alone, self._aside_bytes = 0, 0
        self._not_measured, self._most_measured = 0, 0.0

    @cached_property
    def inference(self) -> Guard:
        """The guard of sampled inference within the same bytes: what does not fit is split, as outputs are equal."""
        return Guard(self.job, replace(self.budget, over_budget="split"), self.limit_bytes, forward_only=True)

    def take_record(self) -> dict[str, Any]:
        """What happened since the last call. The largest batch of the next epoch is measured again."""
        self._most_measured = 0.0
        return self.ledger.take()

    # ---- a sampled batch

    def unit(self, batch: Batch, redraw: Redraw | None = None) -> Unit:
        """A batch as a unit of work. redraw: how other edges are drawn for its seeds, for over_budget=resample."""
        return GuardedUnit(self.job, batch, self, redraw)

    def split_ahead(self, batch: Batch) -> Batch:
        """The batch with its groups, if it will be split: for threads that prepare batches, so that training need not.

        Only what leaves the gradients as they are is decided here: what was learnt by now depends on timing.
        """
        predictor, copied = self._predictor(Sizes.of(batch)), self.batches_on_host
        if self.budget.over_budget != "split" or not predictor.is_sure:
            return batch
        # What gradients take is left out: the thread that trains makes and frees them while this one runs.
        copies = MicroBatchBytes.of(batch, None).resident(Sizes.of(batch)) if copied else 0
        if self.predict_peak(batch) + copies <= self.target_bytes:
            return batch
        with suppress(ValueError):  # the training thread will meet the same, and say so
            batch = replace(batch, groups=tuple(self._groups(batch, copied=copied)))
        return batch

    def make_fit(self, batch: Batch, redraw: Redraw | None = None) -> Batch:
        """The batch as it may run: whole, in groups of its seeds, drawn anew or with fewer edges."""
        needed = self._bytes_of(batch, is_split=False)(Sizes.of(batch))
        if needed <= self.target_bytes:
            return replace(batch, groups=()) if batch.groups else batch
        match self.budget.over_budget:
            case "refuse":
                raise self._refusal(needed, "batch_size")
            case how if how in CUTS:
                return self._cut(batch)
            case "resample" if (found := self._resample(batch, redraw)) is not None:
                return found
        self._check_split()
        return batch if batch.groups else replace(batch, groups=tuple(self._groups(batch)))

    def run(self, batch: Batch, step: Step, redraw: Redraw | None = None) -> list[tuple[Tensor | None, Tensor]]:
        """Give a batch to `step`, whole or in pieces within the limit: [(positions of seeds or None: all, result)]."""
        promised, given, done = self.predict_peak(batch), batch, []
        with meter_of(self.job.device) as meter:
            batch = self.make_fit(batch, redraw)
        largest, todo = meter.peak_bytes, deque[Tensor | None](batch.groups or (None,))
        by_bound = not self._predictor(Sizes.of(batch)).is_sure
        while todo:
            as_given = batch.blocks is given.blocks or self._is_on_other_device(batch)
            seed_idx, other_bytes = todo.popleft(), 0 if as_given else batch.num_bytes
            result, peak_bytes = self._try(batch, seed_idx, step, other_bytes)
            if result is None:
                batch, smaller = self._make_smaller(batch, seed_idx)
                todo.extendleft(reversed(smaller))
                continue
            done.append((seed_idx, result))
            largest = max(largest, peak_bytes)
            if by_bound and len(todo) > 1 and self._predictor(Sizes.of(batch)).is_sure:  # the rest by what was learnt
                by_bound, rest = False, torch.cat([group for group in todo if group is not None])
                todo = deque[Tensor | None](self._groups(batch, rest))
        if len(done) > 1:
            self.ledger.note_split(len(done))
        self.ledger.note_batch(promised, largest)
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
        bytes_of = self._bytes_of(batch, is_split=seed_idx is not None)

        def made_and_run(this: Attempt) -> Tensor | None:
            piece = batch if seed_idx is None else micro_batch_of(batch, seed_idx).batch()
            this.sizes = Sizes.of(piece)
            this.predicted_bytes = bytes_of(this.sizes) + other_bytes
            if this.predicted_bytes > self.target_bytes and seed_idx is not None and seed_idx.numel() > 1:
                return None  # more was learnt since it was found
            piece = piece.to(self.job.device)
            this.meter.lap()
            return step(piece)

        measured = seed_idx is not None or self._is_measured(Sizes.of(batch))
        result, peak_bytes = self._attempt(made_and_run, self.target_bytes, measured=measured, other_bytes=other_bytes)
        if result is not None:
            self._failed_alone = 0
        return result, peak_bytes

    def _is_measured(self, sizes: Sizes) -> bool:
        """Whether a whole batch is; one that is not is noted by what it is expected to take."""
        predictor = self._predictor(sizes)
        if self.job.device.type != "cpu" or not predictor.is_sure:
            return True
        expected, self._not_measured = predictor.expected_bytes(sizes), self._not_measured + 1
        if expected <= self._most_measured and self._not_measured < self.measure_every:
            return False
        self._most_measured, self._not_measured = max(expected, self._most_measured), 0
        return True

    def _make_smaller(self, batch: Batch, seed_idx: Tensor | None) -> tuple[Batch, Sequence[Tensor | None]]:
        """What goes on instead of some seeds that took too much."""
        if self.budget.over_budget == "refuse":
            raise ValueError("memory ran out in a step: make batch_size smaller, or set over_budget=split")
        if self.budget.over_budget in CUTS:
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
        predictor, bytes_of = self._predictor(Sizes.of(batch)), self._bytes_of(batch, is_split=True, copied=copied)
        together = Sizes.of(batch) if among is None else sizes_of(batch, [among])[0]

        def expected(sizes: Sizes) -> float:  # a promise for what is unlike all that was seen is far above it
            return bytes_of(sizes) - predictor.predict_peak(sizes) + predictor.expected_bytes(sizes)

        options: dict[str, Any] = {"among": among, "first": max(2, math.ceil(expected(together) / self.target_bytes))}
        options |= {"max_bytes": self.limit_bytes if predictor.is_sure else math.inf, "min_bytes_of": expected}
        return groups_to_fit(batch, bytes_of, self.target_bytes, predictor.costs, **options)

    def _check_split(self) -> None:
        check_split(self.job.model, instead="make batch_size smaller" if self.forward_only else "set over_budget=cut")

    # ---- a step whose pieces need each other's rows

    def step(self, step: SplittableStep) -> Tensor:
        """Run it at once if it fits, else in pieces; after out-of-memory all of it again, in smaller ones."""
        beside = self.overhead_bytes()
        needed, result, peak_bytes = self._needed_bytes(step) + beside, None, 0
        while result is None:
            if self._must_split(needed, step):
                result, peak_bytes = self._attempt(partial(_run_in_micro_batches, step), needed)
            else:
                result, peak_bytes = self._attempt(partial(_run_whole, step), needed)
            if result is None:
                step.reset()
        self.ledger.note_batch(needed, peak_bytes)
        return result

    def must_split(self, step: SplittableStep) -> bool:
        """Whether a step has to go in pieces; an error where it may not."""
        return self._must_split(self._needed_bytes(step), step)

    def _must_split(self, needed: float, step: SplittableStep) -> bool:
        if needed <= self.target_bytes:
            return False
        if self.budget.over_budget != "split":
            raise self._refusal(needed, step.smaller_by)
        return True

    def _needed_bytes(self, step: SplittableStep) -> float:
        """What a step takes at once: by steps like it, or by what its pieces took."""
        return min(self.predict_peak_of_sizes(step.sizes()), step.bound_bytes())

    def note_split(self, num_micro_batches: int) -> None:
        """Note that a step goes in pieces."""
        self.ledger.note_split(num_micro_batches)

    # ---- a step that cannot be cut

    def measure(self, run: Callable[[], Tensor], predicted_bytes: float) -> Tensor:
        """Run a step, and note what it took of what was promised."""
        with meter_of(self.job.device) as meter:
            result = run()
        self.ledger.note_peak(predicted_bytes, meter.peak_bytes)
        self.ledger.note_batch(predicted_bytes, meter.peak_bytes)
        return result

    # ---- promises, and what became of them

    def _attempt(
        self,
        run: Callable[[Attempt], Tensor | None],
        predicted_bytes: float,
        *,
        measured: bool = True,
        other_bytes: int = 0,
    ) -> tuple[Tensor | None, int]:
        """(result, peak) of a step or a piece; no result where it takes too much, and then nothing has changed.

        predicted_bytes: as far as is known before it is made; other_bytes: what it has already taken.
        """
        with meter_of(self.job.device) if measured else NoMeter() as meter:
            before = StepSnapshot(self.job.module, self.job.device)
            self._aside_bytes = before.gradient_bytes
            this = Attempt(meter, predicted_bytes)
            try:
                result, ran_out = attempt(before, partial(run, this))
            finally:
                self._aside_bytes = 0
        peak_bytes = before.gradient_bytes + other_bytes + meter.peak_bytes
        if ran_out:
            self.ledger.note_out_of_memory()
            self.target_bytes = SHRINK * min(this.predicted_bytes, self.target_bytes)
        if result is None:
            return None, peak_bytes
        if this.sizes is not None and measured:
            self.learn(this.sizes, meter.lap_bytes)
        elif this.sizes is not None:
            peak_bytes += int(self._predictor(this.sizes).expected_bytes(this.sizes))
        self.ledger.note_peak(this.predicted_bytes, peak_bytes if measured else 0)
        self.target_bytes = min(self.limit_bytes, RECOVER * self.target_bytes)
        return result, peak_bytes

    def _refusal(self, needed: float, smaller: str) -> ValueError:
        room, how = self.target_bytes, self.budget.over_budget
        return ValueError(
            f"a batch may take {format_size(needed)}, and {format_size(room)} are left for a step: give the budget "
            f"{format_size(needed - room)} more, make {smaller} smaller, or set over_budget=split instead of {how}"
        )

    def overhead_bytes(self, is_split: bool = False) -> int:
        """What is there beside a step: gradients from before, which the first of several pieces leaves, and buffers."""
        gradients, buffers = state_bytes(self.job.module)
        if is_split and not self.forward_only:
            return buffers + gradients
        return buffers + gradient_bytes(self.job.module) + self._aside_bytes

    def _bytes_of(self, batch: Batch, is_split: bool, copied: bool | None = None) -> Callable[[Sizes], float]:
        """What a step of so many nodes and edges takes: of the batch itself, or of rows and indices taken from it.

        copied: whether from the host, if not by where the batch is now.
        """
        beside, copied = self.overhead_bytes(is_split), self._is_on_other_device(batch) if copied is None else copied
        copies = MicroBatchBytes.of(batch, None if copied else self.job.device) if is_split or copied else None

        def bytes_of(sizes: Sizes) -> float:
            step = self.predict_peak_of_sizes(sizes)
            return beside + (step if copies is None else copies.peak_with_step(sizes, step))

        return bytes_of

    def _is_on_other_device(self, batch: Batch) -> bool:
        """Whether a batch waits on the host for a GPU, where what runs of it is a copy."""
        return batch.seeds.device.type != self.job.device.type

    def predict_peak(self, batch: Batch) -> float:
        return self.predict_peak_of_sizes(Sizes.of(batch))

    def predict_peak_of_sizes(self, sizes: Sizes) -> float:
        """Bytes that a step of so many nodes and edges will not exceed."""
        return self._predictor(sizes).predict_peak(sizes)

    def observe_sizes(self, sizes: Sizes, predicted_bytes: float, peak_bytes: int) -> None:
        """Learn from a step of so many nodes and edges."""
        self.learn(sizes, peak_bytes)
        self.ledger.note_peak(predicted_bytes, peak_bytes)

    def learn(self, sizes: Sizes, peak_bytes: int) -> None:
        """What so many nodes and edges took, of a step or of a stretch of one."""
        self._predictor(sizes).observe(sizes, peak_bytes)

    def _predictor(self, sizes: Sizes) -> Predictor:
        with self._lock:
            if self.predictor is None:
                costs = costs_of(self.job.model, self.job.data.tables.get("x"), len(sizes.edges))
                self.predictor = Predictor(costs.forward_only() if self.forward_only else costs)
            return self.predictor

    # ---- other edges

    def _cut(self, batch: Batch) -> Batch:
        key, bytes_of = ops.derive_key(_key_of(batch), MAX_REDRAWS + 1), self._bytes_of(batch, is_split=True)
        found = cut_to_fit(batch, bytes_of, self.target_bytes, CUTS[self.budget.over_budget], key)
        self.ledger.note_cut(sum(Sizes.of(batch).edges) - sum(Sizes.of(found).edges))
        return found

    def _resample(self, batch: Batch, redraw: Redraw | None) -> Batch | None:
        """The first of some other samples that fits beside the batch; None where none does."""
        if redraw is None:
            raise ValueError("over_budget=resample is for sampled batches: set over_budget=split")
        bytes_of = self._bytes_of(batch, is_split=True)
        for number in range(MAX_REDRAWS):
            key = ops.derive_key(_key_of(batch), number)
            blocks = tuple(b.scaling_sums(batch.blocks[0].scale_sums) for b in redraw(batch.seeds, key))
            self.ledger.note_resampled()
            if bytes_of(Sizes.of_blocks(blocks)) <= self.target_bytes:
                return with_rows(replace(batch, blocks=blocks, key=key), self.job.data.tables)
        return None


@dataclass(eq=False)
class Attempt:
    """A step or a piece that is being tried: what it says of itself once it is made."""

    meter: Meter
    predicted_bytes: float
    """What it will not exceed."""
    sizes: Sizes | None = None
    """What is learnt from the bytes since the meter's last lap; None: nothing."""


def _run_whole(step: SplittableStep, this: Attempt) -> Tensor:
    this.sizes = step.sizes()
    this.meter.lap()
    return step.run_whole()


def _run_in_micro_batches(step: SplittableStep, this: Attempt) -> Tensor:
    def set_predicted_bytes(num_bytes: float) -> None:
        this.predicted_bytes = num_bytes

    return step.run_in_micro_batches(this.meter, set_predicted_bytes)


def _key_of(batch: Batch) -> int:
    return 0 if batch.key is None else int(batch.key)


@dataclass
class GuardedUnit(Unit):
    """One batch through the job's training step, in as many pieces as the budget asks for."""

    job: Job
    batch: Batch
    guard: Guard
    redraw: Redraw | None = None

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
        done = self.guard.run(self.batch, lambda piece: BatchUnit(self.job, piece).forward_backward(total), self.redraw)
        return torch.stack([loss for _, loss in done]).sum()

    def _own_loss(self, total: float) -> Tensor:
        """The same, for a loss of the user's own, which is over all seeds of a batch that goes in pieces."""
        job, batch = self.job, self.guard.make_fit(self.batch, self.redraw)
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
                (outputs * found.output_gradients[at.to(outputs.device)]).sum().backward()
            return torch.zeros_like(found.loss_sum)

        done = self.guard.run(batch, step, self.redraw)
        if found is None:
            return done[0][1]
        found.add_to_parameters()
        return found.loss_sum

    def _loss_at_once(self, batch: Batch, total: float) -> OutputLoss:
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
            return loss_at_outputs(job, whole, outputs, 1 / total)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _random_state(device: torch.device) -> Tensor:
    """Of the generators that a model on the device draws from."""
    on_host = torch.get_rng_state()
    return on_host if device.type == "cpu" else torch.cat([on_host, torch.cuda.get_rng_state(device)])


# ---- a run within a budget


def guard_of(plan: Plan, budget: Budget, job: Job, outline: Outline) -> Guard | None:
    """The guard of a run, with what was learnt while it was planned; None where the plan leaves steps any bytes."""
    if plan.limit_bytes == math.inf:
        return None
    known = None if plan.num_blocks is None else outline.predictor(plan.num_blocks)
    return Guard(job, budget, int(plan.limit_bytes), known, plan.batches_on_host)


@contextmanager
def limit_cuda_memory(budget: Budget | None, device: torch.device) -> Iterator[None]:
    """Within, CUDA gives this process no more than a budget has for the device."""
    if budget is None or budget.device is None or device.type != "cuda":
        yield
        return
    device = with_index(device)
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, parse_size(budget.device) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
