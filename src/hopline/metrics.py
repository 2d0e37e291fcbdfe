"""Metrics of predictions: accuracy, micro-F1, ROC-AUC and MRR. For all of them higher is better.

A metric gets the scores and labels of the same rows (MRR: scores alone) and returns a float. It refuses
empty input and NaN scores, for which it is undefined. `mode_of` tells by the name whether higher or lower
is better, for metrics of the user.
"""

import re
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["max", "min"]
"""Whether the largest or the smallest value of a metric is the best, in the words of torch's schedulers."""

# ---- words in the name of a metric, of which one is enough: "val_loss", "hits@10", "accuracy_of_3"

_RISES = {
    *("acc", "accuracy", "ap", "auc", "auprc", "auroc", "f1", "hits", "kappa", "map", "mcc", "mrr", "ndcg"),
    *("precision", "r2", "recall", "score"),
}
"""Words of metrics for which higher is better."""
_FALLS = {
    *("bce", "brier", "ce", "entropy", "err", "error", "errors", "kl", "logloss", "loss", "mae", "mape", "mse", "nll"),
    *("perplexity", "rmse", "rmsle"),
}
"""Words of metrics for which lower is better."""
_NEGATIONS = {"inverse", "minus", "neg", "negative"}
"""Words that may turn the direction round, so that the name does not tell it."""


def mode_of(name: str) -> Mode | None:
    """Return whether the largest ("max") or the smallest ("min") value of a metric is best, by its name.

    Args:
        name: The name of the metric, such as "val_loss" or "hits@10".

    Returns:
        None if the words do not tell, or contradict each other.

    Example:
        >>> hl.metrics.mode_of("val_loss"), hl.metrics.mode_of("hits@10"), hl.metrics.mode_of("distance")
        ('min', 'max', None)
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    rises = bool(words & _RISES)
    falls = bool(words & _FALLS)
    is_unclear = rises == falls or words & _NEGATIONS
    if is_unclear:
        return None
    return "max" if rises else "min"


def accuracy(scores: Tensor, y: Tensor) -> float:
    """Return the share of rows whose class is predicted correctly.

    Args:
        scores: [n, C] scores, or [n] class ids.
        y: [n] int64 class ids.

    Raises:
        ValueError: There are no rows, a score is NaN, or the shapes do not fit.

    Example:
        >>> hl.metrics.accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        0.5
    """
    _check("accuracy", scores, y)
    predicted = scores.argmax(dim=-1) if scores.dim() == 2 else scores
    if predicted.shape != y.shape:
        raise _shape_error("accuracy", scores, y, "scores [n, C] or class ids [n], and y [n]")
    return (predicted == y).double().mean().item()


def micro_f1(scores: Tensor, y: Tensor) -> float:
    """Return the F1 of all labels pooled: 2 * hits / (predicted + present), or 0 without any of these.

    Args:
        scores: [n, C] logits; above 0 predicts the label.
        y: [n, C] of zeros and ones.

    Raises:
        ValueError: There are no rows, a score is NaN, the shapes differ, or `y` has other values.

    Example:
        >>> hl.metrics.micro_f1(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [1, 1]]))
        1.0
    """
    _check("micro_f1", scores, y)
    if scores.shape != y.shape or scores.dim() != 2:
        raise _shape_error("micro_f1", scores, y, "scores [n, C] and y [n, C]")
    is_predicted = scores > 0
    is_present = _is_positive("micro_f1", y)
    num_hits = (is_predicted & is_present).sum().item()
    total = (is_predicted.sum() + is_present.sum()).item()
    return 2 * num_hits / total if total else 0.0


def roc_auc(scores: Tensor, y: Tensor) -> float:
    """Return the probability that a positive row scores above a negative one. A tie counts one half.

    Args:
        scores: [n] scores, or [n, 2] scores of the negative and the positive class.
        y: [n] of zeros and ones.

    Raises:
        ValueError: There are no rows, a score is NaN, the shapes do not fit, or `y` has other values or
            only one class.

    Example:
        >>> hl.metrics.roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    _check("roc_auc", scores, y)
    if scores.dim() == 2 and scores.shape[1] == 2:
        scores = scores[:, 1].double() - scores[:, 0].double()
    if scores.shape != y.shape or scores.dim() != 1:
        raise _shape_error("roc_auc", scores, y, "scores [n] or [n, 2], and y [n]")
    is_positive = _is_positive("roc_auc", y)
    num_positive = int(is_positive.sum())
    num_negative = len(y) - num_positive
    if not num_positive or not num_negative:
        raise ValueError("roc_auc needs rows of both classes, and y holds only one: evaluate on more rows.")

    # The Mann-Whitney statistic. With ranks from 1 for the lowest score, the rank of a positive row counts
    # itself, the positives below it and the negatives below it. So the wins over negatives are the sum of
    # the positives' ranks minus 1 + 2 + ... + num_positive.
    _, group, size = scores.unique(return_inverse=True, return_counts=True)
    # Equal scores form a group and share the mean of its ranks, which makes a tie count one half.
    rank = (size.cumsum(0).double() - (size.double() - 1) / 2)[group]
    num_wins = rank[is_positive].sum().item() - num_positive * (num_positive + 1) / 2
    return num_wins / (num_positive * num_negative)


def mrr(scores: Tensor) -> float:
    """Return the mean reciprocal rank of column 0 in each row. A tie counts half a rank.

    Args:
        scores: [n, 1 + k] scores, the positive in column 0 and k negatives after it.

    Raises:
        ValueError: There are no rows, a score is NaN, or there is no negative.

    Example:
        >>> hl.metrics.mrr(torch.tensor([[0.5, 0.9, 0.1], [0.9, 0.2, 0.1]]))
        0.75
    """
    _check("mrr", scores)
    if scores.dim() != 2 or scores.shape[1] < 2:
        raise ValueError(f"mrr needs scores [n, 1 + k], the positive first, not {list(scores.shape)}.")
    positive = scores[:, :1]
    negatives = scores[:, 1:]
    num_above = (negatives > positive).sum(dim=1).double()
    num_tied = (negatives == positive).sum(dim=1).double()
    return (1 / (1 + num_above + num_tied / 2)).mean().item()


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "micro_f1": micro_f1,
    "roc_auc": roc_auc,
    "mrr": mrr,
}
"""The metrics by name, as in `Dataset.metric`."""


def _check(name: str, scores: Tensor, y: Tensor | None = None) -> None:
    """Raise ValueError for input on which no metric is defined. name: of the metric."""
    if scores.numel() == 0 or (y is not None and y.numel() == 0):
        raise ValueError(f"{name} of no rows is undefined: give at least one row.")
    if torch.isnan(scores).any():
        raise ValueError(f"{name} of NaN scores is undefined: lower the learning rate, or check the features.")


def _is_positive(name: str, y: Tensor) -> Tensor:
    """A bool mask of the ones in `y`. Raises ValueError if `y` has values other than 0 and 1."""
    is_positive = y == 1
    if not (is_positive | (y == 0)).all():
        raise ValueError(f"{name} needs y of 0 and 1 only: leave unlabelled rows out.")
    return is_positive


def _shape_error(name: str, scores: Tensor, y: Tensor, expected: str) -> ValueError:
    """An error for scores and labels whose shapes do not fit."""
    return ValueError(f"{name} needs {expected}, not {list(scores.shape)} and {list(y.shape)}.")
