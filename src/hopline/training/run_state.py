"""How far a run has come: what `Trainer.fit` begins anew, and what a checkpoint continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hopline.training.callbacks import EpochEnd, Evaluation, Run


@dataclass
class Position:
    """How far a run has come: its current epoch, and how much of that is done."""

    epoch: int = 1
    """The current epoch, counted from 1. One more than the last epoch: all are trained."""
    units: int = 0
    """Units, such as batches, that this rank has trained in this epoch. `rank_steps.NoUnit` counts too."""
    seeds: float = 0
    """Seeds of this epoch that all ranks have trained. May be a fraction, as `StepEnd.size`."""
    loss_sum: Tensor | float = 0.0
    """Sum of this rank's loss over these seeds. A float64 scalar on the device once a step is done."""
    seconds: float = 0.0


@dataclass
class RunState:
    """How far a run has come, and why it stops.

    The trainer makes one per `fit`. The loop, the evaluator and a checkpoint that is resumed write into it.
    """

    run: Run = field(default_factory=Run)
    position: Position = field(default_factory=Position)
    num_steps: int = 0
    stop_reason: str | None = None
    earlier_s: float = 0.0
    late_weights: Mapping[str, Tensor] | None = None
    """The weights that a late result is of, while callbacks see that result. Otherwise None."""

    def has_steps_left(self, num_epochs: int) -> bool:
        """Whether a run of `num_epochs` epochs has anything left to train. A resumed run need not have."""
        if self.position.epoch > num_epochs:
            return False
        # A run that was stopped within an epoch is trained to the end of that epoch.
        return self.stop_reason is None or self.position.units > 0

    def resume(self, stored: Mapping[str, Any], loss_sum: Tensor | float = 0.0) -> None:
        """Continue where a checkpoint ended. loss_sum: this rank's, of the epoch so far."""
        self.run.history = [EpochEnd(**epoch) for epoch in stored["history"]]
        self.run.evaluations = [Evaluation(**evaluation) for evaluation in stored["evaluations"]]
        self.run.epochs = len(self.run.history)
        self.position = Position(**{**stored["position"], "loss_sum": loss_sum})
        self.num_steps = stored["num_steps"]
        self.stop_reason = stored["stop_reason"]
        events = [*self.run.history, *self.run.evaluations]
        self.earlier_s = self.position.seconds + sum(event.seconds for event in events)
