"""A loss or an evaluation of the user's: `Trainer(train_step=, test_step=)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.tasks.task import Task, TestStep, TrainStep, Write


class OwnSteps(Task):
    """The task of a dataset, but for the loss or the evaluation, which are functions of the user's.

    A loss of the user's need not be a mean over rows, so it sees all outputs of a step together.
    """

    def __init__(self, task: Task, train_step: TrainStep | None, test_step: TestStep | None) -> None:
        self.task = task
        self.train_step = train_step
        self.test_step = test_step
        self.settings = task.settings
        self.metric = task.metric
        self.best_is = None if test_step is not None else task.best_is
        self.writes = task.writes
        self.is_mean = train_step is None and task.is_mean

    def examples(self, splits: Mapping[str, Tensor], split: str) -> Tensor | Examples:
        return self.task.examples(splits, split)

    @property
    def has_weights(self) -> bool:
        return self.train_step is None and self.task.has_weights

    def weight(self, y: Tensor | None) -> float | None:
        return self.task.weight(y) if self.train_step is None else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.train_step is None:
            return self.task.loss(model, batch)
        return checked_loss(self.train_step(model, batch))

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return self.task.measure(outputs, y)

    def predict(self, outputs: Tensor, write: Write) -> Tensor:
        return self.task.predict(outputs, write)

    def columns(self, outputs: Tensor, write: Write, classes: Sequence[str] | None) -> dict[str, Tensor]:
        return self.task.columns(outputs, write, classes)

    def state(self) -> dict[str, Any]:
        return self.task.state()


def checked_loss(loss: Any) -> Tensor:
    """The loss of a user's function, as a scalar.

    Raises a ValueError unless it is one number and, with gradients enabled, has a gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        value = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"train_step returned {value}: return the mean loss of the batch's seeds, as one number")
    if not loss.requires_grad and torch.is_grad_enabled():
        raise ValueError("the loss of train_step has no gradient: compute it from model(batch), without detach()")
    return loss.view(())
