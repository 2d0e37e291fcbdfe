"""Asynchronous evaluation gives the run that blocking evaluation gives."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GINConv

import hopline as hl
from hopline.contract import Job
from hopline.training import async_evaluation, checkpoint, validation
from hopline.training.async_evaluation import AsyncEvaluator, EvaluationError, EvaluationThread
from hopline.training.evaluation import Measure
from tests.support.runs import (
    Recorder,
    evaluated,
    fit,
    losses,
    method,
    read_checkpoint,
    records,
    sage,
    same_weights,
    small,
)
from tests.support.warm import Process, python


@pytest.fixture
def thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training never evaluates a snapshot itself, as where a GPU trains."""
    monkeypatch.setattr(AsyncEvaluator, "can_help", False)


@pytest.fixture
def permits(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore with one permit per evaluation that the thread may run, none at first.

    A test decides by it when results come. The backlog is so long that training does not wait for them.
    """
    permits = threading.Semaphore(0)
    evaluate = EvaluationThread._evaluate

    def evaluate_with_permit(self: EvaluationThread, snapshot: validation.Snapshot) -> tuple[dict[str, float], float]:
        while not (permits.acquire(timeout=0.01) or self._is_cancelled.is_set()):
            pass
        return evaluate(self, snapshot)

    monkeypatch.setattr(EvaluationThread, "_evaluate", evaluate_with_permit)
    monkeypatch.setattr(async_evaluation, "BACKLOG", 100)
    return permits


class Permit(hl.Callback):
    """Releases all permits once an epoch is trained."""

    def __init__(self, permits: threading.Semaphore, epoch: int) -> None:
        self.permits = permits
        self.epoch = epoch

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        if epoch.epoch == self.epoch:
            self.permits.release(100)


def model_of(kind: str, data: hl.Dataset) -> nn.Module:
    torch.manual_seed(3)
    return sage(data, dropout=0.5, norm="batch") if kind == "sage" else GAT(data.num_features, 8, 2, data.num_classes)


def outcome(run: hl.Run, model: nn.Module) -> dict[str, Any]:
    """Everything of a run except its times."""
    return {
        "losses": losses(run),
        "evaluations": [(e.epoch, e.split, e.metrics) for e in run.evaluations],
        "end": (run.epochs, run.best_epoch, run.valid, run.test, run.metric, run.reason, run.finished),
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
    }


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "all epochs": ("sage", {"epochs": 6}),
    "patience": ("gat", {"epochs": 30, "patience": 2, "lr": 0.1}),
    "every third": ("sage", {"epochs": 30, "patience": 1, "evaluate_every": 3, "lr": 0.1, "inference": "sampled"}),
}


@pytest.mark.parametrize("helps", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_asynchronous_evaluation_ends_with_the_blocking_run(
    name: str, helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(AsyncEvaluator, "can_help", helps)
    compare_with_blocking(*RUNS[name], tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_with_computed_weights_is_evaluated_asynchronously():
    """`weight_norm` stores a weight that torch's deepcopy refuses."""
    data = small()
    outcomes = []
    for how in ("blocking", "async"):
        torch.manual_seed(0)
        layers = [nn.utils.weight_norm(nn.Linear(sizes[0], sizes[1])) for sizes in ((8, 8), (8, data.num_classes))]
        model = hl.nn.GNN([GINConv(layer) for layer in layers])
        outcomes.append([e.metrics for e in fit(data, model, evaluate=how, epochs=3).evaluations])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["patience", "every third"])
def test_late_results_end_with_the_blocking_run_too(name: str, tmp_path: Path, permits: threading.Semaphore):
    compare_with_blocking(*RUNS[name], tmp_path, permits)
    (end,) = records(tmp_path / "async", "end")
    assert end["dropped"] >= 2


