"""Evaluation beside training gives the run that would have waited for it."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT

import hopline as hl
from hopline import infer
from hopline.training import async_evaluation, checkpoint, validation
from hopline.training.async_evaluation import EvaluationThread
from hopline.training.async_evaluation_process import EvaluationError
from tests.runs import Recorder, evaluated, fit, losses, method, records, sage, same_weights, small
from tests.warm import Process, children, python


@pytest.fixture
def process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training never takes over an evaluation, as where it runs on another kind of device."""
    monkeypatch.setattr(async_evaluation.Beside, "can_help", False)


def slow(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    time.sleep(0.5)
    return {"score": infer.measure(data, infer.exact(model, data, ids), data.labels[ids])["accuracy"]}


def broken(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    raise ZeroDivisionError("no more")


def unhelpful(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    raise ValueError("choose another split")


def no_metric(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    return {}


def model_of(kind: str, data: hl.Dataset) -> nn.Module:
    torch.manual_seed(3)
    return sage(data, dropout=0.5, norm="batch") if kind == "sage" else GAT(data.num_features, 8, 2, data.num_classes)


def outcome(run: hl.Run, model: nn.Module) -> dict[str, Any]:
    """All of a run but its times."""
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


@pytest.mark.parametrize(
    ("name", "where", "helps"),
    [
        *[(name, "thread", helps) for name in RUNS for helps in (False, True)],
        ("patience", "process", False),
        ("every third", "process", True),
    ],
)
def test_it_is_the_run_that_would_have_waited(
    name: str, where: str, helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind, settings = RUNS[name]
    evaluate = {"blocking": "blocking", "async": "async_cpu" if where == "process" else "async"}
    monkeypatch.setattr(async_evaluation.Beside, "can_help", helps)
    data, found, weights = small(), {}, {}
    for how in ("blocking", "async"):
        model = model_of(kind, data)
        run = fit(data, model, evaluate=evaluate[how], out=tmp_path / how, **settings)
        found[how] = outcome(run, model)
        weights[how] = {n: torch.load(tmp_path / how / n, weights_only=True) for n in ("best.pt", "last.pt")}
    assert found["async"] == found["blocking"]
    for name in ("best.pt", "last.pt"):
        assert same_weights(weights["async"][name], weights["blocking"][name])
    for event in ("epoch", "evaluate"):
        of = {how: [r["epoch"] for r in records(tmp_path / how, event)] for how in found}
        assert of["async"] == of["blocking"]
    if "patience" in settings:  # so that this looks at what it is meant to
        assert found["blocking"]["end"][0] < 30
        (end,) = records(tmp_path / "async", "end")
        assert end["dropped"] > 0 or where == "thread"  # a process has not begun by then
    ended = checkpoint.read(tmp_path / "async" / checkpoint.FILE)
    assert ended["position"]["epoch"] == found["blocking"]["end"][0] + 1
    model = model_of(kind, data)
    again = fit(
        data, model, evaluate=evaluate["async"], out=tmp_path / "async", resume=True, **settings
    )  # nothing left
    assert outcome(again, model) == found["blocking"]
    assert not children()


def test_an_error_in_epochs_that_would_not_have_been_trained_is_dropped_with_them():
    data = small()
    settings: dict[str, Any] = {"epochs": 30, "patience": 1, "lr": 0.1}
    beside = "async_cpu"  # a process, which answers nothing before the error
    steps, fails_after = [0], [math.inf]

    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        steps[0] += 1
        factor = 1.0 if steps[0] <= fails_after[0] else math.nan
        return nn.functional.cross_entropy(model(batch), batch.labels) * factor

    model = model_of("gat", data)
    whole = outcome(fit(data, model, train_step=step, **settings), model)
    last = whole["end"][0]
    assert last < 29
    steps, fails_after = [0], [3 * (last + 1)]
    model = model_of("gat", data)
    assert outcome(fit(data, model, train_step=step, evaluate=beside, **settings), model) == whole
    assert steps[0] == 3 * (last + 2)
    steps, fails_after = [0], [0]
    with pytest.raises(ValueError, match="the loss became nan"):
        fit(data, model_of("gat", data), train_step=step, evaluate=beside, **settings)


@pytest.mark.usefixtures("process_alone")
def test_training_does_not_wait_and_hooks_come_in_order():
    data, watch = small(), Recorder()
    run = fit(data, epochs=4, test_step=slow, evaluate="async", callbacks=[watch])
    names = [name for name, _ in watch.calls if name != "step"]
    assert names == ["fit_start", *["epoch"] * 4, *["evaluate"] * 5, "fit_end"]
    assert evaluated(run) == [1, 2, 3, 4]
    assert all(e.seconds >= 0.5 for e in run.evaluations)
    counted = {name for region in run.stages for name in [region.name]}
    assert "evaluate.wait" not in counted


@pytest.mark.usefixtures("process_alone")
def test_with_a_full_backlog_training_waits_for_the_oldest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(async_evaluation, "BACKLOG", 2)
    data, watch = small(), Recorder()
    run = fit(data, epochs=5, test_step=slow, evaluate="async", callbacks=[watch], out=tmp_path)
    (close,) = records(tmp_path, "close")
    assert close["counters"]["evaluate.waits"] == 3
    names = [name for name, _ in watch.calls if name in ("epoch", "evaluate")]
    ahead = [names[: k + 1].count("epoch") - names[: k + 1].count("evaluate") for k in range(len(names) - 1)]
    assert max(ahead) == 3  # two that wait, and the epoch that has just ended
    assert evaluated(run) == [1, 2, 3, 4, 5]
    assert outcome(run, nn.Linear(1, 1))["evaluations"] == [
        (e.epoch, e.split, e.metrics) for e in fit(small(), epochs=5, test_step=slow).evaluations
    ]


@pytest.mark.usefixtures("process_alone")
def test_a_crash_in_evaluation_surfaces_with_its_traceback(tmp_path: Path):
    with pytest.raises(EvaluationError, match="evaluation after epoch 1 failed: ZeroDivisionError: no more") as caught:
        fit(small(), epochs=3, test_step=broken, evaluate="async", out=tmp_path)
    assert "in broken" in caught.value.__notes__[0]
    assert "no more" in records(tmp_path, "end")[0]["reason"]
    with pytest.raises(ValueError, match=r"^choose another split"):
        fit(small(), epochs=3, test_step=unhelpful, evaluate="async")
    with pytest.raises(ValueError, match="evaluation gave no metric"):
        fit(small(), epochs=1, test_step=no_metric, evaluate="async")
    assert not children()


def test_training_evaluates_itself_what_it_would_have_to_wait_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_evaluation, "BACKLOG", 1)
    here, plain = [], async_evaluation.Beside._evaluate_here

    def noted(self: async_evaluation.Beside, snapshot: validation.Snapshot) -> dict[str, Any]:
        here.append(snapshot.epoch)
        return plain(self, snapshot)

    monkeypatch.setattr(async_evaluation.Beside, "_evaluate_here", noted)
    data, found = small(), []
    for how in ("blocking", "async_cpu"):
        model = model_of("sage", data)
        found.append(outcome(fit(data, model, epochs=5, evaluate=how), model))
    assert 1 in here  # the process takes longer to begin than an epoch
    assert found[0] == found[1]


class StopAt(hl.Callback):
    """Interrupts after an epoch; first it waits for some evaluations, as if epochs took long."""

    def __init__(self, epoch: int, after: int = 0) -> None:
        self.epoch, self.after = epoch, after

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.epoch == self.epoch:
            until = time.monotonic() + 60
            while len(trainer.run.evaluations) < self.after and time.monotonic() < until:
                time.sleep(0.05)
                trainer.act_on(trainer.evaluations.arrived())
            raise KeyboardInterrupt


@pytest.mark.parametrize("later", ["async", "blocking"])
def test_interrupted_and_resumed_is_the_run_that_never_stopped(
    later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    after = 1 if later == "async" else 0
    evaluated_for_good, calls = EvaluationThread._evaluated, []

    def held(self: EvaluationThread, room: Any) -> tuple[dict[str, float], float]:
        """Let so many results come, so that none of them ends the run before it is interrupted."""
        calls.append(room)
        while len(calls) > after and not self._ends.is_set():
            time.sleep(0.01)
        return evaluated_for_good(self, room)

    data, watch = small(), Recorder()
    settings: dict[str, Any] = {"epochs": 30, "patience": 3, "lr": 0.1}
    model = model_of("gat", data)
    whole = outcome(fit(data, model, **settings), model)
    stops_after = whole["end"][0]
    model = model_of("gat", data)
    callbacks = [StopAt(stops_after + 1, after=after), watch]
    monkeypatch.setattr(EvaluationThread, "_evaluated", held)
    with pytest.raises(KeyboardInterrupt):
        fit(data, model, evaluate="async", out=tmp_path, callbacks=callbacks, checkpoint_s=0.0, **settings)
    monkeypatch.undo()
    assert not children()
    left = dict(checkpoint.read(tmp_path / checkpoint.FILE)["callbacks"])["Waiting"]["waiting"]
    assert [one["epoch"] for one in left][-1] == stops_after
    (ended,) = watch.payloads("fit_end")
    assert len(ended.evaluations) >= (later == "async")  # a finished one is not lost
    model = model_of("gat", data)
    run = fit(data, model, evaluate=later, out=tmp_path, resume=True, **settings)
    assert outcome(run, model) == whole
    of = {event: [r["epoch"] for r in records(tmp_path, event)] for event in ("epoch", "evaluate")}
    assert of["epoch"] == list(range(1, stops_after + 1))
    assert of["evaluate"][:-1] == list(range(1, stops_after + 1))  # and the test


class Own(hl.Trainer):
    def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
        return super().evaluate(split, exact=exact)


def test_what_could_not_be_the_same_is_refused():
    data = small()
    with pytest.raises(ValueError, match=r"without Own.evaluate: give a function of a module as test_step="):
        Own(sage(data), data, method(), evaluate="async")
    with pytest.raises(ValueError, match="refresh_every=1, or set evaluate=blocking"):
        hl.Trainer(
            sage(data),
            data,
            hl.Historical(num_parts=4, parts_per_batch=2, refresh_every="evaluation"),
            evaluate="async",
        )
    with pytest.raises(ValueError, match="define them at the top of a module, or set evaluate=blocking"):
        fit(data, test_step=lambda *_: {"a": 1.0}, evaluate="async")


def test_without_a_validation_split_no_process_is_started():
    data = small()
    data.splits.pop("valid")
    run = fit(data, evaluate="async")
    assert run.finished


def start(folder: Path, *settings: str) -> Process:
    return python("-m", "hopline", "train", "demo", "model.hidden=8", "evaluate=async", *settings, cwd=folder)


BY_PROCESS = """
from tests.runs import fit, small
from tests.training.test_evaluation import slow
if __name__ == "__main__":
    fit(small(), epochs=100000, evaluate="async", test_step=slow, out="run")
"""


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGINT, "thread"),
        pytest.param(signal.SIGKILL, "process", marks=pytest.mark.spawn),  # finds it among the children
    ],
)
def test_an_end_by_a_signal_leaves_no_process(number: signal.Signals, where: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(BY_PROCESS)
    thread = where == "thread"
    process = start(tmp_path, "out=run", "epochs=100000") if thread else python("script.py", cwd=tmp_path)
    try:
        metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
        while not (metrics.exists() and '"evaluate"' in metrics.read_text()) and time.monotonic() < until:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert thread or any("spawn_main" in " ".join(child.cmdline()) for child in family)
        if number == signal.SIGINT:  # as a terminal sends it, to all of them
            os.killpg(process.pid, number)
        else:
            process.kill()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert "Traceback" not in errors
    if number == signal.SIGINT:
        assert process.returncode == 128 + number, errors
        kept = checkpoint.read(tmp_path / "run" / checkpoint.FILE)
        assert [e["epoch"] for e in kept["evaluations"]] == list(range(1, len(kept["evaluations"]) + 1))


def test_several_ranks_end_with_the_run_that_waited(tmp_path: Path):
    found = {}
    for how in ("blocking", "async"):
        settings = ["devices=2", f"evaluate={how}", f"out={how}", "epochs=8", "patience=1", "lr=1.0", "show=false"]
        process = start(tmp_path, *settings)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        evaluations = [(r["epoch"], r["split"], r["metrics"]) for r in records(tmp_path / how, "evaluate")]
        ended = {key: records(tmp_path / how, "end")[0][key] for key in ("epochs", "best_epoch", "reason", "test")}
        weights = {n: torch.load(tmp_path / how / n, weights_only=True) for n in ("best.pt", "last.pt")}
        found[how] = (evaluations, ended, [r["loss"] for r in records(tmp_path / how, "epoch")], weights)
    assert found["async"][:3] == found["blocking"][:3]
    assert found["blocking"][1]["epochs"] < 8
    assert all(same_weights(found["async"][3][name], weights) for name, weights in found["blocking"][3].items())


def test_a_result_is_a_value_until_the_trainer_acts_on_it():
    data = small()
    trainer = hl.Trainer(model_of("sage", data), data, method(), epochs=1, show=False)
    run = trainer.fit()
    before = len(run.evaluations), trainer.metric, trainer.stop_reason
    (result,) = validation.Blocking(trainer).validate(7)
    assert (result.evaluation.epoch, result.evaluation.split, result.weights) == (7, "valid", None)
    assert (len(run.evaluations), trainer.metric, trainer.stop_reason) == before
    assert trainer.act_on(iter([result])) == [result.evaluation]
    assert run.evaluations[-1] is result.evaluation
