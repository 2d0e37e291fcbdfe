"""Callbacks that report on a run: in the terminal, and in the files of its run folder.

    WatchBudget     predicted and measured memory of the steps of each epoch
    WatchPipeline   the bottleneck of each epoch, and advice at the end
    ShowProgress    a progress bar, and a line per epoch
    WatchHistory    how stale historical embeddings were

`run_folder.WriteReport` writes the records of epochs and evaluations.

All but `ShowProgress` run on all ranks. Only the first rank of a run with a folder has a report. A callback
with `report=None` writes no records.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from hopline import ops
from hopline.nn.whole_module import edge_arrays_read
from hopline.report.bottleneck import Explanation, Setup, explain
from hopline.report.page import thin_out
from hopline.report.writer import Report
from hopline.training.callbacks import Callback, EpochEnd, Evaluation, Run, StepEnd, format_seconds
from hopline.util.config import CHANGES_TRAINING, format_size, plural
from hopline.util.progress import Progress, progress

if TYPE_CHECKING:
    from hopline.budget.plan import Place
    from hopline.training.trainer import Trainer

MAX_POINTS = 300
"""Most numbers per epoch that the report keeps for the memory of steps. With more steps, each number is the
largest of several steps."""
LONG_S = 10.0
"""Seconds of training from which on a bottleneck is worth a line. A shorter run has little to gain."""
MAX_DRIFT = 0.5
"""Drift above which a run says that its histories are old. The most measured with embeddings a few steps
old was 0.29, and the least with embeddings 16 steps old was 0.63. The drift does not predict accuracy
(docs/history.md)."""
SUMMED = ("split", "pieces", "resampled", "cut", "edges_cut", "over", "oom")
"""Counts in the record of the guard, which keeps steps within the budget. They are summed over ranks and
epochs."""


class WatchBudget(Callback):
    """Compares the memory of steps with the plan of a budget, epoch by epoch.

    It runs on all ranks, which put their records together. The first rank writes the result. Without a
    budget it does nothing.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self.records: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        plan = trainer.plan
        if self.report is None or plan is None:
            return
        items = [item for item in plan.items if item.num_bytes]
        places: dict[Place, None] = dict.fromkeys([*(item.place for item in items), plan.compute_place])
        totals = [
            {"place": place, "promised_bytes": plan.peak_bytes(place), "budget_bytes": plan.budget_bytes(place)}
            for place in places
        ]
        self.report.log({"event": "plan", "items": list(map(vars, items)), "totals": totals})

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        if trainer.guard is None:
            return
        record = _over_ranks(trainer.guard.take_record(), trainer)
        # Per step, in bytes: "before" is the predicted peak of the whole batch, "after" the peak as it ran.
        record["num_steps"] = len(record["after"])
        record["before"], _ = thin_out(record["before"], MAX_POINTS)
        record["after"], record["steps_per_point"] = thin_out(record["after"], MAX_POINTS)
        if self.report is not None:
            self.report.log({"event": "budget", "epoch": epoch.epoch, **record})
        self.records.append(record)
        # Only what was not planned is said at once. The rest is said at the end of the run.
        problems = _describe_batches(record, ("oom", "over"))
        if problems:
            trainer.say(f"epoch {epoch.epoch}: {problems}")

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not self.records:
            return
        sums = {name: sum(record[name] for record in self.records) for name in SUMMED}
        largest = {name: max(record[name] for record in self.records) for name in ("promised_bytes", "peak_bytes")}
        # The last record also gives the limit.
        total = self.records[-1] | sums | largest
        changes = _describe_batches(total, ("split", "resampled", "cut"))
        if changes:
            peak = format_size(total["peak_bytes"])
            predicted = format_size(total["promised_bytes"])
            limit = format_size(total["limit_bytes"])
            trainer.say(f"budget: {changes}; a step took up to {peak}, predicted {predicted}, allowed {limit}")


