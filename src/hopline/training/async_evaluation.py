"""Evaluation concurrent with training: a thread on the device that trains, and results taken in order."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hopline import inference as infer
from hopline import ops
from hopline.contract import Job
from hopline.device import streams
from hopline.device.snapshots import preserve_weights
from hopline.inference.captured_forward import PendingInference
from hopline.nn.gnn import GNN
from hopline.pipeline.stages import give_way
from hopline.shards.data import ShardedData
from hopline.training.callbacks import Evaluation
from hopline.training.evaluation import Measure
from hopline.training.validation import Evaluator, Result, Snapshot
from hopline.units.job import for_copy
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


BACKLOG = 8
"""Evaluations that may wait for their turn beside training; with so many, training waits for the oldest."""


class _Cancelled(Exception):
    """Nobody waits for the evaluation any more."""


class EvaluationError(RuntimeError):
    """Evaluation concurrent with training failed. Its cause is the error of the evaluation."""


class WeightsBuffer:
    """Memory for the weights of one epoch, on the device of the model. It is filled again for later epochs."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        """state: A `state_dict` of the model, for the shapes and the device."""
        self.weights = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.filled: torch.cuda.Event | None = None
        """On a GPU, the event of the copy: it runs in the order of the stream, and the host does not wait for it."""

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights of a `state_dict`, which may lie on another device."""
        buffers = list(self.weights.values())
        torch._foreach_copy_(buffers, [state[name] for name in self.weights])  # few kernels on a GPU
        if buffers[0].is_cuda:
            self.filled = torch.cuda.current_stream(buffers[0].device).record_event()


class _Request(NamedTuple):
    """What the thread is asked for."""

    epoch: int
    source: WeightsBuffer | PendingInference


