"""Steps that keep to a memory budget.

A `BudgetGuard` predicts the peak of each step before it runs, and makes a step smaller that would not fit. It
measures steps and gives the measurements to its predictor. There are three kinds of steps:

    run       a sampled batch       micro-batches are independent: one that fails is made smaller and tried again
    step      a `SplittableStep`    micro-batches need each other's rows: after out of memory all starts again
    measure   any other step        cannot be made smaller: it is measured, and compared with its plan

The way of a sampled batch:

    preparing thread                 thread that runs the steps
    split_ahead: groups of seeds ->  make_fit: whole, groups, redrawn or cut
                                     run: each group as a micro-batch
                                     _attempt: snapshot, step, measure, learn; after out of memory undo

`run` and `step` share `_attempt`. After out of memory it restores gradients, buffers and random numbers,
and lowers `target_bytes` for a while. The costs are a prediction per step and, on a CPU, the meter
(`BudgetGuard.measure_every`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.ledger import Ledger
from hopline.budget.micro_batches import (
    MicroBatchBytes,
    check_split,
    cut_to_fit,
    examples_of,
    groups_to_fit,
    micro_batch_of,
    sizes_of,
    with_rows,
)
from hopline.budget.plan import CUTS, Budget, Outline, Plan
from hopline.budget.predictor import Predictor, costs_of
from hopline.contract import Job, Redraw, SplittableStep, Unit
from hopline.core.batch import Batch, Block
from hopline.core.batch_sizes import Sizes
from hopline.device.meter import Meter, NoMeter, meter_of, with_index
from hopline.device.out_of_memory import StepSnapshot, attempt, gradient_bytes, state_bytes
from hopline.units.batch_unit import BatchUnit, autocast
from hopline.units.loss_at_outputs import OutputLoss, batch_of_seeds, loss_at_outputs
from hopline.util import trace
from hopline.util.config import CHANGES_TRAINING, format_size, parse_size

Step = Callable[[Batch], Tensor]
"""A function that trains on, or infers from, a batch or a micro-batch."""
MAX_REDRAWS = 10
"""Samples that over_budget=resample draws for a batch before it is split instead."""
SHRINK = 0.8
"""`BudgetGuard.target_bytes` after out of memory, as a fraction of the smaller of predicted peak and old target."""
RECOVER = 1.02
"""Factor by which `BudgetGuard.target_bytes` grows again after each step that succeeds, up to the limit."""


class FittedBatch(NamedTuple):
    """A batch in a form that fits, and the batch that it was made of."""

    batch: Batch
    """The batch that will run. Its `groups` are those of its micro-batches."""
    original_blocks: tuple[Block, ...]
    """The blocks of the original. `batch` has others if edges were cut or drawn again."""
    predicted_bytes: float
    making_bytes: int


@dataclass(eq=False)
class BudgetGuard:
    """Keeps the steps of one job within `limit_bytes`.

    A guard owns its predictor and its ledger; the job and its model belong to the trainer. `split_ahead`
    may run in any thread. Everything else belongs to the one thread that runs the steps.

    The first batches are split by the bound of the predictor, which is far above their peak. They run in more
    micro-batches than later ones.
    """

    job: Job
    budget: Budget
    limit_bytes: int
    """The most bytes that a step may take, besides resident bytes: weights, optimizer, data, prefetched
    batches."""
    predictor: Predictor | None = None
    """Predicts the peaks of steps. None: one is made at the first batch, and starts with the bound."""
    batches_on_host: bool = False
    """Whether batches wait on the host for a GPU. A batch or micro-batch is copied to the GPU when it
    runs."""
    forward_only: bool = False
    """Whether all steps are forward passes without gradients."""
    measure_every: int = 8
    """Steps from one measured whole batch to the next on a CPU, once the predictor is sure.

    The meter makes steps on a CPU longer (docs/measurements/budget.md). Micro-batches are always measured, and
    so are whole batches that are expected to take more than any before them in the epoch.
    """
    target_bytes: float = field(init=False)
    """The bytes that steps are made to fit in: `limit_bytes`, and less for a while after out of memory."""
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(f"the budget leaves {format_size(max(0, self.limit_bytes))} for a step: give more")
        self.target_bytes = self.limit_bytes
        self.ledger = Ledger(self.limit_bytes)
        self._lock = threading.Lock()  # `_predictor` makes the predictor, and preparing threads call it too
        self._num_single_seed_failures = 0
        """Times in a row that a step of a single seed ran out of memory."""
        self._set_aside_bytes = 0
        """Bytes of earlier gradients that the snapshot of the running attempt holds."""
        self._num_unmeasured = 0
        self._max_measured_bytes = 0.0
        """The most expected bytes of a whole batch that was measured in this epoch."""

    @cached_property
    def inference(self) -> BudgetGuard:
        """The guard of sampled inference, with the same limit. It always splits: that changes no output."""
        return BudgetGuard(self.job, replace(self.budget, over_budget="split"), self.limit_bytes, forward_only=True)

    def take_record(self) -> dict[str, Any]:
        """The ledger's record of an epoch. The largest batch of the next one is measured again."""
        self._max_measured_bytes = 0.0
        return self.ledger.take()

    # ---- a sampled batch

    def unit(self, batch: Batch, redraw: Redraw | None = None) -> Unit:
        """A batch as a unit of work. redraw: draws other edges for its seeds, for over_budget=resample."""
        return GuardedUnit(self.job, batch, self, redraw)

    def split_ahead(self, batch: Batch) -> Batch:
        """The batch with its groups of seeds if it will have to be split, else the batch itself.

        Preparing threads call it, to save the training thread the search for groups. Only splitting is
        decided here, because it does not change the gradients. The predictor's state at this moment depends
        on timing, and nothing that changes results may depend on it.
        """
        sizes = Sizes.of(batch)
        if self.budget.over_budget != "split" or not self._predictor(sizes).is_sure:
            return batch
        # Overhead is left out: it counts gradients, which the training thread sets while this thread runs.
        copied_bytes = MicroBatchBytes.of(batch, device=None).resident(sizes) if self.batches_on_host else 0
        if self.predict_peak(batch) + copied_bytes <= self.target_bytes:
            return batch
        with suppress(ValueError):  # the training thread will raise the same error
            batch = replace(batch, groups=tuple(self._groups(batch, copied=self.batches_on_host)))
        return batch

    def make_fit(self, batch: Batch, redraw: Redraw | None = None) -> Batch:
        """The batch in a form that fits: whole, with groups of seeds, redrawn, or with edges cut
        (`over_budget`)."""
        needed_bytes = self._bytes_of(batch, is_split=False)(Sizes.of(batch))
        if needed_bytes <= self.target_bytes:
            return replace(batch, groups=()) if batch.groups else batch
        over_budget = self.budget.over_budget
        if over_budget == "refuse":
            raise self._refusal(needed_bytes, "batch_size")
        if over_budget in CUTS:
            return self._cut(batch)
        if over_budget == "resample":
            redrawn = self._resample(batch, redraw)
            if redrawn is not None:
                return redrawn
        self._check_split()
        return batch if batch.groups else replace(batch, groups=tuple(self._groups(batch)))

    def run(self, batch: Batch, step: Step, redraw: Redraw | None = None) -> list[tuple[Tensor | None, Tensor]]:
        """Call `step` with a batch, whole or in micro-batches that fit. Returns [(seed_idx, result)] in
        order of running.

        seed_idx: [n] int64, positions of the seeds of a micro-batch; None for the whole batch.
        """
        return self.run_fitted(self.fit(batch, redraw), step)

    def fit(self, batch: Batch, redraw: Redraw | None) -> FittedBatch:
        """The batch in a form that fits (`make_fit`), with what `run_fitted` needs to know of the original."""
        predicted_bytes = self.predict_peak(batch)
        # Redrawing or cutting takes memory too, and counts for the peak of the batch.
        with meter_of(self.job.device) as meter:
            fitted = self.make_fit(batch, redraw)
        return FittedBatch(fitted, batch.blocks, predicted_bytes, meter.peak_bytes)

    def run_fitted(self, fitted: FittedBatch, step: Step) -> list[tuple[Tensor | None, Tensor]]:
        """`run` of a batch that was made to fit."""
        batch, original_blocks, predicted_bytes, making_bytes = fitted
        del fitted  # a batch that has to be cut once more must not stay alive
        max_bytes = making_bytes
        was_sure = self._predictor(Sizes.of(batch)).is_sure
        todo = deque[Tensor | None](batch.groups or (None,))
        done = []
        while todo:
            seed_idx = todo.popleft()
            # A batch with other edges was made by this step, and is not among the prefetched batches that
            # the budget has counted. On the host it takes no memory of the GPU.
            is_replacement = batch.blocks is not original_blocks and not self._is_on_other_device(batch)
            other_bytes = batch.num_bytes if is_replacement else 0
            result, peak_bytes = self._try(batch, seed_idx, step, other_bytes)
            if result is None:
                batch, smaller = self._make_smaller(batch, seed_idx)
                todo.extendleft(reversed(smaller))
                continue
            done.append((seed_idx, result))
            max_bytes = max(max_bytes, peak_bytes)
            # The first batches are split by the bound, into too many groups. Once their first micro-batches
            # have taught the predictor enough, the remaining seeds are split into fewer.
            if not was_sure and len(todo) > 1 and self._predictor(Sizes.of(batch)).is_sure:
                was_sure = True
                remaining = torch.cat([group for group in todo if group is not None])
                todo = deque[Tensor | None](self._groups(batch, remaining))
        if len(done) > 1:
            self.ledger.note(split=1, pieces=len(done))
        self.ledger.note_batch(predicted_bytes, max_bytes)
        return done

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's output for the examples: [num_examples, ...] on the host, by forward passes within the
        limit."""
        done = self.inference.run(batch, lambda micro_batch: model(micro_batch).cpu())
        first_seed_idx, first_rows = done[0]
        ran_whole = first_seed_idx is None
        if ran_whole:
            return first_rows
        device = batch.seeds.device
        by_group = [examples_of(batch, seeds.to(device))[0].cpu() for seeds, _ in done if seeds is not None]
        order = torch.cat(by_group)
        return torch.cat([rows for _, rows in done])[order.argsort()]

    def _try(self, batch: Batch, seed_idx: Tensor | None, step: Step, other_bytes: int) -> tuple[Tensor | None, int]:
        """(result, peak bytes) of one micro-batch.

        The result is None if it takes too much; then nothing has changed.

        other_bytes: bytes of the batch if this step made it (cut or redrawn), else 0.
        """
        bytes_of = self._bytes_of(batch, is_split=seed_idx is not None)

        def make_and_run(this: Attempt) -> Tensor | None:
            micro_batch = batch if seed_idx is None else micro_batch_of(batch, seed_idx).batch()
            this.sizes = Sizes.of(micro_batch)
            this.predicted_bytes = bytes_of(this.sizes) + other_bytes
            can_be_split = seed_idx is not None and seed_idx.numel() > 1
            if this.predicted_bytes > self.target_bytes and can_be_split:
                return None  # the predictor has learnt since this group was found, and now it is too large
            micro_batch = micro_batch.to(self.job.device)
            this.meter.lap()  # the predictor learns from the step alone, without the making of the micro-batch
            return step(micro_batch)

        measured = seed_idx is not None or self._must_measure(Sizes.of(batch))
        # The predicted peak is the target until `make_and_run` has built the micro-batch.
        result, peak_bytes = self._attempt(
            make_and_run, predicted_bytes=self.target_bytes, measured=measured, other_bytes=other_bytes
        )
        if result is not None:
            self._num_single_seed_failures = 0
        return result, peak_bytes

    def _must_measure(self, sizes: Sizes) -> bool:
        """Whether to measure a whole batch that is about to run. The call counts it.

        The ledger gets the expected bytes of a batch that is not measured.
        """
        predictor = self._predictor(sizes)
        if self.job.device.type != "cpu" or not predictor.is_sure:
            return True
        expected_bytes = predictor.expected_bytes(sizes)
        self._num_unmeasured += 1
        if expected_bytes <= self._max_measured_bytes and self._num_unmeasured < self.measure_every:
            return False
        self._max_measured_bytes = max(expected_bytes, self._max_measured_bytes)
        self._num_unmeasured = 0
        return True

    def _make_smaller(self, batch: Batch, seed_idx: Tensor | None) -> tuple[Batch, Sequence[Tensor | None]]:
        """(batch, groups) to run in place of seeds that took too much.

        seed_idx: [n] int64, positions of these seeds; None for the whole batch.
        """
        if self.budget.over_budget == "refuse":
            raise ValueError("memory ran out in a step: set over_budget=split")
        if self.budget.over_budget in CUTS:
            return self._cut(batch), [None]
        self._check_split()
        seeds = torch.arange(batch.num_seeds) if seed_idx is None else seed_idx
        if seeds.numel() > 1:
            self._num_single_seed_failures = 0
            return batch, self._groups(batch, seeds)
        # A single seed cannot be split. It gets one more try: others may have held the memory for a moment.
        self._num_single_seed_failures += 1
        if self._num_single_seed_failures > 1:
            raise ValueError(
                f"memory ran out twice in a step of a single seed, for which the budget leaves "
                f"{format_size(self.limit_bytes)}: give more, or make the fan-outs smaller {CHANGES_TRAINING}"
            )
        return batch, [seeds]

    def _groups(self, batch: Batch, among: Tensor | None = None, copied: bool | None = None) -> list[Tensor]:
        """Groups of seeds, as few as are predicted to fit, and at least two.

        among: the seeds to divide, by position; None for all. copied: as in `_bytes_of`.
        """
        predictor = self._predictor(Sizes.of(batch))
        bytes_of = self._bytes_of(batch, is_split=True, copied=copied)

        # The predicted peak of sizes unlike all measured ones is far too high. Expected bytes tell the
        # number of groups to try first, and whether a single seed must be refused.
        def expected_bytes_of(sizes: Sizes) -> float:
            return bytes_of(sizes) - predictor.predict_peak(sizes) + predictor.expected_bytes(sizes)

        sizes = Sizes.of(batch) if among is None else sizes_of(batch, [among])[0]
        return groups_to_fit(
            batch,
            bytes_of,
            self.target_bytes,
            predictor.costs,
            among=among,
            first=max(2, math.ceil(expected_bytes_of(sizes) / self.target_bytes)),
            # A predictor that is not sure may expect too much, so no seed is refused.
            max_bytes=self.limit_bytes if predictor.is_sure else math.inf,
            expected_bytes_of=expected_bytes_of,
        )

    def _check_split(self) -> None:
        instead = "make batch_size smaller" if self.forward_only else f"set over_budget=cut {CHANGES_TRAINING}"
        check_split(self.job.model, instead=instead)

    # ---- a step whose micro-batches need each other's rows

    def step(self, step: SplittableStep) -> Tensor:
        """Run a step at once if it fits, else in micro-batches. After out of memory all of it runs again."""
        needed_bytes = self._needed_bytes(step) + self.overhead_bytes()
        is_split = False

        def run(this: Attempt) -> Tensor:
            if is_split:  # the step itself tells the guard what to learn from
                return step.run_in_micro_batches(this.meter, partial(setattr, this, "predicted_bytes"))
            this.sizes = step.sizes()
            this.meter.lap()
            return step.run_whole()

        while True:
            # Asked again each time: out of memory has lowered the target.
            is_split = self._must_split(needed_bytes, step)
            result, peak_bytes = self._attempt(run, needed_bytes)
            if result is not None:
                self.ledger.note_batch(needed_bytes, peak_bytes)
                return result
            step.reset()

    def must_split(self, step: SplittableStep) -> bool:
        """Whether a step must run in micro-batches. Raises a ValueError if the budget does not allow that.

        For a forward pass outside `step`. Such a pass takes no snapshot, so no overhead is counted.
        """
        return self._must_split(self._needed_bytes(step), step)

    def _must_split(self, needed_bytes: float, step: SplittableStep) -> bool:
        """`must_split` for a step of which the predicted peak is known."""
        if needed_bytes <= self.target_bytes:
            return False
        if self.budget.over_budget != "split":
            raise self._refusal(needed_bytes, step.smaller_by)
        return True

    def _needed_bytes(self, step: SplittableStep) -> float:
        """Predicted peak of a step at once: the predictor's, from whole steps, or the step's own, from
        micro-batches, whichever is lower."""
        return min(self.predict_peak_of_sizes(step.sizes()), step.bound_bytes())

    def note_split(self, num_micro_batches: int) -> None:
        self.ledger.note(split=1, pieces=num_micro_batches)

    # ---- a step that cannot be made smaller

    def measure(self, run: Callable[[], Tensor], predicted_bytes: float) -> Tensor:
        """Run a step, and note its predicted and its measured bytes."""
        with meter_of(self.job.device) as meter:
            result = run()
        self.ledger.note_peak(predicted_bytes, meter.peak_bytes)
        self.ledger.note_batch(predicted_bytes, meter.peak_bytes)
        return result

    # ---- predictions and measurements

    def _attempt(
        self,
        run: Callable[[Attempt], Tensor | None],
        predicted_bytes: float,
        *,
        measured: bool = True,
        other_bytes: int = 0,
    ) -> tuple[Tensor | None, int]:
        """(result, peak bytes) of a step or a micro-batch. The result is None if it takes too much; then
        all is undone.

        predicted_bytes: the predicted peak as far as it is known now; `run` may set it in its `Attempt`.
        other_bytes: bytes that the step allocated before this call. measured: whether a meter runs.
        """
        with meter_of(self.job.device) if measured else NoMeter() as meter:
            before = StepSnapshot(self.job.module, self.job.device)
            # The snapshot takes earlier gradients out of the module. They are still in memory, and are
            # counted here.
            self._set_aside_bytes = before.gradient_bytes
            this = Attempt(meter, predicted_bytes)
            try:
                result, ran_out = attempt(before, partial(run, this))
            finally:
                self._set_aside_bytes = 0
        peak_bytes = before.gradient_bytes + other_bytes + meter.peak_bytes
        if ran_out:
            self.ledger.note(oom=1)
            self.target_bytes = SHRINK * min(this.predicted_bytes, self.target_bytes)
        if result is None:
            return None, peak_bytes
        if this.sizes is not None and measured:
            self.learn(this.sizes, meter.lap_bytes)
        elif this.sizes is not None:  # not measured: the meter has added 0
            peak_bytes += int(self._predictor(this.sizes).expected_bytes(this.sizes))
        self.ledger.note_peak(this.predicted_bytes, peak_bytes if measured else 0)
        self.target_bytes = min(self.limit_bytes, RECOVER * self.target_bytes)
        return result, peak_bytes

    def _refusal(self, needed_bytes: float, smaller_by: str) -> ValueError:
        """The error for a step that does not fit and may not be split.

        smaller_by: the setting that makes such a step smaller.
        """
        missing = format_size(needed_bytes - self.target_bytes)
        return ValueError(
            f"a batch may take {format_size(needed_bytes)}, and {format_size(self.target_bytes)} are left for a step: "
            f"give the budget {missing} more, set over_budget=split instead of {self.budget.over_budget}, or make "
            f"{smaller_by} smaller {CHANGES_TRAINING}"
        )

    def overhead_bytes(self, is_split: bool = False) -> int:
        """Bytes in memory besides a step: earlier gradients, and a copy of the buffers.

        is_split: gradients of all parameters are counted, since the first micro-batch leaves them for the others.
        """
        all_gradient_bytes, buffer_bytes = state_bytes(self.job.module)
        if is_split and not self.forward_only:
            return buffer_bytes + all_gradient_bytes
        return buffer_bytes + gradient_bytes(self.job.module) + self._set_aside_bytes

    def _bytes_of(self, batch: Batch, is_split: bool, copied: bool | None = None) -> Callable[[Sizes], float]:
        """A function from sizes to the predicted peak of a step, with overhead and copies.

        is_split: the step is of a micro-batch, whose rows and indices are copies. copied: whether the
        step's batch is copied from the host; None to tell by where the batch is now.
        """
        overhead_bytes = self.overhead_bytes(is_split)
        if copied is None:
            copied = self._is_on_other_device(batch)
        copies = None
        if is_split or copied:
            build_device = None if copied else self.job.device
            copies = MicroBatchBytes.of(batch, build_device)

        def bytes_of(sizes: Sizes) -> float:
            step_bytes = self.predict_peak_of_sizes(sizes)
            if copies is not None:
                step_bytes = copies.peak_with_step(sizes, step_bytes)
            return overhead_bytes + step_bytes

        return bytes_of

    def _is_on_other_device(self, batch: Batch) -> bool:
        return batch.seeds.device.type != self.job.device.type

    def predict_peak(self, batch: Batch) -> float:
        """The bytes that a step of this batch, whole, will not exceed, without overhead and copies."""
        return self.predict_peak_of_sizes(Sizes.of(batch))

    def predict_peak_of_sizes(self, sizes: Sizes) -> float:
        """The bytes that a step of these sizes will not exceed, without overhead and copies."""
        return self._predictor(sizes).predict_peak(sizes)

    def learn(self, sizes: Sizes, peak_bytes: int) -> None:
        """Give the predictor the measured peak of a step, or of a part of one, of these sizes."""
        self._predictor(sizes).observe(sizes, peak_bytes)

    def _predictor(self, sizes: Sizes) -> Predictor:
        """The predictor, made at the first call for the number of blocks of `sizes`. Any thread may call."""
        with self._lock:
            if self.predictor is None:
                costs = costs_of(self.job.model, self.job.data.tables.get("x"), len(sizes.edges))
                self.predictor = Predictor(costs.forward_only() if self.forward_only else costs)
            return self.predictor

    # ---- other edges

    def _cut(self, batch: Batch) -> Batch:
        """The batch with as many edges as fit."""
        # A key that no redraw of `_resample` uses.
        key = ops.derive_key(_key_of(batch), MAX_REDRAWS + 1)
        # As for a micro-batch: the batch with fewer edges is a copy.
        bytes_of = self._bytes_of(batch, is_split=True)
        cut = cut_to_fit(batch, bytes_of, self.target_bytes, CUTS[self.budget.over_budget], key)
        self.ledger.note(cut=1, edges_cut=sum(Sizes.of(batch).edges) - sum(Sizes.of(cut).edges))
        return cut

    def _resample(self, batch: Batch, redraw: Redraw | None) -> Batch | None:
        """The first other sample of the seeds that fits, as a batch; None after `MAX_REDRAWS` that do not
        fit."""
        if redraw is None:
            raise ValueError("over_budget=resample is for sampled batches: set over_budget=split")
        # As for a micro-batch: the redrawn batch is in memory together with the original.
        bytes_of = self._bytes_of(batch, is_split=True)
        for number in range(MAX_REDRAWS):
            key = ops.derive_key(_key_of(batch), number)
            # The sampler behind `redraw` does not know the method's `scale_sums`.
            blocks = tuple(b.with_scale_sums(batch.blocks[0].scale_sums) for b in redraw(batch.seeds, key))
            self.ledger.note(resampled=1)
            if bytes_of(Sizes.of_blocks(blocks)) <= self.target_bytes:
                return with_rows(replace(batch, blocks=blocks, key=key), self.job.data.tables)
        return None


@dataclass(eq=False)
class Attempt:
    """A step or micro-batch that is being tried.

    The function that runs it sets the fields once it knows them.
    """

    meter: Meter
    """Measures the attempt. The running function calls `lap()` where the step itself begins."""
    predicted_bytes: float
    sizes: Sizes | None = None
    """The sizes to learn from, with the bytes since the meter's last lap. None: nothing is learnt."""


