"""Metrics of predictions, of classes and of numbers.

    one class per node     accuracy, balanced_accuracy, macro_f1, log_loss
    two classes            roc_auc, average_precision
    several labels         micro_f1, macro_f1, roc_auc, average_precision, log_loss
    numbers                mae, mse, rmse, r2
    ranks                  mrr

A metric gets the scores and labels of the same rows (MRR: scores alone) and returns a float. It refuses
empty input and NaN scores, for which it is undefined. `mode_of` tells by the name whether higher or lower
is better. `find` makes a `Metric` of a name, or of a function or torchmetrics metric of the user's.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    num_hits, total = _hits_of_labels("micro_f1", scores, y)
    return 2 * num_hits.sum().item() / total.sum().item() if total.any() else 0.0


def roc_auc(scores: Tensor, y: Tensor) -> float:
    """Return the probability that a positive row scores above a negative one. A tie counts one half.

    With several labels per row it is the mean over the labels that have rows of both kinds, as OGB computes it.

    Args:
        scores: [n] scores, [n, 2] scores of the negative and the positive class, or [n, C] for C labels.
        y: [n] or [n, C] of zeros and ones.

    Raises:
        ValueError: There are no rows, a score is NaN, the shapes do not fit, or `y` has other values or
            only one class.

    Example:
        >>> hl.metrics.roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    if y.dim() == 2:
        return _mean_over_labels("roc_auc", roc_auc, scores, y, lambda column: 0 < column.sum() < len(y))
    scores, is_positive = _binary("roc_auc", scores, y)
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


