"""Checkpoints: all that a run needs to go on as if it had never stopped, in one file that is whole or not there."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hopline.callbacks import EpochEnd, Evaluation, Run
from hopline.report import versions

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
    seeds: int = 0
    loss_sum: Tensor | float = 0.0
    """Over these seeds."""
    seconds: float = 0.0


def snapshot(trainer: Trainer, run: Run) -> dict[str, Any]:
    """All that decides how a run goes on."""
    position = vars(trainer.position) | {"loss_sum": torch.as_tensor(trainer.position.loss_sum).detach().cpu()}
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
    }


def restore(trainer: Trainer, run: Run, state: Mapping[str, Any]) -> None:
    """The trainer and the run as they were at a snapshot."""
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.schedule.load_state_dict(state["schedule"])
    trainer.position = Position(**state["position"])
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
    torch.set_rng_state(state["rng"]["cpu"])
    if _has_cuda() and len(state["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one at `path` in one step: a kill or a full disk leaves the old one."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "versions": versions(), **state}, buffer)
    payload = buffer.getvalue()
    header = b"%s %s %d\n" % (_MAGIC, hashlib.sha256(payload).hexdigest().encode(), len(payload))
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot write {path} ({reason}): free some space, or choose another folder with out="
        ) from error


def sync_folder(folder: Path) -> None:
    """Wait until a renamed file is on the disk under its new name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, after its checksum was compared; nothing in it is executed."""
    try:
        with path.open("rb") as file:
            header, payload = file.readline(200), file.read()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error}): check the path") from error
    words = header.split()
    if len(words) != 3 or words[0] != _MAGIC:
        raise ValueError(f"{path} is not a hopline checkpoint: remove it, or choose another folder with out=")
    if len(payload) != int(words[2]) or hashlib.sha256(payload).hexdigest().encode() != words[1]:
        raise ValueError(f"{path} is damaged (its checksum does not match): restore it, or remove it to begin anew")
    state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has format {state['format']}, this version of hopline reads {FORMAT}: train it anew")
    return state


def identity(model: nn.Module, data: Any, method: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to go on from a checkpoint; plain values, compared one by one."""
    return {
        "dataset": f"{data.name} ({data.num_nodes} nodes, {data.num_edges} edges, {data.num_features} features)",
        "model": type(model).__name__,
        "parameters": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
        "method": {key: value for key, value in method.items() if key not in ("workers", "look_ahead")},
        **{key: settings[key] for key in ("seed", "optimizer", "lr", "weight_decay", "accumulate", "precision")},
        **{key: settings[key] for key in ("schedule", "clip_norm", "evaluate_every")},
    }


def check_identity(stored: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another run, and name what differs."""
    for key, value in ours.items():
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


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else f"{'x'.join(map(str, shape)) or 'a scalar'}"


class Clock:
    """When the next checkpoint is due: so many seconds after the last."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.restart()

    def restart(self) -> None:
        self.last = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= self.every_s
