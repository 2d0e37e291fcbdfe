"""Evaluators: they validate the epochs that are due, each once and in order, and hand out the results.

    Trainer --validate(epoch)--> Evaluator --Result, Result, ...--> Trainer.act_on

`BlockingEvaluator` makes training wait for every evaluation. `async_evaluation.AsyncEvaluator` lets
training continue. Neither changes the trainer. The trainer acts on each result before it asks for the next
one, and stops asking at the result that ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hopline.nn.attributes import preserve_state, set_attributes
from hopline.training.callbacks import Callback, Evaluation

if TYPE_CHECKING:
    from hopline.training.async_evaluation import WeightsBuffer
    from hopline.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Result:
    """An evaluation to act on as if training had waited for it."""

    evaluation: Evaluation
    weights: Mapping[str, Tensor] | None = None
    """The weights that were evaluated, if the model has changed since. None: the model still has them."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the model that go with `weights` (`nn.attributes`)."""
    reason: str | None = None
    """`Trainer.stop_reason` at the end of the epoch that was evaluated. None: training was not to stop."""

    @property
    def is_late(self) -> bool:
        """Whether the model has other weights by now: training has continued past the evaluated epoch."""
        return self.weights is not None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An epoch that waits for its evaluation, and its weights."""

    epoch: int
    buffer: WeightsBuffer
    reason: str | None = None
    """`Trainer.stop_reason` at the end of the epoch."""


class Waiting(Callback):
    """Puts the epochs that wait for their evaluation into checkpoints, with their weights.

    So a run that is resumed evaluates them. It is a callback because checkpoints store callbacks' states.
    """

    def __init__(self) -> None:
        self.snapshots: deque[Snapshot] = deque()
        """Epochs without a result, oldest first. The evaluator fills and empties it."""
        self._restored: list[dict[str, Any]] = []
        """States from a checkpoint, until `pop_restored`."""

    def state(self) -> dict[str, Any]:
        waiting = []
        for snapshot in self.snapshots:
            weights = {
                name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in snapshot.buffer.weights.items()
            }
            attributes = snapshot.buffer.attributes
            waiting.append(
                {"epoch": snapshot.epoch, "reason": snapshot.reason, "weights": weights, "attributes": attributes}
            )
        return {"waiting": waiting}

    def restore_state(self, state: dict[str, Any]) -> None:
        self._restored = state["waiting"]

    def pop_restored(self) -> list[dict[str, Any]]:
        """The epochs that a checkpoint has left to evaluate, as dicts {epoch, reason, weights, attributes}.

        Empty in later calls.
        """
        restored = self._restored
        self._restored = []
        return restored


class Evaluator(ABC):
    """Evaluates the epochs that are due. A context: leaving it ends the evaluator.

    Methods return iterators of results. The caller acts on a result before it asks for the next one, and
    may stop asking. The trainer makes one evaluator per `fit`, and the thread that trains calls all
    methods.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        """The evaluator reads its model and settings, and leaves them as they were."""
        self.waiting = Waiting()
        """The epochs without a result. The trainer puts it among its callbacks."""

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def begin(self) -> Iterator[Result]:
        """Start, and evaluate the epochs that a checkpoint has left.

        Called after a checkpoint was restored.
        """

    @abstractmethod
    def validate(self, epoch: int) -> Iterator[Result]:
        """Evaluate the weights that the model has at the end of an epoch, or have them evaluated later."""

    def poll(self, *, between_steps: bool = False) -> Iterator[Result]:
        """Results that have come since the last call.

        between_steps: whether the epoch is not over. Ranks may then be at different steps, so several
        ranks get no results yet.
        """
        yield from ()

    def wait_all(self) -> Iterator[Result]:
        """Wait for the results of all epochs that have none."""
        yield from ()

    def take_ready(self) -> Iterator[Result]:
        """Results that have come already, for a run that was interrupted. Does not wait."""
        yield from ()

    def close(self) -> None:  # noqa: B027 - blocking evaluation has nothing to end
        """End without waiting for results."""


class BlockingEvaluator(Evaluator):
    """Makes training wait for every evaluation."""

    def begin(self) -> Iterator[Result]:
        # A run that was begun with evaluate=async may have left epochs to evaluate.
        trainer = self.trainer
        for state in self.waiting.pop_restored():
            with preserve_state(trainer.model):
                trainer.model.load_state_dict(state["weights"])
                set_attributes(trainer.model, state["attributes"])
                evaluation = trainer.evaluate_now(state["epoch"], "valid", exact=self._is_exact)
            yield Result(evaluation, state["weights"], state["attributes"], state["reason"])

    def validate(self, epoch: int) -> Iterator[Result]:
        evaluation = self.trainer.evaluate_now(epoch, "valid", exact=self._is_exact)
        yield Result(evaluation, weights=None, reason=self.trainer.stop_reason)

    @property
    def _is_exact(self) -> bool:
        return self.trainer.settings.inference == "exact"
