"""The contract of a table: shape, dtype and `read` are enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.core.row_handles import Readable, Rows, as_tensor
from hopline.tables import CachedTable, SparseTable, Table, TensorTable
from tests.support.helpers import randn


class Squares(Table):
    """A table of the user's own: row i is (i, i * i)."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (9, 2)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def read(self, ids: Tensor) -> Tensor:
        return torch.stack([ids, ids * ids], dim=1).double()


def test_a_table_needs_only_shape_dtype_and_read() -> None:
    table = Squares()
    assert len(table) == 9
    assert table.num_bytes == 9 * 2 * 8
    assert table[torch.tensor([3, 2])].tolist() == [[3.0, 9.0], [2.0, 4.0]]
    assert table[[4]].tolist() == [[4.0, 16.0]]  # type: ignore[index]
    assert table.storage() is None
    assert table.read_csr(torch.tensor([1])) is None


def test_a_table_is_read_only_unless_it_says_otherwise() -> None:
    with pytest.raises(TypeError, match="Squares is read-only"):
        Squares().write(torch.tensor([0]), torch.zeros(1, 2))


def test_a_table_can_lie_under_another() -> None:
    assert CachedTable(Squares(), torch.tensor([2]))[torch.tensor([2, 5])].tolist() == [[2.0, 4.0], [5.0, 25.0]]


@pytest.mark.parametrize("table", [Squares(), TensorTable(randn(9, 2)), SparseTable.from_dense(randn(9, 2))])
def test_a_handle_reads_later(table: Readable) -> None:
    rows = Rows(table, torch.tensor([7, 1, 1]))
    assert rows.shape == (3, 2)
    assert torch.equal(as_tensor(rows), table.read(torch.tensor([7, 1, 1])))
    assert torch.equal(rows.head(2).read(), rows.read()[:2])
    tensor = torch.ones(2)
    assert as_tensor(tensor) is tensor
