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

from hopline import trace
from hopline.callbacks import EpochEnd, Evaluation, Run
from hopline.files import replacing
from hopline.interrupt import Interrupted, Signals
from hopline.report import versions
from hopline.settings import TrainSettings
from hopline.work import Stateful
from hopline.world import World

if TYPE_CHECKING:
    from hopline.trainer import Trainer

FILE = "checkpoint.pt"
FORMAT = 1
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
        "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if _has_cuda() else []},
        "position": position,
        "num_steps": trainer.num_steps,
        "stop_reason": trainer.stop_reason,
        "metric": trainer.metric,
        "history": [asdict(epoch) for epoch in run.history],
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "callbacks": [[type(callback).__name__, callback.state()] for callback in trainer.active],
        "work": trainer.work.state_dict() if isinstance(trainer.work, Stateful) else {},
    }


def restore(trainer: Trainer, run: Run, state: Mapping[str, Any]) -> None:
    """The trainer and the run as they were at a snapshot."""
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    for group in trainer.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # it is read on the device by a captured step
            group["lr"] = group["lr"].to(trainer.device)
    trainer.schedule.load_state_dict(state["schedule"])
    trainer.position = Position(**state["position"])
    trainer.position.loss_sum = _own_sum(trainer.position.loss_sum, trainer.world)
    trainer.num_steps, trainer.stop_reason = state["num_steps"], state["stop_reason"]
    trainer.metric = state["metric"]
    run.history = [EpochEnd(**epoch) for epoch in state["history"]]
    run.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
    run.epochs = len(run.history)
    waiting = list(state["callbacks"])
    for callback in trainer.active:  # progress and reports may be on now and have been off then
        kept = next((one for one in waiting if one[0] == type(callback).__name__), None)
        if kept is not None:
            waiting.remove(kept)
            callback.restore_state(kept[1])
    if isinstance(trainer.work, Stateful):
        trainer.work.load_state_dict(state["work"])
    torch.set_rng_state(state["rng"]["cpu"])
    if _has_cuda() and len(state["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])


def _own_sum(sums: Tensor | float, world: World) -> Tensor | float:
    """This rank's part of the loss so far; of another number of ranks, the first takes all of it."""
    if not isinstance(sums, Tensor) or (sums.dim() == 0 and world.size == 1):
        return sums
    if sums.numel() == world.size:
        return float(sums.view(-1)[world.rank])
    return float(sums.sum()) if world.rank == 0 else 0.0


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


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
    if len(payload) != int(words[2]) or hashlib.sha256(payload).hexdigest().encode() != words[1]:
        raise ValueError(f"{path} is damaged (its checksum does not match): restore it, or remove it to begin anew")
    state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has format {state['format']}, this version of hopline reads {FORMAT}: train it anew")
    return state


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


def check_identity(stored: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another run, and name what differs."""
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
        if stored.get(key) != value:
            raise ValueError(
                f"{path} is of another run: {key} is {stored.get(key)!r} there and {value!r} here; set it as it was, "
                "or choose another folder with out="
            )


def _checksum(ids: Tensor) -> str:
    """Of sorted node ids, of which there may be millions."""
    return f"{ids.numel()} nodes, crc32:{zlib.crc32(ids.cpu().contiguous().numpy().data):08x}"


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else f"{'x'.join(map(str, shape)) or 'a scalar'}"


class Checkpoints:
    """When a run's checkpoints are written, and when a signal ends it; a context that holds the signals.

    All ranks take part in each; the first one writes. Without a folder nothing is written and signals do what they do.
    """

    def __init__(self, folder: Path | None, settings: TrainSettings, world: World) -> None:
        self.path = None if folder is None else folder / FILE
        self.settings, self.world = settings, world
        self.signals = Signals()
        self.last = time.monotonic()

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

    def resume(self, trainer: Trainer, run: Run) -> None:
        """Put the trainer where the folder's checkpoint is, if there is one and it is asked for."""
        if self.path is None or not self.settings.resume:
            return
        state = read_together(self.path, self.world)
        if state is None:
            return
        check_identity(state["identity"], trainer.identity(), self.path)
        restore(trainer, run, state)
        at = trainer.position
        ranks, now = state["position"]["loss_sum"].numel(), self.world.size
        change = "" if now == ranks else f"; now {now} rank{'s' * (now > 1)}, before {ranks}"
        done = f"epoch {at.epoch}, {round(at.seeds):,} of {trainer.num_seeds:,} seeds done"
        if at.epoch > self.settings.epochs:
            done = f"all {run.epochs} epochs were trained"
        trainer.say(f"going on from {self.path}: {done}{change}")

    @contextmanager
    def between_steps(self) -> Generator[None, None, None]:
        """A signal waits for the end of the step it comes in; elsewhere the last checkpoint has everything."""
        self.signals.at_once = False
        self.last = time.monotonic()
        try:
            yield
        finally:
            self.signals.at_once = True

    def write_if_due(self, trainer: Trainer, run: Run) -> None:
        """By the first rank's clock, or because some rank got a signal: all of them together."""
        due = self.world.rank == 0 and time.monotonic() - self.last >= self.settings.checkpoint_s
        received = self.signals.received or 0
        if self.world.size > 1:
            due, received = (int(value) for value in self.world.most([float(due), float(received)]))
            if received:  # else one that came during the exchange must not be forgotten
                self.signals.received = received
        if due or received:
            self.write(trainer, run)

    def write(self, trainer: Trainer, run: Run) -> None:
        """Write where we are, and end here if a signal asked for it."""
        if self.path is None:
            return
        # The one after an evaluation is in no epoch's seconds, and so in none of its stages.
        with trace.span("evaluate.checkpoint" if self.signals.at_once else "checkpoint"):
            state = snapshot(trainer, run)
            if self.world.rank == 0:
                write(self.path, state)
        self.last = time.monotonic()
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)
