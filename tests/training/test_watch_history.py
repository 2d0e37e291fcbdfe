"""The message of a run about the staleness of its historical embeddings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.methods.historical.staleness import relative_distance
from hopline.training import report_callbacks
from hopline.training.report_callbacks import staleness_of
from tests.support.runs import records, small


def fit(out: Path, lr: float, **method: object) -> hl.Run:
    """A run of few steps per epoch over random parts, so that histories get stale. lr decides how far rows move."""
    data = small()
    torch.manual_seed(0)
    model = hl.nn.GNN([GCNConv(data.num_features, 8), GCNConv(8, data.num_classes)])
    history = hl.Historical(num_parts=12, parts_per_batch=1, partition="random", max_batches=1, **method)  # type: ignore[arg-type]
    return hl.Trainer(model, data, history, epochs=40, lr=lr, evaluate_every=40, show=False, out=out).fit()


@pytest.mark.parametrize(("lr", "warns"), [(0.5, True), (1e-4, False)])
def test_a_run_says_when_its_histories_are_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lr: float, warns: bool
):
    caplog.set_level(logging.INFO, logger="hopline")
    monkeypatch.setattr(report_callbacks, "MAX_DRIFT", 0.2)  # which a small graph exceeds in few steps
    fit(tmp_path / "run", lr)
    (record,) = records(tmp_path / "run", "history")
    assert (record["drift"] > 0.2) == warns
    assert record["age"] > 1
    warnings = [line for line in caplog.messages if "histories are old" in line]
    assert len(warnings) == warns
    assert ("histories are old" in (tmp_path / "run" / "report.html").read_text()) == warns
    if warns:
        assert len(record["sentence"]) <= 100
        assert "set method.refresh_every=1" in warnings[0]


def test_rows_that_do_not_wait_move_less(tmp_path: Path):
    fit(tmp_path / "old", 0.05)
    fit(tmp_path / "fresh", 0.05, refresh_every=1)
    (old,), (fresh,) = (records(tmp_path / name, "history") for name in ("old", "fresh"))
    assert fresh["age"] < old["age"]
    assert fresh["drift"] < old["drift"]


def test_a_run_without_tables_measures_nothing(tmp_path: Path):
    fit(tmp_path / "run", 0.01, halo="drop")
    assert records(tmp_path / "run", "history") == []


def test_advice_is_what_the_run_can_still_change():
    assert staleness_of([0.9], 4.0, refreshes=False)["advice"].startswith("set method.refresh_every=1")
    assert "refresh_every" not in staleness_of([0.9], 4.0, refreshes=True)["advice"]
    assert staleness_of([9.0, 9.0, 0.1, 0.1], 4.0, refreshes=False)["sentence"] == ""  # the first half is a beginning


def test_distance_is_relative_to_the_larger_norm():
    rows = torch.tensor([[3.0, 4.0]])
    assert relative_distance(rows, rows) == 0
    assert relative_distance(rows, torch.zeros(1, 2)) == 1
    assert relative_distance(torch.zeros(1, 2), torch.zeros(1, 2)) == 0
    assert relative_distance(rows, 2 * rows) == pytest.approx(0.5)
