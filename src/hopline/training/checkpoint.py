"""Checkpoints: all that a run needs to resume as if it had never stopped, in one file.

    to save      snapshot(trainer) -> state -> write: replaces the file in one step; it is always whole
    to resume    read_together -> state -> check_identity: refuses another run -> restore(trainer, state)

A state is a dict of tensors and plain values. It holds the weights of the model and attributes that have
changed, the optimizer, the schedule, random states, the position within the epoch, results so far, and the
states of callbacks, of the method's work and of the ranks.

The file is a header line, then what `torch.save` wrote:

    hopline-checkpoint SHA256 NUM_BYTES\\n
    payload

The checksum is compared before anything is loaded, and loading executes nothing (`weights_only`).

`Checkpoints` decides when to write: by time, at the end of training, and after a signal.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
import zlib
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hopline.device.snapshots import random_states, restore_random_states
from hopline.distributed.gradients import Gradients
from hopline.distributed.world import World
from hopline.metrics import Mode, mode_of
from hopline.nn.attributes import changes_since, set_attributes
from hopline.nn.structure import opaque_part
from hopline.report.writer import versions
from hopline.training.run_facts import settings_of, task_facts
from hopline.training.run_state import RunState
from hopline.training.settings import TrainSettings
from hopline.util import trace
from hopline.util.files import replacing
from hopline.util.signals import Interrupted, Signals

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

FILE = "checkpoint.pt"
FORMAT = 3
MAX_TIME_SHARE = 0.02
"""Largest share of the time of a run that writing checkpoints may take."""
_MAGIC = b"hopline-checkpoint"


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """The state of a run, for a checkpoint. All ranks must call this together."""
    world = trainer.world
    run = trainer.run
    trainer.weights_check.check(is_trained=False)  # before a checkpoint replaces one that can be resumed
    loss_sum = torch.as_tensor(trainer.position.loss_sum).detach().cpu()
    if world.size > 1:
        # [num_ranks]: the sum of each rank, so that each resumes with the same bits.
        sum_by_rank = [0.0] * world.size
        sum_by_rank[world.rank] = float(loss_sum)
        loss_sum = torch.tensor(world.sum(sum_by_rank), dtype=torch.float64)
    attributes, lost_parts = changes_since(trainer.fingerprints.code["model"], trainer.model)
    has_validated = any(evaluation.split == "valid" for evaluation in run.evaluations)
    return {
        "identity": identity(trainer),
        "model": trainer.model.state_dict(),
        "attributes": attributes,
        "lost parts": lost_parts,
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "rng": random_states(),
        "position": vars(trainer.position) | {"loss_sum": loss_sum},
        "num_steps": trainer.num_steps,
        "stop_reason": trainer.stop_reason,
        "metric": trainer.metric,
        # Not asked for before it is needed: it raises if the metric's name does not tell the mode.
        "best_is": trainer.best_is if has_validated else None,
        "history": [asdict(epoch) for epoch in run.history],
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "callbacks": [[type(callback).__name__, callback.state()] for callback in trainer.active],
        "work": trainer.work.state_dict(),
        "ranks": _gather_rank_states(_rank_state(trainer), trainer),
    }


def _rank_state(trainer: Trainer) -> dict[str, Any]:
    """The state that only this rank has: of its `gradients`, and with `Gradients.local` also of the weights.

    Ranks whose gradients are `local` have different weights within an epoch, as in local SGD.
    """
    gradients_state = trainer.gradients.state_dict()
    if not isinstance(gradients_state, dict):
        name = type(trainer.gradients).__name__
        raise ValueError(f"{name}.state_dict returned a {type(gradients_state).__name__}: return a dict")
    state: dict[str, Any] = {}
    if gradients_state:
        state["gradients"] = gradients_state
    if trainer.gradients.local:
        state["model"] = trainer.model.state_dict()
        state["optimizer"] = trainer.optimizer.state_dict()
    return state


def _gather_rank_states(state: dict[str, Any], trainer: Trainer) -> list[dict[str, Any]]:
    """On the first rank: the states of all ranks, by rank. An empty list on other ranks, and if all are empty."""
    world = trainer.world
    # The usual sum, `Gradients` itself, has no state on any rank. Then no collective call is needed.
    if type(trainer.gradients) is Gradients or not world.any(bool(state)):
        return []
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    # Every rank sends all to the first rank, and nothing to the others.
    nothing = content[:0]
    contents = world.all_to_all([content, *[nothing] * (world.size - 1)])
    if world.rank > 0:
        return []
    try:
        return [
            torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True, map_location="cpu")
            for content in contents
        ]
    except Exception as error:  # torch and pickle fail in many ways
        raise ValueError(
            f"{type(trainer.gradients).__name__}.state_dict holds more than tensors and plain values, which no "
            "checkpoint keeps: return tensors, numbers, strings, lists and dicts"
        ) from error


def _restore_rank(trainer: Trainer, state: Mapping[str, Any]) -> None:
    if "model" in state:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
    if "gradients" in state:
        trainer.gradients.load_state_dict(state["gradients"])


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put a trainer and its run into the state of a snapshot."""
    trainer.model.load_state_dict(state["model"])
    set_attributes(trainer.model, state["attributes"])
    if state["lost parts"]:
        trainer.say(
            f"{state['lost parts'][0]} of the model had changed while it was trained, and checkpoints keep only "
            "numbers, strings and tensors: restore it in restore_state of a callback, if anything is computed with it",
            logging.WARNING,
        )
    trainer.optimizer.load_state_dict(state["optimizer"])
    ranks = state["ranks"]  # empty if ranks have no states of their own
    if ranks:
        _restore_rank(trainer, ranks[trainer.world.rank])
    for group in trainer.optimizer.param_groups:
        # A captured step reads its rate on the device, and checkpoints are loaded on the CPU.
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(trainer.device)
    trainer.schedule.load_state_dict(state["schedule"])

    loss_sum = _rank_loss_sum(state["position"]["loss_sum"], trainer.world)
    trainer.state.resume(state, loss_sum)
    if trainer.run.evaluations:
        trainer.run_metric.take_name(state["metric"])

    # By the name of the class, and within a class in order. Not by position: callbacks that show progress
    # or write reports may be present in only one of the two runs.
    callback_states: dict[str, deque[dict[str, Any]]] = {}
    for name, callback_state in state["callbacks"]:
        callback_states.setdefault(name, deque()).append(callback_state)
    for callback in trainer.active:
        states = callback_states.get(type(callback).__name__)
        if states:
            callback.restore_state(states.popleft())
    trainer.work.load_state_dict(state["work"])
    restore_random_states(state["rng"])


