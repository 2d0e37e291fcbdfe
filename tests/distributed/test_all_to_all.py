"""One process alone; what several ranks exchange is checked in `shards/ranks.py`."""

from __future__ import annotations

import torch

from hopline.distributed.all_to_all import Channel, Question
from hopline.distributed.world import World
from tests.helpers import randint, randn


def test_alone_a_rank_answers_itself() -> None:
    for channel in (Channel(), Channel(World.alone())):
        assert (channel.rank, channel.size) == (0, 1)
        rows, positions = randn(20, 3), randint(0, 20, 50)
        question = Question(channel, torch.tensor([0, 20]), positions)
        assert torch.equal(question.answer(rows[question.rows]), rows[positions])
        indptr, (first, second) = question.answer_lists(
            question.rows % 3, [question.rows.repeat_interleave(question.rows % 3), torch.arange(1000)]
        )
        assert torch.equal(indptr.diff(), positions % 3)
        assert torch.equal(first, positions.repeat_interleave(positions % 3))
        assert torch.equal(second[: int(indptr[1])], torch.arange(int(indptr[1])))
        assert torch.equal(channel.all(rows), rows)
        assert torch.equal(channel.highest(rows), rows)
        channel.check_same(b"anything", "nothing")


def test_nothing_can_be_asked() -> None:
    question = Question(Channel(), torch.tensor([0, 20]), torch.empty(0, dtype=torch.int64))
    assert question.answer(randn(20, 3)[question.rows]).shape == (0, 3)
