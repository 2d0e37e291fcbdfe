"""Rows of several tables in one: dense and sparse, in their own or another order."""

from __future__ import annotations

import torch

from hopline.tables import SparseTable, TensorTable
from hopline.tables.stacked import StackedTable
from tests.support.helpers import randn


def test_a_stacked_table_reads_the_rows_of_all_its_tables():
    rows = torch.where(randn(9, 3) > 0, randn(9, 3), 0)
    ids = torch.tensor([8, 0, 4, 3, 3])
    mixed = StackedTable([SparseTable.from_dense(rows[:4]), TensorTable(rows[4:])])
    assert (mixed.shape, mixed.dtype) == ((9, 3), torch.float64)
    assert torch.equal(mixed.read(ids), rows[ids])
    assert mixed.read_csr(ids) is None

    sparse = StackedTable([SparseTable.from_dense(some_ids) for some_ids in rows.split([2, 0, 7])])
    for some_ids in (ids, ids[:0]):
        csr = sparse.read_csr(some_ids)
        assert csr is not None
        assert torch.equal(SparseTable(*csr, 3).read(torch.arange(some_ids.numel())), rows[some_ids])


def test_rows_have_the_order_that_is_asked_for():
    rows = torch.where(randn(9, 3) > 0, randn(9, 3), 0)
    order = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1, 5])  # only two rows of the last five are there
    table = StackedTable([SparseTable.from_dense(rows[:4]), TensorTable(rows[[4, 8]])], order)
    ids = torch.tensor([8, 0, 4, 3, 3])
    assert (table.shape, table.dtype) == ((9, 3), torch.float64)
    assert torch.equal(table.read(ids), rows[ids])
