"""Callbacks: the five hooks of a run, what they are called with, and early stopping.

The trainer calls the hooks of all callbacks in order: the user's first, then those that the settings add.
The library writes its reports, progress and best weights by the same hooks (`report_callbacks`,
`best_weights`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hopline.util.config import format_size, nearest, plural
from hopline.util.trace import RegionStatistics

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """An optimizer step, as `Callback.on_step_end` gets it."""

    epoch: int
    """The epoch of the step, counted from 1."""
    step: int
    """The number of the step, counted from 1 over the whole run."""
    loss: Tensor
    """[]: mean loss over the step's seeds, detached. With several ranks, it is the summed loss of this rank's
    seeds divided by `size`. These values add up to the mean. Reading it on a GPU synchronises."""
    size: float
    """Number of seeds in the step, over all ranks. A fraction is possible with `Historical(compensate=True)`:
    a batch then gives its part of the full gradient, however many seeds it has. So each batch counts as an
    equal share of all seeds."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """A finished epoch, as `Callback.on_epoch_end` gets it and `Run.history` lists it."""

    epoch: int
    """The epoch, counted from 1."""
    loss: float
    """Mean training loss over the seeds of all ranks."""
    lr: float
    """Learning rate of the optimizer's first parameter group."""
    seconds: float
    """Seconds of training, without evaluation."""
    seeds_per_s: float
    """Seeds trained per second, over all ranks."""
    slowest_stage: str
    """The stage with the most seconds in `work`."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds from start to end of each stage, summed over threads. The key "wait" has the seconds
    in which training waited for batches."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage's own work, without the time in which it waited for batches or for a core."""
    counters: dict[str, float] = field(default_factory=dict)
    """Counters of the library over the epoch, by name."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of one split, as `Callback.on_evaluate_end` gets them and `Run.evaluations` lists them."""

    epoch: int
    """The epoch whose weights were evaluated."""
    split: str
    """The split: "train", "valid" or "test"."""
    metrics: dict[str, float]
    """Values by the names of the metrics. The first metric chooses the best weights."""
    seconds: float
    """Seconds that the evaluation took."""


@dataclass(kw_only=True)
class Run:
    """What `Trainer.fit` returns: scores, history, time and memory. Printing it shows a table.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1], "valid": [2], "test": [3]},
        ... )
        >>> run = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, epochs=2, show=False).fit()
        >>> run.finished, run.epochs, len(run.history), run.metric
        (True, 2, 2, 'accuracy')
        >>> 0 <= run.test <= 1
        True
    """

    epochs: int = 0
    """Number of epochs trained."""
    best_epoch: int = 0
    """The epoch whose weights the model holds now."""
    reason: str = ""
    """Why training ended."""
    finished: bool = False
    """Whether training ended by itself, rather than by an error or an interruption."""
    valid: float = math.nan
    """The metric on the validation split, at the best epoch. NaN without such a split."""
    test: float = math.nan
    """The metric on the test split, at the best epoch. NaN without such a split."""
    test_is_exact: bool = False
    """Whether hopline computed `test` over every edge. False if a `test_step` or an `evaluate` of yours did."""
    metric: str = ""
    """Name of the metric of `valid` and `test`."""
    history: list[EpochEnd] = field(default_factory=list)
    """One entry per epoch."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """One entry per evaluation, the final test last."""
    stages: list[RegionStatistics] = field(default_factory=list)
    """Times of each stage over all epochs."""
    folder: Path | None = None
    """The run folder. None: nothing was written."""
    rank: int = 0
    """The rank of the process that returned this object. All ranks have the same numbers."""
    dropped: int = 0
    """Number of epochs that were dropped. With asynchronous evaluation, training continues while an epoch is
    evaluated. If that evaluation ends the run, the epochs trained meanwhile are dropped. The last of them may
    be incomplete."""
    seconds: float = 0.0
    """Seconds of the whole run, with those before it was resumed."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak memory of the process, in bytes. "host": resident memory. "device": memory of the GPU that torch
    reserved."""

    def __repr__(self) -> str:
        parts = [f"{self.epochs} {plural(self.epochs, 'epoch')}", f"best epoch {self.best_epoch}"]
        for split, value in (("valid", self.valid), ("test", self.test)):
            if not math.isnan(value):
                parts.append(f"{split} {self.metric} {value:.4f}")
        if self.folder is not None:
            parts.append(f"folder={str(self.folder)!r}")
        return f"Run({', '.join(parts)})"

    def __str__(self) -> str:
        """The result as a table: metrics, time by part, peak memory and the run folder."""
        # Without validation no epoch is known to be the best, so only the number of epochs is shown.
        rows = [("epochs", str(self.epochs))]
        if not math.isnan(self.valid):
            rows = [("best epoch", f"{self.best_epoch} of {self.epochs}")]
        exact = " (exact: over every edge)" if self.test_is_exact else ""
        for split, value, remark in (("valid", self.valid, ""), ("test", self.test, exact)):
            has_split = not math.isnan(value)
            cell = f"{value:.4f}{remark}" if has_split else f"none: the dataset has no {split} split"
            rows.append((f"{split} {self.metric}".strip(), cell))

        times = [f"{name} {format_seconds(seconds)}" for name, seconds in self.time_by_part().items()]
        rows.append(("time", ", ".join(times)))
        phrases = {"host": "{} on the host (with Python and torch)", "device": "{} on the GPU"}
        sizes = [phrases[place].format(format_size(num_bytes)) for place, num_bytes in self.peak_bytes.items()]
        rows.append(("peak memory", ", ".join(sizes)))
        if self.folder is not None:
            rows.append(("run folder", f"{self.folder} (open report.html)"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def time_by_part(self) -> dict[str, float]:
        """Seconds by part: "total", "training", "evaluation", and "rest", such as checkpoints.

        Asynchronous evaluation runs during training. Then the parts add up to more than the total.
        """
        trained_s = sum(epoch.seconds for epoch in self.history)
        evaluated_s = sum(evaluation.seconds for evaluation in self.evaluations)
        rest_s = max(0.0, self.seconds - trained_s - evaluated_s)
        return {"total": self.seconds, "training": trained_s, "evaluation": evaluated_s, "rest": rest_s}


def format_seconds(seconds: float) -> str:
    """About three digits, always in seconds, because lines of epochs are compared with each other."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds:,.0f} s"