def compare_with_blocking(
    kind: str, settings: dict[str, Any], folder: Path, permits: threading.Semaphore | None = None
) -> None:
    """Asynchronous evaluation gives the blocking run: results, weights, records and checkpoint.

    permits: results come when training is two epochs further than the blocking run was.
    """
    data = small()
    outcomes = {}
    weights = {}
    for how in ("blocking", "async"):
        model = model_of(kind, data)
        late = [] if permits is None or not outcomes else [Permit(permits, outcomes["blocking"]["end"][0] + 2)]
        run = fit(data, model, evaluate=how, out=folder / how, callbacks=late, **settings)
        outcomes[how] = outcome(run, model)
        weights[how] = {n: torch.load(folder / how / n, weights_only=True) for n in ("best.pt", "last.pt")}
    assert outcomes["async"] == outcomes["blocking"]
    for name in ("best.pt", "last.pt"):
        assert same_weights(weights["async"][name], weights["blocking"][name])
    for event in ("epoch", "evaluate"):
        epochs_recorded = {how: [r["epoch"] for r in records(folder / how, event)] for how in outcomes}
        assert epochs_recorded["async"] == epochs_recorded["blocking"]
    if "patience" in settings:  # so that this looks at what it is meant to
        assert outcomes["blocking"]["end"][0] < 28
    ended = read_checkpoint(folder / "async" / checkpoint.FILE)
    assert ended["position"]["epoch"] == outcomes["blocking"]["end"][0] + 1
    model = model_of(kind, data)
    resumed = fit(data, model, evaluate="async", out=folder / "async", resume=True, **settings)  # nothing left
    assert outcome(resumed, model) == outcomes["blocking"]


def test_an_error_in_epochs_that_would_not_have_been_trained_is_dropped_with_them(permits: threading.Semaphore):
    data = small()
    settings: dict[str, Any] = {"epochs": 30, "patience": 1, "lr": 0.1}
    steps = [0]
    fails_after = [math.inf]

    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        steps[0] += 1
        fails = steps[0] > fails_after[0]
        if fails:
            permits.release(100)
        return nn.functional.cross_entropy(model(batch), batch.labels) * (math.nan if fails else 1.0)

    model = model_of("gat", data)
    whole = outcome(fit(data, model, train_step=step, **settings), model)
    last = whole["end"][0]
    assert last < 29
    steps = [0]
    fails_after = [3 * (last + 1)]
    model = model_of("gat", data)
    assert outcome(fit(data, model, train_step=step, evaluate="async", **settings), model) == whole
    assert steps[0] == 3 * (last + 2)
    steps = [0]
    fails_after = [0]
    with pytest.raises(ValueError, match="the loss became nan"):
        fit(data, model_of("gat", data), train_step=step, evaluate="async", **settings)


def test_an_error_of_a_callback_is_not_dropped_by_the_result_of_a_later_epoch(permits: threading.Semaphore):
    class Fails(hl.Callback):
        """Fails at the result of epoch 2, and would stop the run at that of epoch 3."""

        def on_evaluate_end(self, trainer: hl.Trainer, evaluation: hl.extend.Evaluation) -> None:
            if evaluation.epoch == 2:
                raise RuntimeError("a mistake in a callback")
            if evaluation.epoch == 3:
                trainer.stop("enough")

    for how in ("blocking", "async"):
        with pytest.raises(RuntimeError, match="a mistake in a callback"):
            fit(small(), epochs=6, evaluate=how, callbacks=[Fails(), Permit(permits, 4)])


@pytest.mark.usefixtures("thread_alone")
def test_training_does_not_wait_and_hooks_come_in_order(permits: threading.Semaphore):
    data = small()
    watch = Recorder()
    run = fit(data, epochs=4, evaluate="async", callbacks=[watch, Permit(permits, 4)])
    names = [name for name, _ in watch.calls if name != "step"]
    assert names == ["fit_start", *["epoch"] * 4, *["evaluate"] * 5, "fit_end"]
    assert evaluated(run) == [1, 2, 3, 4]
    assert all(e.seconds > 0 for e in run.evaluations)
    counted = {name for region in run.stages for name in [region.name]}
    assert "evaluate.wait" not in counted


@pytest.mark.usefixtures("thread_alone")
def test_with_a_full_backlog_training_waits_for_the_oldest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, permits: threading.Semaphore
):
    collect = AsyncEvaluator._collect

    def permit_one(self: AsyncEvaluator, *, wait: bool = False) -> None:
        """Only where training waits does a result come."""
        if wait:
            permits.release()
        collect(self, wait=wait)

    monkeypatch.setattr(AsyncEvaluator, "_collect", permit_one)
    monkeypatch.setattr(async_evaluation, "BACKLOG", 2)
    data = small()
    watch = Recorder()
    run = fit(data, epochs=5, evaluate="async", callbacks=[watch], out=tmp_path)
    (close,) = records(tmp_path, "close")
    assert close["counters"]["evaluate.waits"] == 3
    names = [name for name, _ in watch.calls if name in ("epoch", "evaluate")]
    ahead = [names[: k + 1].count("epoch") - names[: k + 1].count("evaluate") for k in range(len(names) - 1)]
    assert max(ahead) == 3  # two that wait, and the epoch that has just ended
    assert evaluated(run) == [1, 2, 3, 4, 5]
    assert outcome(run, nn.Linear(1, 1))["evaluations"] == [
        (e.epoch, e.split, e.metrics) for e in fit(small(), epochs=5).evaluations
    ]


