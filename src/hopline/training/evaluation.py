"""When a run is validated, where, and what becomes of the results: in the training process, or beside it."""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline.data.dataset import Dataset
from hopline.device import streams as recording
from hopline.shards.data import ShardedData
from hopline.training.async_evaluation import DeviceRoom, EvaluationThread
from hopline.training.async_evaluation_process import EvaluationProcess, Layout, Room, SentData
from hopline.training.callbacks import Callback, Evaluation, KeepWeights, Run, WriteReport
from hopline.training.checkpoint import Position
from hopline.training.measure import Measure
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

BACKLOG = 8
"""Evaluations that may wait for their turn beside training; with so many, training waits for the oldest."""


@dataclass
class Snapshot:
    """An epoch that is to be evaluated, and its weights."""

    epoch: int
    room: Room | DeviceRoom
    reason: str | None = None
    """Why training was to stop after it, if it was."""


class Waiting(Callback):
    """Epochs whose evaluation is not done: a checkpoint keeps their weights, so that a run that goes on does them."""

    def __init__(self) -> None:
        self.snapshots: deque[Snapshot] = deque()
        self.restored: list[dict[str, Any]] = []

    def state(self) -> dict[str, Any]:
        waiting = []
        for one in self.snapshots:
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in one.room.weights.items()}
            waiting.append({"epoch": one.epoch, "reason": one.reason, "weights": weights})
        return {"waiting": waiting}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.restored = state["waiting"]


class Evaluations(ABC):
    """Evaluates the epochs that are due, each once and in order, and acts on the results; a context that ends it."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self.waiting = Waiting()
        trainer.active.append(self.waiting)
        self.weights: Mapping[str, Tensor] | None = None
        """Those of the evaluation whose results are acted on; None where they are the model's own."""

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def ended_after(self) -> int | None:
        """The epoch whose result has ended the run although training has gone on, if there is one."""
        return None

    @abstractmethod
    def begin(self) -> None:
        """After a checkpoint was read: do what it left to do."""

    @abstractmethod
    def validate(self, epoch: int) -> float | None:
        """Evaluate the model as it is; its score (higher is better), if it is known at once."""

    def arrive(self, *, between_steps: bool = False) -> None:  # noqa: B027 - who waits has nothing left
        """Act on the results that have come."""

    def end_before(self) -> bool:
        """After an error in training: whether a result that is still to come would have ended the run before it."""
        return False

    def finish(self) -> None:  # noqa: B027 - who waits has nothing left
        """Wait for all results; afterwards run and model are as the last epoch that counts has left them."""

    def salvage(self) -> None:  # noqa: B027 - who waits has nothing left
        """After an interruption: act on results that have come already."""

    def close(self) -> None:  # noqa: B027 - who waits has nothing left
        """End without waiting for anything."""

    def evaluate_now(self, epoch: int, split: str, exact: bool) -> Evaluation:
        """Evaluate the model here and act on the result."""
        trainer, started = self.trainer, time.perf_counter()
        with trace.span("evaluate"):
            together = isinstance(trainer.data, ShardedData)
            found = trainer.evaluate(split, exact=exact) if trainer.world.rank == 0 or together else {}
            found = trainer.world.broadcast_object(found)
        evaluation = Evaluation(epoch=epoch, split=split, metrics=found, seconds=time.perf_counter() - started)
        self._act_on(evaluation)
        return evaluation

    def _act_on(self, evaluation: Evaluation) -> None:
        if not evaluation.metrics:
            raise ValueError("evaluation gave no metric: let test_step return at least one, as {name: value}")
        self.trainer.metric = next(iter(evaluation.metrics))
        if evaluation.split == "valid":
            self.trainer.score(evaluation.metrics)  # refuses a metric that may be better either way, before it is used
        self.trainer.call("on_evaluate_end", evaluation)
        self.run.evaluations.append(evaluation)

    def _drop_after(self, epoch: int, weights: Mapping[str, Tensor]) -> None:
        """Leave model, run and folder as they were after the epoch that has ended the run."""
        trainer, run = self.trainer, self.run
        trainer.model.load_state_dict(weights)
        run.dropped = run.epochs + (trainer.position.units > 0) - epoch
        if not run.dropped:
            return
        trainer.say(f"the run has ended with epoch {epoch}: what was trained while it was evaluated is dropped")
        run.epochs = epoch
        run.history = [ended for ended in run.history if ended.epoch <= epoch]
        trainer.position = Position(epoch=epoch + 1)
        for callback in trainer.active:
            if isinstance(callback, KeepWeights):
                callback.save_last(trainer)
            elif isinstance(callback, WriteReport):
                callback.drop_after(epoch)


