"""Classes: one per node, a yes or no, or several labels per node.

A model of a single class per node has a score per class, or one score for two classes: that of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hopline import metrics, ops
from hopline.core.batch import Batch
from hopline.metrics import Metric
from hopline.tasks.kinds import LabelKind
from hopline.tasks.settings import METRICS_OF, Classification, LabelFacts
from hopline.tasks.task import Task, Write

HEADS = {"classes": "", "probabilities": "probability ", "scores": "score "}
"""What is written -> what the head of a class's column begins with."""


def bind(settings: Classification, labels: LabelFacts) -> Task:
    """The task of a dataset."""
    # Not by `in`: an object of torchmetrics is equal to everything.
    for_two = isinstance(settings.metric, str) and settings.metric in ("roc_auc", "average_precision")
    if for_two and labels.kind == "single" and labels.num_classes > 2:
        raise ValueError(
            f"metric={settings.metric} is for two classes, and there are {labels.num_classes}: choose one of "
            "balanced_accuracy, macro_f1, log_loss"
        )
    task_class = SeveralLabelsTask if labels.kind == "multi" else ClassTask
    weights = settings.class_weights
    if isinstance(weights, tuple) and len(weights) != labels.num_classes:
        raise ValueError(
            f"class_weights has {len(weights)} numbers for {labels.num_classes} classes: give one per class"
        )
    weights_tensor = None
    if weights == "balanced":
        # Weights are for training alone: predictions need none.
        weights_tensor = None if labels.train is None else task_class.balanced_weights(labels, labels.train)
    elif weights is not None:
        weights_tensor = torch.tensor(weights, dtype=torch.float64)
    return task_class(
        settings=settings,
        kind=labels.kind,
        num_classes=labels.num_classes,
        own_metric=metrics.find(settings.metric or METRICS_OF[labels.kind][0]),
        weights=weights_tensor,
    )


@dataclass(eq=False, kw_only=True)
class ClassTask(Task):
    """One class per node, by cross entropy; or a yes or no, by the cross entropy of one score."""

    settings: Classification
    kind: LabelKind
    num_classes: int
    own_metric: Metric
    weights: Tensor | None = None
    """[num_classes]: the weight of each class in the loss. None: all are 1."""

    is_mean = True

    def __post_init__(self) -> None:
        self.metric = self.own_metric.name
        self.best_is = self.own_metric.best_is

    @staticmethod
    def balanced_weights(labels: LabelFacts, y: Tensor) -> Tensor:
        """[num_classes] float64: as scikit-learn's "balanced", the training nodes / (classes * nodes of the class).

        0 for a class without training nodes.
        """
        counts = labels.total(torch.bincount(y[y >= 0].cpu(), minlength=labels.num_classes).double())
        num_present = (counts > 0).sum()
        return torch.where(counts > 0, counts.sum() / (counts.clamp(min=1) * num_present), 0.0)

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    @cached_property
    def has_zero_weights(self) -> bool:
        return self.weights is not None and bool((self.weights == 0).any())

    def weight(self, y: Tensor | None) -> float | None:
        if self.weights is None or y is None:
            return None
        return float(self.weights.to(y.device)[y].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch)
        y = batch.labels
        is_plain = self.weights is None and not self.settings.label_smoothing
        if self._is_single_score(scores):
            if is_plain:
                scores = _in_float(scores)
                return nn.functional.binary_cross_entropy_with_logits(scores.view(y.shape), y.to(scores.dtype))
            scores = _two_columns(scores)
        if scores.size(-1) < self.num_classes:
            raise ValueError(narrow_output_error(scores.size(-1), self.num_classes))
        if is_plain:
            return ops.cross_entropy(scores, y)
        scores = _in_float(scores)
        weights = None if self.weights is None else self._padded_weights(scores)
        smoothing = self.settings.label_smoothing
        if weights is None or smoothing or not self.has_zero_weights:
            return nn.functional.cross_entropy(scores, y, weight=weights, label_smoothing=smoothing)
        # Torch divides by the weight of the batch, which is 0 where no node has a class that counts.
        total = weights[y].sum()
        return nn.functional.cross_entropy(scores, y, weight=weights, reduction="sum") / torch.where(
            total > 0, total, 1
        )

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        scores = outputs.float()
        if scores.size(-1) == 1:
            if self.num_classes > 2:
                raise ValueError(narrow_output_error(1, self.num_classes))
            # A metric of the user's takes one score per node, as torchmetrics does.
            scores = scores.view(-1) if callable(self.settings.metric) else _two_columns(scores)
        return {self.metric: self.own_metric(scores, y)}

    writes = ("classes", "probabilities", "scores")

    def predict(self, outputs: Tensor, write: Write) -> Tensor:
        """Classes are [n] int64, or [n] uint8 of a single score. All else is [n, ...] float32."""
        scores = outputs.float()
        is_single = self._is_single_score(scores)
        if write == "classes":
            return (scores > 0).view(-1).to(torch.uint8) if is_single else scores.argmax(dim=1)
        if write == "probabilities":
            second = scores.sigmoid()
            return torch.cat([1 - second, second], dim=1) if is_single else scores.softmax(dim=1)
        return scores

    def columns(self, outputs: Tensor, write: Write, classes: Sequence[str] | None) -> dict[str, Any]:
        values = self.predict(outputs, write)
        if write == "classes":
            rows = values.long()
            probability = self.predict(outputs, "probabilities").gather(1, rows[:, None])[:, 0]
            named = values if classes is None else np.array(classes)[rows.numpy()]
            return {"class": named, "probability": probability}
        if write == "scores" and values.size(1) == 1 and self.num_classes != 1:
            return {"score": values[:, 0]}
        return self._columns_by_class(values, HEADS[write], classes)

    def _columns_by_class(self, values: Tensor, head: str, classes: Sequence[str] | None) -> dict[str, Any]:
        names = classes or [str(number) for number in range(self.num_classes)]
        return {f"{head}{name}": values[:, i] for i, name in enumerate(names)}

    def _is_single_score(self, scores: Tensor) -> bool:
        """Whether the model has one score for two classes."""
        return scores.size(-1) == 1 and self.num_classes <= 2

    def _padded_weights(self, scores: Tensor) -> Tensor:
        """[num columns]: the weights, and 1 for columns of the model that are no classes."""
        assert self.weights is not None
        weights = self.weights.to(scores)
        return nn.functional.pad(weights, (0, scores.size(-1) - weights.numel()), value=1.0)


