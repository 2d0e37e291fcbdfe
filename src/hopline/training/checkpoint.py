"""Checkpoints: all that a run needs to go on as if it had never stopped, in one file that is whole or not there."""

from __future__ import annotations

import hashlib
import io
import time
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from hopline.device.snapshots import random_states, restore_random_states
from hopline.distributed.gradients import Gradients
from hopline.distributed.world import World
from hopline.metrics import Mode, mode_of
from hopline.report.writer import versions
from hopline.training.callbacks import EpochEnd, Evaluation, Run
from hopline.training.settings import TrainSettings, upgrade_schedule
from hopline.util import trace
from hopline.util.config import RemovedSetting, removed_settings
from hopline.util.files import replacing
from hopline.util.signals import Interrupted, Signals

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

FILE = "checkpoint.pt"
FORMAT = 1
MAX_TIME_SHARE = 0.02
"""Of the time of a run, what checkpoints may take."""
_MAGIC = b"hopline-checkpoint"


@dataclass
class Position:
    """How far a run has come: which epoch it is in, and what of that is done."""

    epoch: int = 1
    units: int = 0
    """Units of work whose gradients are in the weights."""
    seeds: float = 0
    loss_sum: Tensor | float = 0.0
    """Over these seeds."""
    seconds: float = 0.0


def snapshot(trainer: Trainer, run: Run) -> dict[str, Any]:
    """All that decides how a run goes on."""
    world = trainer.world
    position = vars(trainer.position) | {"loss_sum": torch.as_tensor(trainer.position.loss_sum).detach().cpu()}
    if world.size > 1:  # each rank's own sum, so that it goes on with the very number
        own = [float(position["loss_sum"]) if rank == world.rank else 0.0 for rank in range(world.size)]
        position["loss_sum"] = torch.tensor(world.sum(own), dtype=torch.float64)
    return {
        "identity": trainer.identity(),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "rng": random_states(),
        "position": position,
        "num_steps": trainer.num_steps,
        "stop_reason": trainer.stop_reason,
        "metric": trainer.metric,
        "best_is": trainer.best_is if any(one.split == "valid" for one in run.evaluations) else None,
        "history": [asdict(epoch) for epoch in run.history],
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "callbacks": [[type(callback).__name__, callback.state()] for callback in trainer.active],
        "work": trainer.work.state_dict(),
        "ranks": _gathered(_of_rank(trainer), trainer),
    }


def _of_rank(trainer: Trainer) -> dict[str, Any]:
    """What a rank has of its own: what gradients remember, and where ranks step apart, its weights too."""
    remembered = trainer.gradients.state_dict()
    if not isinstance(remembered, dict):
        raise ValueError(
            f"{type(trainer.gradients).__name__}.state_dict returned a {type(remembered).__name__}: return a dict"
        )
    own: dict[str, Any] = {"gradients": remembered} if remembered else {}
    if trainer.gradients.local:
        own |= {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    return own


def _gathered(own: dict[str, Any], trainer: Trainer) -> list[dict[str, Any]]:
    """What every rank has of its own, in the first rank; an empty list where it is nothing, on any rank."""
    world = trainer.world
    if type(trainer.gradients) is Gradients or not world.any(bool(own)):
        return []
    buffer = io.BytesIO()
    torch.save(own, buffer)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    sent = world.all_to_all([content, *[content[:0]] * (world.size - 1)])
    if world.rank > 0:
        return []
    try:
        return [torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True, map_location="cpu") for part in sent]
    except Exception as error:  # torch and pickle fail in many ways
        raise ValueError(
            f"{type(trainer.gradients).__name__}.state_dict holds more than tensors and plain values, which no "
            "checkpoint keeps: return tensors, numbers, strings, lists and dicts"
        ) from error


