"""Callbacks that record the memory budget, the plan and the bottleneck of a run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

import hopline as hl
from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Budget
from hopline.report.bottleneck import Explanation, Setup, explain
from hopline.report.page import render
from hopline.training.report_callbacks import MAX_POINTS, WatchBudget, setup_of
from tests.support.helpers import guarded
from tests.support.runs import fit, method, records, sage, small


class FakeGuard:
    """A guard with a fixed record of bytes."""

    def __init__(self, *, steps: int = 4, **changes: int) -> None:
        self.record: dict[str, Any] = {"limit_bytes": 100, "promised_bytes": 90.0, "peak_bytes": 80}
        self.record |= {"before": [float(i) for i in range(steps)], "after": [i // 2 for i in range(steps)]}
        self.record |= dict.fromkeys(("split", "pieces", "resampled", "cut", "edges_cut", "over", "oom"), 0) | changes

    def take_record(self) -> dict[str, Any]:
        return dict(self.record)


class InstallGuard(hl.Callback):
    """Puts a fake guard in place of the trainer's when an epoch has been trained."""

    def __init__(self, guard: FakeGuard) -> None:
        self.guard = guard

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        trainer.guard = self.guard  # type: ignore[assignment]


def messages_with(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """The logged messages that contain a word."""
    return [line for line in caplog.messages if word in line]


@pytest.fixture(autouse=True)
def _record_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hopline")


def test_a_budgets_record_is_in_the_report_of_its_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    guard = FakeGuard(steps=10 * MAX_POINTS, split=3, pieces=7, over=2, oom=1, cut=4, edges_cut=5000, resampled=6)
    run = hl.Trainer(sage(small()), small(), method(), callbacks=[InstallGuard(guard)], epochs=1, out=tmp_path).fit()
    assert run.epochs == 1
    (record,) = records(tmp_path, "budget")
    assert record["epoch"] == 1
    assert (record["num_steps"], record["steps_per_point"]) == (10 * MAX_POINTS, 10)
    assert len(record["before"]) == len(record["after"]) == MAX_POINTS
    assert max(record["before"]) == 10 * MAX_POINTS - 1
    (line,) = messages_with(caplog, "predicted")
    assert line.startswith("budget: ")
    for words in ("3 batches split into 7 micro-batches", "6 samples drawn anew", "5,000 edges cut from 4 batches"):
        assert words in line
    assert "up to 80 B, predicted 90 B, allowed 100 B" in line
    (line,) = messages_with(caplog, "epoch 1: ")
    assert "memory ran out in 1 step," in line
    assert "2 steps went over the limit" in line
    assert "Memory budget" in (tmp_path / "report.html").read_text()


def test_an_epoch_that_fitted_says_nothing(caplog: pytest.LogCaptureFixture):
    trainer = hl.Trainer(sage(small()), small(), method(), callbacks=[InstallGuard(FakeGuard())], epochs=1)
    trainer.fit()
    assert not messages_with(caplog, "predicted")


def test_the_budget_record_combines_all_ranks():
    class Two:
        size = 2

        def max(self, values: list[float]) -> list[float]:
            return [max(v, other) for v, other in zip(values, (-70.0, 95.0, 60.0), strict=True)]

        def sum(self, values: list[float]) -> list[float]:
            return [2 * v for v in values]

    class Report:
        def log(self, record: dict[str, Any]) -> None:
            self.record = record

    trainer: Any = type("T", (), {"world": Two(), "say": staticmethod(print)})()
    trainer.guard = FakeGuard(split=3, pieces=7)
    report: Any = Report()
    WatchBudget(report).on_epoch_end(
        trainer, hl.extend.EpochEnd(epoch=4, **dict.fromkeys(NUMBERS, 0.0), slowest_stage="")
    )
    logged = report.record
    assert (logged["limit_bytes"], logged["promised_bytes"], logged["peak_bytes"]) == (70, 95, 80)
    assert (logged["split"], logged["pieces"], logged["oom"]) == (6, 14, 0)


NUMBERS = ("loss", "lr", "seconds", "seeds_per_s")


def test_a_resumed_run_records_each_epochs_budget_once(tmp_path: Path):
    data = small()

    def trainer(epochs: int) -> hl.Trainer:
        guarded_trainer = hl.Trainer(
            sage(data), data, method(), epochs=epochs, out=tmp_path, resume=epochs > 1, show=False
        )
        guarded_trainer.guard = BudgetGuard(guarded_trainer.job, Budget(device="8GiB"), 200_000)
        guarded_trainer.work = guarded(guarded_trainer.work, guarded_trainer.method, guarded_trainer.guard)
        return guarded_trainer

    trainer(1).fit()
    trainer(2).fit()
    first, second = records(tmp_path, "budget")
    assert (first["epoch"], second["epoch"]) == (1, 2)
    for record in (first, second):
        assert record["num_steps"] == len(record["after"]) == 3
        assert record["split"] > 0
        assert max(record["after"]) == record["peak_bytes"] <= record["limit_bytes"] == 200_000 < max(record["before"])
        assert record["over"] == 0
    page = render(tmp_path)
    assert "before splitting, step 1:" in page
    assert "before splitting, step 6:" in page


def test_a_plan_is_in_the_report_next_to_the_measured_bytes(tmp_path: Path):
    data = small()
    trainer = hl.Trainer(sage(data), data, method(), epochs=1, out=tmp_path, show=False, budget="64MiB")
    trainer.fit()
    assert trainer.plan is not None
    (plan,) = records(tmp_path, "plan")
    (record,) = records(tmp_path, "budget")
    (total,) = plan["totals"]
    assert (total["place"], total["budget_bytes"]) == ("host", 64 * 2**20)
    assert total["promised_bytes"] == trainer.plan.peak_bytes("host")
    assert {"graph", "features", "weights", "optimizer"} <= {item["name"] for item in plan["items"]}
    assert 0 < record["peak_bytes"] <= record["promised_bytes"] <= record["limit_bytes"] < total["budget_bytes"]
    page = (tmp_path / "report.html").read_text()
    assert "Memory plan" in page
    assert "Memory budget" in page


def test_the_pipeline_explains_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = fit(small(), epochs=3, out=tmp_path, show=True)
    epochs = records(tmp_path, "pipeline")
    (end,) = records(tmp_path, "explain")
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    assert not records(tmp_path, "budget"), "there was none"
    for record, epoch in zip(epochs, run.history, strict=True):
        assert record["num_batches"] == 3
        assert record["workers"] == 1
        assert record["stages"]["forward"] == epoch.stages["forward"]
        assert record["stages"]["sample"] > 0
        assert record["achieved"] == pytest.approx(epoch.seconds / record["serial_s"])
    assert end["seconds"] == pytest.approx((run.history[1].seconds + run.history[2].seconds) / 2)
    assert not messages_with(caplog, "bottleneck:"), "there is nothing to gain in a second"
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Pipeline</h2>" in page
    assert "Memory budget" not in page


@pytest.mark.parametrize("advice", ["", "set method.workers=7"])
def test_a_bottleneck_is_said_where_something_can_be_done(
    advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def found(*timed: Any) -> Explanation | None:
        real = explain(*timed)
        return real and dataclasses.replace(real, sentence=f"gather: {advice}", advice=advice)

    monkeypatch.setattr("hopline.training.report_callbacks.explain", found)
    monkeypatch.setattr("hopline.training.report_callbacks.LONG_S", 0.0)
    fit(small(), epochs=2)
    assert messages_with(caplog, "bottleneck") == ([f"bottleneck: gather: {advice}"] if advice else [])


def test_an_epoch_that_was_resumed_midway_is_not_explained(tmp_path: Path):
    data = small()

    class Stop(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            if step.step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(data, epochs=2, out=tmp_path, callbacks=[Stop()], checkpoint_s=0.0)
    fit(data, epochs=2, out=tmp_path, resume=True)
    assert [record["epoch"] for record in records(tmp_path, "epoch")] == [1, 2]
    assert [record["epoch"] for record in records(tmp_path, "pipeline")] == [2]


def test_evaluation_that_takes_longer_than_training_is_said(caplog: pytest.LogCaptureFixture):
    class Slow(hl.Callback):
        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            run.evaluations = [dataclasses.replace(e, seconds=3 * run.history[0].seconds) for e in run.evaluations]
            run.history = [run.history[0]] * 2

    fit(small(), epochs=2, show=True, callbacks=[Slow()])
    assert messages_with(caplog, "evaluation") == ["evaluation: 75% of the run: set evaluate_every=5 or evaluate=async"]


def test_advice_is_for_what_this_run_can_change():
    data = small()
    setup = setup_of(hl.Trainer(sage(data), data, method(workers=0), show=False))
    assert setup == Setup(
        workers=0,
        look_ahead=2,
        max_workers=setup.num_cores,
        num_cores=setup.num_cores,
        sampled=True,
        gpu_free=setup.gpu_free,
    )
    full_batch = setup_of(hl.Trainer(sage(data), data, hl.FullBatch(num_shards=2), show=False))
    assert (full_batch.workers, full_batch.max_workers, full_batch.sampled) == (0, 0, False)
