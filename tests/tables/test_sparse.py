"""Sparse tables: rows equal to the dense ones, stored entries, and read-only."""

from __future__ import annotations

import pytest
import torch

from hopline.tables import SparseTable
from tests.support.helpers import randint, randn


def sparse_rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[30, 12] rows that are mostly zeros; row 4 is all zeros."""
    rows = randn(30, 12, dtype=dtype)
    rows[rows.abs() < 1] = 0
    rows[4] = 0
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_reads_what_the_dense_rows_hold(dtype: torch.dtype) -> None:
    rows = sparse_rows(dtype)
    table = SparseTable.from_dense(rows)
    ids = torch.cat([randint(0, 30, 40), torch.tensor([4, 4])])
    assert table.shape == (30, 12)
    assert table.dtype == dtype
    assert torch.equal(table.read(ids), rows[ids])
    assert table.read(ids[:0]).shape == (0, 12)


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


@pytest.mark.parametrize("bad", [-1, 30])
def test_an_id_that_is_not_there_raises(bad: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0 \.\. 29"):
        SparseTable.from_dense(sparse_rows()).read(torch.tensor([bad]))
