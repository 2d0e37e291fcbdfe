"""Asynchronous evaluation: a thread evaluates snapshots of the weights while training continues.

    training thread (first rank)                                 evaluation thread

    after_epoch: append a `Snapshot` of the weights
                 to `waiting.snapshots`
    _serve_thread: submit(snapshot)       -- _pending -->        load the weights into its copy of the model
                   results()              <-- _pending --        measure the validation split
    _collect: broadcast what is ready to all ranks
              act on it in the order of the epochs

The run is the same as one with evaluate="blocking". That needs three things: results are acted on in the
order of the epochs, at the same points on all ranks, and with the weights that were evaluated. What was
trained after the epoch that ends the run is dropped (`Evaluator.all_results`).

The price is memory: a copy of the model, and of the weights of up to `BACKLOG` epochs that wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import Job
from hopline.device import streams
from hopline.inference.captured_forward import CapturedInferences, PendingInference
from hopline.nn.attributes import copy_attributes, fixed_parts_of, set_attributes
from hopline.nn.layered import Layered
from hopline.nn.probe import copy_module
from hopline.nn.structure import hash_of
from hopline.pipeline.stages import give_way
from hopline.shards.data import ShardedData
from hopline.training.callbacks import Evaluation
from hopline.training.evaluation import Measure
from hopline.training.validation import Evaluator, Snapshot, loaded
from hopline.units.job import for_copy
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


BACKLOG = 8
"""Most epochs that may wait for their results. With that many, training waits for the oldest before it adds
another."""


class _Cancelled(Exception):
    """Raised inside an evaluation whose thread is being closed, to end it."""


class EvaluationError(RuntimeError):
    """Raised in the training thread if an asynchronous evaluation failed. Its cause is the original error."""


class EvaluationThread:
    """A thread that evaluates weights in the order in which they are submitted.

    It owns a copy of the model, and on a GPU a stream. One other thread, the one that trains, calls all
    public methods.

    On a CPU the thread has a lower priority than training, and hopline's kernels use no other thread. If
    all convs are fused, torch's operations use no other thread either: their results do not depend on the
    number of threads. Otherwise torch uses as many threads as for training, so that results are the same.
    On a GPU the host only reads data, with as many threads as for training.
    """

    def __init__(self, measure: Measure, job: Job) -> None:
        module = copy_module(job.module)
        module.requires_grad_(False)
        self._attributes_hash = hash_of(copy_attributes(module))
        # Views of the tables that may be read while training reads them too.
        tables = {name: table.concurrent_view() for name, table in job.data.tables.items()}
        data = replace(job.data, tables=tables)
        self._job = for_copy(job, module, data)
        self._measure = measure
        self._is_cancelled = threading.Event()
        self._pending: deque[Future[Evaluation]] = deque()
        """Evaluations that were submitted and not returned by `results`, in order. The caller's thread owns it."""
        model = self._job.model
        if isinstance(model, Layered):
            model.layer = self._stop_if_cancelled(model.layer)  # type: ignore[method-assign]
        self._num_torch_threads = torch.get_num_threads()

        self._captured_inference = measure.captured_inference(self._job)
        self._labels: Tensor | None = None
        if self._captured_inference is not None:
            # No other thread may draw random numbers during a capture, and training draws them. So the
            # training thread captures, in `prepare`, and the evaluation thread never does.
            self._captured_inference.left_to_others = True
        self._stream: Any = streams.stream_for("evaluate", job.device) if job.device.type == "cuda" else None
        self._pool = ops.start_threads(1, "hopline-evaluation", self._set_up_thread)

    @property
    def is_ready(self) -> bool:
        """Whether `submit` may be called. If not, `prepare` must come first, when no evaluation is pending."""
        return self._captured_inference is None or not self._captured_inference.is_due

    @property
    def max_pending(self) -> int:
        """Most evaluations that may be pending at once.

        Two, so that the thread can start the second without waiting for training to submit it. Only one
        until it is settled whether evaluations are replayed as a CUDA graph: with two, timing would decide
        which evaluation is the first one to be replayed.
        """
        return 2 if self._captured_inference is None or self._captured_inference.is_settled else 1

    def prepare(self) -> None:
        """Capture the evaluation as a CUDA graph, if that is due. No evaluation may be pending."""
        if self._captured_inference is not None and self._captured_inference.is_due:
            self._captured_inference.capture(self._stream)
            self._labels = self._measure.labels(self._job)

    def submit(self, snapshot: Snapshot) -> None:
        """Evaluate the weights of a snapshot, which must not change until the result has come.

        A captured evaluation is launched here, in the training thread. Two threads that launch kernels
        would take turns in Python's interpreter.
        """
        pending = None
        if hash_of(snapshot.attributes) != self._attributes_hash:
            # Numbers that a module reads in Python are part of the captured graph.
            self._captured_inference = None
        if self._captured_inference is not None:
            pending = self._captured_inference.launch(snapshot.weights, snapshot.copied, self._stream)
        self._pending.append(self._pool.submit(self._answer, snapshot.epoch, snapshot if pending is None else pending))

    def results(self, *, wait: bool = False) -> list[Evaluation]:
        """The evaluations that have ended since the last call. wait: whether to wait for at least one.

        Raises the error of an evaluation that failed, after the results before it were returned.
        """
        evaluations: list[Evaluation] = []
        while self._pending and (self._pending[0].done() or (wait and not evaluations)):
            if evaluations and self._pending[0].exception() is not None:
                break
            evaluations.append(self._pending[0].result())  # one that failed stays, so that later calls raise too
            self._pending.popleft()
        return evaluations

    def close(self) -> None:
        """End the thread. An evaluation of a `GNN` that is running ends before its next chunk."""
        self._is_cancelled.set()
        self._pool.shutdown(cancel_futures=True)
        self._pending.clear()
        if self._stream is not None:
            # A CUDA graph must not be freed before its kernels have run.
            self._stream.synchronize()

    def _stop_if_cancelled(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer function of the model, which raises `_Cancelled` once the thread is being closed."""
        # The inner function holds the event, and not `self`. Otherwise whoever keeps the model would keep
        # the job.
        is_cancelled = self._is_cancelled

        def layer_unless_cancelled(*args: Any) -> Any:
            if is_cancelled.is_set():
                raise _Cancelled
            return layer(*args)

        return layer_unless_cancelled

    def _set_up_thread(self) -> None:
        """Set the number of threads and the priority of the evaluation thread, in that thread."""
        on_gpu = self._stream is not None
        if not on_gpu:
            ops.serial_here()
        is_fused = isinstance(self._job.model, Layered) and self._job.model.is_fused
        if on_gpu or not is_fused:
            # Torch keeps this number per thread. On a CPU, `serial_here` has set it to 1. On a GPU, the thread
            # begins with the number that any thread set last.
            torch.set_num_threads(self._num_torch_threads)
        give_way()

    def _answer(self, epoch: int, source: Snapshot | PendingInference) -> Evaluation:
        """Evaluate weights, or measure the outputs that a replayed CUDA graph is computing from them already.

        Runs in the evaluation thread.
        """
        try:
            if self._is_cancelled.is_set():
                raise _Cancelled
            if isinstance(source, PendingInference):
                metrics, seconds = self._wait_for(source)
            else:
                metrics, seconds = self._evaluate(source)
            return Evaluation(epoch=epoch, split="valid", metrics=metrics, seconds=seconds)
        except (_Cancelled, ValueError):  # the message of a ValueError already says what the user can change
            raise
        except Exception as error:
            sentence = " ".join(str(error).split())
            failure = f"evaluation after epoch {epoch} failed: {type(error).__name__}: {sentence}"
            raise EvaluationError(failure) from error

    def _evaluate(self, snapshot: Snapshot) -> tuple[dict[str, float], float]:
        """Load the weights of a snapshot, and evaluate them. Returns (metrics, seconds)."""
        started = time.perf_counter()
        with self._stream_after(snapshot):
            self._job.module.load_state_dict(snapshot.weights)
            set_attributes(self._job.module, snapshot.attributes)
            metrics = self._measure(self._job)
        return metrics, time.perf_counter() - started

    def _wait_for(self, pending: PendingInference) -> tuple[dict[str, float], float]:
        """Wait for the outputs of a launched evaluation, and measure them.

        Returns (metrics, seconds). The seconds are those of the GPU and of measuring.
        """
        assert self._labels is not None
        scores, on_gpu_s = pending.wait()
        scores_came = time.perf_counter()
        trace.tell("infer.layer", scores_came - on_gpu_s, on_gpu_s)
        metrics = self._job.task.measure(scores, self._labels)
        return metrics, on_gpu_s + time.perf_counter() - scores_came

    @contextmanager
    def _stream_after(self, snapshot: Snapshot) -> Iterator[None]:
        """On a GPU: a context of the evaluation stream, which waits for the weights of the snapshot."""
        if snapshot.copied is None:
            yield
            return
        # The lock: a capture in another thread fails if this thread synchronises with the device meanwhile.
        with streams.capture_lock, torch.cuda.device(self._job.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(snapshot.copied)
            yield


class AsyncEvaluator(Evaluator):
    """Evaluates in a thread while training continues.

    The first rank owns the thread. All ranks keep snapshots, and get results together at the end of an
    epoch. A single rank gets them between steps too. On a CPU, training that has to wait for a result
    evaluates a snapshot itself, if the thread has not begun all of them.

    The training thread calls all methods.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        exact = trainer.settings.inference == "exact"
        # `CapturedInferences` of its own: the thread replays CUDA graphs while training may evaluate too.
        self.measure = replace(trainer.measure, exact=exact, show=False, captured=CapturedInferences())
        self.thread: EvaluationThread | None = None
        """On the first rank, from `begin` to `__exit__`, if there is anything to evaluate."""
        self.submitted: set[int] = set()
        """Epochs that the thread has been asked to evaluate, and has not answered."""
        self.results: dict[int, Evaluation] = {}
        """By epoch: evaluations that are done, and wait for those of earlier epochs."""
        self._fixed_parts: dict[str, str] = {}
        """What the model computes with that a snapshot does not hold, when training began (`nn.attributes`)."""
        self._training_stream = contextlib.ExitStack()
        """On a GPU: the stream in which training runs, from `__enter__` to `__exit__`."""

    def __enter__(self) -> Self:
        if self.trainer.device.type == "cuda":
            # Training and the thread share the GPU. Kernels of training go first.
            self._training_stream.enter_context(streams.high_priority_stream(self.trainer.device))
        return self

    def __exit__(self, *error: object) -> None:
        with self._training_stream:
            if self.thread is not None:
                self.thread.close()
            self.thread = None

    @property
    def can_help(self) -> bool:
        """Whether training may evaluate instead of waiting. A GPU may lack memory for two evaluations."""
        return self.trainer.device.type == "cpu"

    def begin(self) -> None:
        trainer = self.trainer
        self._fixed_parts = fixed_parts_of(trainer.model)
        restored = [*self.waiting.snapshots]
        self.waiting.snapshots.clear()
        if trainer.world.rank == 0 and trainer.has("valid") and (trainer.has_steps_left or restored):
            self.thread = EvaluationThread(self.measure, trainer.job)
        for snapshot in restored:
            self._take_snapshot(snapshot)

    def after_epoch(self, epoch: int) -> None:
        if self.trainer.is_evaluated(epoch):
            if len(self.waiting.snapshots) >= BACKLOG:
                trace.count("evaluate.waits", 1)
                with trace.span("evaluate.wait"):
                    self._collect(wait=True)
            model = self.trainer.model
            with trace.span("evaluate.snapshot"):
                self._check_fixed_parts()
                self._take_snapshot(
                    Snapshot(epoch, self.trainer.stop_reason, model.state_dict(), copy_attributes(model))
                )
        self._collect()

    def after_step(self) -> None:
        # Ranks may be at different steps, so several ranks get no results yet.
        if self.trainer.world.size > 1:
            self._serve_thread()
        else:
            self._collect()

    def wait_all(self) -> None:
        with trace.span("evaluate.finish"):
            while self.waiting.snapshots:
                self._collect(wait=True)

    def take_ready(self) -> None:
        if self.thread is not None:
            self._serve_thread()
            self._act_on_oldest(self._ready_evaluations())

    def _check_fixed_parts(self) -> None:
        """Refuse a model of which something has changed that a snapshot does not hold."""
        parts = fixed_parts_of(self.trainer.model)
        changed = [name for name in {**self._fixed_parts, **parts} if parts.get(name) != self._fixed_parts.get(name)]
        if changed:
            raise ValueError(
                f"evaluate=async evaluates a copy of the model, and {changed[0]} of the model has changed since "
                "training began, which the copy does not follow: keep it as a number or a tensor in an attribute of a "
                "module, or set evaluate=blocking"
            )

    def _take_snapshot(self, live: Snapshot) -> None:
        self.waiting.snapshots.append(live.copy_to(self.trainer.device))
        self._serve_thread()

    def _serve_thread(self, *, wait: bool = False) -> None:
        """Take the results of the thread, and submit the next snapshots. wait: whether to wait for a result."""
        if self.thread is None:
            return
        for evaluation in self.thread.results(wait=wait):
            self.submitted.discard(evaluation.epoch)
            self.results[evaluation.epoch] = evaluation
        if not self.submitted:
            self.thread.prepare()
        # Below 0 when `max_pending` has fallen to 1 while two evaluations are pending.
        num_free = self.thread.max_pending - len(self.submitted) if self.thread.is_ready else 0
        for snapshot in self._unstarted()[: max(0, num_free)]:
            self.thread.submit(snapshot)
            self.submitted.add(snapshot.epoch)

    def _unstarted(self) -> list[Snapshot]:
        """Snapshots that are neither submitted nor evaluated, oldest first."""
        return [
            snapshot
            for snapshot in self.waiting.snapshots
            if snapshot.epoch not in self.submitted and snapshot.epoch not in self.results
        ]

    def _ready_evaluations(self) -> list[Evaluation]:
        """Evaluations of the oldest snapshots, up to the first that is not done: they can be acted on."""
        evaluations = []
        for snapshot in self.waiting.snapshots:
            if snapshot.epoch not in self.results:
                break
            evaluations.append(self.results[snapshot.epoch])
        return evaluations

    def _collect(self, *, wait: bool = False) -> None:
        """Act on the results that are ready, on all ranks, in the order of the epochs. All ranks call together.

        wait: whether to wait for at least one, or evaluate one here if nobody has begun it.
        """
        # The same on all ranks: each keeps snapshots of the same epochs.
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
        # As dicts, since `broadcast_object` sends JSON. Only the first rank has any.
        records = [vars(evaluation) for evaluation in self._ready_evaluations()]
        records = self.trainer.world.broadcast_object(records)
        self._act_on_oldest([Evaluation(**record) for record in records])

    def _evaluate_in_trainer(self, snapshot: Snapshot) -> None:
        """Evaluate a snapshot in the training thread, with the trainer's own model."""
        job = self.trainer.job
        started = time.perf_counter()
        with loaded(snapshot, job.module):
            metrics = self.measure(job)
        seconds = time.perf_counter() - started
        self.results[snapshot.epoch] = Evaluation(epoch=snapshot.epoch, split="valid", metrics=metrics, seconds=seconds)

    def _act_on_oldest(self, evaluations: Sequence[Evaluation]) -> None:
        """Act on the results of the oldest snapshots, one by one."""
        for evaluation in evaluations:
            snapshot = self.waiting.snapshots.popleft()
            assert evaluation.epoch == snapshot.epoch
            self.results.pop(snapshot.epoch, None)
            self.act_on(evaluation, snapshot)


def check_async(trainer: Trainer) -> None:
    """Refuse a run that cannot be evaluated asynchronously, or would end differently than a blocking one."""
    if isinstance(trainer.data, ShardedData):
        raise ValueError(
            "evaluate=async needs the whole graph in one process, and this dataset is one shard of it: open the "
            "dataset that was partitioned, or set evaluate=blocking"
        )
    if trainer.task.test_step is not None:
        raise ValueError(
            "evaluate=async cannot run test_step=, since its random draws would change those of training: set "
            "evaluate=blocking"
        )
    if trainer.run_metric.overrides_evaluate:
        raise ValueError(
            f"evaluate=async evaluates a copy of the model, without {type(trainer).__name__}.evaluate: set "
            "evaluate=blocking"
        )
    if trainer.work.keep_rows is not None:
        raise ValueError(
            f"{type(trainer.method).__name__} takes embeddings from exact evaluation here, and evaluate=async leaves "
            "none: set method.refresh_every=1, or set evaluate=blocking"
        )
