"""What happens around training: five hooks, and the callbacks that the library itself uses."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from hopline import ops
from hopline.files import replacing
from hopline.progress import Progress, progress
from hopline.report import Report, write_text
from hopline.report_html import read_records
from hopline.run_facts import run_facts
from hopline.trace import RegionStatistics

if TYPE_CHECKING:
    from hopline.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """An optimizer step."""

    epoch: int
    step: int
    """Counted from 1 over the whole run."""
    loss: Tensor
    """Mean loss over the step's seeds, a detached scalar (reading it on a GPU waits for the step)."""
    size: int
    """Seeds in the step."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """A finished epoch."""

    epoch: int
    loss: float
    lr: float
    seconds: float
    seeds_per_s: float
    slowest_stage: str
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage, summed over threads."""
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


class Callback:
    """Override what you need. `trainer.stop("why")` in any hook ends training after the current epoch."""

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
        value = evaluation.metrics[trainer.metric]
        if value > self.best:
            self.best, self.best_epoch, self.waited = value, evaluation.epoch, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(
                f"validation {trainer.metric} has not risen above {self.best:.4f} (epoch {self.best_epoch}) "
                f"for {self.patience} evaluations"
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
        if evaluation.split == "valid" and evaluation.metrics[trainer.metric] > self.best_value:
            self.best_value, self.best_epoch = evaluation.metrics[trainer.metric], evaluation.epoch
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
    """A bar over the epoch's seeds and a line per epoch."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.context: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        ranks = f"; {trainer.world.size} ranks" if trainer.world.size > 1 else ""
        trainer.say(f"{trainer.data!r}; {parameters:,} parameters; {type(trainer.method).__name__}{ranks}")
        if "split" in trainer.data.meta:
            trainer.say(f"split: {trainer.data.meta['split']}")
        if not ops.kernel_cache().exists():
            trainer.say("compiling kernels: once on this machine, some ten seconds")

    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
        if self.context is None:
            label = f"epoch {step.epoch}/{trainer.settings.epochs}"
            self.context = progress(label, trainer.num_seeds, "seeds", brief=True)
            self.bar = self.context.__enter__()
        assert self.bar is not None
        self.bar.advance(step.size, loss=step.loss)

    def _close(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.context = self.bar = None

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self._close()
        trainer.say(
            f"epoch {epoch.epoch}: loss {epoch.loss:.4f}, {epoch.seconds:.1f} s, {epoch.seeds_per_s:,.0f} seeds/s, "
            f"slowest stage: {epoch.slowest_stage}"
        )

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())
        trainer.say(f"epoch {evaluation.epoch}: {evaluation.split} {values} ({evaluation.seconds:.1f} s)")

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        self._close()
        if run.finished:  # an error speaks for itself
            trainer.say(f"stopped after epoch {run.epochs}: {run.reason}")


class WriteReport(Callback):
    """Everything that happens, into the run folder's report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_fit_start(self, trainer: Trainer) -> None:
        self.report.log_once({"event": "start", **run_facts(trainer)})

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.report.log({"event": "epoch", **vars(epoch)})

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.report.log({"event": "evaluate", **vars(evaluation)})

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
                "peak_rss_bytes": peak_memory_bytes(),
                "stages": [vars(region) for region in run.stages],
            }
        )


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    try:
        import resource
    except ImportError:  # not on every system
        return psutil.Process().memory_info().rss
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
