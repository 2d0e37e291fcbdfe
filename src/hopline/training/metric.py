"""The metric of a run: who computes it, its name, and whether its largest or smallest value is best.

The dataset's metric has a name from the start. A `test_step` of the user, or an overridden `Trainer.evaluate`,
names its metrics when it returns them, and the first one counts. `RunMetric.try_test_step` asks before training, and
`RunMetric.try_metric` tries a metric of the task.

Best weights, early stopping and the plateau schedule compare `RunMetric.score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, get_args

import torch
from torch import Tensor

from hopline.contract import Job
from hopline.device.snapshots import evaluating
from hopline.metrics import Mode, mode_of
from hopline.shards.data import ShardedData
from hopline.tasks.task import Task, TestStep
from hopline.units.job import examples_of

MAX_TRIED_LABELS = 1 << 14
"""Most labels of a split on which a metric is tried before training."""
NUM_TRIED_NODES = 64
"""Validation nodes at which a `test_step` is tried before training."""


class RunMetric:
    """The metric that chooses the best weights of a run.

    Args:
        task: What is learnt. Its metric counts unless `test_step` or `Trainer.evaluate` of the user's gives others.
        mode: As the user gave it: whether the first metric is best at its "max" or its "min".
        overrides_evaluate: Whether the trainer is of a class that overrides `evaluate`.
    """

    def __init__(self, task: Task, mode: Mode | None, *, overrides_evaluate: bool) -> None:
        self.task = task
        self.name = task.metric
        self.given_mode: Mode | None = mode
        self.overrides_evaluate = overrides_evaluate
        self.is_own = task.test_step is not None or overrides_evaluate
        self.is_known = not self.is_own
        """Whether `name` is the metric that evaluations give."""
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"metric_mode must be 'max' or 'min', not {mode!r}")
        if mode is not None and not self.is_own and task.mode() not in (None, mode):
            raise ValueError(
                f"metric_mode={mode!r} is for a metric of your own, and {task.metric} is best at its {task.mode()}: "
                "give test_step=, or leave it out"
            )

    @property
    def mode(self) -> Mode | None:
        """Whether the largest or the smallest value is the best. None: not known, or not yet."""
        return self.given_mode or (self._mode() if self.is_known else None)

    @property
    def best_is(self) -> Mode:
        """As `mode`. Raises a ValueError if the name does not tell."""
        mode = self.given_mode or self._mode()
        if mode is None:
            raise ValueError(
                f"the name of the metric {self.name!r} does not tell whether higher or lower is better: give the "
                "Trainer metric_mode='max' or metric_mode='min'"
            )
        return mode

    def _mode(self) -> Mode | None:
        return mode_of(self.name) if self.is_own else self.task.mode(self.name)

    def score(self, metrics: Mapping[str, float]) -> float:
        """The first metric, negated if lower is better."""
        value = metrics[self.name]
        return value if self.best_is == "max" else -value

    def take_name(self, name: str) -> None:
        """From now on, `name` is the metric that evaluations give."""
        self.name = name
        self.is_known = True

    def try_metric(self, job: Job) -> None:
        """Compute the metric of random outputs, to refuse before training one that does not go with the labels.

        A task of the user's, which alone knows its outputs, and labels in shards are not tried.
        """
        if self.is_own or isinstance(job.data, ShardedData):
            return
        for split in ("valid", "test"):
            examples = examples_of(job.task, job.data, split)
            if not len(examples):
                continue
            y = examples.labels(job.data.y, torch.arange(min(len(examples), MAX_TRIED_LABELS)))
            if y is None:
                raise ValueError(
                    f"the dataset has no labels to evaluate split {split!r} by: give it y, or steps of your own, "
                    "train_step= and test_step="
                )
            if job.task.settings is None:
                continue
            metrics: dict[str, float] = {}
            # Some of the labels may be too few for the metric.
            with suppress(ValueError) if len(y) < len(examples) else nullcontext():
                metrics = _metrics_of_random_outputs(job, y.cpu())
            if metrics and split == "valid":
                self.score(metrics)  # raises if the name does not tell what is best

    def try_test_step(self, job: Job) -> None:
        """Call `test_step` at a few nodes, to refuse what it returns before anything is trained. Collective.

        An error of `test_step` counts for nothing, since so few nodes may be too few for it.
        """
        ids = job.data.splits.get("valid")
        if self.task.test_step is None or self.given_mode is not None or ids is None or not ids.numel():
            return
        name = ""
        problem = ""
        if job.world.rank == 0 or isinstance(job.data, ShardedData):
            tried: list[Any] = []
            with suppress(Exception):
                tried.append(run_test_step(self.task.test_step, job, ids[:NUM_TRIED_NODES]))
            try:
                name = first_metric(tried[0]) if tried else ""
            except ValueError as error:
                problem = str(error)
        name, problem = job.world.broadcast_object([name, problem])
        if problem:
            raise ValueError(problem)
        if name:
            self.take_name(name)
            self.score({name: 0.0})  # raises if the name does not tell what is best


def _metrics_of_random_outputs(job: Job, y: Tensor) -> dict[str, float]:
    """The metrics of a task of hopline's for outputs of any model. y: [n, ...], labels on the host."""
    generator = torch.Generator().manual_seed(0)
    widths = (job.data.num_outputs, 1)  # a model may have one score for two classes
    first_error: ValueError | None = None
    for width in widths:
        try:
            return job.task.measure(torch.randn(len(y), width, generator=generator), y)
        except ValueError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def run_test_step(test_step: TestStep, job: Job, ids: Tensor) -> dict[str, float]:
    """What the user's function returns for a model, in evaluation mode."""
    # Random numbers that the function draws must not change those of training.
    gpus = [job.device] if job.device.type == "cuda" else []
    with evaluating(job.model), torch.random.fork_rng(gpus):
        return test_step(job.model, job.data, ids)


def as_metrics(returned: Any) -> dict[str, float]:
    """Metrics by name, as the user's function should have returned them. Raises ValueError."""
    try:
        metrics = {str(name): float(value) for name, value in returned.items()}
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # of a tensor with many elements: RuntimeError
        raise ValueError(
            f"test_step returned {returned!r:.60}: return numbers by name, as {{'accuracy': 0.9}}"
        ) from error
    if not metrics:
        raise ValueError("evaluation gave no metric: let test_step return at least one, as {'accuracy': 0.9}")
    return metrics


def first_metric(returned: Any) -> str:
    """The name of the metric that counts. Raises ValueError as `as_metrics` does."""
    return next(iter(as_metrics(returned)))