def balanced_accuracy(scores: Tensor, y: Tensor) -> float:
    """Return the mean over the classes that rows have of the share of their rows that is predicted correctly.

    Arguments and errors are those of `accuracy`.

    Example:
        >>> hl.metrics.balanced_accuracy(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    predicted = _predicted_classes("balanced_accuracy", scores, y)
    _, row_class, num_rows = y.unique(return_inverse=True, return_counts=True)
    hits = torch.zeros(len(num_rows), dtype=torch.float64).index_add_(0, row_class, (predicted == y).double())
    return (hits / num_rows).mean().item()


def macro_f1(scores: Tensor, y: Tensor) -> float:
    """Return the mean over classes, or over labels, of their F1: 2 * hits / (predicted + present).

    As in scikit-learn, a class counts if a row has it or is predicted to have it. A label that is neither
    present nor predicted has an F1 of 0.

    Args:
        scores: [n, C] scores; with several labels per row, above 0 predicts the label. Or [n] class ids.
        y: [n] int64 class ids, or [n, C] of zeros and ones for several labels.

    Raises:
        ValueError: There are no rows, a score is NaN, the shapes do not fit, or `y` [n, C] has other values.

    Example:
        >>> hl.metrics.macro_f1(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
        0.6666666666666666
    """
    if y.dim() == 2:
        num_hits, total = _hits_of_labels("macro_f1", scores, y)
        return (2 * num_hits.double() / total.double().clamp(min=1)).mean().item()
    predicted = _predicted_classes("macro_f1", scores, y)
    num_classes = int(torch.maximum(predicted, y).max()) + 1
    num_hits = torch.bincount(y[predicted == y], minlength=num_classes).double()
    total = torch.bincount(predicted, minlength=num_classes) + torch.bincount(y, minlength=num_classes)
    occurs = total > 0
    return (2 * num_hits[occurs] / total[occurs]).mean().item()


def average_precision(scores: Tensor, y: Tensor) -> float:
    """Return the area under the steps of precision over recall, as scikit-learn computes it.

    With several labels per row it is the mean over the labels that some rows have. Arguments and errors are those of
    `roc_auc`.

    Example:
        >>> hl.metrics.average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.8333333333333333
    """
    if y.dim() == 2:
        return _mean_over_labels("average_precision", average_precision, scores, y, lambda column: column.any())
    scores, is_positive = _binary("average_precision", scores, y)
    num_positive = int(is_positive.sum())
    if not num_positive:
        raise ValueError("average_precision needs rows of the class 1, and y holds none: evaluate on more rows.")
    # Rows with one score come in together: precision is read after the last of each group.
    values, group = scores.unique(return_inverse=True)  # ascending
    hits = torch.zeros(len(values), dtype=torch.float64).index_add_(0, group, is_positive.double()).flip(0)
    rows = torch.bincount(group, minlength=len(values)).double().flip(0)
    precision = hits.cumsum(0) / rows.cumsum(0)
    return (precision * hits).sum().item() / num_positive


def log_loss(scores: Tensor, y: Tensor) -> float:
    """Return the mean cross entropy, by natural logarithms.

    Args:
        scores: [n, C] logits of the classes, or of C labels.
        y: [n] int64 class ids, or [n, C] of zeros and ones for several labels.

    Example:
        >>> round(hl.metrics.log_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1])), 4)
        0.6931
    """
    _check("log_loss", scores, y)
    if y.dim() == 2:
        _check_same_shape("log_loss", scores, y)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores.double(), y.double()).item()
    if scores.dim() != 2 or scores.size(0) != y.size(0):
        raise _shape_error("log_loss", scores, y, "scores [n, C] and y [n]")
    return torch.nn.functional.cross_entropy(scores.double(), y).item()


def mae(predicted: Tensor, y: Tensor) -> float:
    """Return the mean absolute error over all entries of `y` that are not NaN.

    Args:
        predicted: [n] or [n, k] predictions.
        y: Labels of the same shape. NaN stands for a number that is not known.

    Raises:
        ValueError: No label is known, a prediction is NaN, or the shapes differ.

    Example:
        >>> hl.metrics.mae(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0]))
        1.5
    """
    predicted, y = _known_pairs("mae", predicted, y)
    return (predicted - y).abs().mean().item()


def mse(predicted: Tensor, y: Tensor) -> float:
    """Return the mean squared error. Arguments and errors are those of `mae`.

    Example:
        >>> hl.metrics.mse(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0]))
        2.5
    """
    predicted, y = _known_pairs("mse", predicted, y)
    return ((predicted - y) ** 2).mean().item()


def rmse(predicted: Tensor, y: Tensor) -> float:
    """Return the root of the mean squared error over all entries. Arguments and errors are those of `mae`.

    Example:
        >>> hl.metrics.rmse(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0]))
        2.0
    """
    predicted, y = _known_pairs("rmse", predicted, y)
    return ((predicted - y) ** 2).mean().sqrt().item()


def r2(predicted: Tensor, y: Tensor) -> float:
    """Return the share of the variance of the labels that the predictions explain: 1 is perfect, 0 the mean.

    For several numbers per node it is the mean over the columns, as in scikit-learn. Arguments are those of `mae`.

    Raises:
        ValueError: A column has fewer than two labels, or equal ones. Or as `mae`.

    Example:
        >>> hl.metrics.r2(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 6.0]))
        0.3571428571428571
    """
    _known_pairs("r2", predicted, y)  # checks
    columns = zip(predicted.reshape(len(y), -1).unbind(1), y.reshape(len(y), -1).unbind(1), strict=True)
    values = []
    for column, labels in columns:
        column, labels = _known_pairs("r2", column, labels)
        spread = ((labels - labels.mean()) ** 2).sum()
        if not spread > 0:
            raise ValueError("r2 needs labels of two values or more in every column: evaluate on more rows.")
        values.append(1 - ((column - labels) ** 2).sum() / spread)
    return torch.stack(values).mean().item()


MAX_ERROR_CHARACTERS = 300
"""Characters that a message repeats of an error of the user's metric."""
METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "micro_f1": micro_f1,
    "macro_f1": macro_f1,
    "roc_auc": roc_auc,
    "average_precision": average_precision,
    "log_loss": log_loss,
    "mae": mae,
    "mse": mse,
    "rmse": rmse,
    "r2": r2,
    "mrr": mrr,
}
"""The metrics by name, as in `Dataset.metric`."""