def _rank_loss_sum(sums: Tensor, world: World) -> float:
    """This rank's part of the loss sum of the epoch. sums: by rank; with another number of ranks the first gets all."""
    if sums.numel() == world.size:
        return float(sums.view(-1)[world.rank])
    return float(sums.sum()) if world.rank == 0 else 0.0


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint at `path` in one step. A kill or a full disk leaves the old one as it was."""
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
    """The checkpoint that the first rank finds, on every rank. None if there is none.

    Only the first rank reads the file. It sends the bytes to the others.
    """
    content = b""
    problem = ""
    if world.rank == 0 and path.exists():
        try:
            content = path.read_bytes()
            # Raises if the file is damaged, before it is sent to the other ranks.
            parse(content, path)
        except (OSError, ValueError) as error:
            problem = str(error)
    num_bytes, problem = world.broadcast_object([len(content), problem])
    if problem:
        raise ValueError(problem)
    if not num_bytes:
        return None
    buffer = bytearray(content) if world.rank == 0 else bytearray(num_bytes)
    received = torch.frombuffer(buffer, dtype=torch.uint8)
    world.broadcast_tensors([received])
    return parse(received.numpy().tobytes(), path)


def parse(content: bytes, path: Path) -> dict[str, Any]:
    """The state in the bytes of a checkpoint file. Its checksum is compared first, and nothing in it is executed.

    path: for messages.
    """
    header, _, payload = content.partition(b"\n")
    words = header.split()
    if len(words) != 3 or words[0] != _MAGIC:
        raise ValueError(f"{path} is not a hopline checkpoint: remove it, or choose another folder with out=")
    _, checksum, num_bytes = words
    is_whole = num_bytes == b"%d" % len(payload)
    if not is_whole or hashlib.sha256(payload).hexdigest().encode() != checksum:
        raise _damage_error(path, "its checksum does not match")
    try:
        state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception as error:  # torch, zip and pickle fail in many ways
        raise _damage_error(path, f"it does not hold plain tensors and values: {type(error).__name__}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise _damage_error(path, "it does not say its format")
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has format {state['format']}, this version of hopline reads {FORMAT}: train it anew")
    return state


def _damage_error(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} is damaged ({problem}): restore it, or remove it to begin anew")


def was_recorded(record: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is from before the checkpoint `state`.

    What came after the checkpoint is trained again, and its lines are written again.
    """
    epoch = record.get("epoch")
    if record.get("event") == "evaluate":
        evaluated = {(evaluation["epoch"], evaluation["split"]) for evaluation in state["evaluations"]}
        return (epoch, record.get("split")) in evaluated
    # A line without an epoch is about the whole run.
    return not isinstance(epoch, int) or epoch <= len(state["history"])


