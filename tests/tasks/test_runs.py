"""Runs of tasks: resumed, evaluated asynchronously, over ranks and shards, from files, and on the command line."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import hopline as hl
from tests.equivalence.training_cases import SCENARIOS, WAYS, Scenario, make, trainer_of
from tests.support.runs import assert_refused, command, overrides, records, small

WEIGHTED = ("regression, standardised, some not known", "class weights and smoothing of the task")


class StopAfter(hl.Callback):
    """Interrupts a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.step == self.step:
            raise KeyboardInterrupt


def weights_of(scenario: Scenario, way: str, **options: Any) -> list[Tensor]:
    model = make(scenario.model)
    trainer = trainer_of(scenario, WAYS[way], model, **options)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        assert options["callbacks"]
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("way", ["sampled-block", "historical", "historical-compensated", "sweep"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_a_resumed_run_is_the_one_that_never_stopped(name: str, way: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    options: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_s": 0.0}
    weights_of(scenario, way, callbacks=[StopAfter(5)], **options)
    resumed = weights_of(scenario, way, callbacks=[], resume=True, **options)
    for ours, expected in zip(resumed, weights_of(scenario, way, callbacks=[]), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", WEIGHTED)
def test_asynchronous_evaluation_gives_the_metrics_of_a_blocking_one(name: str) -> None:
    runs = []
    for evaluate in ("blocking", "async"):
        scenario = SCENARIOS[name]
        trainer = trainer_of(scenario, WAYS["sampled-block"], make(scenario.model), callbacks=[], evaluate=evaluate)
        runs.append(trainer.fit())
    assert [e.metrics for e in runs[0].evaluations] == [e.metrics for e in runs[1].evaluations]
    assert (runs[0].best_epoch, runs[0].valid, runs[0].test) == (runs[1].best_epoch, runs[1].valid, runs[1].test)


class Scaled(hl.extend.Task):
    """Squared errors, times a factor."""

    metric = "mse"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
        return self.factor * nn.functional.mse_loss(model(batch).view(-1), batch.labels)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {"mse": float((outputs.view(-1) - y).square().mean())}


@pytest.mark.parametrize(
    ("before", "after"),
    [(Scaled(0.1), Scaled(0.2)), (hl.Regression(), hl.Regression(loss="mae")), (None, hl.Regression(standardize=True))],
)
def test_a_run_is_not_resumed_with_another_task(before: Any, after: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_s": 0.0}
    scenario = dataclasses.replace(SCENARIOS["regression"], task=before)
    weights_of(scenario, "sampled-block", callbacks=[StopAfter(5)], **options)
    with pytest.raises(ValueError, match="task"):
        weights_of(dataclasses.replace(scenario, task=after), "sampled-block", callbacks=[], resume=True, **options)


# ---- from files, on the command line


def numbers() -> Tensor:
    """[400, 2]: numbers to predict, of which some are not known."""
    y = small().x.read(torch.arange(400))[:, :2] * 3 + 50
    y[::7, 1] = torch.nan
    return y


def written(kind: str, folder: Path) -> str:
    """The dataset as the command line takes it, stored as a kind of files."""
    data = small()
    x, y, edges = data.x.read(torch.arange(400)), numbers(), data.graph.edge_index()
    masks = {f"{name}_mask": torch.isin(torch.arange(400), ids) for name, ids in data.splits.items()}
    if kind == "pyg":
        hl.from_pyg(Data(x=x, y=y, edge_index=edges, **masks)).save(folder / "graph")
        return str(folder / "graph")
    arrays = {name: value.numpy() for name, value in {"x": x, "y": y, "edge_index": edges, **masks}.items()}
    np.savez(folder / "graph.npz", allow_pickle=False, **arrays)
    if kind == "npz":
        return str(folder / "graph.npz")
    command("convert", folder / "graph.npz", folder / "whole", "task=regression")
    command("partition", folder / "whole", folder / "shards", "shards=2", "how=random")
    return str(folder / "shards")


@pytest.mark.parametrize("kind", ["pyg", "npz", "shards"])
def test_numbers_are_learnt_and_predicted_on_the_command_line(kind: str, tmp_path: Path) -> None:
    dataset = written(kind, tmp_path)
    out = tmp_path / "run"
    task = ["task=regression", "task.standardize=true", "task.loss=huber", "task.metric=mae"]
    status, text, err = command("train", dataset, *overrides(out=out, epochs=2), *task)
    assert (status, err) == (0, "")
    (end,) = records(out, "end")
    assert "test mae" in text
    status, text, err = command("infer", out, f"out={tmp_path / 'values.csv'}")
    assert (status, err) == (0, "")
    with (tmp_path / "values.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "value 0", "value 1"]
    by_id = {int(row["id"]): row for row in rows}
    values = torch.tensor([[float(by_id[i][f"value {k}"]) for k in (0, 1)] for i in range(400)])
    ids = small().splits["test"]
    expected = hl.metrics.mae(values[ids], numbers()[ids])
    assert end["test"]["mae"] == pytest.approx(expected, rel=1e-5)
    status, text, err = command("test", out)
    assert (status, err) == (0, "")
    assert f"mae: {expected:.4f}" in text


def test_whole_numbers_of_a_table_are_learnt_as_numbers(tmp_path: Path) -> None:
    data = small()
    edges = data.graph.edge_index().T.tolist()
    (tmp_path / "edges.csv").write_text("src,dst\n" + "\n".join(f"{a},{b}" for a, b in edges))
    rows = [f"{i},{i % 9},{i % 5 if i % 11 else ''}" for i in range(400)]
    (tmp_path / "nodes.csv").write_text("id,size,label\n" + "\n".join(rows))
    convert = ("convert", tmp_path / "edges.csv", tmp_path / "graph", f"nodes={tmp_path / 'nodes.csv'}")
    status, text, err = command(*convert, "num_nodes=400", "task=regression", "split=0.5,0.2,0.2")
    assert status == 0
    opened = hl.open(str(tmp_path / "graph"))
    assert (opened.task, opened.labels.isnan().sum()) == ("regression", 37)
    assert not any(opened.labels[ids].isnan().any() for ids in opened.splits.values())
    status, text, err = command("train", tmp_path / "graph", *overrides(out=tmp_path / "run", epochs=1))
    assert (status, err) == (0, "")
    assert "test rmse" in text
    assert json.loads((tmp_path / "run" / "config.json").read_text())["inputs"]["task"] == "regression"


def test_tasks_that_do_not_go_with_a_dataset_are_refused_on_the_command_line(tmp_path: Path) -> None:
    small().save(tmp_path / "classes")
    written("pyg", tmp_path)
    for name, settings, words in (
        ("classes", ["task=regression"], "task=regression needs numbers"),
        ("classes", ["task=regresion"], "Did you mean 'regression'?"),
        ("classes", ["task=classification", "task.metric=rmse"], "metric=rmse does not go"),
        ("classes", ["task=classification", "task.loss=mse"], "Unknown key 'task.loss'"),
        ("classes", ["task=classification", "task.class_weights=1,2"], "class_weights has 2 numbers"),
        ("graph", ["task=classification"], "set task=regression"),
        ("graph", ["task=regression", "task.metric=accuracy"], "metric=accuracy does not go"),
    ):
        assert_refused(command("train", tmp_path / name, *overrides(), *settings), words)
