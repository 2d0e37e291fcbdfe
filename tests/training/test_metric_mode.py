"""A metric's mode, max or min, decides best epoch, patience, plateau schedule and report alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import hopline as hl
from hopline import infer
from hopline.metrics import mode_of
from hopline.report.page import render
from hopline.training import checkpoint
from tests.support.runs import StopAfter, evaluated, fit, read_checkpoint, records, small, without


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, "max") for name in ("accuracy", "micro_f1", "roc_auc", "mrr", "val/acc", "Hits@10", "accuracy_of_3")],
        *[(name, "min") for name in ("loss", "val_loss", "MSE", "rmse", "mae", "error rate", "cross-entropy", "nll")],
        *[(name, None) for name in ("neg_mse", "negative log loss", "brier_score", "size", "", "flossing")],
    ],
)
def test_the_name_of_a_metric_tells_its_mode(name: str, mode: str | None):
    assert mode_of(name) == mode


class Scripted:
    """A test step that returns the next of some values."""

    def __init__(self, name: str, *values: float) -> None:
        self.name = name
        self.values = iter(values)

    def __call__(self, model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {self.name: next(self.values)}


def scripted(name: str, *values: float, **settings: Any) -> hl.Run:
    """A run with an epoch for each value of its validation metric."""
    settings = {"epochs": len(values)} | settings
    tried = [] if "metric_mode" in settings else [0.0]  # before training, to learn the name
    return fit(without(small(), "test"), test_step=Scripted(name, *tried, *values), **settings)


@pytest.mark.parametrize(
    ("name", "settings", "best"), [("mse", {}, 3), ("accuracy", {}, 1), ("size", {"metric_mode": "min"}, 3)]
)
def test_the_best_epoch_is_the_lowest_of_what_falls(name: str, settings: dict[str, Any], best: int):
    run = scripted(name, 3.0, 2.0, 1.0, 1.5, **settings)
    assert (run.best_epoch, run.valid) == (best, {1: 3.0, 3: 1.0}[best])


def test_metric_mode_overrides_what_the_name_tells():
    assert scripted("loss", 3.0, 2.0, 1.0, metric_mode="max").best_epoch == 1


def test_patience_counts_evaluations_without_a_fall():
    run = scripted("mse", 3.0, 2.0, 2.5, 2.0, 0.1, patience=2)
    assert (run.epochs, run.best_epoch) == (4, 2)
    assert run.reason == "validation mse has not fallen below 2.0000 (epoch 2) for 2 evaluations"


def test_a_plateau_schedule_acts_when_the_metric_no_longer_falls():
    schedule = hl.Schedule(name="plateau", every=0, factor=0.1)
    run = scripted("mse", 3.0, 2.0, 1.0, 2.0, 2.0, schedule=schedule, lr=1.0, optimizer="sgd")
    assert [epoch.lr for epoch in run.history] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.1])


@pytest.mark.parametrize(
    ("returned", "words"),
    [({"size": 1.0}, "metric_mode='max' or metric_mode='min'"), (0.5, "as {'accuracy'"), (None, "as {'accuracy'")],
    ids=str,
)
def test_what_a_test_step_returns_is_refused_before_training(returned: Any, words: str):
    def train_step(model: nn.Module, batch: hl.Batch) -> Tensor:
        pytest.fail("a step was trained")

    with pytest.raises(ValueError, match=words):
        fit(small(), train_step=train_step, test_step=lambda *_: returned)


def test_a_test_step_for_which_a_few_nodes_are_too_few_is_asked_later():
    def needs_many(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"accuracy": 1 / (ids.numel() > 64)}

    assert fit(small(), test_step=needs_many).valid == 1.0


def test_only_what_hopline_has_computed_over_every_edge_is_called_exact():
    assert "exact: over every edge" in str(fit(small()))
    assert "exact" not in str(fit(small(), test_step=loss_of))


def size(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    return {"size": float(ids.numel())}


def test_without_validation_nothing_is_chosen_by_it():
    assert fit(without(small(), "valid"), test_step=size).test == 170.0


@pytest.mark.parametrize(("mode", "words"), [("min", "give test_step="), ("lower", "must be 'max' or 'min'")])
def test_a_mode_that_means_nothing_is_refused(mode: Any, words: str):
    with pytest.raises(ValueError, match=words):
        fit(small(), metric_mode=mode)


# ---- resumed


def loss_of(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    """Falls, and rises again with so high a rate."""
    return {"loss": float(nn.functional.cross_entropy(infer.exact(model, data, ids), data.labels[ids]))}


FALLING: dict[str, Any] = {"epochs": 12, "lr": 0.3, "patience": 2, "test_step": loss_of}


def test_a_resumed_run_keeps_to_it(tmp_path: Path):
    uninterrupted = fit(small(), **FALLING)
    losses = {e.epoch: e.metrics["loss"] for e in uninterrupted.evaluations if e.split == "valid"}
    assert uninterrupted.best_epoch == min(losses, key=lambda epoch: losses[epoch]) < uninterrupted.epochs < 12
    with pytest.raises(RuntimeError, match="enough"):
        fit(small(), out=tmp_path, checkpoint_s=0.0, callbacks=[StopAfter(3 * uninterrupted.best_epoch + 2)], **FALLING)
    with pytest.raises(ValueError, match=r"min of loss, .*the max .*'min'"):
        fit(small(), out=tmp_path, resume=True, metric_mode="max", **FALLING)
    resumed = fit(small(), out=tmp_path, resume=True, **FALLING)
    assert (resumed.best_epoch, resumed.epochs, resumed.reason) == (
        uninterrupted.best_epoch,
        uninterrupted.epochs,
        uninterrupted.reason,
    )
    assert evaluated(resumed) == evaluated(uninterrupted)


def test_a_checkpoint_that_kept_the_highest_loss_is_refused(tmp_path: Path):
    fit(small(), out=tmp_path, **{**FALLING, "epochs": 2})
    state = read_checkpoint(tmp_path / checkpoint.FILE)
    state["best_is"] = "max"
    checkpoint.write(tmp_path / checkpoint.FILE, state)
    with pytest.raises(ValueError, match=r"max of loss, .*the min"):
        fit(small(), out=tmp_path, resume=True, **FALLING)


def test_the_page_of_a_run_that_was_killed_shows_the_lowest(tmp_path: Path):
    fit(small(), out=tmp_path, **FALLING)
    lines_before_end = [
        line for line in (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True) if '"end"' not in line
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines_before_end))
    best = min(r["metrics"]["loss"] for r in records(tmp_path, "evaluate") if r["split"] == "valid")
    tiles = render(tmp_path).split("best valid")[0]
    assert f"{best:.4f}" in tiles[-200:]