def is_over(state: Mapping[str, Any], epochs: int) -> bool:
    """Whether a run of `epochs` epochs has nothing left to train or to validate."""
    # The callback `validation.Waiting` holds the epochs that wait for their evaluation.
    must_validate = any(
        callback_state.get("waiting") for name, callback_state in state["callbacks"] if name == "Waiting"
    )
    run_state = RunState()
    run_state.resume(state)
    return not must_validate and not run_state.has_steps_left(epochs)


def identity(trainer: Trainer) -> dict[str, Any]:
    """Facts, in plain values, that must be the same for a run to resume from a checkpoint.

    The method's `workers` and `look_ahead` are not among them: they change the speed alone.
    """
    model = trainer.model
    data = trainer.data
    asked = settings_of(trainer)
    settings = asked["train"]
    compared_settings = (
        "seed",
        "optimizer",
        "lr",
        "weight_decay",
        "accumulate",
        "precision",
        "weight_decay_rest",
        "schedule",
        "clip_norm",
        "evaluate_every",
        "inference",
    )
    splits = {"validation nodes": "valid", "test nodes": "test"}
    examples = trainer.job.examples
    own_labels = {} if examples.y is None else {"labels of the examples": _checksum(examples.y)}
    return {
        "dataset": f"{data.name} ({data.num_nodes} nodes, {data.num_edges} edges, {data.num_features} features)",
        "training nodes": _checksum(examples.nodes),
        **own_labels,
        **{title: _checksum(data.splits[name]) if name in data.splits else None for title, name in splits.items()},
        "task": task_facts(trainer.task.settings or trainer.task),
        "model": type(model).__name__,
        # The extra state of a module is no tensor.
        "parameters": {name: list(getattr(tensor, "shape", ())) for name, tensor in model.state_dict().items()},
        "contents": dict(trainer.fingerprints.contents),
        "code": {name: dict(parts) for name, parts in trainer.fingerprints.code.items()},
        "method": {key: value for key, value in asked["method"].items() if key not in ("workers", "look_ahead")},
        **{key: settings[key] for key in compared_settings},
        "gradients": asked["gradients"],
    }


