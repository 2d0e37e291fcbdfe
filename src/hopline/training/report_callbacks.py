"""Callbacks that compare a run with what was promised: its bytes with a budget, its pipeline with its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hopline.report.bottleneck import Explanation, Setup, explain
from hopline.report.page import thinned
from hopline.report.writer import Report
from hopline.training.callbacks import Callback, EpochEnd, Run, StepEnd
from hopline.util.config import format_size

if TYPE_CHECKING:
    from hopline.budget.memory_plan import Place
    from hopline.training.trainer import Trainer

MOST_POINTS = 300
"""Steps of an epoch that the report keeps bytes of; of more, the largest of each stretch."""
LONG_S = 10.0
"""Seconds of training from which on a bottleneck is worth a line: of a shorter run there is nothing to gain."""
SUMMED = ("split", "pieces", "resampled", "cut", "edges_cut", "over", "oom")


class WatchBudget(Callback):
    """What a budget's steps were promised and took, epoch by epoch; on all ranks, and the first one writes."""

    def __init__(self, report: Report | None = None) -> None:
        self.report = report
        self.records: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.records = []
        plan = trainer.plan
        if self.report is None or plan is None:
            return
        items = [item for item in plan.items if item.num_bytes]
        places: dict[Place, None] = dict.fromkeys([*(item.place for item in items), plan.home])
        totals = [
            {"place": place, "promised_bytes": plan.peak_bytes(place), "budget_bytes": plan.budget_bytes(place)}
            for place in places
        ]
        self.report.log({"event": "plan", "items": list(map(vars, items)), "totals": totals})

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        guard = getattr(trainer.work, "guard", None)
        if guard is None:
            return
        record = _over_ranks(guard.take_record(), trainer)
        before, after = record["before"], record["after"]
        record["num_steps"] = len(after)
        record["before"], _ = thinned(before, MOST_POINTS)
        record["after"], record["steps_per_point"] = thinned(after, MOST_POINTS)
        if self.report is not None:
            self.report.log({"event": "budget", "epoch": epoch.epoch, **record})
        self.records.append(record)
        if problems := _happened(record, ("oom", "over")):  # the rest is as planned, and can wait for the end
            trainer.say(f"epoch {epoch.epoch}: {problems}")

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        if not self.records:
            return
        sums = {name: sum(record[name] for record in self.records) for name in SUMMED}
        largest = {name: max(record[name] for record in self.records) for name in ("promised_bytes", "peak_bytes")}
        total = self.records[-1] | sums | largest
        if words := _happened(total, ("split", "resampled", "cut")):
            step, predicted, limit = (format_size(total[f"{name}_bytes"]) for name in ("peak", "promised", "limit"))
            trainer.say(f"budget: {words}; a step took up to {step}, promised {predicted}, allowed {limit}")