class EvaluationThread:
    """One thread that evaluates weights in the order in which it is asked to, with a copy of the model.

    On a CPU, its kernels and, where all convs are fused, torch's products run in it alone and give way to training. No
    result depends on the number of threads there; elsewhere torch computes in as many as in the thread that trains. On
    a GPU it has a stream of its own, and reads what lies on the host in as many threads as training would.
    """

    def __init__(self, measure: Measure, job: Job) -> None:
        module = copy.deepcopy(job.module)
        module.requires_grad_(False)
        data = replace(job.data, tables={name: table.concurrent_view() for name, table in job.data.tables.items()})
        self._job = for_copy(job, module, data)
        self._measure = measure
        self._is_cancelled = threading.Event()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Evaluation | Exception] = queue.SimpleQueue()
        self._failure: Exception | None = None
        model = self._job.model
        if isinstance(model, GNN):
            model.layer = self._stop_if_cancelled(model.layer)  # type: ignore[method-assign]
        self._num_torch_threads = torch.get_num_threads()

        self._captured_inference = measure.captured_inference(self._job)
        self._labels: Tensor | None = None
        if self._captured_inference is not None:
            self._captured_inference.left_to_others = True  # of whom one draws while it would record
        self._stream: Any = streams.stream_for("evaluate", job.device) if job.device.type == "cuda" else None
        self._pool = ops.start_threads(1, "hopline-evaluation", self._set_up_thread)
        self._future = self._pool.submit(self._serve)

    @property
    def is_ready(self) -> bool:
        """Whether it may be asked for another; else, when it has answered all, somebody is to `prepare` it."""
        return self._captured_inference is None or not self._captured_inference.is_due

    @property
    def max_pending(self) -> int:
        """Evaluations that it may be asked for before it has answered.

        One, until it is settled whether they are replayed: otherwise it would depend on how long the first one took
        which of them is the first replay.
        """
        return 2 if self._captured_inference is None or self._captured_inference.is_settled else 1

    def prepare(self) -> None:
        """While it does nothing: what the thread that trains has to do for it."""
        if self._captured_inference is not None and self._captured_inference.is_due:
            self._captured_inference.capture(self._stream)
            self._labels = self._measure.labels(self._job)

    def submit(self, epoch: int, buffer: WeightsBuffer) -> None:
        """Have the weights in a room evaluated; it must stay as it is until the answer has come.

        What is recorded is given to the GPU here: two threads that do so would take turns in the interpreter.
        """
        pending = None
        if self._captured_inference is not None:
            pending = self._captured_inference.launch(buffer.weights, buffer.filled, self._stream)
        self._requests.put(_Request(epoch, source=buffer if pending is None else pending))

    def results(self, *, wait: bool = False) -> list[Evaluation]:
        """What has come since the last time; wait: until it says anything at all."""
        evaluations: list[Evaluation] = []
        must_wait = wait
        while self._failure is None:
            try:
                answer = self._answers.get(block=must_wait)
            except queue.Empty:
                break
            must_wait = False
            if isinstance(answer, Exception):
                self._failure = answer
            else:
                evaluations.append(answer)
        if self._failure is not None and not evaluations:  # what came before it counts
            raise self._failure
        return evaluations

    def close(self) -> None:
        """End it, within a chunk of what it is evaluating."""
        self._is_cancelled.set()
        self._requests.put(None)
        self._pool.shutdown()
        self._future.result()
        if self._stream is not None:
            self._stream.synchronize()  # a graph must not go before its kernels

    def _stop_if_cancelled(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        is_cancelled = self._is_cancelled  # and not all of this: who keeps the model would keep the job for ever

        def layer_unless_cancelled(*args: Any) -> Any:
            if is_cancelled.is_set():
                raise _Cancelled
            return layer(*args)

        return layer_unless_cancelled

    def _set_up_thread(self) -> None:
        on_gpu = self._stream is not None  # where threads of the host only bring it what it computes with
        if not on_gpu:
            ops.serial_here()
        is_fused = isinstance(self._job.model, GNN) and self._job.model.is_fused
        if on_gpu or not is_fused:
            torch.set_num_threads(self._num_torch_threads)  # of this thread only
        give_way()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None and not self._is_cancelled.is_set():
            epoch, source = request
            try:
                if isinstance(source, PendingInference):
                    metrics, seconds = self._wait_for(source)
                else:
                    metrics, seconds = self._evaluate(source)
                self._answers.put(Evaluation(epoch=epoch, split="valid", metrics=metrics, seconds=seconds))
            except _Cancelled:
                return
            except ValueError as error:  # the user's to put right
                self._answers.put(error)
                return
            except Exception as error:
                sentence = " ".join(str(error).split())
                failure = EvaluationError(f"evaluation after epoch {epoch} failed: {type(error).__name__}: {sentence}")
                failure.__cause__ = error
                self._answers.put(failure)
                return

    def _evaluate(self, buffer: WeightsBuffer) -> tuple[dict[str, float], float]:
        started = time.perf_counter()
        with self._stream_after(buffer):
            self._job.module.load_state_dict(buffer.weights)
            metrics = self._measure(self._job)
        return metrics, time.perf_counter() - started

    def _wait_for(self, pending: PendingInference) -> tuple[dict[str, float], float]:
        assert self._labels is not None
        scores, on_gpu_s = pending.wait()
        scores_came = time.perf_counter()
        trace.tell("infer.layer", scores_came - on_gpu_s, on_gpu_s)
        metrics = infer.measure(self._job.data, scores, self._labels)
        return metrics, on_gpu_s + time.perf_counter() - scores_came

    @contextmanager
    def _stream_after(self, buffer: WeightsBuffer) -> Iterator[None]:
        """On a GPU, the stream that evaluates, once the weights are in the room."""
        if buffer.filled is None:
            yield
            return
        with streams.capture_lock, torch.cuda.device(self._job.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.filled)
            yield


class AsyncEvaluator(Evaluator):
    """A thread evaluates, and training goes on.

    What is trained before a result says that the run has ended is dropped, so that the run is the one that would have
    waited. The first rank has the thread; results come to all ranks together, at the end of an epoch. On a CPU, where
    training would have to wait for the thread, it takes over some of the evaluations instead.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        exact = trainer.settings.inference == "exact"
        self.measure = Measure(trainer.method, exact=exact, **trainer.chunks)
        self.free_buffers: list[WeightsBuffer] = []
        """Rooms whose weights nobody needs any more."""
        self.thread: EvaluationThread | None = None
        self.submitted: set[int] = set()
        """Epochs that the thread has been asked to evaluate."""
        self.results: dict[int, Evaluation] = {}
        """By epoch, what has come and is to be acted on after those before it."""
        self._training_stream = contextlib.ExitStack()

    def __enter__(self) -> AsyncEvaluator:
        if self.trainer.device.type == "cuda":  # which training and the thread share
            self._training_stream.enter_context(streams.high_priority_stream(self.trainer.device))
        return self

    def __exit__(self, *error: object) -> None:
        with self._training_stream:
            self.close()

    @property
    def can_help(self) -> bool:
        """Whether training may evaluate too, rather than wait: a GPU may have no memory for two at once."""
        return self.trainer.device.type == "cpu"

    def begin(self) -> Iterator[Result]:
        trainer = self.trainer
        restored = self.waiting.pop_restored()
        will_train = trainer.stop_reason is None and trainer.position.epoch <= trainer.settings.epochs
        if trainer.world.rank == 0 and trainer.has("valid") and (will_train or restored):
            self.thread = EvaluationThread(self.measure, trainer.job)
        for state in restored:
            self._take_snapshot(state["epoch"], state["weights"], state["reason"])
        yield from ()

    def validate(self, epoch: int) -> Iterator[Result]:
        if len(self.waiting.snapshots) >= BACKLOG:
            trace.count("evaluate.waits", 1)
            with trace.span("evaluate.wait"):
                yield from self._collect(wait=True)
        with trace.span("evaluate.snapshot"):
            self._take_snapshot(epoch, self.trainer.model.state_dict(), self.trainer.stop_reason)

    def poll(self, *, between_steps: bool = False) -> Iterator[Result]:
        if between_steps and self.trainer.world.size > 1:
            self._serve_thread()
        else:
            yield from self._collect()

    def wait_all(self) -> Iterator[Result]:
        with trace.span("evaluate.finish"):
            while self.waiting.snapshots:
                yield from self._collect(wait=True)

    def take_ready(self) -> Iterator[Result]:
        if self.thread is not None:
            self._serve_thread()
            yield from self._release(self._ready_evaluations())

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()
        self.thread = None
        self.free_buffers.clear()

    def _take_snapshot(self, epoch: int, weights: Mapping[str, Tensor], reason: str | None) -> None:
        """A snapshot, to be evaluated in its turn."""
        buffer = self.free_buffers.pop() if self.free_buffers else WeightsBuffer(self.trainer.model.state_dict())
        buffer.fill(weights)
        self.waiting.snapshots.append(Snapshot(epoch, buffer, reason))
        self._serve_thread()

    def _serve_thread(self, *, wait: bool = False) -> None:
        """Take the thread's answers, and keep it busy."""
        if self.thread is None:
            return
        for evaluation in self.thread.results(wait=wait):
            self.submitted.discard(evaluation.epoch)
            self.results[evaluation.epoch] = evaluation
        if not self.submitted:
            self.thread.prepare()
        num_free = self.thread.max_pending - len(self.submitted) if self.thread.is_ready else 0
        for snapshot in self._unstarted()[: max(0, num_free)]:
            self.thread.submit(snapshot.epoch, snapshot.buffer)
            self.submitted.add(snapshot.epoch)

    def _unstarted(self) -> list[Snapshot]:
        """What nobody has begun to evaluate, the oldest first."""
        return [
            snapshot
            for snapshot in self.waiting.snapshots
            if snapshot.epoch not in self.submitted and snapshot.epoch not in self.results
        ]

    def _ready_evaluations(self) -> list[Evaluation]:
        """Results that can be acted on: those of the oldest epochs, as far as they have come."""
        evaluations = []
        for snapshot in self.waiting.snapshots:
            if snapshot.epoch not in self.results:
                break
            evaluations.append(self.results[snapshot.epoch])
        return evaluations

    def _collect(self, *, wait: bool = False) -> Iterator[Result]:
        """Results in their order. wait: at least one, if need be by evaluating here what nobody has begun."""
        if not self.waiting.snapshots:
            return
        self._serve_thread()
        while wait and self.thread is not None and not self._ready_evaluations():
            unstarted = self._unstarted()
            if unstarted and self.can_help:
                self._evaluate_in_trainer(unstarted[0])
                self._serve_thread()
            else:
                self._serve_thread(wait=True)
        records = self.trainer.world.broadcast_object([vars(evaluation) for evaluation in self._ready_evaluations()])
        yield from self._release([Evaluation(**record) for record in records])

    def _evaluate_in_trainer(self, snapshot: Snapshot) -> None:
        trainer = self.trainer
        started = time.perf_counter()
        with preserve_weights(trainer.model):
            trainer.model.load_state_dict(snapshot.buffer.weights)
            metrics = self.measure(trainer.job)
        seconds = time.perf_counter() - started
        self.results[snapshot.epoch] = Evaluation(epoch=snapshot.epoch, split="valid", metrics=metrics, seconds=seconds)

    def _release(self, evaluations: Sequence[Evaluation]) -> Iterator[Result]:
        """The results of the oldest snapshots, one by one. The weights of one are there until the next is asked for."""
        for evaluation in evaluations:
            snapshot = self.waiting.snapshots.popleft()
            assert evaluation.epoch == snapshot.epoch
            self.results.pop(snapshot.epoch, None)
            yield Result(evaluation, weights=snapshot.buffer.weights, reason=snapshot.reason)
            self.free_buffers.append(snapshot.buffer)


def check_async(trainer: Trainer, *, overrides_evaluate: bool) -> None:
    """Refuse what could not be evaluated beside training, or not with the same result.

    overrides_evaluate: whether the trainer is of a class that overrides `evaluate`.
    """
    if isinstance(trainer.data, ShardedData):
        raise ValueError(
            "evaluate=async needs the whole graph in one process, and this dataset is one shard of it: open the "
            "dataset that was partitioned, or set evaluate=blocking"
        )
    if trainer.test_step is not None:
        raise ValueError(
            "evaluate=async cannot run test_step=, since its random draws would change those of training: set "
            "evaluate=blocking"
        )
    if overrides_evaluate:
        raise ValueError(
            f"evaluate=async evaluates a copy of the model, without {type(trainer).__name__}.evaluate: set "
            "evaluate=blocking"
        )
    if trainer.work.keep_rows is not None:
        raise ValueError(
            f"{type(trainer.method).__name__} takes embeddings from exact evaluation here, and evaluate=async leaves "
            "none: set method.refresh_every=1, or set evaluate=blocking"
        )
