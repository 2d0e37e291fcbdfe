"""`Evaluator`: validates the epochs that are due, and acts on each result once, in the order of the epochs.

    Trainer --after_step(), after_epoch(epoch)--> Evaluator --act_on(evaluation)--> callbacks, Run

An `Evaluator` makes training wait for every evaluation. An `async_evaluation.AsyncEvaluator` lets training
continue, so a result is late: the model has other weights by then. The run still has the outcome of a blocking
one. Callbacks see the weights that were evaluated, and `stop_reason` as it was. If a late result ends the run,
`act_on` raises `RunEnded`, which leaves the loop, and `all_results` drops everything trained since.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from hopline.nn.attributes import preserve_state, set_attributes
from hopline.shards.data import ShardedData
from hopline.training.callbacks import Callback, Evaluation
from hopline.training.metric import as_metrics, first_metric
from hopline.training.run_state import Position
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An epoch that waits for its evaluation, and its weights."""

    epoch: int
    reason: str | None
    """`Trainer.stop_reason` at the end of the epoch. None: training was not to stop."""
    weights: Mapping[str, Any]
    """As `state_dict` gave them. Those of `get_extra_state` need be no tensors."""
    attributes: Mapping[str, Any]
    """Attributes of the model that go with the weights (`nn.attributes`)."""
    copied: torch.cuda.Event | None = None
    """On a GPU: an event after the copy of the weights, for streams that read them. The host does not wait."""

    def copy_to(self, device: torch.device) -> Snapshot:
        """The snapshot with copies of its weights on a device, which training does not change."""
        weights = {
            name: value.detach().to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in self.weights.items()
        }
        copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return replace(self, weights=weights, copied=copied)


@contextmanager
def loaded(snapshot: Snapshot, model: nn.Module) -> Iterator[None]:
    """A context in which a model has the weights and attributes of a snapshot."""
    with preserve_state(model):
        model.load_state_dict(snapshot.weights)
        set_attributes(model, snapshot.attributes)
        yield