@pytest.mark.usefixtures("thread_alone")
def test_a_crash_in_evaluation_surfaces_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(measure: Measure, job: Job, keep: Any = None) -> dict[str, float]:
        raise ZeroDivisionError("no more")

    def unhelpful(measure: Measure, job: Job, keep: Any = None) -> dict[str, float]:
        raise ValueError("choose another split")

    def no_metric(measure: Measure, job: Job, keep: Any = None) -> dict[str, float]:
        return {}

    monkeypatch.setattr(Measure, "__call__", broken)
    with pytest.raises(EvaluationError, match="epoch 1 failed: ZeroDivisionError: no more") as caught:
        fit(small(), epochs=3, evaluate="async", out=tmp_path)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    assert "no more" in records(tmp_path, "end")[0]["reason"]
    monkeypatch.setattr(Measure, "__call__", unhelpful)
    with pytest.raises(ValueError, match=r"^choose another split"):
        fit(small(), epochs=3, evaluate="async")
    monkeypatch.setattr(Measure, "__call__", no_metric)
    with pytest.raises(ValueError, match="evaluation gave no metric"):
        fit(small(), epochs=1, evaluate="async")


def test_training_evaluates_a_snapshot_itself_when_the_backlog_is_full(
    monkeypatch: pytest.MonkeyPatch, permits: threading.Semaphore
):
    monkeypatch.setattr(async_evaluation, "BACKLOG", 3)  # two that the thread has been asked for, and one more
    in_trainer: list[int] = []
    plain = AsyncEvaluator._evaluate_in_trainer

    def noted(self: AsyncEvaluator, snapshot: validation.Snapshot) -> None:
        in_trainer.append(snapshot.epoch)
        permits.release(100)
        plain(self, snapshot)

    monkeypatch.setattr(AsyncEvaluator, "_evaluate_in_trainer", noted)
    data = small()
    outcomes = []
    for how in ("blocking", "async"):
        model = model_of("sage", data)
        outcomes.append(outcome(fit(data, model, epochs=5, evaluate=how), model))
    assert in_trainer[0] == 3
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("hook", ["step", "epoch"])
def test_a_callback_that_stops_training_is_not_overtaken_by_earlier_results(hook: str, permits: threading.Semaphore):
    class StopTraining(hl.Callback):
        """Stops in epoch 3, and lets the results of all earlier epochs come only afterwards."""

        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            if hook == "step" and step.epoch == 3:
                self.stop(trainer)

        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            if hook == "epoch" and epoch.epoch == 3:
                self.stop(trainer)

        def stop(self, trainer: hl.Trainer) -> None:
            trainer.stop("enough")
            permits.release(100)

    data = small()
    outcomes = []
    for how in ("blocking", "async"):
        model = model_of("sage", data)
        run = fit(data, model, epochs=5, evaluate=how, callbacks=[StopTraining()])
        outcomes.append(outcome(run, model))
        assert (run.epochs, run.dropped, run.reason) == (3, 0, "enough")
        while permits.acquire(blocking=False):  # none is left for the next run
            pass
    assert outcomes[0] == outcomes[1]


class StopAt(hl.Callback):
    """Interrupts a run at the end of an epoch's first step, once `after` evaluations have ended."""

    def __init__(self, epoch: int, after: int = 0) -> None:
        self.epoch = epoch
        self.after = after

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.epoch == self.epoch:
            until = time.monotonic() + 60
            while len(trainer.run.evaluations) < self.after and time.monotonic() < until:
                time.sleep(0.05)
                trainer.evaluator.after_step()
            raise KeyboardInterrupt


