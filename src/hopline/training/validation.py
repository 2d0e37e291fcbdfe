"""When a run is validated: epochs that are due, each once and in their order, and their results as values.

`BlockingEvaluator` makes training wait for every evaluation; `async_evaluation.AsyncEvaluator` lets it go on. Both
hand out `Result`s
and change nothing of the trainer. The trainer acts on each result before it asks for the next (`Trainer.act_on`), and
stops asking at the one that ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hopline.device.snapshots import preserve_weights
from hopline.training.callbacks import Callback, Evaluation

if TYPE_CHECKING:
    from hopline.training.async_evaluation import WeightsBuffer
    from hopline.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Result:
    """Metrics of a split, to be acted on as if training had waited for them."""

    evaluation: Evaluation
    weights: Mapping[str, Tensor] | None = None
    """What was evaluated, where training has gone on since; None where it is the model as it is."""
    reason: str | None = None
    """Why training was to stop after that epoch, if it was."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An epoch that is to be evaluated, and its weights."""

    epoch: int
    buffer: WeightsBuffer
    reason: str | None = None
    """Why training was to stop after it, if it was."""


class Waiting(Callback):
    """Epochs whose evaluation is not done: a checkpoint keeps their weights, so that a run that goes on does them."""

    def __init__(self) -> None:
        self.snapshots: deque[Snapshot] = deque()
        self._restored: list[dict[str, Any]] = []

    def state(self) -> dict[str, Any]:
        waiting = []
        for snapshot in self.snapshots:
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in snapshot.buffer.weights.items()}
            waiting.append({"epoch": snapshot.epoch, "reason": snapshot.reason, "weights": weights})
        return {"waiting": waiting}

    def restore_state(self, state: dict[str, Any]) -> None:
        self._restored = state["waiting"]

    def pop_restored(self) -> list[dict[str, Any]]:
        """What a checkpoint has left to evaluate, once: {epoch, reason, weights} of each epoch."""
        restored = self._restored
        self._restored = []
        return restored


class Evaluator(ABC):
    """Evaluates the epochs that are due. A context that ends it.

    Results come as iterators. Whoever acts on a result does so before asking for the next, and may stop asking.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        """It is asked for its model and settings, and not changed."""
        self.waiting = Waiting()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def begin(self) -> Iterator[Result]:
        """After a checkpoint was read: evaluate what it has left."""

    @abstractmethod
    def validate(self, epoch: int) -> Iterator[Result]:
        """Evaluate the model as it is, now or later."""

    def poll(self, *, between_steps: bool = False) -> Iterator[Result]:
        """Results that have come since. between_steps: on a rank by itself, where others may be at another step."""
        yield from ()

    def wait_all(self) -> Iterator[Result]:
        """Wait for all results that are to come."""
        yield from ()

    def take_ready(self) -> Iterator[Result]:
        """After an interruption: results that have come already."""
        yield from ()

    def close(self) -> None:  # noqa: B027 - who waits has nothing left
        """End without waiting for anything."""


class BlockingEvaluator(Evaluator):
    """Training waits for every evaluation."""

    def begin(self) -> Iterator[Result]:
        """Of a run that was begun with evaluate=async, epochs may be left."""
        trainer = self.trainer
        for state in self.waiting.pop_restored():
            with preserve_weights(trainer.model):
                trainer.model.load_state_dict(state["weights"])
                evaluation = trainer.evaluate_now(state["epoch"], "valid", exact=self._is_exact)
            yield Result(evaluation, weights=state["weights"], reason=state["reason"])

    def validate(self, epoch: int) -> Iterator[Result]:
        evaluation = self.trainer.evaluate_now(epoch, "valid", exact=self._is_exact)
        yield Result(evaluation, weights=None, reason=self.trainer.stop_reason)

    @property
    def _is_exact(self) -> bool:
        return self.trainer.settings.inference == "exact"