def _restore_rank(trainer: Trainer, own: Mapping[str, Any]) -> None:
    if "model" in own:
        trainer.model.load_state_dict(own["model"])
        trainer.optimizer.load_state_dict(own["optimizer"])
    if "gradients" in own:
        trainer.gradients.load_state_dict(own["gradients"])


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """The trainer and its run as they were at a snapshot."""
    position = state["position"]
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    if ranks := state.get("ranks"):  # of an earlier version there are none
        _restore_rank(trainer, ranks[trainer.world.rank])
    for group in trainer.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # it is read on the device by a captured step
            group["lr"] = group["lr"].to(trainer.device)
    trainer.schedule.load_state_dict(state["schedule"])
    trainer.take_over(
        position=Position(**{**position, "loss_sum": _own_sum(position["loss_sum"], trainer.world)}),
        num_steps=state["num_steps"],
        stop_reason=state["stop_reason"],
        metric=state["metric"],
        history=[EpochEnd(**epoch) for epoch in state["history"]],
        evaluations=[Evaluation(**evaluation) for evaluation in state["evaluations"]],
    )
    waiting = list(state["callbacks"])
    for callback in trainer.active:  # progress and reports may be on now and have been off then
        kept = next((one for one in waiting if one[0] == type(callback).__name__), None)
        if kept is not None:
            waiting.remove(kept)
            callback.restore_state(kept[1])
    trainer.work.load_state_dict(state["work"])
    restore_random_states(state["rng"])


def _own_sum(sums: Tensor | float, world: World) -> Tensor | float:
    """This rank's part of the loss so far; of another number of ranks, the first takes all of it."""
    if not isinstance(sums, Tensor) or (sums.dim() == 0 and world.size == 1):
        return sums
    if sums.numel() == world.size:
        return float(sums.view(-1)[world.rank])
    return float(sums.sum()) if world.rank == 0 else 0.0


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one at `path` in one step: a kill or a full disk leaves the old one."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "versions": versions(), **state}, buffer)
    payload = buffer.getvalue()
    header = b"%s %s %d\n" % (_MAGIC, hashlib.sha256(payload).hexdigest().encode(), len(payload))
    try:
        with replacing(path) as file:
            file.write(header)
            file.write(payload)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot write {path} ({reason}): free some space, or choose another folder with out="
        ) from error


def read_together(path: Path, world: World) -> dict[str, Any] | None:
    """The checkpoint that the first rank finds, on every rank; None where there is none."""
    content, problem = b"", ""
    if world.rank == 0 and path.exists():
        try:
            content = path.read_bytes()
            parse(content, path)  # what is damaged is not sent around
        except (OSError, ValueError) as error:
            problem = str(error)
    size, problem = world.broadcast_object([len(content), problem])
    if problem:
        raise ValueError(problem)
    if not size:
        return None
    received = torch.frombuffer(bytearray(content or size), dtype=torch.uint8)
    world.broadcast_tensors([received])
    return parse(received.numpy().tobytes(), path)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, after its checksum was compared; nothing in it is executed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error}): check the path") from error
    return parse(content, path)


def parse(content: bytes, path: Path) -> dict[str, Any]:
    """The bytes of a checkpoint file."""
    header, _, payload = content.partition(b"\n")
    words = header.split()
    if len(words) != 3 or words[0] != _MAGIC:
        raise ValueError(f"{path} is not a hopline checkpoint: remove it, or choose another folder with out=")
    if words[2] != b"%d" % len(payload) or hashlib.sha256(payload).hexdigest().encode() != words[1]:
        raise _damaged(path, "its checksum does not match")
    try:
        state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception as error:  # torch, zip and pickle fail in many ways
        raise _damaged(path, f"it does not hold plain tensors and values: {type(error).__name__}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise _damaged(path, "it does not say its format")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has format {state['format']}, this version of hopline reads {FORMAT}: train it anew")
    return state


def _damaged(path: Path, how: str) -> ValueError:
    return ValueError(f"{path} is damaged ({how}): restore it, or remove it to begin anew")


