"""Losses of tasks against torch, in one batch and in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopline as hl
from hopline.tasks.settings import LabelFacts, TaskSettings
from hopline.tasks.task import Task

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(30, 4, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(4, (30,), generator=GENERATOR)
WEIGHTS = (0.5, 1.0, 2.0, 4.0)
NUMBERS = torch.randn(30, 4, generator=GENERATOR, dtype=torch.float64)
HOLES = torch.where(torch.rand(30, 4, generator=GENERATOR) < 0.3, torch.nan, NUMBERS)


def bound(settings: TaskSettings, y: Tensor) -> Task:
    kind = "regression" if y.is_floating_point() else "single" if y.dim() == 1 else "multi"
    return settings.bind(LabelFacts(kind=kind, num_classes=4, train=y))


def loss_of(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    batch: Any = SimpleNamespace(labels=y, y=y)
    return task.loss(lambda _: outputs, batch)  # type: ignore[arg-type]


CASES = {
    "cross entropy": (hl.Classification(), CLASSES, nn.CrossEntropyLoss()),
    "weights": (
        hl.Classification(class_weights=WEIGHTS),
        CLASSES,
        nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64)),
    ),
    "weights and smoothing": (
        hl.Classification(class_weights=WEIGHTS, label_smoothing=0.2),
        CLASSES,
        nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.2),
    ),
    "several labels, weights": (
        hl.Classification(class_weights=WEIGHTS),
        (NUMBERS > 0).long(),
        lambda scores, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(WEIGHTS, dtype=torch.float64))(
            scores, y.double()
        ),
    ),
    "squared errors": (hl.Regression(), NUMBERS, nn.MSELoss()),
    "absolute errors": (hl.Regression(loss="mae"), NUMBERS, nn.L1Loss()),
    "huber": (hl.Regression(loss="huber"), NUMBERS, nn.HuberLoss()),
    "numbers that are not known": (
        hl.Regression(),
        HOLES,
        lambda outputs, y: nn.functional.mse_loss(outputs[~y.isnan()], y[~y.isnan()]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_that_of_torch_and_so_is_the_sum_over_pieces(case: str):
    settings, y, expected_loss = CASES[case]
    task = bound(settings, y)
    scores = SCORES.clone().requires_grad_()
    expected = expected_loss(scores, y)
    (expected_gradient,) = torch.autograd.grad(expected, scores)

    pieces = torch.arange(30).split([1, 12, 17])
    weights = [task.weight(y[rows]) for rows in pieces]
    sizes = [float(len(rows)) if w is None else w for rows, w in zip(pieces, weights, strict=True)]
    assert task.has_weights == (weights[0] is not None)
    ours = loss_of(task, scores, y)
    shares = [loss_of(task, scores[r], y[r]) * (w / sum(sizes)) for r, w in zip(pieces, sizes, strict=True)]
    in_pieces = torch.stack(shares).sum()
    for loss in (ours, in_pieces):
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(loss, scores, retain_graph=True)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def test_one_score_for_two_classes_is_weighted_as_two():
    y = CLASSES % 2
    settings = hl.Classification(class_weights=(0.5, 3.0), label_smoothing=0.1)
    task = settings.bind(LabelFacts(kind="binary", num_classes=2, train=y))
    two_columns = torch.cat([torch.zeros(30, 1, dtype=torch.float64), SCORES[:, :1]], dim=1)
    expected = nn.functional.cross_entropy(
        two_columns, y, weight=torch.tensor([0.5, 3.0], dtype=torch.float64), label_smoothing=0.1
    )
    torch.testing.assert_close(loss_of(task, SCORES[:, :1], y), expected, rtol=0, atol=1e-12)


def test_balanced_weights_are_those_of_scikit_learn():
    y = torch.tensor([0, 0, 0, 1, -1])  # class 2 has no training node
    task: Any = hl.Classification(class_weights="balanced").bind(LabelFacts(kind="single", num_classes=3, train=y))
    assert task.weights.tolist() == [4 / (2 * 3), 4 / (2 * 1), 0.0]
    several = torch.tensor([[1, 0], [1, 0], [0, 0]])
    task = hl.Classification(class_weights="balanced").bind(LabelFacts(kind="multi", num_classes=2, train=several))
    assert task.weights.tolist() == [1 / 2, 1.0]


def test_standardised_targets_are_learnt_and_predictions_are_in_the_units_of_the_labels():
    y = HOLES * 100 + 7
    task = bound(hl.Regression(standardize=True), y)
    mean = y.nanmean(0)
    deviation = ((y - mean) ** 2).nanmean(0).sqrt()
    is_known = ~y.isnan()
    expected = nn.functional.mse_loss(SCORES[is_known], ((y - mean) / deviation)[is_known])
    torch.testing.assert_close(loss_of(task, SCORES, y), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(task.predict(SCORES, "values"), SCORES * deviation + mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(task.predict(SCORES, "scores"), SCORES)
    rmse = hl.metrics.rmse(SCORES * deviation + mean, y)
    assert task.measure(SCORES, y) == {"rmse": pytest.approx(rmse)}


def test_standardised_targets_far_from_zero_keep_their_digits():
    y = 1.7e9 + NUMBERS
    task = bound(hl.Regression(standardize=True), y)
    targets = (NUMBERS - NUMBERS.mean(0)) / NUMBERS.std(0, correction=0)
    outputs = SCORES.float()
    assert float(loss_of(task, outputs, y)) == pytest.approx(float((SCORES - targets).square().mean()), rel=1e-5)
    errors = outputs.double() * NUMBERS.std(0, correction=0) + NUMBERS.mean(0) - NUMBERS
    assert task.measure(outputs, y)["rmse"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-5)


def test_a_column_of_equal_targets_is_not_divided_by_zero():
    task = bound(hl.Regression(standardize=True), torch.full((5, 4), 3.0))
    assert loss_of(task, torch.zeros(5, 4), torch.full((5, 4), 3.0)) == 0.0


@pytest.mark.parametrize(
    ("settings", "y", "words"),
    [
        (hl.Classification(), NUMBERS, "set task=regression"),
        (hl.Regression(), CLASSES, "leave out task="),
        (hl.Classification(class_weights=(1.0, 2.0)), CLASSES, "class_weights has 2 numbers for 4 classes"),
        (hl.Regression(metric="accuracy"), NUMBERS, "metric=accuracy.*choose one of rmse"),
        (hl.Classification(metric="mae"), CLASSES, "metric=mae.*choose one of accuracy"),
    ],
)
def test_a_task_that_does_not_go_with_the_labels_is_refused(settings: TaskSettings, y: Tensor, words: str):
    with pytest.raises(ValueError, match=words):
        bound(settings, y)


def test_outputs_of_another_width_are_refused():
    with pytest.raises(ValueError, match="its last layer 4"):
        loss_of(bound(hl.Regression(), NUMBERS), SCORES[:, :1], NUMBERS)
    with pytest.raises(ValueError, match="widen its last layer"):
        loss_of(bound(hl.Classification(), CLASSES), SCORES[:, :2], CLASSES)


WRONG: Any = "rmse"
WRONG_NAME: dict[str, Any] = {"metrics": "mae"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hl.Classification(label_smoothing=1.0), "label_smoothing"),
        (lambda: hl.Classification(class_weights=(1.0, -1.0)), "class_weights"),
        (lambda: hl.Classification(class_weights=(0.0, 0.0)), "not all 0"),
        (lambda: hl.Classification(class_weights=(0.0, 1.0), label_smoothing=0.1), "label_smoothing=0"),
        (lambda: hl.Regression(loss=WRONG), "loss must be"),
        (lambda: hl.Regression(**WRONG_NAME), "metric"),
    ],
)
def test_wrong_settings_are_refused(make: Any, words: str):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("weights", [[0.5, 2.0], torch.tensor([0.5, 2.0]), torch.tensor([0.5, 2.0]).numpy()])
def test_class_weights_come_as_torch_takes_them(weights: Any):
    assert hl.Classification(class_weights=weights).class_weights == (0.5, 2.0)