class Blocking(Evaluations):
    """Training waits for every evaluation."""

    def begin(self) -> None:
        """Of a run that was begun with evaluate=async, epochs may be left: done here, as if training had waited."""
        trainer, left = self.trainer, self.waiting.restored
        self.waiting.restored = []
        if not left:
            return
        now, later = {name: t.clone() for name, t in trainer.model.state_dict().items()}, trainer.stop_reason
        for snapshot in left:
            trainer.stop_reason = snapshot["reason"]
            trainer.model.load_state_dict(snapshot["weights"])
            self.validate(snapshot["epoch"])
            if trainer.stop_reason is not None:
                self._drop_after(snapshot["epoch"], snapshot["weights"])
                trainer.checkpoints.write(trainer, self.run)
                return
        trainer.model.load_state_dict(now)
        trainer.stop_reason = later

    def validate(self, epoch: int) -> float | None:
        exact = self.trainer.settings.inference == "exact"
        return self.trainer.score(self.evaluate_now(epoch, "valid", exact).metrics)


class Beside(Evaluations):
    """A thread, or a process on the CPU, evaluates, and training goes on.

    What is trained before a result says that the run has ended is dropped, so that the run is the one that would have
    waited. The first rank has it; results come to all ranks together, at the end of an epoch. Where training
    would have to wait for it, and runs on the CPU too, it takes over some of the evaluations instead.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        super().__init__(trainer, run)
        settings = trainer.settings
        self.measure = Measure(trainer.method, trainer.test_step, exact=settings.inference == "exact", **trainer.chunks)
        self.layout = Layout.of(trainer.model.state_dict())
        self.rooms: list[Room | DeviceRoom] = []
        self.free: list[Room | DeviceRoom] = []
        self.process: EvaluationProcess | EvaluationThread | None = None
        self.asked: set[int] = set()
        """Epochs that the process has been asked to evaluate."""
        self.results: dict[int, dict[str, Any]] = {}
        """By epoch, what has come and is to be acted on after those before it."""
        self.ended: Snapshot | None = None
        self.first = contextlib.ExitStack()

    def __enter__(self) -> Beside:
        if self._on_gpu:  # which training and a thread that evaluates share
            self.first.enter_context(recording.going_first(self.trainer.device))
        return self

    def __exit__(self, *error: object) -> None:
        with self.first:
            self.close()

    @property
    def _on_gpu(self) -> bool:
        """Whether it evaluates on the GPU that trains."""
        return self.trainer.device.type == "cuda" and self.trainer.sent is None

    @property
    def ended_after(self) -> int | None:
        return None if self.ended is None else self.ended.epoch

    @property
    def can_help(self) -> bool:
        """Whether training may evaluate too, rather than wait: a GPU may have no memory for two at once."""
        return self.trainer.device.type == "cpu"

    def begin(self) -> None:
        trainer, left = self.trainer, self.waiting.restored
        goes_on = trainer.stop_reason is None and trainer.position.epoch <= trainer.settings.epochs
        if trainer.world.rank == 0 and trainer.has("valid") and (goes_on or left):
            if trainer.sent is None:
                self.process = EvaluationThread(self.measure, trainer.job)
            else:
                seed = trainer.settings.seed
                self.process = EvaluationProcess(self.measure, trainer.sent, trainer.model, self.layout, seed)
        self.waiting.restored = []
        for state in left:
            self._take(state["epoch"], state["weights"], state["reason"])

    def validate(self, epoch: int) -> float | None:
        if len(self.waiting.snapshots) >= BACKLOG:
            trace.count("evaluate.waits", 1)
            with trace.span("evaluate.wait"):
                self._collect(wait=True)
        if self.ended is None:
            with trace.span("evaluate.snapshot"):
                self._take(epoch, self.trainer.model.state_dict(), self.trainer.stop_reason)
        return None

    def arrive(self, *, between_steps: bool = False) -> None:
        if self.ended is not None:
            return
        if between_steps and self.trainer.world.size > 1:
            self._listen()
        else:
            self._collect()

    def end_before(self) -> bool:
        if self.trainer.world.size == 1:  # else others may not have met the error
            self._collect_all()
        return self.ended is not None

    def finish(self) -> None:
        waited = bool(self.waiting.snapshots)
        self._collect_all()
        if self.ended is not None:
            self.waiting.snapshots.clear()
            self._drop_after(self.ended.epoch, self.ended.room.weights)
        if waited or self.ended is not None:
            self.trainer.checkpoints.write(self.trainer, self.run)

    def salvage(self) -> None:
        if self.process is not None and self.ended is None:
            with contextlib.suppress(Exception):  # the interruption is what ends the run
                self._listen()
                for answer in self._in_order():
                    self._deliver(answer)

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        for room in self.rooms:
            room.close()
        self.process, self.rooms = None, []

    def _take(self, epoch: int, weights: Mapping[str, Tensor], reason: str | None) -> None:
        """A snapshot, to be evaluated in its turn."""
        if not self.free:
            self.rooms.append(self._new_room())
            self.free.append(self.rooms[-1])
        room = self.free.pop()
        room.fill(weights)
        self.waiting.snapshots.append(Snapshot(epoch, room, reason))
        self._listen()

    def _new_room(self) -> Room | DeviceRoom:
        return DeviceRoom(self.layout, self.trainer.device) if self._on_gpu else Room(self.layout)

    def _listen(self, *, wait: bool = False) -> None:
        """Take the process's answers, and keep it busy."""
        if self.process is None:
            return
        for answer in self.process.answers(wait=wait):
            self.asked.discard(answer["epoch"])
            self.results[answer["epoch"]] = answer
        if not self.asked:
            self.process.prepare()
        room = self.process.most_asked - len(self.asked) if self.process.is_ready else 0
        for snapshot in self._left()[: max(0, room)]:
            self.process.ask(snapshot.epoch, snapshot.room)
            self.asked.add(snapshot.epoch)

    def _left(self) -> list[Snapshot]:
        """What nobody has begun to evaluate, the oldest first."""
        return [one for one in self.waiting.snapshots if one.epoch not in self.asked and one.epoch not in self.results]

    def _in_order(self) -> list[dict[str, Any]]:
        """Results that can be acted on: those of the oldest epochs, as far as they have come."""
        come = itertools.takewhile(lambda one: one.epoch in self.results, self.waiting.snapshots)
        return [self.results[one.epoch] for one in come]

    def _collect(self, *, wait: bool = False) -> None:
        """Act on results in their order; at least on one, if need be by evaluating here what nobody has begun."""
        if not self.waiting.snapshots:
            return
        self._listen()
        while wait and self.process is not None and not self._in_order():
            left = self._left()
            if left and self.can_help:
                self.results[left[0].epoch] = self._evaluate_here(left[0])
                self._listen()
            else:
                self._listen(wait=True)
        for answer in self.trainer.world.broadcast_object(self._in_order()):
            if self.ended is None:
                self._deliver(answer)

    def _collect_all(self) -> None:
        with trace.span("evaluate.finish"):
            while self.waiting.snapshots and self.ended is None:
                self._collect(wait=True)

    def _evaluate_here(self, snapshot: Snapshot) -> dict[str, Any]:
        trainer, started = self.trainer, time.perf_counter()
        now = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(snapshot.room.weights)
        try:
            found = self.measure(trainer.job)
        finally:
            trainer.model.load_state_dict(now)
        return {"epoch": snapshot.epoch, "metrics": found, "seconds": time.perf_counter() - started}

    def _deliver(self, answer: Mapping[str, Any]) -> None:
        """Act on a result as if training had waited for it."""
        trainer, snapshot = self.trainer, self.waiting.snapshots.popleft()
        assert answer["epoch"] == snapshot.epoch
        self.results.pop(snapshot.epoch, None)
        found = {"metrics": answer["metrics"], "seconds": answer["seconds"]}
        later, trainer.stop_reason, self.weights = trainer.stop_reason, snapshot.reason, snapshot.room.weights
        try:
            self._act_on(Evaluation(epoch=snapshot.epoch, split="valid", **found))
        finally:
            self.weights = None
        if trainer.stop_reason is not None:
            self.ended = snapshot
        else:
            trainer.stop_reason = later
            self.free.append(snapshot.room)