class Callback:
    """Hooks around training: override what you need, and give objects of it to `Trainer(callbacks=[...])`.

        on_fit_start     before the first step, and before the state of a checkpoint is restored
        on_step_end      after every optimizer step, with a `StepEnd`
        on_epoch_end     after every epoch, with an `EpochEnd`
        on_evaluate_end  after every evaluation of a split, with an `Evaluation`
        on_fit_end       once, with the `Run`

    `trainer.stop("why")` in any hook ends training after the current epoch. Every rank calls its own
    callbacks.

    Raises:
        TypeError: A subclass has a method `on_...` that is no hook, and would never be called.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class Log(hl.Callback):
        ...     def on_step_end(self, trainer, step):
        ...         print(f"step {step.step} of {step.size} seeds")
        ...
        ...     def on_epoch_end(self, trainer, epoch):
        ...         print(f"epoch {epoch.epoch}")
        ...         if epoch.epoch == 2:
        ...             trainer.stop("two epochs are enough")
        ...
        ...     def on_evaluate_end(self, trainer, evaluation):
        ...         print(f"{evaluation.split}: {', '.join(evaluation.metrics)}")
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1], "valid": [2]},
        ... )
        >>> run = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, callbacks=[Log()], epochs=9, show=False).fit()
        step 1 of 2 seeds
        epoch 1
        valid: accuracy
        step 2 of 2 seeds
        epoch 2
        valid: accuracy
        >>> run.reason
        'two epochs are enough'
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a method `on_...` that is no hook: it is misspelt, and would never be called."""
        super().__init_subclass__(**arguments)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                advice = nearest(name, hooks) or f" The hooks are {', '.join(hooks)}."
                raise TypeError(f"{cls.__name__} has a method '{name}', and there is no such hook.{advice}")

    def on_fit_start(self, trainer: Trainer) -> None: ...
    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None: ...
    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None: ...
    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None: ...
    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        """Called once at the end, also when training failed or was interrupted (`run.reason` says so)."""

    def state(self) -> dict[str, Any]:
        """The state that checkpoints store: tensors, numbers, strings, lists and dicts of these."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Called with what `state` returned, after `on_fit_start` of a run that is resumed."""


class EarlyStop(Callback):
    """Stop when the validation metric has not improved for `patience` evaluations.

    `Trainer(patience=)` adds one.

    Args:
        patience: Evaluations without a better validation metric before training stops.

    Raises:
        ValueError: `patience` is below 1.

    Example:
        >>> hl.EarlyStop(patience=10).patience
        10
    """

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1 evaluation, not {patience}")
        self.patience = patience

    def on_fit_start(self, trainer: Trainer) -> None:
        # The best score: the metric, negated if lower is better (`Trainer.score`).
        self.best = -math.inf
        self.best_epoch = 0
        # Evaluations since the best one.
        self.waited = 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.best_epoch = state["best_epoch"]
        self.waited = state["waited"]

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split != "valid":
            return
        score = trainer.score(evaluation.metrics)
        if score > self.best:
            self.best = score
            self.best_epoch = evaluation.epoch
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            higher_is_better = trainer.best_is == "max"
            change = f"risen above {self.best:.4f}" if higher_is_better else f"fallen below {-self.best:.4f}"
            trainer.stop(
                f"validation {trainer.metric} has not {change} (epoch {self.best_epoch}) "
                f"for {self.patience} evaluations"
            )