@dataclass(eq=False, kw_only=True)
class SeveralLabelsTask(ClassTask):
    """Several labels per node, each by the cross entropy of its score."""

    @staticmethod
    def balanced_weights(labels: LabelFacts, y: Tensor) -> Tensor:
        """[C] float64: the training nodes without a label / those with it. 1 for a label that no node has."""
        present = y.double().sum(0).cpu()
        *num_present, num_rows = labels.total(torch.cat([present, torch.tensor([float(len(y))])])).unbind()
        present = torch.stack(num_present)
        return torch.where(present > 0, (num_rows - present) / present.clamp(min=1), 1.0)

    @property
    def has_weights(self) -> bool:
        return False  # they weight the labels that are present, and a mean over all of them stays one

    def weight(self, y: Tensor | None) -> float | None:
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = _in_float(model(batch))
        y = batch.labels
        target = y.to(scores.dtype)
        if self.settings.label_smoothing:
            target = target * (1 - self.settings.label_smoothing) + self.settings.label_smoothing / 2
        weights = None if self.weights is None else self.weights.to(scores)
        return nn.functional.binary_cross_entropy_with_logits(scores.view(y.shape), target, pos_weight=weights)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {self.metric: self.own_metric(outputs.float(), y)}

    def predict(self, outputs: Tensor, write: Write) -> Tensor:
        """Labels are [n, C] uint8. All else is [n, C] float32."""
        scores = outputs.float()
        if write == "classes":
            return (scores > 0).to(torch.uint8)
        return scores.sigmoid() if write == "probabilities" else scores

    def columns(self, outputs: Tensor, write: Write, classes: Sequence[str] | None) -> dict[str, Any]:
        values = self.predict(outputs, write)
        if write == "classes":
            values = values.bool()
        return self._columns_by_class(values, HEADS[write], classes)


def narrow_output_error(num_columns: int, num_classes: int) -> str:
    """The message for a model with fewer output columns than classes."""
    columns = "1 column" if num_columns == 1 else f"{num_columns} columns"
    return f"the model puts out {columns} for {num_classes} classes: widen its last layer"


def _in_float(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _two_columns(scores: Tensor) -> Tensor:
    """[n, 2]: scores of both classes, whose softmax is the sigmoid of the single score. scores: [n, 1]."""
    return torch.cat([torch.zeros_like(scores), scores], dim=-1)
