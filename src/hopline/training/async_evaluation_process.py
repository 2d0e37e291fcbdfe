"""The process that evaluates beside training: it opens the data by handles and reads weights where they lie."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn

from hopline import interop
from hopline.contract import Job
from hopline.data.dataset import Dataset
from hopline.distributed.launch import _end_with_parent
from hopline.distributed.shared_memory import SharedArray, map_file, new_file, share
from hopline.units.job import make_job
from hopline.util.signals import SIGNALS

NICER = 10
"""How much lower the priority of evaluation is: training comes first where cores are few."""
ALIGNED = 64
"""Tensors begin at multiples of so many bytes, as torch's own do."""

Measure = Callable[[Job], dict[str, float]]
"""What is evaluated, given the data and a model with the weights in question."""


class EvaluationError(RuntimeError):
    """Evaluation beside training failed; a note holds the other process's traceback."""


@dataclass(frozen=True)
class SentData:
    """A dataset as handles to memory or files, of which every process reads the same copy."""

    data: Dataset
    """With the graph and tables, whose pickles are handles, and nothing else."""
    y: SharedArray | None
    splits: dict[str, SharedArray]

    @classmethod
    def of(cls, data: Dataset) -> SentData:
        """What is not mapped from a file is copied into shared memory once; tables move there altogether."""
        if data.graph.device.type != "cpu":
            raise ValueError(
                "a process of its own evaluates on the CPU, and this dataset is on a GPU: give it in the host's "
                "memory, or set evaluate=blocking"
            )
        tables = {name: interop.shared(table) for name, table in data.tables.items()}
        bare = replace(data, graph=interop.shared(data.graph), tables=tables, y=None, splits={}, alternatives=())
        splits = {name: share(ids) for name, ids in data.splits.items()}
        return cls(bare, None if data.y is None else share(data.y), splits)

    def open(self) -> Dataset:
        """The dataset, in the process that was sent the handles."""
        splits = {name: array.tensor for name, array in self.splits.items()}
        return replace(self.data, y=None if self.y is None else self.y.tensor, splits=splits)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a `state_dict` lies among the bytes of all of them."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """(name, type, shape, first byte)."""
    num_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Layout:
        entries, end = [], 0
        for name, tensor in state.items():
            entries.append((name, tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return cls(tuple(entries), max(end, ALIGNED))

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors that lie in some bytes."""
        found = {}
        for name, dtype, shape, start in self.entries:
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            found[name] = memory[start:stop].view(dtype).view(shape)
        return found


class Room:
    """Room for one epoch's weights, in memory that the other process opens by its path."""

    def __init__(self, layout: Layout) -> None:
        self._file = new_file(layout.num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}" if isinstance(self._file, int) else self._file
        self.weights = layout.views(_mapped(self.path, layout))

    def fill(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(state[name])

    def close(self) -> None:
        """Who has it mapped keeps it until then."""
        os.close(self._file) if isinstance(self._file, int) else os.unlink(self._file)


def _mapped(path: str, layout: Layout) -> Tensor:
    handle = os.open(path, os.O_RDWR)
    try:
        return map_file(handle, 0, torch.uint8, (layout.num_bytes,), writable=True)
    finally:
        os.close(handle)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy on the CPU of all but the weights, which are tensors of no memory."""
    memo: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())


class EvaluationProcess:
    """One process that evaluates weights in the order in which it is asked to; it ends with this one."""

    most_asked = 2
    """Evaluations that it may be asked for before it has answered: it has one to do and the next at hand."""

    def __init__(self, measure: Measure, data: SentData, model: nn.Module, layout: Layout, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.is_ready = False
        """Whether it has begun: that takes seconds, in which it cannot evaluate yet."""
        self._failure: Exception | None = None
        self._pipe, theirs = context.Pipe()
        try:
            told = ForkingPickler.dumps((measure, data, without_weights(model), layout, seed, torch.get_num_threads()))
            given = (theirs, bytes(told), os.getpid())
            self._process = context.Process(target=_serve, args=given, name="hopline-evaluation")
            with _signals_kept_from_children():
                self._process.start()
        except Exception as error:  # pickling fails in many ways
            self._pipe.close()
            raise ValueError(
                f"the model, the method or test_step cannot be sent to the process that evaluates ({error}): define "
                "them at the top of a module, or set evaluate=blocking"
            ) from error
        finally:
            theirs.close()  # so that reading ends when the process does

    def ask(self, epoch: int, room: Any) -> None:
        """Have the weights in a room evaluated; it must stay as it is until the answer has come."""
        with contextlib.suppress(BrokenPipeError):  # that the process has ended is said where answers are read
            self._pipe.send_bytes(json.dumps({"epoch": epoch, "path": room.path}).encode())

    def answers(self, *, wait: bool = False) -> list[dict[str, Any]]:
        """What has come since the last time, as {epoch, metrics, seconds}; wait: until it says anything at all."""
        found: list[dict[str, Any]] = []
        while self._failure is None and (wait or self._pipe.poll()):
            wait = False
            try:
                said = json.loads(self._pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                said = {"error": self._ended(), "kind": "", "trace": ""}
            if "error" in said:
                self._failure = _failure(said)
            elif "ready" in said:
                self.is_ready = True
            else:
                found.append(said)
        if self._failure is not None and len(found) == 0:  # what came before it counts
            raise self._failure
        return found

    def prepare(self) -> None:
        """It prepares itself."""

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def _ended(self) -> str:
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"the process that evaluates {how}: it may have run out of memory; where it never began, put what your "
            "script runs under `if __name__ == '__main__':`, or set evaluate=blocking"
        )


def _failure(said: Mapping[str, Any]) -> Exception:
    kind = ValueError if said["kind"] == "ValueError" else EvaluationError  # the user's to put right
    error = kind(said["error"])
    if said["trace"]:
        error.add_note(f"In the process that evaluates:\n{said['trace']}")
    return error


@contextlib.contextmanager
def _signals_kept_from_children() -> Generator[None]:
    """Ctrl-C in a terminal goes to every process of a group; what evaluates is ended by its parent alone."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, told: bytes, parent: int) -> None:
    """The life of the process: weights in, metrics out.

    What it is told is opened here and not by multiprocessing, so that a parent that ends meanwhile ends it in silence.
    """
    _end_with_parent(parent)
    if hasattr(os, "nice"):
        os.nice(NICER)
    asked: dict[str, Any] = {}
    try:
        measure, sent, model, layout, seed, threads = ForkingPickler.loads(told)  # type: ignore[attr-defined]
        torch.set_num_threads(threads)  # what torch computes in other threads may differ in the last bit
        torch.manual_seed(seed)
        data = sent.open()
        model.load_state_dict(layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8)), assign=True)
        job = make_job(model, data, seed=seed)
        pipe.send_bytes(json.dumps({"ready": True}).encode())
        while True:
            asked = json.loads(pipe.recv_bytes())
            started = time.perf_counter()
            model.load_state_dict(layout.views(_mapped(asked["path"], layout)))
            found = measure(job)
            answer = {"epoch": asked["epoch"], "metrics": found, "seconds": time.perf_counter() - started}
            pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, ConnectionError):  # nobody asks any more
        return
    except Exception as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        sentence = " ".join(str(error).split())
        after = f" after epoch {asked['epoch']}" if asked else ""
        said = sentence if kind == "ValueError" else f"evaluation{after} failed: {type(error).__name__}: {sentence}"
        with contextlib.suppress(ConnectionError):
            pipe.send_bytes(json.dumps({"error": said, "kind": kind, "trace": traceback.format_exc()}).encode())
