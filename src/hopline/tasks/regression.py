"""Numbers: one or several per node.

An entry that is NaN is left out of the loss and of the metric. The loss is the mean over the other entries,
so a batch counts by their number: `weight` is that number, in nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hopline import metrics
from hopline.core.batch import Batch
from hopline.metrics import Metric
from hopline.tasks.settings import METRICS_OF, LabelFacts, Regression
from hopline.tasks.task import Task, TotalOverRanks, Write

LOSSES = {
    "mse": nn.functional.mse_loss,
    "mae": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
}
"""Losses by name, as torch computes them."""


def bind(settings: Regression, labels: LabelFacts) -> RegressionTask:
    """The task of a dataset."""
    has_missing = False
    mean = deviation = None
    if labels.train is not None:
        y = labels.train.reshape(len(labels.train), labels.num_classes).double().cpu()
        has_missing = bool(labels.total(y.isnan().sum().double()) > 0)
        if settings.standardize:
            mean, deviation = _statistics(y, labels.total)
    elif settings.standardize and labels.state:
        mean = torch.tensor(labels.state["mean"], dtype=torch.float64)
        deviation = torch.tensor(labels.state["deviation"], dtype=torch.float64)
    metric = metrics.find(settings.metric or METRICS_OF["regression"][0])
    return RegressionTask(
        settings=settings,
        num_targets=labels.num_classes,
        own_metric=metric,
        mean=mean,
        deviation=deviation,
        has_missing=has_missing,
    )


@dataclass(eq=False, kw_only=True)
class RegressionTask(Task):
    """Numbers, by a loss of torch over the entries that are known."""

    settings: Regression
    num_targets: int
    own_metric: Metric
    mean: Tensor | None = None
    """[num_targets] float64: mean of the training targets, with standardize=True."""
    deviation: Tensor | None = None
    """[num_targets] float64: their standard deviation; 1 where all are equal."""
    has_missing: bool = False
    """Whether some entry of a training node is NaN."""

    is_mean = True

    def __post_init__(self) -> None:
        self.metric = self.own_metric.name
        self.best_is = self.own_metric.best_is

    @property
    def has_weights(self) -> bool:
        return self.has_missing

    def weight(self, y: Tensor | None) -> float | None:
        if not self.has_missing or y is None:
            return None
        return float((~y.isnan()).sum()) / self.num_targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        y = self._rows(batch.labels)
        self._check_width(outputs)
        outputs = outputs.reshape(y.shape)
        if self.mean is not None and self.deviation is not None:
            # In float64: of a large mean, as of points in time, float32 would leave nothing of the deviations.
            y = (y.double() - self.mean.to(y.device)) / self.deviation.to(y.device)
        y = y.to(outputs.dtype)
        loss = LOSSES[self.settings.loss]
        if not self.has_missing:
            return loss(outputs, y)
        is_known = ~y.isnan()
        # Not outputs[is_known]: its length would have to be read from a GPU. A difference of 0 has no gradient.
        total = loss(torch.where(is_known, outputs, 0), torch.where(is_known, y, 0), reduction="sum")
        return total / is_known.sum().clamp(min=1)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        self._check_width(outputs)
        predicted = self.predict(outputs, "values").reshape(y.shape).to(y.dtype)
        if callable(self.settings.metric):  # of hopline's, some go by column and know NaN
            is_known = ~y.isnan()
            if not is_known.all():
                predicted, y = predicted[is_known], y[is_known]
        return {self.metric: self.own_metric(predicted, y)}

    def predict(self, outputs: Tensor, write: Write) -> Tensor:
        """[n, num_targets]: float64 where targets were standardised, in which their mean is exact."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if write == "scores" or self.mean is None or self.deviation is None:
            return outputs
        return outputs.double() * self.deviation + self.mean

    def state(self) -> dict[str, Any]:
        if self.mean is None or self.deviation is None:
            return {}
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    def _rows(self, y: Tensor) -> Tensor:
        """[n, num_targets]: the labels, a column for a single target."""
        return y.reshape(y.size(0), self.num_targets)

    def _check_width(self, outputs: Tensor) -> None:
        width = outputs.size(-1) if outputs.dim() > 1 else 1
        if width != self.num_targets:
            raise ValueError(
                f"the model puts out {width} columns for {self.num_targets} numbers per node: give its last layer "
                f"{self.num_targets}"
            )


def _statistics(y: Tensor, total: TotalOverRanks) -> tuple[Tensor, Tensor]:
    """([k], [k]): mean and standard deviation of each column over its known entries. y: [n, k] float64."""
    is_known = ~y.isnan()
    count = total(is_known.sum(0).double()).clamp(min=1)
    mean = total(y.nan_to_num().sum(0)) / count
    deviation = (total(((y - mean).nan_to_num() ** 2).sum(0)) / count).sqrt()
    return mean, torch.where(deviation > 0, deviation, 1.0)
