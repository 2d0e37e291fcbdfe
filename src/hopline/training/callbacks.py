"""What happens around training: five hooks, and the callbacks that the library itself uses."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from hopline import ops
from hopline.report.page import read_records
from hopline.report.run_facts import run_facts
from hopline.report.writer import Report, write_text
from hopline.util.config import format_size, nearest
from hopline.util.files import replacing
from hopline.util.progress import Progress, progress
from hopline.util.trace import RegionStatistics

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """An optimizer step."""

    epoch: int
    step: int
    """Counted from 1 over the whole run."""
    loss: Tensor
    """Mean loss over the step's seeds, a detached scalar (reading it on a GPU waits for the step)."""
    size: float
    """Seeds in the step; with `Historical(compensate=True)` the share of all seeds that its batches stand for."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """A finished epoch."""

    epoch: int
    loss: float
    lr: float
    seconds: float
    seeds_per_s: float
    slowest_stage: str
    """The stage with the most work."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds from the beginning to the end of each stage, summed over threads; `wait` is for batches."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage's own work: without waiting for batches, and without a thread's waiting for a core."""
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of one split."""

    epoch: int
    split: str
    metrics: dict[str, float]
    seconds: float


@dataclass(kw_only=True)
class Run:
    """What `Trainer.fit` returns."""

    epochs: int = 0
    """Epochs trained."""
    best_epoch: int = 0
    """The epoch whose weights the model holds now."""
    reason: str = ""
    """Why training ended."""
    finished: bool = False
    """Whether it ended of itself, rather than by an error or an interruption."""
    valid: float = math.nan
    """The metric on the validation split, at the best epoch."""
    test: float = math.nan
    """The metric on the test split, at the best epoch, exact."""
    metric: str = ""
    history: list[EpochEnd] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    stages: list[RegionStatistics] = field(default_factory=list)
    folder: Path | None = None
    rank: int = 0
    """Which of the processes that trained together this is from; all have the same numbers."""
    dropped: int = 0
    """Epochs trained, the last perhaps in part, while the evaluation that ended the run went on; they left nothing."""
    seconds: float = 0.0
    """Of the whole run, with what it took before it was resumed."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The largest memory of the process: "host" is resident memory, "device" what torch reserved of the GPU."""

    def __repr__(self) -> str:
        where = "" if self.folder is None else f", folder={str(self.folder)!r}"
        scores = [
            f"{split} {self.metric} {value:.4f}"
            for split, value in (("valid", self.valid), ("test", self.test))
            if not math.isnan(value)
        ]
        return f"Run({', '.join([f'{self.epochs} epochs', f'best epoch {self.best_epoch}', *scores])}{where})"

    def __str__(self) -> str:
        """The result as a table: metrics, time by part, memory, where the run lies."""
        # Without validation no epoch is known to be the best.
        rows = [("epochs", str(self.epochs))]
        if not math.isnan(self.valid):
            rows = [("best epoch", f"{self.best_epoch} of {self.epochs}")]
        for split, value, how in (("valid", self.valid, ""), ("test", self.test, " (exact: over every edge)")):
            name = f"{split} {self.metric}".strip()
            rows.append((name, f"none: the dataset has no {split} split" if math.isnan(value) else f"{value:.4f}{how}"))
        rows.append(("time", ", ".join(f"{name} {_seconds(s)}" for name, s in self.time_by_part().items())))
        sizes = {"host": "{} on the host (with Python and torch)", "device": "{} on the GPU"}
        rows.append(("peak memory", ", ".join(sizes[p].format(format_size(n)) for p, n in self.peak_bytes.items())))
        if self.folder is not None:
            rows.append(("run folder", f"{self.folder} (open report.html)"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def time_by_part(self) -> dict[str, float]:
        """Seconds of the whole run, of training and evaluation, and of the rest, such as starting and checkpoints.

        Asynchronous evaluation takes place during training: the parts are then more than the whole.
        """
        trained_s = sum(epoch.seconds for epoch in self.history)
        evaluated_s = sum(evaluation.seconds for evaluation in self.evaluations)
        rest_s = max(0.0, self.seconds - trained_s - evaluated_s)
        return {"total": self.seconds, "training": trained_s, "evaluation": evaluated_s, "rest": rest_s}


def _seconds(seconds: float) -> str:
    """Seconds to three digits or so, always in this unit: epochs are compared downwards."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


class Callback:
    """Override what you need. `trainer.stop("why")` in any hook ends training after the current epoch."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a misspelt hook, which would never be called."""
        super().__init_subclass__(**arguments)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                hint = nearest(name, hooks) or f" The hooks are {', '.join(hooks)}."
                raise TypeError(f"{cls.__name__} has a method '{name}', and there is no such hook.{hint}")

    def on_fit_start(self, trainer: Trainer) -> None: ...
    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None: ...
    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None: ...
    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None: ...
    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        """Called once at the end, also when training failed or was interrupted (`run.reason` says so)."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: tensors, numbers, strings, lists and dicts of these."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Called with what `state` returned, after `on_fit_start` of a run that goes on."""


class EarlyStop(Callback):
    """Stop when the validation metric has not improved for `patience` evaluations."""

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1 evaluation, not {patience}")
        self.patience = patience

    def on_fit_start(self, trainer: Trainer) -> None:
        self.best, self.best_epoch, self.waited = -math.inf, 0, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.best, self.best_epoch, self.waited = state["best"], state["best_epoch"], state["waited"]

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split != "valid":
            return
        score = trainer.score(evaluation.metrics)
        if score > self.best:
            self.best, self.best_epoch, self.waited = score, evaluation.epoch, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            rises = trainer.best_is == "max"
            bound = f"risen above {self.best:.4f}" if rises else f"fallen below {-self.best:.4f}"
            trainer.stop(
                f"validation {trainer.metric} has not {bound} (epoch {self.best_epoch}) for {self.patience} evaluations"
            )


class KeepWeights(Callback):
    """The best and the last weights as `state_dict`s of the user's model, in memory and in the run folder.

    Best is by the validation metric; without one, the last weights are the best.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.best: dict[str, Tensor] | None = None
        self.best_value, self.best_epoch = -math.inf, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_value": self.best_value, "best_epoch": self.best_epoch}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.best, self.best_value, self.best_epoch = state["best"], state["best_value"], state["best_epoch"]

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split == "valid" and trainer.score(evaluation.metrics) > self.best_value:
            self.best_value, self.best_epoch = trainer.score(evaluation.metrics), evaluation.epoch
            self.best = {name: t.detach().clone() for name, t in trainer.evaluated_weights().items()}
            self._save("best.pt", self.best)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.save_last(trainer)

    def save_last(self, trainer: Trainer) -> None:
        """The weights as they are, as the last ones."""
        if self.folder is not None:
            self._save("last.pt", trainer.model.state_dict())

    def restore(self, trainer: Trainer, last_epoch: int) -> int:
        """Load the best weights into the model; returns their epoch."""
        if self.best is None:
            self._save("best.pt", trainer.model.state_dict())
            return last_epoch
        trainer.model.load_state_dict(self.best)
        return self.best_epoch

    def _save(self, name: str, weights: dict[str, Any]) -> None:
        if self.folder is None:
            return
        try:
            with replacing(self.folder / name) as file:
                torch.save(weights, file)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise ValueError(f"cannot write {self.folder / name}: {error}; free space or choose out=") from error


class ShowProgress(Callback):
    """A bar over the epoch's seeds, and a line per epoch with its evaluation."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.context: Any = None
        self.waiting: list[tuple[EpochEnd, bool]] = []
        """Epochs whose line is not printed yet, and whether an evaluation of theirs is to come: asynchronously, it
        comes during a later epoch."""
        self.results: dict[int, Evaluation] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self.waiting, self.results = [], {}
        self._print(trainer, repr(trainer.data))
        if "split" in trainer.data.meta:
            self._print(trainer, f"split: {trainer.data.meta['split']}")
        parameters = sum(p.numel() for p in trainer.model.parameters())
        ranks = f", {trainer.world.size} ranks" if trainer.world.size > 1 else ""
        model = f"{type(trainer.model).__name__}, {parameters:,} parameters"
        self._print(trainer, f"{model}, {changed(trainer.method)}, {trainer.device}{ranks}")
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
        self.waiting.append((epoch, trainer.is_evaluated(epoch.epoch)))
        self._print_complete(trainer)

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split == "valid":
            self.results[evaluation.epoch] = evaluation
            self._print_complete(trainer)

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        self._close()
        for epoch, _ in self.waiting:
            if epoch.epoch <= run.epochs:  # later ones were dropped
                self._print(trainer, self._line(trainer, epoch))
        if run.finished:  # an error speaks for itself
            self._print(trainer, f"done: {run.reason}")

    def _print_complete(self, trainer: Trainer) -> None:
        """Print the epochs of which nothing is awaited any more, in their order."""
        while self.waiting:
            epoch, is_evaluated = self.waiting[0]
            if is_evaluated and epoch.epoch not in self.results:
                return
            self._print(trainer, self._line(trainer, epoch))
            del self.waiting[0]

    def _line(self, trainer: Trainer, epoch: EpochEnd) -> str:
        """The columns of one epoch, each of the same width on every line."""
        last, evaluation = trainer.settings.epochs, self.results.get(epoch.epoch)
        parts = [f"epoch {epoch.epoch:>{len(str(last))}}/{last}", f"loss {epoch.loss:.4f}"]
        seconds = _seconds(epoch.seconds)
        if evaluation is not None:
            parts += [f"valid {name} {value:.4f}" for name, value in evaluation.metrics.items()]
            seconds += f" + {_seconds(evaluation.seconds)} evaluation"
        return "  ".join([*parts, seconds, f"{epoch.seeds_per_s:,.0f} seeds/s"])

    def _close(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.context = self.bar = None

    def _print(self, trainer: Trainer, text: str) -> None:
        print(text, flush=True)
        trainer.note(text)


def changed(settings: Any) -> str:
    """Settings as one would write them in Python, without those that are as they always are."""
    if not is_dataclass(settings):
        return type(settings).__name__
    given = ((f.name, getattr(settings, f.name), f.default) for f in fields(settings))
    shown = ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual)
    return f"{type(settings).__name__}({shown})"


class WriteReport(Callback):
    """Everything that happens, into the run folder's report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_fit_start(self, trainer: Trainer) -> None:
        self.report.log_once({"event": "start", **run_facts(trainer)})

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.report.log({"event": "epoch", **vars(epoch)})

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        falls = evaluation.split == "valid" and trainer.best_is == "min"
        self.report.log({"event": "evaluate", **vars(evaluation), **({"best_is": "min"} if falls else {})})

    def drop_after(self, epoch: int) -> None:
        """Take the epochs behind this one, which has ended the run, out of the record."""
        path = self.report.folder / "metrics.jsonl"
        of_epochs = ("epoch", "budget", "pipeline")
        records = [r for r in read_records(path) if r.get("event") not in of_epochs or r["epoch"] <= epoch]
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        self.report.log(
            {
                "event": "end",
                "epochs": run.epochs,
                "dropped": run.dropped,
                "best_epoch": run.best_epoch,
                "reason": run.reason,
                "valid": {run.metric: run.valid},
                "test": {run.metric: run.test},
                "peak_rss_bytes": run.peak_bytes.get("host"),
                "peak_device_bytes": run.peak_bytes.get("device"),
                "seconds": run.seconds,
                "stages": [vars(region) for region in run.stages],
            }
        )


def peak_bytes(device: torch.device) -> dict[str, int]:
    """The largest memory of this process so far, by place."""
    found = {"host": peak_memory_bytes()}
    if device.type == "cuda":
        # Reserved, not allocated: it is what others cannot use. Measuring steps for a budget resets the peak to what is
        # reserved then, and torch seldom gives that back.
        found["device"] = torch.cuda.max_memory_reserved(device)
    return found


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    try:
        import resource
    except ImportError:  # not on every system
        return psutil.Process().memory_info().rss
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
