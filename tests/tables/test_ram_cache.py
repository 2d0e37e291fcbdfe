"""A cache over another table: hot rows are read once, writes reach both, hits and misses are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.tables import CachedTable, TensorTable
from hopline.util import trace
from tests.support.helpers import randn

ROWS = randn(30, 4)


class Counting(TensorTable):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.asked: list[int] = []

    def read(self, ids: Tensor) -> Tensor:
        self.asked += ids.tolist()
        return super().read(ids)


def test_a_hot_row_is_not_asked_for_again() -> None:
    below = Counting(ROWS.clone())
    table = CachedTable(below, torch.tensor([2, 4]))
    below.asked.clear()
    table.read(torch.tensor([4, 1, 2, 2]))
    assert below.asked == [1]


def test_hits_and_misses_are_counted() -> None:
    counters = trace.Counters()
    table = CachedTable(TensorTable(ROWS), torch.tensor([2, 4]))
    with trace.listen(counters):
        table.read(torch.tensor([4, 1, 2, 2]))
    assert counters.totals() == {"rows.cache_hit": 3, "rows.cache_miss": 1}


def test_a_write_that_is_refused_below_changes_nothing() -> None:
    table = CachedTable(TensorTable(ROWS, read_only=True), torch.tensor([1]))
    with pytest.raises(TypeError, match="read-only"):
        table.write(torch.tensor([1]), torch.zeros(1, 4))
    assert torch.equal(table.read(torch.tensor([1])), ROWS[[1]])


def test_counts_its_own_bytes_only() -> None:
    assert CachedTable(TensorTable(ROWS), torch.tensor([1, 2])).num_bytes == 2 * 4 * 8 + 30 * 4
