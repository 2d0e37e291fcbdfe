"""`StackedTable`: the rows of several tables, such as those of all shards, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.tables.base import Table
from hopline.tables.shareable import Shareable


class _TableRows(NamedTuple):
    """Rows of one table of a `StackedTable`."""

    table: Table
    rows: Tensor
    """[n] int64: numbers of the rows in `table`."""
    positions: Tensor
    """[n] int64: positions of these rows among the ids that were asked for."""


class StackedTable(Shareable, Table):
    """The rows of several tables, one behind the other. They are read from these tables on every `read`.

    tables: of one dtype, dense or sparse.
    order: [num_rows] int64: for each row of this table, its number among the rows of all tables. A row of -1 must not
        be read. None: the rows keep that number.
    """

    def __init__(self, tables: Sequence[Table], order: Tensor | None = None) -> None:
        self.tables = list(tables)
        self.order = order
        self.ptr = torch.tensor([0, *map(len, tables)]).cumsum(0)  # [num_tables + 1] int64: first row of each table

    def __reduce__(self) -> tuple[object, ...]:
        others = {"tables": self.tables, "ptr": self.ptr}
        if self.order is None:
            return StackedTable.from_shared, ({}, {**others, "order": None})
        return StackedTable.from_shared, (self.share_arrays("order"), others)

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows = int(self.ptr[-1]) if self.order is None else self.order.numel()
        return (num_rows, *self.tables[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    @property
    def version(self) -> int | None:
        """The sum of the tables' versions: it changes with each of them. None if one of them has none."""
        versions = [table.version for table in self.tables]
        known = [version for version in versions if version is not None]
        return sum(known) if len(known) == len(versions) else None

    def _by_table(self, ids: Tensor) -> list[_TableRows]:
        """The rows `ids`, grouped by table. Tables without any of them are left out."""
        numbers = ids if self.order is None else self.order[ids]
        table_of = torch.bucketize(numbers, self.ptr[1:-1], right=True)
        group_ptr, order = ops.group_by_key(table_of, len(self.tables))
        group_sizes = group_ptr.diff().tolist()
        row_groups = (numbers - self.ptr[table_of])[order].split(group_sizes)
        position_groups = order.split(group_sizes)
        groups = map(_TableRows, self.tables, row_groups, position_groups)
        return [group for group in groups if group.rows.numel()]

    def read(self, ids: Tensor) -> Tensor:
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        for group in self._by_table(ids):
            rows[group.positions] = group.table.read(group.rows)
        return rows

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        # Without ids the first table tells whether rows are sparse, and their dtypes.
        groups = self._by_table(ids) or [_TableRows(self.tables[0], ids, ids)]
        counts: list[Tensor] = []
        columns: list[Tensor] = []
        values: list[Tensor] = []
        for group in groups:
            csr = group.table.read_csr(group.rows)
            if csr is None:
                return None
            group_indptr, group_columns, group_values = csr
            counts.append(group_indptr.diff())
            columns.append(group_columns)
            values.append(group_values)

        # Rows come grouped by table. The inverse of `order` brings them back into the order of `ids`.
        order = torch.cat([group.positions for group in groups])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        grouped_counts = torch.cat(counts)
        grouped_indptr = torch.cat([grouped_counts.new_zeros(1), grouped_counts.cumsum(0)])
        indptr, positions = ops.row_entries(grouped_indptr, inverse)
        return indptr, torch.cat(columns)[positions], torch.cat(values)[positions]
