"""Each metric against its definition written as loops, in float64, with many ties."""

import math
from collections.abc import Callable

import pytest
import torch
import torchmetrics
from torch import Tensor

from hopline.metrics import (
    METRICS,
    accuracy,
    average_precision,
    balanced_accuracy,
    find,
    log_loss,
    macro_f1,
    mae,
    micro_f1,
    mrr,
    mse,
    r2,
    rmse,
    roc_auc,
)

Metric = Callable[[Tensor, Tensor], float]


def draw_scores(seed: int, *shape: int) -> Tensor:
    """Scores from few values, so that ties are common."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double() / 2


def draw_labels(seed: int, *shape: int, classes: int = 2) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_counts_matches(seed: int):
    scores = torch.rand(50, 4, generator=torch.Generator().manual_seed(seed))
    y = draw_labels(seed, 50, classes=4)
    right = sum(max(range(4), key=row.__getitem__) == int(c) for row, c in zip(scores.tolist(), y, strict=True))
    assert accuracy(scores, y) == pytest.approx(right / 50, abs=1e-15)
    assert accuracy(scores.argmax(1), y) == accuracy(scores, y)


@pytest.mark.parametrize("seed", range(3))
def test_micro_f1_pools_labels(seed: int):
    scores = draw_scores(seed, 30, 5)
    y = draw_labels(seed, 30, 5)
    pairs = list(zip(scores.flatten().tolist(), y.flatten().tolist(), strict=True))
    hits = sum(s > 0 and t == 1 for s, t in pairs)
    wrong = sum((s > 0) != (t == 1) for s, t in pairs)
    assert micro_f1(scores, y) == pytest.approx(2 * hits / (2 * hits + wrong), abs=1e-15)
    assert micro_f1(scores, y.float()) == micro_f1(scores, y)


def test_micro_f1_of_nothing_predicted_and_nothing_present_is_zero():
    assert micro_f1(torch.full((2, 2), -1.0), torch.zeros(2, 2)) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_roc_auc_compares_all_pairs(seed: int):
    scores = draw_scores(seed, 60)
    y = draw_labels(seed + 100, 60)
    positives = scores[y == 1].tolist()
    negatives = scores[y == 0].tolist()
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    expected = wins / (len(positives) * len(negatives))
    assert roc_auc(scores, y) == pytest.approx(expected, abs=1e-14)
    assert roc_auc(torch.stack([-scores, scores], dim=1), y) == pytest.approx(expected, abs=1e-14)
    assert roc_auc(-scores, y) == pytest.approx(1 - expected, abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_mrr_takes_the_middle_of_tied_ranks(seed: int):
    scores = draw_scores(seed, 40, 9)
    total = 0.0
    for positive, *negatives in scores.tolist():
        optimistic = 1 + sum(n > positive for n in negatives)
        pessimistic = 1 + sum(n >= positive for n in negatives)
        total += 1 / ((optimistic + pessimistic) / 2)
    assert mrr(scores) == pytest.approx(total / 40, abs=1e-14)


def test_low_precision_scores_are_counted_exactly():
    many = torch.zeros(5000, dtype=torch.bfloat16)
    y = torch.zeros(5000, dtype=torch.long)
    y[0] = 1
    assert accuracy(many, y) == 4999 / 5000
    assert roc_auc(many, y) == 0.5


def test_metrics_are_found_by_name():
    assert all(function.__name__ == name for name, function in METRICS.items())
    assert find("rmse").function is rmse
    with pytest.raises(ValueError, match=r"no metric 'f1': choose one of .*macro_f1"):
        find("f1")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (balanced_accuracy, torchmetrics.classification.MulticlassAccuracy(5, average="macro")),
        (macro_f1, torchmetrics.classification.MulticlassF1Score(5, average="macro")),
    ],
    ids=["balanced_accuracy", "macro_f1"],
)
def test_metrics_of_classes_are_those_of_torchmetrics(ours: Metric, theirs: torchmetrics.Metric, seed: int):
    scores = torch.rand(60, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = draw_labels(seed, 60, classes=5)
    assert ours(scores, y) == pytest.approx(theirs(scores, y).item(), abs=1e-6)


def test_classes_that_never_occur_count_for_nothing():
    y = torch.tensor([0, 0, 1, 1])
    predicted = torch.tensor([0, 1, 1, 3])
    assert balanced_accuracy(predicted, y) == 0.5  # of two classes
    assert macro_f1(predicted, y) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # class 3 is predicted, class 2 is not


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (macro_f1, torchmetrics.classification.MultilabelF1Score(5, threshold=0.5)),
        (roc_auc, torchmetrics.classification.MultilabelAUROC(5)),
        (average_precision, torchmetrics.classification.MultilabelAveragePrecision(5)),
    ],
    ids=["macro_f1", "roc_auc", "average_precision"],
)
def test_metrics_of_several_labels_are_those_of_torchmetrics(ours: Metric, theirs: torchmetrics.Metric, seed: int):
    scores = draw_scores(seed, 60, 5)
    y = draw_labels(seed + 50, 60, 5)
    assert ours(scores, y) == pytest.approx(theirs(scores.sigmoid(), y).item(), abs=1e-6)


def test_labels_that_all_rows_have_or_none_are_left_out():
    scores = draw_scores(0, 30, 3)
    y = draw_labels(1, 30, 3)
    y[:, 1] = 0
    y[:, 2] = 1
    assert roc_auc(scores, y) == roc_auc(scores[:, 0], y[:, 0])
    assert average_precision(scores, y) == (average_precision(scores[:, 0], y[:, 0]) + 1) / 2
    with pytest.raises(ValueError, match="more rows"):
        roc_auc(scores, torch.ones(30, 3))


@pytest.mark.parametrize("seed", range(3))
def test_average_precision_of_ties_is_that_of_torchmetrics(seed: int):
    scores = draw_scores(seed, 60)
    y = draw_labels(seed + 100, 60)
    expected = torchmetrics.classification.BinaryAveragePrecision()(scores.sigmoid(), y).item()
    assert average_precision(scores, y) == pytest.approx(expected, abs=1e-6)
    assert average_precision(torch.stack([-scores, scores], dim=1), y) == pytest.approx(expected, abs=1e-6)


def test_log_loss_is_the_mean_of_minus_log_probabilities():
    scores = draw_scores(0, 20, 4)
    y = draw_labels(1, 20, classes=4)
    total = -sum(math.log(row[int(c)]) for row, c in zip(scores.softmax(1).tolist(), y, strict=True))
    assert log_loss(scores, y) == pytest.approx(total / 20, abs=1e-14)
    several = draw_labels(2, 20, 4)
    probabilities = torch.where(several == 1, scores.sigmoid(), 1 - scores.sigmoid())
    assert log_loss(scores, several) == pytest.approx(-probabilities.log().mean().item(), abs=1e-14)


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (mae, torchmetrics.MeanAbsoluteError()),
        (mse, torchmetrics.MeanSquaredError()),
        (rmse, torchmetrics.MeanSquaredError(squared=False)),
    ],
    ids=["mae", "mse", "rmse"],
)
def test_errors_of_numbers_leave_out_what_is_not_known(
    ours: Metric, theirs: torchmetrics.Metric, shape: tuple[int, ...]
):
    predicted = draw_scores(0, *shape)
    y = draw_scores(1, *shape)
    y[::7] = torch.nan
    is_known = ~y.isnan()
    assert ours(predicted, y) == pytest.approx(theirs(predicted[is_known], y[is_known]).item(), abs=1e-6)
    predicted[::7] = torch.nan  # what is not known need not be predicted either
    assert math.isfinite(ours(predicted, y))


def test_r2_is_the_mean_over_columns():
    predicted = draw_scores(0, 40, 3)
    y = draw_scores(1, 40, 3)
    expected = [torchmetrics.R2Score()(predicted[:, i], y[:, i]).item() for i in range(3)]
    assert r2(predicted, y) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert r2(predicted[:, :1], y[:, 0]) == pytest.approx(expected[0], abs=1e-6)
    with pytest.raises(ValueError, match="two values or more"):
        r2(predicted[:, 0], torch.ones(40))


def test_a_metric_of_torchmetrics_says_what_is_best_and_keeps_no_state():
    metric = find(torchmetrics.MeanSquaredError())
    assert (metric.name, metric.best_is) == ("MeanSquaredError", "min")
    assert metric(torch.ones(3), torch.zeros(3)) == 1.0
    assert metric(torch.zeros(3), torch.zeros(3)) == 0.0
    assert find(torchmetrics.classification.MulticlassF1Score(4)).best_is == "max"


def test_a_metric_returns_one_number():
    assert find(lambda scores, y: torch.tensor([2.5]))(torch.ones(3), torch.ones(3)) == 2.5
    with pytest.raises(ValueError, match="return one number"):
        find(lambda scores, y: scores)(torch.ones(3), torch.ones(3))


NAN = torch.tensor([[float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accuracy(torch.empty(0, 3), torch.empty(0)), "no rows"),
        (lambda: micro_f1(torch.empty(0, 3), torch.empty(0, 3)), "no rows"),
        (lambda: roc_auc(torch.empty(0), torch.empty(0)), "no rows"),
        (lambda: mrr(torch.empty(0, 3)), "no rows"),
        (lambda: roc_auc(torch.rand(4), torch.ones(4)), "only one"),
        (lambda: roc_auc(torch.rand(4), torch.tensor([0, 1, -1, 0])), "0 and 1 only"),
        (lambda: accuracy(NAN, torch.tensor([0])), "NaN"),
        (lambda: mrr(NAN), "NaN"),
        (lambda: accuracy(torch.rand(4, 3), torch.zeros(4, 1)), r"\[4, 3\] and \[4, 1\]"),
        (lambda: micro_f1(torch.rand(4, 3), torch.zeros(4)), "micro_f1 needs"),
        (lambda: roc_auc(torch.rand(4, 3), torch.zeros(4)), "roc_auc needs"),
        (lambda: mrr(torch.rand(4, 1)), "mrr needs"),
    ],
)
def test_refusals_say_what_is_needed(call: Callable[[], float], words: str):
    with pytest.raises(ValueError, match=words):
        call()
