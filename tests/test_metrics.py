"""Each metric against its definition written as loops, in float64, with many ties."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hopline.metrics import METRICS, accuracy, micro_f1, mrr, roc_auc


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
    assert {"accuracy": accuracy, "micro_f1": micro_f1, "roc_auc": roc_auc, "mrr": mrr} == METRICS


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
