"""The usual losses of a task, and what a loss must be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.contract import TrainStep
from hopline.core.batch import Batch


def supervised_loss(task: str, num_classes: int) -> TrainStep:
    """The training step with the usual loss of a task: the mean over the batch's seeds.

    The loss is cross entropy. It is binary cross entropy if nodes have several labels (task "multi"), or if
    the model has a single score for two classes.
    """

    def train_step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch)
        y = batch.labels
        is_single_score = scores.size(-1) == 1 and num_classes <= 2  # a score of the second of two classes
        if task == "multi" or is_single_score:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            return nn.functional.binary_cross_entropy_with_logits(scores.view(y.shape), y.to(scores.dtype))
        if scores.size(-1) < num_classes:
            raise ValueError(narrow_output_error(scores.size(-1), num_classes))
        return ops.cross_entropy(scores, y)

    return train_step


def narrow_output_error(num_columns: int, num_classes: int) -> str:
    """The message for a model with fewer output columns than classes."""
    columns = "1 column" if num_columns == 1 else f"{num_columns} columns"
    return f"the model puts out {columns} for {num_classes} classes: widen its last layer"


def check_loss_of(train_step: TrainStep) -> TrainStep:
    """A user's own training step, with a check of its loss.

    The step raises a ValueError unless the loss is one number and, with gradients enabled, has a gradient.
    """

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = train_step(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            value = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"train_step returned {value}: return the mean loss of the batch's seeds, as one number")
        if not loss.requires_grad and torch.is_grad_enabled():
            raise ValueError("the loss of train_step has no gradient: compute it from model(batch), without detach()")
        return loss.view(())

    return step