def check_identity(stored: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another run, and name the first fact that differs. stored, ours: of `identity`."""
    kinds = {"contents": ("other data", "dataset"), "parameters": ("another model", "model")}
    for key, value in ours.items():
        theirs = stored.get(key)
        if key == "code" or theirs == value:  # code is compared last: differences of settings are easier to read
            continue
        if key in kinds:
            kind, noun = kinds[key]
            name = _first_difference(theirs or {}, value)
            change = _describe_change(name, theirs or {}, value)
            raise ValueError(
                f"{path} is of {kind}: {change}; take the {noun} it was made with, or another folder with out="
            )
        raise ValueError(
            f"{path} is of another run: {key} is {theirs!r} there and {value!r} here; set it as it was, "
            "or choose another folder with out="
        )
    _check_code(stored["code"], ours["code"], path)


def _check_code(stored: Mapping[str, Mapping[str, str]], ours: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """Refuse a checkpoint of another model, or of other functions of the user, and name the part that differs."""
    opaque = opaque_part(ours["model"])
    if opaque is not None:
        raise ValueError(
            f"{path} may be of another model: {opaque} of the model cannot be compared; give its class a __getstate__ "
            "that returns plain values, or choose another folder with out="
        )
    for name, parts in ours.items():
        theirs = stored[name]
        if theirs == parts:
            continue
        part = name if theirs.get(name) != parts.get(name) else _first_difference(theirs, parts)
        change = _describe_change(part, theirs, parts)
        if part.endswith(" source"):
            change = f"{part.removesuffix(' source')} has changed"
        if name == "model":
            raise ValueError(
                f"{path} is of another model: its parameters have the same shapes, and {change}; take the model "
                "it was made with, newly built if it has run since, or another folder with out="
            )
        raise ValueError(
            f"{path} is of another run: {change}; take the {name} it was made with, or another folder with out="
        )


def _first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return next(name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name))


def _describe_change(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return f"{name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here"


def check_mode(state: Mapping[str, Any], metric_mode: Mode | None, path: Path) -> None:
    """Refuse a checkpoint whose best epoch was chosen by the other mode, "max" or "min"."""
    if not state["evaluations"]:
        return
    name = state["metric"]
    theirs = state["best_is"]
    ours = metric_mode or mode_of(name)
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"{path} has kept the epoch with the {theirs} of {name}, and here the {ours} is the best: give the Trainer "
            f"metric_mode={theirs!r}, or choose another folder with out="
        )


def _checksum(ids: Tensor) -> str:
    return f"{ids.size(0)} nodes, crc32:{zlib.crc32(ids.cpu().contiguous().numpy().data):08x}"


class Checkpoints:
    """Decides when a run writes a checkpoint, and when a signal ends it. A context that handles signals.

    Checkpoints are written by time and at the end of training. They take at most `MAX_TIME_SHARE` of the
    time of a run, unless checkpoint_s=0 asks for one after every step. All ranks take part in each one, and
    the first rank writes it. Without a folder nothing is written, and signals act as usual.

    The trainer owns it, and enters it once per `fit`. All methods belong to the thread that trains.
    """

    def __init__(self, folder: Path | None, settings: TrainSettings, world: World) -> None:
        self.path = None if folder is None else folder / FILE
        self.settings = settings
        self.world = world
        self.signals = Signals()
        self.last_write_s = time.monotonic()
        """Reading of `time.monotonic` when the last checkpoint was written, or training began."""
        self.write_duration_s = 0.0

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
        """The checkpoint to resume from. None without one, or without resume=true. One of another run is refused."""
        if not self.settings.resume:
            return None
        state = None if self.path is None else read_together(self.path, self.world)
        if self.path is None or state is None:
            place = "without out= there is" if self.path is None else f"{self.path.parent} has"
            trainer.say(f"nothing to resume: {place} no checkpoint, so the run starts anew")
            return None
        needed = ("identity", "position", "callbacks", "history", "evaluations")
        missing = [key for key in needed if key not in state]
        if missing:
            raise _damage_error(self.path, f"it has no {missing[0]}")
        check_identity(state["identity"], identity(trainer), self.path)
        check_mode(state, trainer.run_metric.given_mode, self.path)
        num_ranks = len(state["ranks"])
        if num_ranks not in (0, self.world.size):
            raise ValueError(
                f"{self.path} has a state for each of {num_ranks} ranks that {type(trainer.gradients).__name__} "
                f"remembers, and this run has {self.world.size}: start {num_ranks}, or choose another folder with out="
            )
        return state

    def resume(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, and say where the run resumes."""
        restore(trainer, state)
        run = trainer.run
        position = trainer.position
        if trainer.stop_reason is not None and not trainer.has_steps_left:
            progress = f"training has ended after epoch {run.epochs}: {trainer.stop_reason}"
        elif position.epoch > self.settings.epochs:
            progress = (
                f"all {run.epochs} epochs were trained" if run.epochs > 1 else "1 epoch was trained, the only one"
            )
        else:
            progress = f"epoch {position.epoch}, {round(position.seeds):,} of {trainer.num_seeds:,} seeds done"

        num_ranks = self.world.size
        num_ranks_before = state["position"]["loss_sum"].numel()
        change = ""
        if num_ranks != num_ranks_before:
            change = f"; now {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, before {num_ranks_before}"
        trainer.say(f"resuming from {self.path}: {progress}{change}")

    @contextmanager
    def hold_signals(self) -> Generator[None, None, None]:
        """A context in which a signal does not end the run before the current step or evaluation is done.

        Then a checkpoint is written, and the run ends. Outside the context a signal ends the run at once:
        nothing is trained yet, or the last checkpoint has everything.
        """
        self.signals.at_once = False
        self.last_write_s = time.monotonic()
        try:
            yield
        finally:
            self.signals.at_once = True

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints: as set, or more if writing one takes too long. 0: one after every step."""
        requested_s = self.settings.checkpoint_s
        if requested_s == 0:
            return 0.0
        return max(requested_s, self.write_duration_s / MAX_TIME_SHARE)

    def write_if_due(self, trainer: Trainer, *, at_end: bool = False, in_epoch: bool = False) -> None:
        """Write a checkpoint if one is due by time, or if some rank has received a signal.

        All ranks call this together.

        at_end: whether training has ended, which makes a checkpoint due. in_epoch: as in `write`.
        """
        # The clock of the first rank decides, so that all ranks write together.
        is_due = at_end or (self.world.rank == 0 and time.monotonic() - self.last_write_s >= self.interval_s)
        signal = self.signals.received or 0
        if self.world.size > 1:
            is_due, signal = (int(value) for value in self.world.max([float(is_due), float(signal)]))
            # Only if there was one, so that a signal that came during `World.max` is not overwritten.
            if signal:
                self.signals.received = signal
        if is_due or signal:
            self.write(trainer, in_epoch=in_epoch)

    def write(self, trainer: Trainer, *, in_epoch: bool = False) -> None:
        """Write a checkpoint. Then raise `Interrupted` if a signal was received. All ranks call together.

        in_epoch: whether this is between steps, so that its time counts as part of the epoch.
        """
        if self.path is None:
            return
        started = time.monotonic()
        # Two names, since only a checkpoint between steps is part of the seconds of an epoch. The report
        # subtracts it from the training time.
        with trace.span("checkpoint" if in_epoch else "evaluate.checkpoint"):
            state = snapshot(trainer)
            if self.world.rank == 0:
                write(self.path, state)
        self.last_write_s = time.monotonic()
        self.write_duration_s = self.last_write_s - started
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)
