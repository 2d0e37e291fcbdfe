"""Everything once, in seconds: each method, a budget, async evaluation, two ranks, resuming and the command line.

`make quick` runs this and ruff: the first thing to do after a change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import hopline as hl
from tests.support.runs import assert_refused, command, fit, losses, small


def tiny() -> hl.Dataset:
    """60 nodes in two rings; a node's class is its ring, which only its neighbours' features tell well."""
    node = torch.arange(60)
    ring = node // 30
    place = node % 30
    edges = [torch.stack([ring * 30 + (place + hop) % 30, node]) for hop in (1, 2, 3)]
    noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    masks = {f"{name}_mask": node % 3 == k for k, name in enumerate(("train", "val", "test"))}
    return hl.from_pyg(Data(x=noise + ring[:, None], y=ring, edge_index=torch.cat(edges, dim=1), **masks))


def model_for(data: hl.Dataset) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN([SAGEConv(data.num_features, 8), SAGEConv(8, data.num_classes)], dropout=0.2)


def test_opens_a_graph_by_name():
    data = hl.open("planted", num_nodes=100, num_edges=500, num_classes=2, num_train=20, num_valid=10)
    assert (data.num_nodes, data.num_edges, data.splits["test"].numel()) == (100, 500, 70)


def test_takes_a_pyg_graph():
    data = tiny()
    assert (data.num_nodes, data.num_edges, data.num_classes) == (60, 180, 2)
    assert sorted(data.splits) == ["test", "train", "valid"]


METHODS: dict[str, hl.extend.Method] = {
    "sampled": hl.Sampled(fanouts=(3, 2), batch_size=8),
    "trees": hl.Sampled(fanouts=(3, 2), batch_size=8, layout="tree"),
    "historical": hl.Historical(num_parts=6, parts_per_batch=2, partition="streaming"),
    "compensated": hl.Historical(num_parts=6, parts_per_batch=2, partition="streaming", compensate=True),
    "sweep": hl.FullBatch(num_shards=3, partition="streaming"),
    "sequential": hl.FullBatch(num_shards=3, partition="streaming", aggregation="sequential"),
    "stored": hl.FullBatch(num_shards=3, partition="streaming", aggregation="stored"),
    "one shot": hl.FullBatch(num_shards=3, partition="streaming", aggregation="one_shot"),
}


def train(method: hl.extend.Method, **settings: Any) -> hl.Run:
    data = tiny()
    return hl.Trainer(model_for(data), data, method, **{"epochs": 15, "lr": 0.02, "show": False} | settings).fit()


@pytest.mark.parametrize("name", METHODS)
def test_trains_and_tests(name: str):
    run = train(METHODS[name], lr=0.02 if METHODS[name].__class__ is hl.Sampled else 0.1)

    assert run.epochs == 15
    assert run.history[-1].loss < run.history[0].loss
    assert run.test > 0.8


def test_a_budget_splits_batches_and_changes_no_gradient():
    data = small()
    method = hl.Sampled(fanouts=(4, 3), batch_size=150)
    unlimited = fit(data, how=method)
    budgeted = fit(data, how=method, budget="150KiB")

    assert [epoch.counters["budget.batches_split"] for epoch in budgeted.history] == [1, 1]
    assert losses(budgeted) == pytest.approx(losses(unlimited), rel=1e-5)


def test_asynchronous_evaluation_is_the_blocking_one():
    blocking, concurrent = (train(METHODS["sampled"], epochs=4, evaluate=how) for how in ("blocking", "async"))

    assert [e.metrics for e in concurrent.evaluations] == [e.metrics for e in blocking.evaluations]
    assert concurrent.test == blocking.test


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path):
    whole = train(METHODS["historical"], epochs=4)
    train(METHODS["historical"], epochs=2, out=tmp_path / "run")
    resumed = train(METHODS["historical"], epochs=4, out=tmp_path / "run", resume=True)

    assert [e.loss for e in resumed.history] == [e.loss for e in whole.history]
    assert resumed.test == whole.test


def test_the_command_trains_on_two_ranks_and_infers(tmp_path: Path):
    tiny().save(tmp_path / "graph")
    settings = ["model.layers=2", "model.hidden=8", "method.fanouts=3,2", "epochs=2", "show=false"]

    trained = command(
        "train", tmp_path / "graph", "devices=2", "method.batch_size=4", f"out={tmp_path / 'run'}", *settings
    )
    assert trained.status == 0, trained.err
    assert "test accuracy" in trained.out
    assert command("infer", tmp_path / "run").status == 0
    assert (tmp_path / "run" / "predictions.csv").exists()
    assert_refused(command("train", "demo", "epoch=3"), "Unknown key 'epoch'", "Did you mean 'epochs'?")


def test_infers_at_all_nodes_and_at_some():
    data = tiny()
    model = model_for(data)
    ids = torch.tensor([3, 40])
    scores = hl.infer.exact(model, data)
    assert scores.shape == (60, 2)
    torch.testing.assert_close(hl.infer.exact(model, data, ids), scores[ids])


def test_loads_batches_for_a_loop_of_ones_own():
    data = tiny()
    batches = list(hl.Sampled(fanouts=(2, 2), batch_size=8).loader(data, "train"))
    assert [batch.num_seeds for batch in batches] == [8, 8, 4]
    assert sorted(torch.cat([batch.seeds for batch in batches]).tolist()) == data.splits["train"].tolist()
    assert model_for(data)(batches[0]).shape == (8, 2)


def test_saves_opens_and_verifies_a_folder(tmp_path: Path):
    data = tiny()
    data.save(tmp_path / "tiny")
    assert hl.verify(tmp_path / "tiny")
    again = hl.open(tmp_path / "tiny")
    assert torch.equal(again.graph.indices, data.graph.indices)
    model = model_for(data)
    torch.testing.assert_close(hl.infer.exact(model, again), hl.infer.exact(model, data))