@pytest.mark.parametrize("later", ["async", "blocking"])
def test_interrupted_and_resumed_is_the_run_that_never_stopped(
    later: str, tmp_path: Path, permits: threading.Semaphore
):
    num_evaluated = 0
    if later == "async":
        num_evaluated = 1
        permits.release()  # no more than one, so that no result ends the run before it is interrupted
    data = small()
    watch = Recorder()
    settings: dict[str, Any] = {"epochs": 30, "patience": 3, "lr": 0.1}
    model = model_of("gat", data)
    expected = outcome(fit(data, model, **settings), model)
    stops_after = expected["end"][0]
    model = model_of("gat", data)
    callbacks = [StopAt(stops_after + 1, after=num_evaluated), watch]
    with pytest.raises(KeyboardInterrupt):
        fit(data, model, evaluate="async", out=tmp_path, callbacks=callbacks, checkpoint_s=0.0, **settings)
    waiting = dict(read_checkpoint(tmp_path / checkpoint.FILE)["callbacks"])["Waiting"]["waiting"]
    assert [snapshot["epoch"] for snapshot in waiting][-1] == stops_after
    (ended,) = watch.payloads("fit_end")
    assert len(ended.evaluations) == num_evaluated  # a finished one is not lost
    permits.release(100)
    model = model_of("gat", data)
    run = fit(data, model, evaluate=later, out=tmp_path, resume=True, **settings)
    assert outcome(run, model) == expected
    epochs_recorded = {event: [r["epoch"] for r in records(tmp_path, event)] for event in ("epoch", "evaluate")}
    assert epochs_recorded["epoch"] == list(range(1, stops_after + 1))
    assert epochs_recorded["evaluate"][:-1] == list(range(1, stops_after + 1))  # and the test


class Own(hl.Trainer):
    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        return super().evaluate(split, exact=exact)


def test_asynchronous_evaluation_that_could_differ_is_refused():
    data = small()
    with pytest.raises(ValueError, match=r"Own\.evaluate: .*evaluate=blocking"):
        Own(sage(data), data, method(), evaluate="async")
    with pytest.raises(ValueError, match=r"refresh_every=1, .*evaluate=blocking"):
        hl.Trainer(
            sage(data),
            data,
            hl.Historical(num_parts=4, parts_per_batch=2, refresh_every="evaluation"),
            evaluate="async",
        )
    with pytest.raises(ValueError, match=r"evaluate=async .*test_step=.*evaluate=blocking$"):
        hl.Trainer(sage(data), data, method(), test_step=lambda *_: {"a": 1.0}, evaluate="async")


def test_without_a_validation_split_no_thread_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_evaluation, "EvaluationThread", None)
    data = small()
    data.splits.pop("valid")
    run = fit(data, evaluate="async")
    assert run.finished


def start(folder: Path, *settings: str) -> Process:
    return python("-m", "hopline", "train", "demo", "model.hidden=8", "evaluate=async", *settings, cwd=folder)


def test_an_end_by_ctrl_c_keeps_the_results_that_have_come(tmp_path: Path):
    process = start(tmp_path, "out=run", "epochs=100000")
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        until = time.monotonic() + 90
        while not (metrics.exists() and '"evaluate"' in metrics.read_text()) and time.monotonic() < until:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to all of them
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert "Traceback" not in errors
    assert process.returncode == 128 + signal.SIGINT, errors
    stored = read_checkpoint(tmp_path / "run" / checkpoint.FILE)
    assert stored["evaluations"]
    assert [e["epoch"] for e in stored["evaluations"]] == list(range(1, len(stored["evaluations"]) + 1))


def test_several_ranks_end_with_the_blocking_run(tmp_path: Path):
    outcomes = {}
    for how in ("blocking", "async"):
        settings = ["devices=2", f"evaluate={how}", f"out={how}", "epochs=8", "patience=1", "lr=1.0", "show=false"]
        process = start(tmp_path, *settings)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        evaluations = [(r["epoch"], r["split"], r["metrics"]) for r in records(tmp_path / how, "evaluate")]
        ended = {key: records(tmp_path / how, "end")[0][key] for key in ("epochs", "best_epoch", "reason", "test")}
        weights = {n: torch.load(tmp_path / how / n, weights_only=True) for n in ("best.pt", "last.pt")}
        outcomes[how] = (evaluations, ended, [r["loss"] for r in records(tmp_path / how, "epoch")], weights)
    assert outcomes["async"][:3] == outcomes["blocking"][:3]
    assert outcomes["blocking"][1]["epochs"] < 8
    assert all(same_weights(outcomes["async"][3][name], weights) for name, weights in outcomes["blocking"][3].items())


def test_an_evaluation_is_a_value_until_it_is_acted_on():
    data = small()
    trainer = hl.Trainer(model_of("sage", data), data, method(), epochs=1, show=False)
    run = trainer.fit()
    before = len(run.evaluations), trainer.metric, trainer.stop_reason
    evaluator = validation.Evaluator(trainer)
    evaluation = evaluator.evaluate(7, "valid", exact=True)
    assert (evaluation.epoch, evaluation.split) == (7, "valid")
    assert (len(run.evaluations), trainer.metric, trainer.stop_reason) == before
    evaluator.act_on(evaluation)
    assert run.evaluations[-1] is evaluation