def _key_of(batch: Batch) -> int:
    """The key of a batch as a number; 0 for a batch without random draws."""
    return 0 if batch.key is None else int(batch.key)


@dataclass
class GuardedUnit(BatchUnit):
    """One batch through the job's training step, in as many micro-batches as the guard needs."""

    guard: BudgetGuard
    redraw: Redraw | None = None

    def forward_backward(self, total: float) -> Tensor:
        if not self.size:  # no loss and no gradients
            return super().forward_backward(total)
        if not self.job.task.is_mean:
            return self._own_loss(total)

        def step(micro_batch: Batch) -> Tensor:
            return BatchUnit(self.job, micro_batch).forward_backward(total)

        done = self.guard.run(self.batch, step, self.redraw)
        return torch.stack([loss for _, loss in done]).sum()

    def _own_loss(self, total: float) -> Tensor:
        """`forward_backward` for a loss of the user's own, which may not be a sum over seeds.

        A batch in micro-batches takes two passes. The first one computes all outputs without gradients, and
        from them the loss L over all examples and its gradient g at the outputs. The second one runs each
        micro-batch with gradients, and goes back from sum(outputs * g), whose gradient at the outputs is g.
        A batch that fits takes one pass.
        """
        job = self.job
        fitted = self.guard.fit(self.batch, self.redraw)
        batch = fitted.batch
        output_loss = self._loss_at_once(batch, total) if batch.groups else None
        sorted_seeds, order = torch.sort(batch.seeds)

        def step(micro_batch: Batch) -> Tensor:
            nonlocal output_loss
            if micro_batch.num_seeds == batch.num_seeds:
                return BatchUnit(job, micro_batch).forward_backward(total)
            if output_loss is None:  # the whole batch ran out of memory, and was split after all
                output_loss = self._loss_at_once(batch, total)
            # Positions of the micro-batch's seeds in the batch, by binary search among the sorted seeds.
            seed_idx = order[torch.searchsorted(sorted_seeds, micro_batch.seeds.to(batch.seeds.device))]
            examples, _ = examples_of(batch, seed_idx)
            with autocast(job), trace.span("forward", job.device):
                outputs = job.model(micro_batch)
            with trace.span("backward", job.device):
                (outputs * output_loss.output_gradients[examples.to(outputs.device)]).sum().backward()
            return torch.zeros_like(output_loss.loss_sum)  # the loss over all seeds is known already

        done = self.guard.run_fitted(fitted, step)
        if output_loss is None:
            ((_, loss_sum),) = done  # the batch ran whole
            return loss_sum
        # Gradients of parameters that the loss reads directly, as a weight penalty does.
        output_loss.add_to_parameters()
        return output_loss.loss_sum

    def _loss_at_once(self, batch: Batch, total: float) -> OutputLoss:
        """The loss over all seeds, and its gradients, from a forward pass in micro-batches without gradients.

        Raises a ValueError if the model draws random numbers of its own: the second pass would draw others.
        """
        job = self.job
        before = _random_state(job.device)
        with torch.no_grad(), autocast(job), trace.span("forward", job.device):
            outputs = self.guard.outputs(job.model, batch).to(job.device)
        if not torch.equal(before, _random_state(job.device)):
            raise ValueError(
                "a loss of your own over a batch in micro-batches needs the same outputs twice, and a part of the "
                "model draws random numbers by itself, as attention dropout does: give a larger budget, or set its "
                f"dropout to 0 or make batch_size smaller {CHANGES_TRAINING}"
            )
        labels = None if batch.y is None else batch.y.to(job.device)
        whole = batch_of_seeds(job, batch.example_ids.to(job.device), labels, batch.key)
        with autocast(job):
            return loss_at_outputs(job, whole, outputs, 1 / total)


def _random_state(device: torch.device) -> Tensor:
    """The states of torch's generators that a model on the device draws from, as one uint8 tensor."""
    on_host = torch.get_rng_state()
    return on_host if device.type == "cpu" else torch.cat([on_host, torch.cuda.get_rng_state(device)])


# ---- a run within a budget


def guard_of(plan: Plan, budget: Budget, job: Job, outline: Outline) -> BudgetGuard | None:
    """The guard of a run, with the predictor of its plan; None where the plan sets no limit for a step."""
    if plan.limit_bytes == math.inf:
        return None
    return BudgetGuard(
        job,
        budget,
        limit_bytes=int(plan.limit_bytes),
        predictor=None if plan.num_blocks is None else outline.predictor(plan.num_blocks),
        batches_on_host=plan.batches_on_host,
    )


@contextmanager
def limit_cuda_memory(budget: Budget | None, device: torch.device) -> Iterator[None]:
    """Limit the memory that CUDA gives this process to the budget's, and restore the old limit at the end."""
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
