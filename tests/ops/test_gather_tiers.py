"""The definition of gathering from hot and cold rows, on the CPU."""

from __future__ import annotations

import pytest
import torch

from hopline.ops.gather_tiers import count_ids, gather_tiers, new_counts
from tests.support.helpers import randint, randn

ROWS = randn(40, 3)


def test_hot_rows_come_from_the_cache_and_the_rest_from_below() -> None:
    hot_ids = torch.tensor([7, 0, 39])
    hot_slot = torch.full((40,), -1, dtype=torch.int32)
    hot_slot[hot_ids] = torch.arange(3, dtype=torch.int32)
    ids = torch.cat([randint(0, 40, 50), hot_ids])
    marked = -ROWS[hot_ids]  # so that one sees where a row came from
    counts = new_counts("cpu")
    ours = gather_tiers(marked, ROWS, hot_slot, ids, counts)
    is_hot = torch.isin(ids, hot_ids)
    assert torch.equal(ours, torch.where(is_hot[:, None], -ROWS[ids], ROWS[ids]))
    assert counts.sum(0).tolist() == [int(is_hot.sum()), int((~is_hot).sum()), 0]


def test_an_empty_slot_gives_zeros_and_counts_nothing() -> None:
    counts = new_counts("cpu")
    ours = gather_tiers(ROWS, None, None, torch.tensor([5, -1, 2]), counts)
    assert torch.equal(ours, torch.stack([ROWS[5], torch.zeros(3, dtype=ROWS.dtype), ROWS[2]]))
    assert counts.sum(0).tolist() == [2, 0, 0]


def test_staged_rows_are_read_where_they_stand_or_where_they_always_are() -> None:
    hot_slot = torch.tensor([-1, 0, -3], dtype=torch.int32)
    counts = new_counts("cpu")
    hot = torch.tensor([[1.0], [2.0], [3.0]])  # the second and third for staged rows
    cold = torch.tensor([[10.0], [11.0], [12.0]])
    ids = torch.tensor([2, 1, 0])
    assert gather_tiers(hot, cold, hot_slot, ids, counts).view(-1).tolist() == [2, 1, 10]
    assert counts.sum(0).tolist() == [1, 1, 1]
    assert gather_tiers(hot, cold, hot_slot, ids, counts, staged=False).view(-1).tolist() == [12, 1, 10]
    assert counts.sum(0).tolist() == [2, 3, 1]


@pytest.mark.parametrize("bad", [-2, 40])
def test_an_id_that_is_not_there_raises(bad: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0 \.\. 39"):
        gather_tiers(ROWS, None, None, torch.tensor([bad]))


def test_accesses_are_counted_by_row() -> None:
    counts = torch.zeros(5, dtype=torch.int32)
    count_ids(counts, torch.tensor([3, 3, -1, 0]))
    count_ids(counts, torch.tensor([3], dtype=torch.int32))
    assert counts.tolist() == [1, 0, 0, 3, 0]
