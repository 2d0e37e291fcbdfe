"""The library's own callbacks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import torch
from torch import Tensor, nn

import hopline as hl
from hopline.training.best_weights import KeepWeights
from hopline.training.run_times import peak_memory_bytes
from hopline.util.files import CheckedFile
from tests.support.runs import fit, method, sage, small


class FakeTrainer:
    """The part of a trainer that callbacks use."""

    metric = "accuracy"
    best_is = "max"
    reason: str | None = None

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def stop(self, reason: str) -> None:
        self.reason = reason

    def score(self, metrics: dict[str, float]) -> float:
        return metrics[self.metric] if self.best_is == "max" else -metrics[self.metric]

    def evaluated_weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def evaluation(epoch: int, value: float, split: str = "valid", **more: float) -> hl.extend.Evaluation:
    return hl.extend.Evaluation(epoch=epoch, split=split, metrics={"accuracy": value, **more}, seconds=0.0)


def epoch_of_stop(stop: hl.EarlyStop, values: list[float]) -> int | None:
    """The epoch after which an early stop ends a run with these validation values."""
    trainer: Any = FakeTrainer()
    stop.on_fit_start(trainer)
    for epoch, value in enumerate(values, 1):
        stop.on_evaluate_end(trainer, evaluation(epoch, value))
        if trainer.reason is not None:
            return epoch
    return None


def test_early_stop_waits_for_its_patience_and_begins_again_at_each_rise():
    assert epoch_of_stop(hl.EarlyStop(2), [0.1, 0.2, 0.2, 0.3, 0.1, 0.2]) == 6
    assert epoch_of_stop(hl.EarlyStop(1), [0.1, 0.1]) == 2
    assert epoch_of_stop(hl.EarlyStop(3), [0.1, 0.2, 0.1, 0.1]) is None


def test_early_stop_starts_afresh_with_every_fit():
    stop = hl.EarlyStop(2)
    assert epoch_of_stop(stop, [0.9, 0.1, 0.1]) == 3
    assert epoch_of_stop(stop, [0.1, 0.2, 0.3]) is None


def test_early_stop_ignores_other_splits():
    stop = hl.EarlyStop(1)
    trainer = FakeTrainer()
    stop.on_fit_start(trainer)  # type: ignore[arg-type]
    for epoch in range(1, 5):
        stop.on_evaluate_end(trainer, evaluation(epoch, 0.5, "test"))  # type: ignore[arg-type]
    assert trainer.reason is None


def test_keep_weights_keeps_the_first_of_equally_good_ones():
    keep = KeepWeights(None)
    trainer = FakeTrainer()
    for epoch, value in enumerate([0.1, 0.4, 0.4, 0.2], 1):
        nn.init.constant_(trainer.model.weight, epoch)
        keep.on_evaluate_end(trainer, evaluation(epoch, value))  # type: ignore[arg-type]
    assert keep.restore(trainer, 4) == 2  # type: ignore[arg-type]
    assert trainer.model.weight.item() == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_is_named_and_leaves_the_old_weights(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keep = KeepWeights(tmp_path)
    trainer = FakeTrainer()
    keep.on_epoch_end(trainer, None)  # type: ignore[arg-type]
    before = (tmp_path / "last.pt").read_bytes()

    def full(weights: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"cannot write .*last\.pt"):
        keep.on_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert (tmp_path / "last.pt").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "last.pt.sha256"]
    assert CheckedFile(tmp_path / "last.pt").read() == before


@pytest.mark.parametrize("evaluate", ["blocking", "async"])
def test_an_epoch_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, evaluate: str):
    run = fit(small(), epochs=10, evaluate_every=3, evaluate=evaluate, show=True, out=tmp_path)
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if "seeds/s" in line]
    accuracy_by_epoch = {e.epoch: e.metrics["accuracy"] for e in run.evaluations if e.split == "valid"}
    assert list(accuracy_by_epoch) == [3, 6, 9, 10]
    for line, epoch in zip(lines, run.history, strict=True):
        assert line.startswith(f"epoch {epoch.epoch:>2}/10  loss {epoch.loss:.4f}  ")
        assert ("valid" in line) == (epoch.epoch in accuracy_by_epoch)
        assert (
            epoch.epoch not in accuracy_by_epoch or f"  valid accuracy {accuracy_by_epoch[epoch.epoch]:.4f}  " in line
        )
        assert len(line) < 100
    assert [line for line in printed if line.startswith("epoch")] == lines, "nothing else is said of an epoch"
    assert len(printed) == len(set(printed)), "nothing is said twice"
    log = (tmp_path / "run.log").read_text()
    assert all(line in log for line in printed)
    assert "done: all 10 epochs are trained" in log


def test_an_epoch_that_ended_but_was_not_evaluated_is_told_of_too(capsys: pytest.CaptureFixture[str]):
    class Trainer(hl.Trainer):
        def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
            raise KeyboardInterrupt

    data = small()
    with pytest.raises(KeyboardInterrupt):
        Trainer(sage(data), data, method(), epochs=1).fit()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch"))
    assert line.startswith("epoch 1/1  loss")


def test_messages_go_through_logging_and_progress_can_be_switched_off(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    caplog.set_level(logging.INFO, logger="hopline")
    fit(small(), epochs=1, out=tmp_path)
    fit(small(), epochs=2, out=tmp_path, resume=True)
    assert [message for message in caplog.messages if message.startswith("resuming from")]
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_misspelt_hook_is_refused():
    with pytest.raises(TypeError, match=r"'on_epoch_ends'.*'on_epoch_end'"):
        type("Mine", (hl.Callback,), {"on_epoch_ends": lambda self, trainer, epoch: None})
    with pytest.raises(TypeError, match="hooks are on_fit_start, on_step_end"):
        type("Mine", (hl.Callback,), {"on_zzz": None})


def test_a_run_is_shown_in_a_few_lines(tmp_path: Path):
    run = fit(small(), epochs=3, out=tmp_path)
    assert repr(run).count("\n") == 0
    assert len(repr(run)) < 200
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in str(run).splitlines())
    assert list(rows) == ["best epoch", "valid accuracy", "test accuracy", "time", "peak memory", "run folder"]
    assert rows["valid accuracy"] == f"{run.valid:.4f}"
    parts = run.time_by_part()
    assert parts["total"] == pytest.approx(parts["training"] + parts["evaluation"] + parts["rest"])
    assert parts["training"] == sum(epoch.seconds for epoch in run.history)
    assert parts["rest"] > 0
    resumed = fit(small(), epochs=4, out=tmp_path, resume=True)
    assert resumed.seconds > run.seconds - parts["rest"], "what it took before counts"


def test_the_work_of_a_stage_leaves_out_waiting():
    run = fit(small(), epochs=2)
    for epoch in run.history:
        assert "wait" in epoch.stages
        assert "wait" not in epoch.work
        assert epoch.work["forward"] == epoch.stages["forward"]
        assert epoch.slowest_stage == max(epoch.work, key=lambda name: epoch.work[name])


def test_the_trainer_calls_its_callbacks_in_their_order():
    order: list[str] = []

    class Named(hl.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            order.append(self.name)

    data = small()
    hl.Trainer(sage(data), data, method(), callbacks=[Named("a"), Named("b")], epochs=1, show=False).fit()
    assert order == ["a", "b"]


def test_peak_memory_is_in_bytes():
    assert psutil.Process().memory_info().rss * 0.9 < peak_memory_bytes() < psutil.virtual_memory().total


def test_that_kernels_are_compiled_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.ops._had_cache", False)
    for times in (1, 0):
        fit(small(), epochs=1, show=True)
        assert capsys.readouterr().out.count("compiling kernels: once on this machine") == times


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("own_logging", [True, False])
def test_a_trainer_in_python_prints_what_the_command_prints(
    show: bool, own_logging: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    """Once: a program whose own logging shows messages gets them there."""

    class Advise(hl.Callback):
        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            trainer.say("set workers=4")

    if own_logging:
        caplog.set_level(logging.INFO, logger="hopline")
    fit(small(), how=hl.FullBatch(), epochs=1, show=show, callbacks=[Advise()])
    printed = capsys.readouterr().out
    for line in ("set workers=4", "full batch by aggregation="):  # during the run, and while the method is bound
        assert printed.count(line) == (show and not own_logging)
        assert caplog.text.count(line) == own_logging
