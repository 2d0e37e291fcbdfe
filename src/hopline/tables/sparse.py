"""`SparseTable`: rows in CSR form, for features that are mostly zeros, such as bags of words.

Row i has the entries indptr[i] .. indptr[i + 1] - 1: entry e has the value values[e] in the column columns[e].
`read_csr` gives rows in this form to kernels that multiply by them; `read` makes them dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import version_of
from hopline.tables.base import Table
from hopline.tables.shareable import Shareable


class SparseTable(Shareable, Table):
    """Rows [num_rows, num_columns] of which only the non-zero entries are stored.

    Args:
        indptr: [num_rows + 1] int64: row i has the entries indptr[i] .. indptr[i + 1] - 1.
        columns: [nnz] int32 or int64: the column of each entry.
        values: [nnz]: the value of each entry.
        num_columns: Width of a row.

    Example:
        >>> table = hl.extend.SparseTable.from_dense(torch.eye(3))
        >>> table.values.numel(), table[torch.tensor([1])].tolist()
        (3, [[0.0, 1.0, 0.0]])
    """

    def __init__(self, indptr: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> None:
        self.indptr = indptr  # [num_rows + 1] int64
        self.columns = columns  # [nnz] int32 or int64
        self.values = values  # [nnz]
        self.num_columns = num_columns

    @classmethod
    def from_dense(cls, rows: Tensor) -> SparseTable:
        """The non-zero entries of `rows` [num_rows, num_columns] as a table."""
        row, column = rows.nonzero(as_tuple=True)
        indptr = torch.zeros(rows.size(0) + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(row, minlength=rows.size(0)).cumsum(0)
        return cls(indptr=indptr, columns=column.int(), values=rows[row, column], num_columns=rows.size(1))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.indptr.numel() - 1, self.num_columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def num_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in (self.indptr, self.columns, self.values))

    @property
    def version(self) -> int | None:
        # Counters only grow, so their sum changes with each of them.
        return sum(version_of(array) for array in (self.indptr, self.columns, self.values))

    def to(self, device: torch.device | str) -> SparseTable:
        """A table with these rows on a device."""
        return SparseTable(
            indptr=self.indptr.to(device),
            columns=self.columns.to(device),
            values=self.values.to(device),
            num_columns=self.num_columns,
        )

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of `ids` [n] in CSR form: (indptr [n + 1], columns [nnz], values [nnz]).

        The result is on the device of the table, not of the ids: no kernel reads these arrays from another
        device.
        """
        indptr, entries = ops.row_entries(self.indptr, ids.to(self.indptr.device))
        return indptr, self.columns[entries], self.values[entries]

    def read(self, ids: Tensor) -> Tensor:
        indptr, columns, values = self.read_csr(ids)
        entry_rows = torch.repeat_interleave(torch.arange(ids.numel(), device=indptr.device), indptr.diff())
        dense = torch.zeros(ids.numel(), self.num_columns, dtype=self.dtype, device=indptr.device)
        # Entries of a row that repeat a column add up, as in every CSR library. Not by index_put, which
        # adds in any order if torch has several threads: index_add_ adds in the order of the entries.
        dense.view(-1).index_add_(0, entry_rows * self.num_columns + columns, values)
        return dense

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a handle: another process reads the same memory."""
        arrays = self.share_arrays("indptr", "columns", "values")
        return SparseTable.from_shared, (arrays, {"num_columns": self.num_columns})
