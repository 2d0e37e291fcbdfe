"""Regression and weighted classes, trained by every method: a plain PyG loop in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import BinaryAUROC

import hopline as hl
from tests.support.helpers import generator
from tests.support.runs import small

EPOCHS = 3
WEIGHTS = tuple(float(i + 1) for i in range(small().num_classes))


def with_labels(y: Tensor) -> hl.Dataset:
    data = small()
    return hl.from_edges(
        torch.stack([data.graph.indices.long(), torch.arange(400).repeat_interleave(data.graph.indptr.diff())]),
        x=data.x.read(torch.arange(400)).double(),
        y=y,
        splits=data.splits,
    )


def numbers(width: int, *, holes: bool) -> hl.Dataset:
    y = torch.randn(400, width, generator=generator(3), dtype=torch.float64) * 5 + 20
    if holes:
        y[torch.rand(400, width, generator=generator(4)) < 0.3] = torch.nan
        y[:, 0] = y[:, 0].nan_to_num(20.0)
    return with_labels(y if width > 1 else y[:, 0])


def model_for(data: hl.Dataset) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN([SAGEConv(data.num_features, 8), SAGEConv(8, data.num_outputs)]).double()


CASES: dict[str, tuple[hl.Dataset, Any, Any]] = {
    "squared errors": (numbers(1, holes=False), hl.Regression(), nn.functional.mse_loss),
    "absolute errors of three": (numbers(3, holes=True), hl.Regression(loss="mae"), nn.functional.l1_loss),
    "standardised, some not known": (
        numbers(3, holes=True),
        hl.Regression(loss="huber", standardize=True),
        nn.functional.huber_loss,
    ),
    "classes with weights": (
        with_labels(small().labels),
        hl.Classification(class_weights=WEIGHTS, label_smoothing=0.1),
        None,
    ),
}


def plain_loss(case: str, data: hl.Dataset, outputs: Tensor, ids: Tensor) -> Tensor:
    y = data.labels[ids]
    loss = CASES[case][2]
    if loss is None:
        weight = torch.tensor(WEIGHTS, dtype=torch.float64)
        return nn.functional.cross_entropy(outputs, y, weight=weight, label_smoothing=0.1)
    y = y.reshape(len(y), -1)
    if case.startswith("standardised"):
        train = data.labels[data.splits["train"]]
        mean = train.nanmean(0)
        y = (y - mean) / ((train - mean) ** 2).nanmean(0).sqrt()
    is_known = ~y.isnan()
    return loss(outputs[is_known], y[is_known])


def plain_run(case: str, data: hl.Dataset) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of plain full batch by stock PyG convs."""
    model = model_for(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pyg = data.to_pyg()
    x = data.x.read(torch.arange(400))
    losses = []
    for _ in range(EPOCHS):
        h = model.convs[0](x, pyg.edge_index).relu()
        outputs = model.convs[1](h, pyg.edge_index)[data.splits["train"]]
        loss = plain_loss(case, data, outputs, data.splits["train"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_batches_that_are_accumulated_are_one_mean_over_what_counts(case: str):
    data, task, _ = CASES[case]
    expected_losses, expected_weights = plain_run(case, data)
    model = model_for(data)
    run = hl.Trainer(
        model,
        data,
        task=task,
        epochs=EPOCHS,
        lr=0.01,
        weight_decay=0.0,
        show=False,
        evaluate_every=EPOCHS,
        method=hl.Sampled(fanouts=(-1, -1), batch_size=37),
        accumulate=100,
    ).fit()
    assert [epoch.loss for epoch in run.history] == pytest.approx(expected_losses, rel=1e-9)
    if run.best_epoch == EPOCHS:
        for ours, expected in zip(model.parameters(), expected_weights, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_a_regression_is_evaluated_and_predicted_in_the_units_of_its_labels(tmp_path: Path):
    data = numbers(1, holes=False)
    model = model_for(data)
    task = hl.Regression(standardize=True, metric="mae")
    run = hl.Trainer(model, data, task=task, epochs=2, show=False, out=tmp_path / "run").fit()
    y = data.labels[data.splits["train"]]
    outputs = hl.infer.exact(model, data).view(-1)
    values = outputs * ((y - y.mean()) ** 2).mean().sqrt() + y.mean()
    ids = data.splits["test"]
    assert run.metric == "mae"
    assert run.test == pytest.approx(float((values[ids] - data.labels[ids]).abs().mean()), rel=1e-6)

    saved = hl.load(tmp_path / "run", model=model_for(data))
    assert saved.evaluate(data) == {"mae": pytest.approx(run.test, rel=1e-6)}
    columns = saved.predict(data)
    assert list(columns) == ["id", "value"]
    torch.testing.assert_close(torch.from_numpy(columns["value"]).double(), values.double(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="write must be one of values, scores, embeddings"):
        saved.predict(data, write="classes")


def test_early_stopping_and_best_weights_go_by_the_smallest_error():
    data = numbers(1, holes=False)
    run = hl.Trainer(model_for(data), data, task="regression", epochs=6, lr=0.5, patience=2, show=False).fit()
    errors = {e.epoch: e.metrics["rmse"] for e in run.evaluations if e.split == "valid"}
    assert run.best_epoch == min(errors, key=errors.__getitem__)


def test_a_task_of_the_user_trains_and_chooses_the_best():
    class Signs(hl.extend.Task):
        metric = "wrong_share"
        best_is = "min"

        def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
            return nn.functional.soft_margin_loss(model(batch).view(-1), (batch.labels > 20).double() * 2 - 1)

        def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
            return {"wrong_share": ((outputs.view(-1) > 0) != (y > 20)).double().mean().item()}

    data = numbers(1, holes=False)
    run = hl.Trainer(model_for(data), data, task=Signs(), epochs=3, show=False).fit()
    shares = [e.metrics["wrong_share"] for e in run.evaluations if e.split == "valid"]
    assert run.valid == min(shares)


@pytest.mark.parametrize(
    ("data", "task", "words"),
    [
        (numbers(1, holes=False), "classification", "set task=regression"),
        (with_labels(small().labels), "regression", "task='regression'"),
        (with_labels(small().labels), hl.Classification(metric="rmse"), "metric=rmse"),
        (with_labels(small().labels), "ranking", "task must be"),
    ],
)
def test_a_task_that_does_not_go_with_the_data_is_refused(data: hl.Dataset, task: Any, words: str):
    with pytest.raises(ValueError, match=words):
        hl.Trainer(model_for(data), data, task=task, show=False)


def distance(scores: Tensor, y: Tensor) -> float:
    return 3.0


CLASSES_OF_TWO = with_labels(small().labels % 2)
ONE_VALUE_OF_TEST = with_labels(torch.rand(400).index_fill(0, small().splits["test"], 0.5))


@pytest.mark.parametrize(
    ("data", "task", "words"),
    [
        (with_labels(small().labels), hl.Classification(metric="roc_auc"), "roc_auc is for two classes"),
        (CLASSES_OF_TWO, hl.Classification(metric=distance), "metric_mode='max' or metric_mode='min'"),
        (CLASSES_OF_TWO, hl.Classification(metric=lambda scores, y: "good"), "return one number"),
        (
            with_labels(small().labels),
            hl.Classification(metric=torchmetrics.MeanSquaredError()),
            "MeanSquaredError raised",
        ),
        (ONE_VALUE_OF_TEST, hl.Regression(metric="r2"), "r2 needs"),
    ],
)
def test_a_metric_that_does_not_go_with_the_labels_is_refused_before_training(data: hl.Dataset, task: Any, words: str):
    class NoStep(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            pytest.fail("a step was trained")

    with pytest.raises(ValueError, match=words):
        hl.Trainer(model_for(data), data, task=task, epochs=1, show=False, callbacks=[NoStep()]).fit()


@pytest.mark.parametrize(("width", "kind"), [(1, "single"), (1, "binary")])
def test_a_metric_of_torchmetrics_for_two_classes_gets_one_score_per_node(width: int, kind: Any):
    data = CLASSES_OF_TWO.with_fields(task=kind)
    task = hl.Classification(metric=BinaryAUROC())
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(data.num_features, width)]).double()
    run = hl.Trainer(model, data, task=task, epochs=1, show=False).fit()
    ids = data.splits["test"]
    expected = hl.metrics.roc_auc(hl.infer.exact(model, data, ids).view(-1), data.labels[ids])
    assert run.test == pytest.approx(expected, abs=1e-6)


def test_a_metric_of_the_user_gets_the_known_numbers():
    data = numbers(3, holes=True)
    model = model_for(data)
    task = hl.Regression(metric=torchmetrics.MeanAbsoluteError())
    run = hl.Trainer(model, data, task=task, epochs=1, show=False).fit()
    ids = data.splits["test"]
    assert run.test == pytest.approx(hl.metrics.mae(hl.infer.exact(model, data, ids), data.labels[ids]), rel=1e-6)


def test_an_evaluation_without_labels_is_refused_before_training():
    class Small(hl.extend.Task):
        metric = "loss"

        def loss(self, model: nn.Module, batch: hl.Batch) -> Tensor:
            return model(batch).square().mean()

        def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
            return {"loss": float(outputs.square().mean())}

    data = numbers(1, holes=False)
    unlabelled = hl.from_edges(data.graph.edge_index(), x=data.x.read(torch.arange(400)), splits=data.splits)
    with pytest.raises(ValueError, match=r"no labels.*test_step="):
        hl.Trainer(model_for(data), unlabelled, task=Small(), epochs=1, show=False).fit()
    train_only = hl.from_edges(
        data.graph.edge_index(), x=data.x.read(torch.arange(400)), splits={"train": data.splits["train"]}
    )
    assert hl.Trainer(model_for(data), train_only, task=Small(), epochs=1, show=False).fit().finished


def test_a_training_node_without_any_number_is_refused():
    data = numbers(3, holes=False)
    y = data.labels.clone()
    y[data.splits["train"][2]] = torch.nan
    with pytest.raises(ValueError, match="which has no label"):
        with_labels(y)
