"""Captured steps: equal to steps without capture, and an epoch of them does not synchronise with the host."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.data.synthetic import planted_partition
from hopline.methods.sampled.captured_step import CapturedUnit, forbid_synchronising
from hopline.tables import TensorTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def data_on_gpu(**changes: Any) -> hl.Dataset:
    """A planted graph of 4000 nodes."""
    settings: dict[str, Any] = {"num_nodes": 4000, "num_edges": 40_000, "num_classes": 5, "num_features": 16, "seed": 1}
    return planted_partition(**(settings | changes))


MODELS = {
    "sage": lambda i, o: hl.nn.GNN([pyg.SAGEConv(i, 32), pyg.SAGEConv(32, 32), pyg.SAGEConv(32, o)], dropout=0.5),
    "sage max": lambda i, o: hl.nn.GNN([pyg.SAGEConv(i, 32, aggr="max"), pyg.SAGEConv(32, 32), pyg.SAGEConv(32, o)]),
    "batch norm": lambda i, o: hl.nn.GNN(
        [pyg.SAGEConv(i, 32), pyg.SAGEConv(32, 32), pyg.SAGEConv(32, o)], norm="batch"
    ),
    "gcn": lambda i, o: hl.nn.GNN([pyg.GCNConv(i, 32), pyg.GCNConv(32, 32), pyg.GCNConv(32, o)], dropout=0.2),
    "gin": lambda i, o: hl.nn.GNN(
        [
            pyg.GINConv(nn.Sequential(nn.Linear(i, 32), nn.BatchNorm1d(32), nn.ReLU())),
            *[pyg.SAGEConv(32, 32)],
            pyg.SAGEConv(32, o),
        ]
    ),
    "gat": lambda i, o: hl.nn.GNN([pyg.GATConv(i, 8, heads=4), pyg.GATConv(32, 8, heads=4), pyg.GATConv(32, o)]),
    "transformer": lambda i, o: hl.nn.GNN([pyg.TransformerConv(i, 32), pyg.SAGEConv(32, 32), pyg.SAGEConv(32, o)]),
}


SAME_BITS = ("sage", "sage max", "batch norm")
"""Models whose kernels sum in a fixed order, so that losses are equal to the bit."""


def train(name: str, *, captured: bool, precision: str = "float32", epochs: int = 3, **options: Any) -> tuple[Any, Any]:
    """(trainer, run) of three layers in the tree layout on a GPU, with steps captured or not."""
    torch.manual_seed(0)
    data = data_on_gpu()
    model = MODELS[name](data.num_features, data.num_classes)
    method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
    trainer = hl.Trainer(model, data, method, epochs=epochs, device="cuda", show=False, precision=precision, **options)
    if not captured:
        run_without_capture(trainer)
    return trainer, trainer.fit()


def run_without_capture(trainer: hl.Trainer) -> None:
    """Have a trainer run its steps kernel by kernel: every size counts as one that cannot be captured."""
    trainer.work.steps = dict.fromkeys(range(10_000))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_have_the_losses_of_steps_without_capture(name: str):
    (one, captured), (_, eager) = (train(name, captured=c, clip_norm=1.0) for c in (True, False))
    assert len(one.work.steps) == 2
    assert None not in one.work.steps.values(), "a step was not captured"

    losses = [[e.loss for e in run.history] for run in (captured, eager)]
    if name in SAME_BITS:
        assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-4)
    # Later losses drift where convs of PyG and reductions of torch sum in any order.
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_a_tree_on_the_gpu_trains_as_on_the_cpu(name: str):
    losses = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        data = data_on_gpu()
        model = MODELS[name](data.num_features, data.num_classes).double()
        method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
        run = hl.Trainer(model, data, method, epochs=2, device=device, show=False).fit()
        losses.append([e.loss for e in run.history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


class Freeze(hl.Callback):
    """Unfreezes the first layer after a step, and freezes the last one after another."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        assert isinstance(trainer.model, hl.nn.GNN)
        if step.step == self.first:
            trainer.model.convs[0].requires_grad_(True)
        if step.step == self.last:
            trainer.model.convs[2].requires_grad_(False)


