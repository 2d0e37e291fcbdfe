"""The thread of asynchronous evaluation: snapshots of weights, results in order, failures, its end."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import hopline as hl
from hopline import infer
from hopline.contract import Job
from hopline.inference.captured_forward import PendingInference
from hopline.nn import GNN
from hopline.nn.attributes import copy_attributes
from hopline.training.async_evaluation import EvaluationError, EvaluationThread
from hopline.training.evaluation import Measure
from hopline.training.validation import Snapshot
from hopline.util import trace
from hopline.util.trace import Timers
from tests.support.runs import method, sage, small


def trainer_of() -> hl.Trainer:
    data = small()
    torch.manual_seed(0)
    return hl.Trainer(sage(data, norm="batch"), data, method(), show=False)


def take_snapshots(trainer: hl.Trainer, count: int) -> list[Snapshot]:
    """Snapshots of different weights each."""
    snapshots = []
    for epoch in range(1, count + 1):
        for p in trainer.model.parameters():
            p.data.add_(torch.randn_like(p))
        live = Snapshot(epoch, None, trainer.model.state_dict(), copy_attributes(trainer.model))
        snapshots.append(live.copy_to(trainer.device))
    return snapshots


def test_the_model_of_an_evaluation_thread_does_not_keep_its_job():
    """As what is recorded of a job does, which is known for as long as the job is."""
    trainer = trainer_of()
    thread = EvaluationThread(Measure(trainer.method), trainer.job)
    thread.close()
    model = thread._job.model
    job = weakref.ref(thread._job)
    del thread
    gc.collect()
    assert isinstance(model, GNN)
    assert job() is None


def test_a_failure_is_raised_after_earlier_results_with_its_cause():
    trainer = trainer_of()
    calls = [0]

    class Fails(Measure):
        def __call__(self, job: Job, keep: Any = None) -> dict[str, float]:
            calls[0] += 1
            if calls[0] == 2:
                raise ZeroDivisionError("no\nmore")
            return super().__call__(job, keep)

    snapshots = take_snapshots(trainer, 2)
    thread = EvaluationThread(Fails(trainer.method), trainer.job)
    for snapshot in snapshots:
        thread.submit(snapshot)
    assert thread._pending[-1].exception(60) is not None
    assert [one.epoch for one in thread.results()] == [1]
    with pytest.raises(EvaluationError, match="epoch 2 failed: ZeroDivisionError: no more") as caught:
        thread.results(wait=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    thread.close()


def test_closing_ends_an_evaluation_at_its_next_layer():
    trainer = trainer_of()
    begun = threading.Event()
    go_on = threading.Event()

    class Waits(Measure):
        def __call__(self, job: Job, keep: Any = None) -> dict[str, float]:
            begun.set()
            go_on.wait()
            return super().__call__(job, keep)

    (snapshot,) = take_snapshots(trainer, 1)
    thread = EvaluationThread(Waits(trainer.method), trainer.job)
    thread.submit(snapshot)
    begun.wait()
    thread._is_cancelled.set()
    go_on.set()
    thread.close()
    assert thread.results() == []


class PastEvent:
    """A CUDA event that has happened."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: PastEvent) -> float:
        return 250.0


class FakeCapturedInference:
    """In place of a captured inference: `launch` computes at once, and records the thread that called it."""

    is_due = True
    is_settled = False

    def __init__(self, trainer: hl.Trainer) -> None:
        self.job = trainer.job
        self.ids = trainer.data.splits["valid"]
        self.launch_threads = []

    def capture(self, stream: object) -> None:
        self.is_due = False
        self.is_settled = True

    def launch(self, weights: Any, after: object, stream: object) -> PendingInference:
        self.launch_threads.append(threading.current_thread().name)
        before = {name: t.clone() for name, t in self.job.module.state_dict().items()}
        self.job.module.load_state_dict(weights)
        rows = infer.exact(self.job.model, self.job.data, self.ids)
        self.job.module.load_state_dict(before)
        return PendingInference(rows, PastEvent(), PastEvent())  # type: ignore[arg-type]


def test_captured_inference_is_launched_by_the_caller_and_awaited_by_the_thread():
    trainer = trainer_of()
    measure = Measure(trainer.method)
    snapshots = take_snapshots(trainer, 3)
    thread = EvaluationThread(measure, trainer.job)
    assert thread.is_ready
    thread._captured_inference = recorded = FakeCapturedInference(trainer)  # type: ignore[assignment]
    assert not thread.is_ready
    assert thread.max_pending == 1, "until it is recorded, so that the same ones are replayed every time"
    thread.prepare()
    assert thread.is_ready
    assert thread.max_pending == 2
    spans = Timers()
    results = []
    with trace.listen(spans):
        for snapshot in snapshots:
            thread.submit(snapshot)
        while len(results) < 3:
            results += thread.results(wait=True)
    thread.close()
    assert recorded.launch_threads == [threading.current_thread().name] * 3
    assert spans.this_epoch()["infer.layer"] >= 0.75
    for result, snapshot in zip(results, snapshots, strict=True):
        trainer.model.load_state_dict(snapshot.weights)
        assert result.epoch == snapshot.epoch
        assert result.metrics == measure(trainer.job)
        assert result.seconds >= 0.25
