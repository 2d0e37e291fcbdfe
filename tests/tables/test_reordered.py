from __future__ import annotations

import pytest
import torch

from hopline.tables import SparseTable, TensorTable
from hopline.tables.views import ReorderedTable
from tests.helpers import randn

ORDER = torch.tensor([3, 0, 4, 1, 2])


def test_rows_are_read_and_written_under_their_new_numbers() -> None:
    rows = randn(5, 3)
    table = ReorderedTable(TensorTable(rows.clone()), ORDER)
    ids = torch.tensor([4, 0, 0])
    assert torch.equal(table.read(ids), rows[ORDER[ids]])
    assert (table.shape, table.dtype, len(table), table.num_bytes) == ((5, 3), torch.float64, 5, 40)
    table.write(torch.tensor([1]), torch.ones(1, 3, dtype=torch.float64))
    assert torch.equal(table.below.read(torch.tensor([0]))[0], torch.ones(3, dtype=torch.float64))
    assert table.read_csr(ids) is None


def test_sparse_rows_stay_sparse() -> None:
    rows = torch.eye(5)
    found = ReorderedTable(SparseTable.from_dense(rows), ORDER).read_csr(torch.tensor([0, 2]))
    assert found is not None
    assert found[1].tolist() == [3, 4]


@pytest.mark.parametrize("bad", [-1, 5])
def test_rows_that_are_not_there_are_refused(bad: int) -> None:
    table = ReorderedTable(TensorTable(randn(5, 3)), ORDER)
    with pytest.raises(IndexError):
        table.read(torch.tensor([bad]))
    with pytest.raises(ValueError, match="each row once"):
        ReorderedTable(table.below, ORDER[:4])


def test_other_processes_get_a_handle() -> None:
    table = ReorderedTable(TensorTable(randn(5, 3)), ORDER.clone())
    function, arguments = table.__reduce__()  # type: ignore[misc]
    again = function(*arguments)  # type: ignore[operator]
    assert torch.equal(again.read(torch.arange(5)), table.read(torch.arange(5)))