@pytest.mark.parametrize(("first", "last"), [(1, 100), (4, 5), (5, 12), (7, 8)])
def test_parameters_that_are_frozen_or_unfrozen_train_as_on_the_cpu(first: int, last: int):
    """Between steps of an epoch, and at its end: four steps of 250 nodes and a smaller one make an epoch."""
    losses = []
    weights = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        data = data_on_gpu(num_train=1100)
        model = MODELS["sage"](data.num_features, data.num_classes).double()
        model.convs[0].requires_grad_(False)
        method = hl.Sampled(fanouts=(5, 4, 3), batch_size=250, layout="tree")
        options: dict[str, Any] = {"callbacks": [Freeze(first, last)], "optimizer": "sgd", "lr": 0.1}
        trainer = hl.Trainer(model, data, method, epochs=4, device=device, show=False, clip_norm=0.5, **options)
        losses.append([e.loss for e in trainer.fit().history])
        weights.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
        if device == "cuda":
            assert None not in trainer.work.steps.values(), "a step was not captured"  # type: ignore[attr-defined]
            assert len(trainer.work.steps) == 2  # type: ignore[attr-defined]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num_train", [256, 300, 600])
def test_an_epoch_may_have_fewer_steps_than_are_run_before_the_capture(num_train: int):
    data = data_on_gpu(num_train=num_train)
    losses = {}
    for captured in (True, False):
        torch.manual_seed(0)
        method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
        trainer = hl.Trainer(MODELS["sage"](16, 5), data, method, epochs=3, device="cuda", show=False)
        if not captured:
            run_without_capture(trainer)
        losses[captured] = [epoch.loss for epoch in trainer.fit().history]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_bf16_is_close_to_float32_and_uses_the_fused_layers():
    runs = [train("sage", captured=True, precision=p)[1] for p in ("bf16", "float32")]
    assert [e.loss for e in runs[0].history] == pytest.approx([e.loss for e in runs[1].history], rel=2e-2)
    assert runs[0].test == pytest.approx(runs[1].test, abs=0.03)


def test_captured_runs_are_equal_to_the_bit():
    runs = [train("sage", captured=True, precision="bf16")[1] for _ in range(2)]
    assert [e.loss for e in runs[0].history] == [e.loss for e in runs[1].history]


@pytest.mark.parametrize("placement", [None, hl.Placement(features="pinned", cache="64KB")], ids=["near", "staged"])
def test_an_epoch_of_captured_steps_does_not_synchronise(placement: hl.Placement | None):
    trainer, _ = train("sage", captured=True, epochs=1, placement=placement)
    assert (trainer.work.prefetcher is None) == (placement is None)

    trainer.model.train()
    units = list(trainer.work.units(2))
    assert len({unit.size for unit in units}) == 2  # the last is not full
    assert all(isinstance(unit, CapturedUnit) for unit in units)

    torch.cuda.synchronize()
    with forbid_synchronising():
        for unit in trainer.work.units(2):
            trainer.step([unit])


def test_captured_steps_accumulate_gradients():
    runs = [train("sage", captured=c, accumulate=3)[1] for c in (True, False)]
    assert [e.loss for e in runs[0].history] == pytest.approx([e.loss for e in runs[1].history], rel=2e-4)


def test_a_loss_that_synchronises_runs_without_capture_and_logs_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="hopline")
    data = data_on_gpu()
    torch.manual_seed(0)
    model = MODELS["sage"](data.num_features, data.num_classes)

    def loss_that_synchronises(model: nn.Module, batch: hl.Batch) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch), batch.labels)
        assert loss.item() > 0  # waits for the device
        return loss

    method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
    trainer = hl.Trainer(model, data, method, epochs=1, device="cuda", train_step=loss_that_synchronises)
    trainer.fit()

    assert "not captured in a CUDA graph" in caplog.text


