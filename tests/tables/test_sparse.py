"""Sparse tables: rows equal to the dense ones, stored entries, and read-only."""

from __future__ import annotations

import pytest
import torch

from hopline.tables import SparseTable
from tests.support.helpers import randn


def sparse_rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[30, 12] rows that are mostly zeros; row 4 is all zeros."""
    rows = randn(30, 12, dtype=dtype)
    rows[rows.abs() < 1] = 0
    rows[4] = 0
    return rows


def test_reads_rows_as_they_are_stored() -> None:
    rows = sparse_rows()
    ids = torch.tensor([9, 4, 0, 9])
    indptr, columns, values = SparseTable.from_dense(rows).read_csr(ids)
    for i, node in enumerate(ids.tolist()):
        row_range = slice(int(indptr[i]), int(indptr[i + 1]))
        assert columns[row_range].tolist() == rows[node].nonzero().view(-1).tolist()
        assert values[row_range].tolist() == rows[node][rows[node] != 0].tolist()


def test_repeated_entries_add_up() -> None:
    table = SparseTable(torch.tensor([0, 3]), torch.tensor([1, 1, 0]), torch.tensor([2.0, 3.0, 1.0]), 3)
    assert table.read(torch.tensor([0])).tolist() == [[1.0, 5.0, 0.0]]


def test_num_bytes_counts_stored_entries_and_not_zeros() -> None:
    table = SparseTable.from_dense(sparse_rows())
    stored = table.values.numel()
    assert table.num_bytes == 31 * 8 + stored * (4 + 8)
    assert table.storage() is None


def test_a_sparse_table_is_read_only() -> None:
    with pytest.raises(TypeError, match="SparseTable is read-only"):
        SparseTable.from_dense(sparse_rows()).write(torch.tensor([0]), torch.zeros(1, 12))