@dataclass(frozen=True)
class Metric:
    """A metric by its name, with what is best. `find` makes it."""

    name: str
    function: Callable[..., Any]
    """(scores, y) -> a number, or a tensor with one."""
    best_is: Mode | None
    """None: the name does not tell."""

    def __call__(self, scores: Tensor, y: Tensor) -> float:
        function = self.function
        if hasattr(function, "reset"):  # torchmetrics: the object accumulates over calls, and threads may share it
            function = copy.deepcopy(function)
        try:
            value = function(scores, y)
        except Exception as error:
            if function is METRICS.get(self.name):
                raise
            raise ValueError(
                f"the metric {self.name} raised {type(error).__name__} for scores {list(scores.shape)} and labels "
                f"{list(y.shape)}: {str(error)[:MAX_ERROR_CHARACTERS]}"
            ) from error
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)):
            raise ValueError(f"the metric {self.name} returned {type(value).__name__}: return one number")
        return float(value)


def find(metric: str | Callable[..., Any]) -> Metric:
    """Return the metric of a name, or of a function (scores, y) -> number of the user's.

    An object of torchmetrics says itself whether higher is better.

    Raises:
        ValueError: There is no metric of that name.

    Example:
        >>> hl.metrics.find("rmse").best_is
        'min'
    """
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(f"there is no metric {metric!r}: choose one of {', '.join(METRICS)}")
        return Metric(metric, METRICS[metric], mode_of(metric))
    name = getattr(metric, "__name__", "") or type(metric).__name__
    best_is = mode_of(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))  # MulticlassF1Score has words too
    higher_is_better = getattr(metric, "higher_is_better", None)
    if isinstance(higher_is_better, bool):
        best_is = "max" if higher_is_better else "min"
    return Metric(name, metric, best_is)


def _predicted_classes(name: str, scores: Tensor, y: Tensor) -> Tensor:
    """[n] int64: the classes with the largest scores. scores: [n, C], or [n] class ids."""
    _check(name, scores, y)
    predicted = scores.argmax(dim=-1) if scores.dim() == 2 else scores.long()
    if predicted.shape != y.shape:
        raise _shape_error(name, scores, y, "scores [n, C] or class ids [n], and y [n]")
    return predicted


def _hits_of_labels(name: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """([C], [C]) int64, by label: rows that have it and are predicted to, and rows of either kind together."""
    _check(name, scores, y)
    _check_same_shape(name, scores, y)
    is_predicted = scores > 0
    is_present = _is_positive(name, y)
    return (is_predicted & is_present).sum(0), is_predicted.sum(0) + is_present.sum(0)


def _binary(name: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """([n], [n] bool): the score of the positive class, and whether it is the row's. scores: [n], or [n, 2]."""
    _check(name, scores, y)
    if scores.dim() == 2 and scores.shape[1] == 2:
        scores = scores[:, 1].double() - scores[:, 0].double()
    if scores.shape != y.shape or scores.dim() != 1:
        raise _shape_error(name, scores, y, "scores [n] or [n, 2], and y [n]")
    return scores, _is_positive(name, y)


def _mean_over_labels(
    name: str,
    metric: Callable[[Tensor, Tensor], float],
    scores: Tensor,
    y: Tensor,
    is_defined: Callable[[Tensor], Tensor | bool],
) -> float:
    """The mean of a metric over some labels. scores, y: [n, C]. is_defined: whether for a label's [n] bool."""
    _check(name, scores, y)
    _check_same_shape(name, scores, y)
    is_present = _is_positive(name, y)
    columns = [i for i in range(y.size(1)) if is_defined(is_present[:, i])]
    if not columns:
        raise ValueError(f"{name} needs a label that some rows have and others have not: evaluate on more rows.")
    return sum(metric(scores[:, i], y[:, i]) for i in columns) / len(columns)


def _check_same_shape(name: str, scores: Tensor, y: Tensor) -> None:
    if scores.shape != y.shape or y.dim() != 2:
        raise _shape_error(name, scores, y, "scores [n, C] and y [n, C]")


def _known_pairs(name: str, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """([m], [m]) float64: predictions and labels of the entries whose label is known."""
    if predicted.dim() == 2 and predicted.size(1) == 1 and y.dim() == 1:
        predicted = predicted[:, 0]
    if predicted.shape != y.shape:
        raise _shape_error(name, predicted, y, "predictions of the shape of y")
    is_known = ~y.isnan()
    _check(name, predicted[is_known])
    return predicted[is_known].double(), y[is_known].double()


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
