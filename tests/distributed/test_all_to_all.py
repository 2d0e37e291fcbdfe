"""All-to-all in one process. `shards/ranks.py` checks what several ranks exchange."""

from __future__ import annotations

import torch

from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.distributed.world import World
from tests.support.helpers import randint, randn


def test_one_rank_receives_what_it_sends_itself() -> None:
    for channel in (Channel(), Channel(World.alone())):
        assert (channel.rank, channel.size) == (0, 1)
        rows = randn(20, 3)
        positions = randint(0, 20, 50)
        request = RowRequest(channel, torch.tensor([0, 20]), positions)
        assert torch.equal(request.reply(rows[request.rows]), rows[positions])
        indptr, (first, second) = request.reply_lists(
            request.rows % 3, [request.rows.repeat_interleave(request.rows % 3), torch.arange(1000)]
        )
        assert torch.equal(indptr.diff(), positions % 3)
        assert torch.equal(first, positions.repeat_interleave(positions % 3))
        assert torch.equal(second[: int(indptr[1])], torch.arange(int(indptr[1])))
        assert torch.equal(channel.all_gather(rows), rows)
        assert torch.equal(channel.max(rows), rows)
        assert channel.gather_bytes(b"anything") == [b"anything"]


def test_a_request_for_no_rows_is_answered() -> None:
    request = RowRequest(Channel(), torch.tensor([0, 20]), torch.empty(0, dtype=torch.int64))
    assert request.reply(randn(20, 3)[request.rows]).shape == (0, 3)