class RunEnded(Exception):
    """Raised by the result of an epoch that ends the run, after training has continued past that epoch."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(f"the run has ended with epoch {snapshot.epoch}")
        self.snapshot = snapshot


class Waiting(Callback):
    """Puts the epochs that wait for their evaluation into checkpoints, with their weights.

    So a run that is resumed evaluates them. It is a callback because checkpoints store callbacks' states.
    """

    def __init__(self) -> None:
        self.snapshots: deque[Snapshot] = deque()
        """Epochs without a result, oldest first: those of a checkpoint at first. The evaluator fills and empties it."""

    def state(self) -> dict[str, Any]:
        waiting = []
        for snapshot in self.snapshots:
            fields = vars(snapshot.copy_to(torch.device("cpu")))
            waiting.append({name: value for name, value in fields.items() if name != "copied"})
        return {"waiting": waiting}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.snapshots = deque(Snapshot(**snapshot) for snapshot in state["waiting"])


class Evaluator:
    """Evaluates the epochs that are due, and makes training wait for it. A context: leaving it ends the evaluator.

    The trainer makes one evaluator per `fit`, and the thread that trains calls all methods. Each method may act
    on results, and so raise `RunEnded`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        """The evaluator reads its model and settings, and writes results into its state."""
        self.waiting = Waiting()
        """The epochs without a result. The trainer puts it among its callbacks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End without waiting for results."""

    def begin(self) -> None:
        """Start, and evaluate the epochs that a checkpoint has left. Called after one was restored."""
        # A run that was begun with evaluate=async may have left some.
        while self.waiting.snapshots:
            snapshot = self.waiting.snapshots.popleft()
            with loaded(snapshot, self.trainer.model):
                evaluation = self._validate(snapshot.epoch)
            self.act_on(evaluation, snapshot)

    def after_epoch(self, epoch: int) -> Evaluation | None:
        """Evaluate the weights that the model has after an epoch, if it is due. None if the result comes later."""
        if not self.trainer.is_evaluated(epoch):
            return None
        evaluation = self._validate(epoch)
        self.act_on(evaluation)
        return evaluation

    def after_step(self) -> None:
        """Act on results that have come meanwhile."""

    def wait_all(self) -> None:
        """Wait for the results of all epochs that have none, and act on them."""

    def take_ready(self) -> None:
        """Act on results that have come already, for a run that was interrupted. Does not wait."""

    def evaluate(self, epoch: int, split: str, *, exact: bool) -> Evaluation:
        """Evaluate the model with the weights that it has now.

        All ranks call this and get the same metrics. The first rank computes them. If the dataset is
        sharded, all ranks compute them together.
        """
        trainer = self.trainer
        started = time.perf_counter()
        with trace.span("evaluate"):
            computes = trainer.world.rank == 0 or isinstance(trainer.data, ShardedData)
            metrics = as_metrics(trainer.evaluate(split, exact=exact)) if computes else {}
            metrics = trainer.world.broadcast_object(metrics)
        return Evaluation(epoch=epoch, split=split, metrics=metrics, seconds=time.perf_counter() - started)

    def _validate(self, epoch: int) -> Evaluation:
        return self.evaluate(epoch, "valid", exact=self.trainer.settings.inference == "exact")

    def act_on(self, evaluation: Evaluation, snapshot: Snapshot | None = None) -> None:
        """Let callbacks see a result as if training had waited for it, and add it to the run.

        snapshot: what was evaluated, if the result is late. While callbacks see it, `stop_reason` and
        `evaluated_weights` are those of its epoch. Training may have found a later reason to stop. That reason
        stands, unless callbacks stop at this result.
        """
        state = self.trainer.state
        self.trainer.run_metric.take_name(first_metric(evaluation.metrics))
        if evaluation.split == "valid":
            # Raises if the metric may be better either way, before any callback compares it.
            self.trainer.score(evaluation.metrics)

        if snapshot is None:
            self.trainer.call("on_evaluate_end", evaluation)
            state.run.evaluations.append(evaluation)
            return
        later_reason = state.stop_reason
        state.stop_reason = snapshot.reason
        state.late_weights = snapshot.weights
        try:
            self.trainer.call("on_evaluate_end", evaluation)
            state.run.evaluations.append(evaluation)
            if state.stop_reason is not None:
                raise RunEnded(snapshot)
        except Exception:
            # A blocking run ends here too. Later epochs count no more.
            self.waiting.snapshots.clear()
            raise
        finally:
            state.late_weights = None
        state.stop_reason = later_reason

    @contextmanager
    def all_results(self) -> Generator[None, None, None]:
        """A context of training. At its end all results have come, and what a blocking run has not is dropped.

        The last checkpoint does not have results that come here. So if any come, another one is written.
        """
        must_write = False
        try:
            with self._results_before_errors():
                yield
            must_write = bool(self.waiting.snapshots)
            self.wait_all()
        except RunEnded as end:
            must_write = True
            self._drop_after(end.snapshot)
        except KeyboardInterrupt:
            # Evaluations that are done still count. Their errors must not hide the interruption.
            with suppress(Exception):
                self.take_ready()
            raise
        if must_write:
            self.trainer.checkpoints.write(self.trainer)

    @contextmanager
    def _results_before_errors(self) -> Iterator[None]:
        """A context whose errors are raised if the results that are yet to come do not end the run.

        A result may end the run with an earlier epoch. A blocking run would then never have met the error.
        """
        try:
            yield
        except RunEnded:
            raise
        except Exception:
            # Waiting is a collective call, so several ranks do not: the others may not have failed.
            if self.trainer.world.size == 1:
                self.wait_all()
            raise

    def _drop_after(self, last: Snapshot) -> None:
        """Drop what was trained after the epoch that ended the run: from model, run and folder."""
        trainer = self.trainer
        state = trainer.state
        run = state.run
        trainer.model.load_state_dict(last.weights)
        set_attributes(trainer.model, last.attributes)

        run.dropped = run.epochs - last.epoch
        has_begun_another = state.position.epoch > run.epochs and state.position.units > 0
        if has_begun_another:
            run.dropped += 1
        state.position = Position(epoch=last.epoch + 1)
        if not run.dropped:
            return
        trainer.say(f"the run has ended with epoch {last.epoch}: what was trained while it was evaluated is dropped")
        run.epochs = last.epoch
        run.history = [epoch_end for epoch_end in run.history if epoch_end.epoch <= last.epoch]
        trainer.keep_weights.save_last(trainer)
        trainer.folder.drop_after(last.epoch)
