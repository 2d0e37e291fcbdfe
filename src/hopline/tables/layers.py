"""Tables that are written: the rows of all nodes after each layer.

An `Allocator` says where a table lies. The code that reads and writes is the same for all of them. Tables know
positions only: node ids, or places in the order of a partition, are the caller's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hopline import ops
from hopline.tables.allocators import Allocator, DeviceMemory
from hopline.tables.memory import TensorTable

At = Tensor | Sequence[slice]
"""Positions of rows in a table: one by one, or as slabs that are copied whole."""


def as_positions(at: At) -> Tensor:
    """[n] int64: the positions one by one."""
    return at if isinstance(at, Tensor) else torch.cat([torch.arange(slab.start, slab.stop) for slab in at])


class RowSource(Protocol):
    """Where rows after some layers are read."""

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """Copies of the rows at some positions of layer `l`, as they are stored."""
        ...


class LayerTables:
    """Rows of all nodes after each layer: one table per layer, created when the first rows tell its width.

    Args:
        num_rows: Of every table.
        allocator: Where tables lie; memory of the host by default.
        name: Of the tables, for those that are files.
        dtype: Of the stored rows, by default that of the first rows that are written.

    Example:
        >>> tables = hl.extend.LayerTables(4)
        >>> tables.write(0, torch.tensor([2, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> tables.rows(0, torch.arange(4)).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0], [0.0, 0.0]]
    """

    def __init__(
        self, num_rows: int, allocator: Allocator | None = None, *, name: str = "h", dtype: torch.dtype | None = None
    ) -> None:
        self.num_rows, self.allocator, self.name, self.dtype = num_rows, allocator or DeviceMemory(), name, dtype
        self.tables: dict[int, Tensor] = {}

    def table(self, l: int, like: Tensor) -> Tensor:
        """The table of layer `l`: [num_rows, *row_shape], for rows like these."""
        shape = (self.num_rows, *like.shape[1:])
        if l not in self.tables:
            self.tables[l] = self.allocator.new(self.name, l, shape, self.dtype or like.dtype)
        table = self.tables[l]
        assert table.shape == shape, f"layer {l} has rows of {tuple(table.shape[1:])}, not {tuple(like.shape[1:])}"
        return table

    def of(self, l: int) -> TensorTable:
        """The table of layer `l` as a `Table`, for handles."""
        return TensorTable(self.tables[l])

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> TensorTable | None:
        """The table of layer `l`, if a conv on that device may read rows of that type straight out of it."""
        table = self.tables[l]
        return TensorTable(table) if (table.device, table.dtype) == (device, dtype) else None

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """Copies of the rows at some positions of layer `l`, as they are stored."""
        table = self.tables[l]
        return ops.gather_rows(table, positions.to(table.device))

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        """Write rows after layer `l`. computed: when they were computed, where a GPU writes later; by default now."""
        if isinstance(at, Tensor):
            self._write_at(l, at, rows)
            return
        table, start = self.table(l, rows), 0
        for slab in at:
            count = slab.stop - slab.start
            table[slab].copy_(rows[start : start + count])
            start += count

    def _write_at(self, l: int, positions: Tensor, rows: Tensor) -> None:
        table = self.table(l, rows)
        table[positions.to(table.device)] = rows.to(table.device, table.dtype)

    def sums(self, l: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros to add the gradients after layer `l` to, near the tables. Those of an earlier call become invalid."""
        return self.allocator.sums(l, shape, dtype)

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowSource:
        """Where rows after these layers are read: here, or in a copy of what is on other hosts. Collective.

        positions: the positions that will be read, ascending; None for all.
        """
        return self

    def complete(self, l: int) -> None:
        """All rows after layer `l` are written: let whoever computes the next layer read them. Collective."""

    def drop(self, l: int) -> None:
        """The rows after layer `l` are not needed any more."""
        self.tables.pop(l, None)

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())