def _over_ranks(record: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """A record of one rank, with the least limit, the largest bytes and the counts of all ranks.

    The numbers per step stay those of this rank. All ranks must call this together.
    """
    world = trainer.world
    if world.size == 1:
        return record
    # The least limit is the negative of the largest negative limit, so that one message does for all three.
    values = [-record["limit_bytes"], record["promised_bytes"], record["peak_bytes"]]
    negative_limit, promised, peak = world.max([float(value) for value in values])
    totals = world.sum([float(record[name]) for name in SUMMED])
    counts = {name: int(total) for name, total in zip(SUMMED, totals, strict=True)}
    return record | {"limit_bytes": -negative_limit, "promised_bytes": promised, "peak_bytes": peak} | counts


def _describe_batches(record: dict[str, Any], names: tuple[str, ...]) -> str:
    """What was done to the batches of an epoch or a run. names: counts to mention if they are not 0."""

    def count(key: str, noun: str) -> str:
        return f"{record[key]:,} {plural(record[key], noun)}"

    phrases = {
        "split": f"{count('split', 'batch')} split into {count('pieces', 'micro-batch')}",
        "resampled": f"{count('resampled', 'sample')} drawn anew",
        "cut": f"{count('edges_cut', 'edge')} cut from {count('cut', 'batch')}",
        "oom": f"memory ran out in {count('oom', 'step')}, run again in smaller micro-batches",
        "over": f"{count('over', 'step')} went over the limit",
    }
    return ", ".join(phrases[name] for name in names if record[name])


class WatchPipeline(Callback):
    """Explains the time of epochs: in the report for each one, and at the end of the run for all of them.

    The first epoch compiles kernels and fills caches, so at the end it counts only if it is the only one.
    An epoch that was resumed half-way is left out: its first steps were timed in another process.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self.num_steps = 0
        self.epochs: list[tuple[EpochEnd, int]] = []
        """The epochs that count, each with its number of batches."""

    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
        self.num_steps += 1

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        num_batches = trainer.position.units
        max_timed_batches = self.num_steps * trainer.settings.accumulate
        self.num_steps = 0
        # More batches than this process has trained: the epoch was resumed half-way.
        if num_batches > max_timed_batches:
            return
        self.epochs.append((epoch, num_batches))
        explanation = explain(epoch.stages, epoch.seconds, num_batches, setup_of(trainer), epoch.work)
        self._log({"event": "pipeline", "epoch": epoch.epoch}, explanation, trainer)

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not run.finished or not self.epochs:
            return
        epochs, nums_batches = zip(*self.epochs[1:] or self.epochs, strict=True)
        explanation = explain(
            _mean([epoch.stages for epoch in epochs]),
            sum(epoch.seconds for epoch in epochs) / len(epochs),
            round(sum(nums_batches) / len(epochs)),
            setup_of(trainer),
            _mean([epoch.work for epoch in epochs]),
        )
        if explanation is None:
            return
        self._log({"event": "explain"}, explanation, trainer)
        is_long = sum(epoch.seconds for epoch in run.history) >= LONG_S
        if explanation.advice and is_long:
            trainer.say(f"bottleneck: {explanation.sentence}")
        advice = _evaluation_advice(trainer, run)
        if advice:
            trainer.say(advice)

    def _log(self, head: dict[str, Any], explanation: Explanation | None, trainer: Trainer) -> None:
        if self.report is not None and explanation is not None:
            setup = setup_of(trainer)
            self.report.log({**head, **vars(explanation), "workers": setup.workers, "look_ahead": setup.look_ahead})


def _mean(tables: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0.0) for table in tables) / len(tables) for name in names}


def setup_of(trainer: Trainer) -> Setup:
    """The settings of a run that matter for its speed, as they are after an epoch."""
    work = trainer.work.describe()
    on_gpu = trainer.device.type == "cuda"
    plan = trainer.plan
    return Setup(
        workers=work.workers,
        look_ahead=work.look_ahead,
        max_workers=work.max_workers,
        planned=work.is_sampled and plan is not None and plan.method != trainer.requested_method,
        num_cores=trainer.world.num_cores,
        # A sampler of the user's has no fan-outs that could be advised.
        sampled=work.is_sampled and getattr(trainer.method, "sampler", None) is None,
        on_gpu=on_gpu,
        drawn_on_gpu=work.on_gpu,
        bf16=trainer.settings.precision == "bf16",
        gpu_free=not on_gpu and torch.cuda.is_available(),
    )


def _evaluation_advice(trainer: Trainer, run: Run) -> str:
    """A sentence of advice if blocking evaluation takes longer than training. Else an empty string."""
    evaluation_s = sum(evaluation.seconds for evaluation in run.evaluations if evaluation.split == "valid")
    training_s = sum(epoch.seconds for epoch in run.history)
    every = trainer.settings.evaluate_every
    # With no more epochs than `every`, only the last one was evaluated: a larger interval would not help.
    if trainer.settings.evaluate != "blocking" or evaluation_s <= training_s or run.epochs <= every:
        return ""
    share = evaluation_s / (evaluation_s + training_s)
    # Twice the interval, and at least 5 epochs: a rule of thumb.
    return f"evaluation: {share:.0%} of the run: set evaluate_every={max(2 * every, 5)} or evaluate=async"


def staleness_of(drifts: list[float], age: float, refreshes: bool) -> dict[str, Any]:
    """The staleness of a run: drift and age, a sentence about what is wrong, and what to type. Both "" if nothing is.

    drifts: how far embeddings moved while they waited in the tables, relative to their norm: one number per epoch
    that measured it, in order. age: the mean age of the embeddings that batches read, in steps. refreshes: whether
    tables are already filled exactly in every epoch.
    """
    # The later half alone: at the beginning of every run weights move fast, and embeddings with them.
    drift = statistics.fmean(drifts[len(drifts) // 2 :])
    if drift <= MAX_DRIFT:
        return {"drift": drift, "age": age, "sentence": "", "advice": ""}
    remedies = "a smaller lr= or a larger method.parts_per_batch"
    if not refreshes:
        remedies = f"method.refresh_every=1, {remedies}"
    sentence = f"histories are old: rows move by {drift:.0%} of their norm in the {age:.1f} steps that they wait"
    return {"drift": drift, "age": age, "sentence": sentence, "advice": f"set {remedies} {CHANGES_TRAINING}"}


class WatchHistory(Callback):
    """Says at the end of a run if its historical embeddings were too stale.

    Each epoch counts two things (`EpochEnd.counters`): the drift, how far embeddings have moved between two
    writes relative to their norm, and the age of the embeddings that batches read. Does nothing for methods
    without them.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self.staleness: dict[str, Any] = {}
        self.drifts: list[float] = []
        self.age_sum = 0.0
        """Sum of the ages of all rows that batches read, in steps."""
        self.num_rows = 0.0

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.age_sum += epoch.counters.get("history.age_sum", 0.0)
        self.num_rows += epoch.counters.get("history.rows", 0.0)
        if "history.drift" in epoch.counters:
            self.drifts.append(epoch.counters["history.drift"])

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not self.drifts:
            return
        mean_age = self.age_sum / max(1.0, self.num_rows)
        self.staleness = staleness_of(self.drifts, mean_age, trainer.work.describe().refreshes)
        if self.report is not None:
            self.report.log({"event": "history", **self.staleness})
        if self.staleness["sentence"]:
            trainer.say(f"{self.staleness['sentence']}: {self.staleness['advice']}")


@dataclass(frozen=True)
class _EpochLine:
    """An epoch whose line is not printed yet."""

    epoch: EpochEnd
    waits_for_evaluation: bool
    """Whether the line shows an evaluation. An asynchronous one ends during a later epoch."""


class ShowProgress(Callback):
    """Shows a progress bar over the seeds of an epoch, and prints a line per epoch with its evaluation.

    A line is printed once its evaluation is done, and after the lines of all earlier epochs.
    """

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.context: Any = None
        self.waiting: deque[_EpochLine] = deque()
        """Epochs whose line is not printed yet, oldest first."""
        self.results: dict[int, Evaluation] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self._print(trainer, repr(trainer.data))
        if "split" in trainer.data.meta:
            self._print(trainer, f"split: {trainer.data.meta['split']}")
        num_parameters = sum(p.numel() for p in trainer.model.parameters())
        model = f"{type(trainer.model).__name__}, {num_parameters:,} parameters"
        ranks = f", {trainer.world.size} ranks" if trainer.world.size > 1 else ""
        self._print(trainer, f"{model}, {format_changed(trainer.method)}, {trainer.device}{ranks}")
        for line in _edge_array_lines(trainer):
            self._print(trainer, line)
        if ops.is_first_time():
            self._print(trainer, "compiling kernels: once on this machine, some ten seconds")

    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
        if self.context is None:
            label = f"epoch {step.epoch}/{trainer.settings.epochs}"
            self.context = progress(label, trainer.num_seeds, "seeds", brief=True)
            self.bar = self.context.__enter__()
        assert self.bar is not None
        self.bar.advance(step.size, loss=step.loss)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self._close()
        self.waiting.append(_EpochLine(epoch, trainer.is_evaluated(epoch.epoch)))
        self._print_complete(trainer)

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split == "valid":
            self.results[evaluation.epoch] = evaluation
            self._print_complete(trainer)

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        self._close()
        for line in self.waiting:
            was_dropped = line.epoch.epoch > run.epochs
            if not was_dropped:
                self._print(trainer, self._format_line(trainer, line.epoch))
        # An error is printed by whoever catches it.
        if run.finished:
            self._print(trainer, f"done: {run.reason}")

    def _print_complete(self, trainer: Trainer) -> None:
        """Print the lines that wait for nothing, in the order of the epochs."""
        while self.waiting:
            line = self.waiting[0]
            if line.waits_for_evaluation and line.epoch.epoch not in self.results:
                return
            self._print(trainer, self._format_line(trainer, line.epoch))
            self.waiting.popleft()

    def _format_line(self, trainer: Trainer, epoch: EpochEnd) -> str:
        """The line of one epoch. Lines have the same columns, so that the eye compares downwards."""
        num_epochs = trainer.settings.epochs
        width = len(str(num_epochs))
        columns = [f"epoch {epoch.epoch:>{width}}/{num_epochs}", f"loss {epoch.loss:.4f}"]
        seconds = format_seconds(epoch.seconds)
        evaluation = self.results.get(epoch.epoch)
        if evaluation is not None:
            columns += [f"valid {name} {value:.4f}" for name, value in evaluation.metrics.items()]
            seconds += f" + {format_seconds(evaluation.seconds)} evaluation"
        columns += [seconds, f"{epoch.seeds_per_s:,.0f} seeds/s"]
        return "  ".join(columns)

    def _close(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.context = self.bar = None

    def _print(self, trainer: Trainer, text: str) -> None:
        print(text, flush=True)
        trainer.note(text)


EDGE_WORDS = {"weight": "edge weights", "attr": "edge features", "type": "edge types"}


def _edge_array_lines(trainer: Trainer) -> list[str]:
    """Which edge arrays the model uses, and how to leave them out; and which it does not use."""
    edge = trainer.data.edge_arrays
    read = edge_arrays_read(trainer.job.model, edge)
    unused = [repr(name) for name in edge if name not in read]
    lines = []
    if read:
        words = " and ".join(EDGE_WORDS.get(name, f"the edge array {name!r}") for name in read)
        off = "data.without_edge_arrays()" if trainer.config is None else "edge_arrays=none"
        lines.append(f"uses {words} (to leave them out: {off})")
    if unused:
        takes = "a conv can take weight, attr and type, if it is made for them"
        lines.append(f"does not use {', '.join(unused)} of the edges: {takes}")
    return lines


def format_changed(settings: Any) -> str:
    """Settings as one would write them in Python, without those that have their defaults."""
    if not is_dataclass(settings):
        return type(settings).__name__
    changed = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            # An object without a `repr` of its own would be shown with its address.
            has_repr = type(value).__repr__ is not object.__repr__
            changed.append(f"{field.name}={value!r}" if has_repr else f"{field.name}={type(value).__name__}(...)")
    return f"{type(settings).__name__}({', '.join(changed)})"
