"""Units of work, and the usual losses; how methods make them is in tests/methods/sampled/test_sampled.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hopline.contract import Unit
from hopline.core.batch import Batch
from hopline.tasks.kinds import LabelKind
from tests.support.helpers import randint, randn, usual_task


class Scores(nn.Module):
    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, batch: Batch) -> Tensor:
        return self.scores


def loss_of(task: LabelKind, scores: Tensor, y: Tensor, num_classes: int) -> Tensor:
    batch: Any = Batch(torch.arange(y.size(0)), (), None, y)
    return usual_task(num_classes, task).loss(Scores(scores), batch)


def test_each_task_has_its_loss():
    scores = randn(9, 4)
    y = randint(0, 4, 9)
    assert torch.equal(loss_of("single", scores, y, 4), nn.functional.cross_entropy(scores, y))
    several = randint(0, 2, 36).view(9, 4)
    expected = nn.functional.binary_cross_entropy_with_logits(scores, several.double())
    assert torch.equal(loss_of("multi", scores, several, 4), expected)
    yes = randint(0, 2, 9)
    expected = nn.functional.binary_cross_entropy_with_logits(scores[:, 0], yes.double())
    assert torch.equal(loss_of("binary", scores[:, :1], yes, 2), expected)


def test_half_precision_scores_are_compared_in_float32():
    scores = randn(9, 4).bfloat16()
    y = randint(0, 4, 9)
    assert torch.equal(loss_of("single", scores, y, 4), nn.functional.cross_entropy(scores.float(), y))


def test_too_few_columns_are_refused():
    with pytest.raises(ValueError, match="widen its last layer"):
        loss_of("single", randn(9, 3), randint(0, 4, 9), 4)


def test_a_unit_leaves_the_total_of_all_ranks_to_the_trainer():
    class Own(Unit):
        size = 7

        def forward_backward(self, total: int) -> Tensor:
            return torch.zeros(())

    unit = Own()
    unit.commit()
    assert unit.total_size is None
