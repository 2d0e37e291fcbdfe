"""The record of a run's start: what is trained, on what and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCN

import hopline as hl
from hopline.contract import Job, Work
from tests.support.runs import fit, method, records, sage, small


def test_the_start_of_a_run_is_recorded_once_before_its_first_epoch(tmp_path: Path):
    data = small()
    model = sage(data)
    fit(data, model, out=tmp_path)
    first, *later = records(tmp_path)
    assert [r["event"] for r in later].count("start") == 0
    assert first.pop("elapsed_s") >= 0
    described = first.pop("method")
    assert first == {
        "event": "start",
        "dataset": data.name,
        "num_nodes": 400,
        "num_edges": data.num_edges,
        "num_features": 8,
        "num_classes": 4,
        "num_seeds": 150,
        "model": "GNN",
        "layers": ["SAGEConv", "SAGEConv"],
        "num_parameters": 2 * 8 * 16 + 16 + 2 * 16 * 4 + 4,
        "device": "cpu",
        "num_ranks": 1,
    }
    assert (described["kind"], described["fanouts"], described["batch_size"]) == ("sampled", [4, 3], 50)
    assert "num_seeds</td><td>150</td>" in (tmp_path / "report.html").read_text()


class Broken(hl.Trainer):
    """Fails after its report is open, and before any callback is called, if it is resumed."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        if not self.settings.resume:
            return super().make_optimizer()
        raise RuntimeError("no optimizer")


def test_a_resumed_run_that_fails_at_once_keeps_its_start(tmp_path: Path):
    data = small()
    Broken(sage(data), data, method(), epochs=1, lr=0.01, out=tmp_path, show=False).fit()
    with pytest.raises(RuntimeError, match="no optimizer"):
        Broken(sage(data), data, method(), epochs=2, lr=0.01, out=tmp_path, resume=True, show=False).fit()
    (start,) = records(tmp_path, "start")
    assert start["model"] == "GNN"


class Mine(hl.extend.Method):
    """A method of the user's own that is no dataclass."""

    def bind(self, job: Job) -> Work:
        return method().bind(job)


def test_models_of_pyg_and_methods_of_the_users_own_are_described(tmp_path: Path):
    data = small()
    fit(data, GCN(8, 6, 2, 4), Mine(), epochs=1, out=tmp_path)
    (start,) = records(tmp_path, "start")
    assert (start["model"], start["layers"]) == ("GCN", ["GCNConv", "GCNConv"])
    assert start["method"]["kind"] == "mine"
    assert "Mine" in start["method"]["repr"]


def test_a_method_that_says_nothing_of_itself_is_known_by_its_name_when_resumed(tmp_path: Path):
    data = small()
    fit(data, how=Mine(), epochs=1, out=tmp_path)
    assert fit(data, how=Mine(), epochs=2, out=tmp_path, resume=True).epochs == 2


def test_a_plan_within_a_budget_is_what_is_trained(tmp_path: Path):
    data = small()
    trainer = hl.Trainer(sage(data), data, method(workers="auto"), epochs=1, out=tmp_path, show=False, budget="64MiB")
    trainer.fit()
    (start,) = records(tmp_path, "start")
    assert isinstance(start["method"]["workers"], int)