@pytest.mark.parametrize("fails_at", [1, 4, 5])  # before the capture, in it, and in a step that is run as it is
def test_after_a_step_that_failed_the_next_run_with_the_model_is_captured(fails_at: int):
    data = data_on_gpu()
    calls = [0]
    torch.manual_seed(0)
    model = MODELS["sage"](data.num_features, data.num_classes)

    def fail_at(model: nn.Module, batch: hl.Batch) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch), batch.labels)
        calls[0] += 1
        if calls[0] >= fails_at:
            raise ZeroDivisionError
        return loss

    method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
    with pytest.raises(ZeroDivisionError) as error:
        hl.Trainer(model, data, method, device="cuda", show=False, train_step=fail_at).fit()

    trainer = hl.Trainer(model, data, method, epochs=2, device="cuda", show=False)
    trainer.fit()
    assert error.traceback, "which holds the loss of the step"
    assert len(trainer.work.steps) == 2  # type: ignore[attr-defined]
    assert None not in trainer.work.steps.values()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "placement", [{"features": "pinned", "cache": "64KB"}, {"features": "pinned", "graph": "pinned"}]
)
def test_data_that_is_not_all_on_the_device_trains_the_same(placement: dict[str, Any]):
    losses = []
    for chosen_placement in (None, hl.Placement(**placement)):
        torch.manual_seed(0)
        data = data_on_gpu()
        model = MODELS["sage"](data.num_features, data.num_classes)
        method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree", look_ahead=3)
        run = hl.Trainer(model, data, method, epochs=2, device="cuda", show=False, placement=chosen_placement).fit()
        losses.append([e.loss for e in run.history])
        if chosen_placement is not None and "cache" in placement:
            misses = run.history[-1].counters["rows.cache_miss"]
            assert misses > 0
            # Rows of three steps come together, each of them once.
            assert run.history[-1].counters["bytes.from_host"] < 0.8 * misses * 16 * 4
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layout", ["block", "tree"])
@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"features": "host", "graph": "host"},
        {"features": "device", "graph": "host"},
        {"features": "pinned", "graph": "host", "cache": "20kB"},
        {"features": "pinned", "graph": "pinned"},
        {"features": "pinned", "graph": "pinned", "cache": 0},
    ],
)
def test_batches_on_a_gpu_train_as_on_the_cpu(placement: dict[str, Any], layout: Any):
    losses = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        data = data_on_gpu()
        data = replace(data, tables={"x": TensorTable(data.x.read(torch.arange(data.num_nodes)).double())})
        model = MODELS["sage"](data.num_features, data.num_classes).double()
        method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout=layout)
        where = hl.Placement(**placement)
        run = hl.Trainer(model, data, method, epochs=2, device=device, show=False, placement=where).fit()
        losses.append([e.loss for e in run.history])
        if device == "cuda" and placement.get("graph") == "host":
            assert (run.history[-1].counters.get("bytes.gathered", 0) > 0) == (placement["features"] == "host")
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


def test_two_ranks_on_one_gpu_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOPLINE_BACKEND", "gloo")
    losses = []
    for ranks in (1, 2):
        options = [
            f"devices={ranks}",
            f"method.batch_size={512 // ranks}",
            f"out={tmp_path / str(ranks)}",
        ]
        command = [sys.executable, "-m", "hopline", "train", "demo", "epochs=1", "device=cuda", "method.layout=tree"]
        done = subprocess.run([*command, "show=false", *options], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / str(ranks) / "metrics.jsonl").read_text().splitlines()
        losses.append(next(float(json.loads(line)["loss"]) for line in lines if "loss" in json.loads(line)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("schedule", ["constant", "step"])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(schedule: str, tmp_path: Path):
    runs = []
    for parts in ([4], [2, 4]):
        for number, epochs in enumerate(parts):
            torch.manual_seed(0)
            data = data_on_gpu()
            model = MODELS["sage"](data.num_features, data.num_classes)
            method = hl.Sampled(fanouts=(5, 4, 3), batch_size=256, layout="tree")
            settings = {"epochs": epochs, "device": "cuda", "show": False, "precision": "bf16", "resume": number > 0}
            plan = (
                hl.Schedule(name=schedule) if schedule == "constant" else hl.Schedule(name="step", every=1, factor=0.5)
            )
            run = hl.Trainer(model, data, method, out=tmp_path / str(len(parts)), schedule=plan, **settings).fit()
        runs.append(run.history)
    assert [e.loss for e in runs[1]] == [e.loss for e in runs[0]][-len(runs[1]) :]
    assert [e.lr for e in runs[1]] == [e.lr for e in runs[0]][-len(runs[1]) :]
