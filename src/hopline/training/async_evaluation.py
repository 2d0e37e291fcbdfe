"""The thread that evaluates beside training on the same device: it shares the data, and needs no time to begin."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hopline import inference as infer
from hopline import ops
from hopline.contract import Job
from hopline.device import streams as recording
from hopline.inference.captured_forward import Launched
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import as_walkable
from hopline.pipeline.stages import give_way
from hopline.training.async_evaluation_process import EvaluationError, Layout, Measure, Room
from hopline.training.measure import Measure as OwnMeasure
from hopline.util import trace


class _Cancelled(Exception):
    """Nobody waits for the evaluation any more."""


class DeviceRoom:
    """Room for one epoch's weights on the GPU that trains: filled in its turn, and nobody waits for that."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.weights = layout.views(torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
        self.filled: Any = None

    def fill(self, state: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(list(self.weights.values()), [state[name] for name in self.weights])  # in few kernels
        self.filled = torch.cuda.current_stream(next(iter(self.weights.values())).device).record_event()

    def close(self) -> None:
        """It goes with the last who knows it."""


class EvaluationThread:
    """One thread that evaluates weights in the order in which it is asked to, with a copy of the model.

    On a CPU, its kernels and, where all convs are fused, torch's products run in it alone and give way to training. No
    result depends on the number of threads there; elsewhere torch computes in as many as in the thread that trains. On
    a GPU it has a stream of its own, and reads what lies on the host in as many threads as training would.
    """

    def __init__(self, measure: Measure, job: Job) -> None:
        module = copy.deepcopy(job.module)
        module.requires_grad_(False)
        data = replace(job.data, tables={name: table.beside() for name, table in job.data.tables.items()})
        self._job = replace(job, model=as_walkable(module), module=module, data=data, say=lambda text: None)
        self._measure = measure
        self._ends = threading.Event()
        self._asked: queue.SimpleQueue[tuple[int, Room | DeviceRoom | Launched] | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._failure: Exception | None = None
        model = self._job.model
        if isinstance(model, GNN):
            model.layer = self._checked(model.layer)  # type: ignore[method-assign]
        self._threads = torch.get_num_threads()
        self._replayed = measure.replayed(self._job) if isinstance(measure, OwnMeasure) else None
        self._labels: Tensor | None = None
        if self._replayed is not None:
            self._replayed.left_to_others = True  # of whom one draws while it would record
        self._stream: Any = recording.stream_for("evaluate", job.device) if job.device.type == "cuda" else None
        self._pool = ops.start_threads(1, "hopline-evaluation", self._begin)
        self._served = self._pool.submit(self._serve)

    @property
    def is_ready(self) -> bool:
        """Whether it may be asked for another; else, when it has answered all, somebody is to `prepare` it."""
        return self._replayed is None or not self._replayed.is_due

    @property
    def most_asked(self) -> int:
        """Evaluations that it may be asked for before it has answered.

        One, until it is settled whether they are replayed: otherwise it would depend on how long the first one took
        which of them is the first replay.
        """
        return 2 if self._replayed is None or self._replayed.is_settled else 1

    def prepare(self) -> None:
        """While it does nothing: what the thread that trains has to do for it."""
        if self._replayed is not None and self._replayed.is_due:
            self._replayed.record(self._stream)
            assert isinstance(self._measure, OwnMeasure)
            self._labels = self._measure.labels(self._job)

    def ask(self, epoch: int, room: Room | DeviceRoom) -> None:
        """Have the weights in a room evaluated; it must stay as it is until the answer has come.

        What is recorded is given to the GPU here: two threads that do so would take turns in the interpreter.
        """
        launched = None
        if self._replayed is not None and isinstance(room, DeviceRoom):
            launched = self._replayed.launched(room.weights, room.filled, self._stream)
        self._asked.put((epoch, room if launched is None else launched))

    def answers(self, *, wait: bool = False) -> list[dict[str, Any]]:
        """What has come since the last time, as {epoch, metrics, seconds}; wait: until it says anything at all."""
        found: list[dict[str, Any]] = []
        while self._failure is None:
            try:
                said = self._told.get(block=wait)
            except queue.Empty:
                break
            wait = False
            if isinstance(said, Exception):
                self._failure = said
            else:
                found.append(said)
        if self._failure is not None and not found:  # what came before it counts
            raise self._failure
        return found

    def close(self) -> None:
        """End it, within a chunk of what it is evaluating."""
        self._ends.set()
        self._asked.put(None)
        self._pool.shutdown()
        self._served.result()
        if self._stream is not None:
            self._stream.synchronize()  # a graph must not go before its kernels

    def _checked(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        ends = self._ends  # and not all of this: who keeps the model for later would keep the job for ever

        def checked(*args: Any) -> Any:
            if ends.is_set():
                raise _Cancelled
            return layer(*args)

        return checked

    def _begin(self) -> None:
        on_gpu = self._stream is not None  # where threads of the host only bring it what it computes with
        if not on_gpu:
            ops.serial_here()
        if on_gpu or not (isinstance(self._job.model, GNN) and self._job.model.is_fused):
            torch.set_num_threads(self._threads)  # of this thread only
        give_way()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None and not self._ends.is_set():
            epoch, given = asked
            try:
                found, seconds = self._waited_for(given) if isinstance(given, Launched) else self._evaluated(given)
                self._told.put({"epoch": epoch, "metrics": found, "seconds": seconds})
            except _Cancelled:
                return
            except ValueError as error:  # the user's to put right
                self._told.put(error)
                return
            except Exception as error:
                sentence = " ".join(str(error).split())
                failure = EvaluationError(f"evaluation after epoch {epoch} failed: {type(error).__name__}: {sentence}")
                failure.__cause__ = error
                self._told.put(failure)
                return

    def _evaluated(self, room: Room | DeviceRoom) -> tuple[dict[str, float], float]:
        started = time.perf_counter()
        with self._stream_of(room):
            self._job.module.load_state_dict(room.weights)
            found = self._measure(self._job)
        return found, time.perf_counter() - started

    def _waited_for(self, launched: Launched) -> tuple[dict[str, float], float]:
        assert self._labels is not None
        (scores, on_gpu_s), waited = launched.wait(), time.perf_counter()
        trace.tell("infer.layer", waited - on_gpu_s, on_gpu_s)
        found = infer.measure(self._job.data, scores, self._labels)
        return found, on_gpu_s + time.perf_counter() - waited

    @contextmanager
    def _stream_of(self, room: Room | DeviceRoom) -> Iterator[None]:
        """On a GPU, the stream that evaluates, once the weights are in the room."""
        if not isinstance(room, DeviceRoom):
            yield
            return
        assert room.filled is not None
        with recording.turn, torch.cuda.device(self._job.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(room.filled)
            yield