def in_process(trainer: Trainer) -> bool:
    """Whether a process evaluates beside training, and not a thread: by choice, and where the user's own function might
    draw what training draws."""
    return trainer.settings.evaluate_on == "host" or trainer.test_step is not None


def evaluates_here(trainer: Trainer) -> bool:
    """Whether evaluation beside training takes memory of the device that trains."""
    return trainer.settings.evaluate == "async" and not (in_process(trainer) and trainer.device.type != "cpu")


def sent_data(trainer: Trainer, data: Dataset) -> SentData | None:
    """The data for the process that evaluates, if one does, before it is placed: what is pinned cannot be shared."""
    if trainer.settings.evaluate != "async" or not in_process(trainer):
        return None
    if trainer.world.rank or isinstance(data, ShardedData) or not data.splits.get("valid", torch.empty(0)).numel():
        return None
    return SentData.of(data)


def check_beside(trainer: Trainer, *, own_way: bool) -> None:
    """Refuse what could not be evaluated beside training, or not with the same result.

    own_way: whether the trainer is of a class that overrides `evaluate`.
    """
    instead = "or set evaluate=blocking"
    if isinstance(trainer.data, ShardedData):
        raise ValueError("evaluate=async needs the whole graph in one process: open the dataset uncut, " + instead)
    if own_way:
        raise ValueError(
            f"evaluate=async runs in another process, without {type(trainer).__name__}.evaluate: give a function of a "
            f"module as test_step=, {instead}"
        )
    if getattr(trainer.work, "keep_rows", None) is not None:
        raise ValueError(
            "evaluate=async leaves no rows for training: set method.refresh_with_evaluation=false, " + instead
        )