def _over_ranks(record: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The largest bytes and the sums of all ranks; the steps are this one's."""
    world = trainer.world
    if world.size == 1:
        return record
    largest = [-record["limit_bytes"], record["promised_bytes"], record["peak_bytes"]]
    limit, promised, peak = world.most([float(value) for value in largest])
    sums = world.sum([float(record[name]) for name in SUMMED])
    counts = {name: int(total) for name, total in zip(SUMMED, sums, strict=True)}
    return record | {"limit_bytes": -limit, "promised_bytes": promised, "peak_bytes": peak} | counts


def _happened(record: dict[str, Any], names: tuple[str, ...]) -> str:
    """What was done to the batches of an epoch or a run, in words: those of the counts that are not 0."""
    words = {
        "split": f"{_batches(record['split'])} split into {record['pieces']} pieces",
        "resampled": f"{record['resampled']} samples drawn anew",
        "cut": f"{record['edges_cut']:,} edges cut from {_batches(record['cut'])}",
        "oom": f"memory ran out in {record['oom']} steps, which went on in smaller pieces",
        "over": f"{record['over']} steps were over the limit",
    }
    return ", ".join(words[name] for name in names if record[name])


def _batches(number: int) -> str:
    return f"{number} batch{'es' * (number != 1)}"


class WatchPipeline(Callback):
    """Why epochs take as long as they do: in the report for each one, and at the end in a sentence for all.

    The first epoch, which compiles and fills caches, counts only where it is the only one; one that was begun in an
    earlier process is left out, since its first steps were not timed here.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report

    def on_fit_start(self, trainer: Trainer) -> None:
        self.steps, self.timed = 0, list[_Timed]()

    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
        self.steps += 1

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        num_batches, steps, self.steps = trainer.position.units, self.steps, 0
        if num_batches > steps * trainer.settings.accumulate:
            return
        timed = _Timed(epoch.stages, epoch.seconds, num_batches, epoch.work)
        self.timed.append(timed)
        self._log({"event": "pipeline", "epoch": epoch.epoch}, timed.explained(setup_of(trainer)), trainer)

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        timed = self.timed[1:] or self.timed if run.finished else []
        if not timed or (found := _together(timed).explained(setup_of(trainer))) is None:
            return
        self._log({"event": "explain"}, found, trainer)
        if found.advice and sum(epoch.seconds for epoch in run.history) >= LONG_S:
            trainer.say(f"bottleneck: {found.sentence}")
        if advice := _about_evaluation(trainer, run):
            trainer.say(advice)

    def _log(self, head: dict[str, Any], found: Explanation | None, trainer: Trainer) -> None:
        if self.report is not None and found is not None:
            setup = setup_of(trainer)
            self.report.log({**head, **vars(found), "workers": setup.workers, "look_ahead": setup.look_ahead})


class _Timed:
    """What was timed of an epoch."""

    def __init__(self, stages: dict[str, float], seconds: float, num_batches: int, alone: dict[str, float]) -> None:
        self.stages, self.seconds, self.num_batches, self.alone = stages, seconds, num_batches, alone

    def explained(self, setup: Setup) -> Explanation | None:
        return explain(self.stages, self.seconds, self.num_batches, setup, self.alone)


def _together(timed: list[_Timed]) -> _Timed:
    """The mean of some epochs."""

    def mean(parts: list[dict[str, float]]) -> dict[str, float]:
        return {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for part in parts for name in part}

    seconds = sum(one.seconds for one in timed) / len(timed)
    batches = round(sum(one.num_batches for one in timed) / len(timed))
    return _Timed(mean([one.stages for one in timed]), seconds, batches, mean([one.alone for one in timed]))


def setup_of(trainer: Trainer) -> Setup:
    """What of a run can be changed, after an epoch."""
    loader, method = getattr(trainer.work, "loader", None), trainer.method
    load = getattr(loader, "load", None)
    threads = getattr(loader, "threads", None) if load is None else (load.workers, load.look_ahead)
    together = loader is not None and getattr(method, "workers", 0) != 0  # ranks prepare by one thread each, in step
    on_gpu = trainer.device.type == "cuda"
    workers, look_ahead = threads or (int(together), 1)
    drawn_on_gpu = bool(getattr(loader, "on_gpu", False))
    return Setup(
        workers=workers,
        look_ahead=look_ahead,
        most_workers=0 if threads is None or drawn_on_gpu else max(1, loader.num_cores),  # type: ignore[union-attr]
        planned=trainer.plan is not None and getattr(trainer.asked, "workers", None) == "auto",
        num_cores=trainer.world.num_cores,
        sampled=hasattr(method, "fanouts"),
        on_gpu=on_gpu,
        drawn_on_gpu=drawn_on_gpu,
        bf16=trainer.settings.precision == "bf16",
        gpu_free=not on_gpu and torch.cuda.is_available(),
    )


def _about_evaluation(trainer: Trainer, run: Run) -> str:
    """What to do where evaluation takes longer than training."""
    evaluated_s = sum(e.seconds for e in run.evaluations if e.split == "valid")
    trained_s = sum(epoch.seconds for epoch in run.history)
    every = trainer.settings.evaluate_every
    if trainer.settings.evaluate == "async" or evaluated_s <= trained_s or run.epochs <= every:
        return ""
    share = evaluated_s / (evaluated_s + trained_s)
    return f"evaluation: {share:.0%} of the run: set evaluate_every={max(2 * every, 5)} or evaluate=async"