def was_recorded(record: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is of what a checkpoint holds; what came after it is trained and told again."""
    epoch = record.get("epoch")
    if record.get("event") == "evaluate":
        return (epoch, record.get("split")) in {(one["epoch"], one["split"]) for one in state["evaluations"]}
    return not isinstance(epoch, int) or epoch <= len(state["history"])


def is_over(state: Mapping[str, Any], epochs: int) -> bool:
    """Whether a run of so many epochs has nothing left to train or to validate."""
    left = any(kept.get("waiting") for name, kept in state["callbacks"] if name == "Waiting")
    return not left and (state["stop_reason"] is not None or state["position"]["epoch"] > epochs)


def identity(
    model: nn.Module,
    data: Any,
    method: Mapping[str, Any],
    settings: Mapping[str, Any],
    contents: Mapping[str, str],
    structure: str,
) -> dict[str, Any]:
    """What must be the same for a run to go on from a checkpoint; plain values, compared one by one.

    contents: of the dataset, by the names of its arrays. structure: of the model, apart from its weights.
    """
    return {
        "dataset": f"{data.name} ({data.num_nodes} nodes, {data.num_edges} edges, {data.num_features} features)",
        "training nodes": _checksum(data.splits["train"]),
        "model": type(model).__name__,
        "parameters": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
        "contents": dict(contents),
        "settings of the model": structure,
        "method": {key: value for key, value in method.items() if key not in ("workers", "look_ahead")},
        **{key: settings[key] for key in ("seed", "optimizer", "lr", "weight_decay", "accumulate", "precision")},
        **{key: settings[key] for key in ("weight_decay_rest", "schedule", "clip_norm", "evaluate_every")},
    }


def check_identity(
    stored: Mapping[str, Any], ours: Mapping[str, Any], path: Path, removed: Mapping[str, RemovedSetting]
) -> None:
    """Refuse a checkpoint of another run, and name what differs. removed: settings that the method no longer has."""
    stored = {**stored, "method": _without_removed(stored.get("method"), removed, path)}
    stored.setdefault("gradients", {"kind": "sum"})  # the only way there was
    for key, value in ours.items():
        if key in ("training nodes", "contents", "settings of the model") and key not in stored:
            continue  # written before they were compared
        if key == "contents" and stored[key] != value:
            theirs = stored[key]
            name = next(n for n in {**theirs, **value} if theirs.get(n) != value.get(n))
            change = "is new" if name not in theirs else "is missing" if name not in value else "has changed"
            raise ValueError(
                f"{path} is of other data: {name} of the dataset {change}; take the dataset it was made with, or "
                "another folder with out="
            )
        if key == "settings of the model" and stored[key] != value:
            raise ValueError(
                f"{path} is of another model: its parameters have the same shapes, and its settings or its code have "
                "changed; take the model it was made with, or another folder with out="
            )
        if key == "parameters" and stored.get(key) != value:
            theirs = stored.get(key, {})
            names = [n for n in {**theirs, **value} if theirs.get(n) != value.get(n)]
            raise ValueError(
                f"{path} is of another model: {names[0]} is {_shape(theirs.get(names[0]))} there and "
                f"{_shape(value.get(names[0]))} here; take the model it was made with, or another folder with out="
            )
        theirs = upgrade_schedule(stored[key]) if key == "schedule" and key in stored else stored.get(key)
        if theirs != value:
            raise ValueError(
                f"{path} is of another run: {key} is {theirs!r} there and {value!r} here; set it as it was, "
                "or choose another folder with out="
            )


def _without_removed(method: Any, removed: Mapping[str, RemovedSetting], path: Path) -> Any:
    """The settings of a stored method that still exist. One that was removed must have had its default."""
    if not isinstance(method, Mapping):
        return method
    for key in method.keys() & removed.keys():
        if method[key] != removed[key].default:
            raise ValueError(f"{path} is of a run with method.{key}={method[key]}. {removed[key].refusal(key)}")
    return {key: value for key, value in method.items() if key not in removed}


def check_mode(state: Mapping[str, Any], metric_mode: Mode | None, path: Path) -> None:
    """Refuse a checkpoint whose best epoch was chosen the other way; one that does not say took the highest value."""
    if not state["evaluations"]:
        return
    name, there = state["metric"], state.get("best_is", "max")
    here = metric_mode or mode_of(name)
    if there is not None and here is not None and there != here:
        raise ValueError(
            f"{path} has kept the epoch with the {there} of {name}, and here the {here} is the best: give the Trainer "
            f"metric_mode={there!r}, or choose another folder with out="
        )


def _checksum(ids: Tensor) -> str:
    """Of sorted node ids, of which there may be millions."""
    return f"{ids.numel()} nodes, crc32:{zlib.crc32(ids.cpu().contiguous().numpy().data):08x}"


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else f"{'x'.join(map(str, shape)) or 'a scalar'}"


class Checkpoints:
    """When a run's checkpoints are written, and when a signal ends it; a context that holds the signals.

    They are written by time and at the end of training, and take at most `MAX_TIME_SHARE` of the time of a run unless
    checkpoint_s=0 asks for one after every step. All ranks take part in each; the first one writes. Without a folder
    nothing is written and signals do what they do.
    """

    def __init__(self, folder: Path | None, settings: TrainSettings, world: World) -> None:
        self.path = None if folder is None else folder / FILE
        self.settings, self.world = settings, world
        self.signals = Signals()
        self.last = time.monotonic()
        """When the last one was written, or training began."""
        self.took_s = 0.0
        """How long writing the last one took."""

    def __enter__(self) -> Self:
        self.signals = Signals()
        if self.path is not None:
            self.signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.path is not None:
            self.signals.__exit__(kind, error, where)

    def find(self, trainer: Trainer) -> dict[str, Any] | None:
        """The checkpoint to go on from, if there is one and it is asked for; that of another run is refused."""
        if self.path is None or not self.settings.resume:
            return None
        state = read_together(self.path, self.world)
        if state is None:
            return None
        missing = [key for key in ("identity", "position", "callbacks", "history", "evaluations") if key not in state]
        if missing:
            raise _damaged(self.path, f"it has no {missing[0]}")
        check_identity(state["identity"], trainer.identity(), self.path, removed_settings(type(trainer.asked)))
        check_mode(state, trainer.metric_mode, self.path)
        ranks = len(state.get("ranks", []))
        if ranks not in (0, self.world.size):
            raise ValueError(
                f"{self.path} has a state for each of {ranks} ranks that {type(trainer.gradients).__name__} remembers, "
                f"and this run has {self.world.size}: start {ranks}, or choose another folder with out="
            )
        return state

    def resume(self, trainer: Trainer, run: Run, state: Mapping[str, Any]) -> None:
        """Put the trainer where a checkpoint is, and say where that is."""
        restore(trainer, state)
        at = trainer.position
        ranks, now = state["position"]["loss_sum"].numel(), self.world.size
        change = "" if now == ranks else f"; now {now} rank{'s' * (now > 1)}, before {ranks}"
        done = f"epoch {at.epoch}, {round(at.seeds):,} of {trainer.num_seeds:,} seeds done"
        if trainer.stop_reason is not None:
            done = f"training has ended after epoch {run.epochs}: {trainer.stop_reason}"
        elif at.epoch > self.settings.epochs:
            done = f"all {run.epochs} epochs were trained"
        trainer.say(f"going on from {self.path}: {done}{change}")

    @contextmanager
    def holding_signals(self) -> Generator[None, None, None]:
        """A signal waits for the end of the step or evaluation it comes in, after which a checkpoint is written.

        Outside, where nothing is trained yet or the last checkpoint has everything, it ends the run at once.
        """
        self.signals.at_once = False
        self.last = time.monotonic()
        try:
            yield
        finally:
            self.signals.at_once = True

    @property
    def interval_s(self) -> float:
        """Seconds from one to the next: more than were asked for, where writing one takes too large a share of them."""
        asked_s = self.settings.checkpoint_s
        return max(asked_s, self.took_s / MAX_TIME_SHARE) if asked_s else 0.0

    def write_if_due(self, trainer: Trainer, run: Run, *, at_end: bool = False, in_epoch: bool = False) -> None:
        """By the first rank's clock, or because some rank got a signal: all of them together.

        at_end: whether training has ended, which is always written. in_epoch: whether the time is an epoch's.
        """
        due = at_end or (self.world.rank == 0 and time.monotonic() - self.last >= self.interval_s)
        received = self.signals.received or 0
        if self.world.size > 1:
            due, received = (int(value) for value in self.world.max([float(due), float(received)]))
            if received:  # else one that came during the exchange must not be forgotten
                self.signals.received = received
        if due or received:
            self.write(trainer, run, in_epoch=in_epoch)

    def write(self, trainer: Trainer, run: Run, *, in_epoch: bool = False) -> None:
        """Write where we are, and end here if a signal asked for it."""
        if self.path is None:
            return
        started = time.monotonic()
        # One that is not written among the steps is in no epoch's seconds, and so in none of its stages.
        with trace.span("checkpoint" if in_epoch else "evaluate.checkpoint"):
            state = snapshot(trainer, run)
            if self.world.rank == 0:
                write(self.path, state)
        self.last = time.monotonic()
        self.took_s = self.last - started
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)
