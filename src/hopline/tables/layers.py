"""`LayerTables`: writable tables that hold the rows of all nodes after each layer.

The layer-wise engine writes layer l into one table and reads it from there for layer l + 1. An `Allocator`
decides in which memory a table lies: on the device, in pinned or other host memory, or in mapped files.
Reading and writing is the same code for all of them.

Tables know positions only. Whether a position is a node id, or a node's rank in the order of a partition,
is up to the caller. The cost is `num_rows` rows per layer, from the first write of the layer until `drop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hopline import ops
from hopline.device.row_mover import write_rows
from hopline.tables.allocators import Allocator, DeviceMemory
from hopline.tables.memory import TensorTable

At = Tensor | Sequence[slice]
"""Positions of rows in a table: [n] int64, or row ranges, each of which is copied at once."""


def as_positions(at: At) -> Tensor:
    """[n] int64: the positions as a tensor."""
    if isinstance(at, Tensor):
        return at
    return torch.cat([torch.arange(row_range.start, row_range.stop) for row_range in at])


class RowSource(Protocol):
    """A source of rows after some layers: the tables, or a snapshot of some of their rows."""

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """Copies of the rows at `positions` [n] after layer `l`, in the place and dtype of the table."""
        ...


class LayerTables:
    """Rows of all nodes after each layer: one table per layer, created when the first rows tell its width.

    It owns the tables, starts no thread and takes no lock.

    Args:
        num_rows: Rows of every table.
        allocator: Decides where tables lie. Default: host memory.
        name: Name of the tables, for those that are files.
        dtype: Element type of the stored rows. Default: that of the first rows that are written.

    Example:
        >>> tables = hl.extend.LayerTables(4)
        >>> tables.write(0, torch.tensor([2, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> tables.rows(0, torch.arange(4)).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0], [0.0, 0.0]]
    """

    def __init__(
        self, num_rows: int, allocator: Allocator | None = None, *, name: str = "h", dtype: torch.dtype | None = None
    ) -> None:
        self.num_rows = num_rows
        self.allocator = allocator or DeviceMemory()
        self.name = name
        self.dtype = dtype
        self.tables: dict[int, Tensor] = {}
        """The tables by layer, each [num_rows, *row_shape]."""

    def table(self, l: int, like: Tensor) -> Tensor:
        """[num_rows, *row_shape]: the table of layer `l`, created at the first call, for rows like `like`."""
        shape = (self.num_rows, *like.shape[1:])
        if l not in self.tables:
            self.tables[l] = self.allocator.new(self.name, l, shape, self.dtype or like.dtype)
        table = self.tables[l]
        assert table.shape == shape, f"layer {l} has rows of {tuple(table.shape[1:])}, not {tuple(like.shape[1:])}"
        return table

    def of(self, l: int) -> TensorTable:
        """The table of layer `l` as a `Table`, for handles of rows (`core.row_handles.Rows`)."""
        return TensorTable(self.tables[l])

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> TensorTable | None:
        """The table of layer `l` if a conv on `device` may read rows of `dtype` from it directly, else None."""
        table = self.tables[l]
        can_read = table.device == device and table.dtype == dtype
        return TensorTable(table) if can_read else None

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """Copies of the rows at `positions` [n] after layer `l`, in the place and dtype of the table."""
        table = self.tables[l]
        return ops.gather_rows(table, positions.to(table.device))

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        """Write rows after layer `l`, in the order of `at`.

        computed: a CUDA event after which the rows are complete, for tables that a GPU writes later. Default:
            this moment.
        """
        write_rows(self.table(l, rows), at, rows)

    def sums(self, l: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros, in the place of the tables, to which gradients at the rows after layer `l` are added.

        They may reuse the memory of an earlier call for the layer, which must not be used any more.
        """
        return self.allocator.sums(l, shape, dtype)

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowSource:
        """A source of the rows after these layers. Collective.

        The source is these tables, or a snapshot if rows are on other hosts.

        positions: [n] int64, ascending: the positions that will be read. None: all.
        """
        return self

    def complete(self, l: int) -> None:
        """Let the next layer read the rows after layer `l`: all of them are written. Collective."""

    def drop(self, l: int) -> None:
        """Forget the table of layer `l`: its rows are not needed any more."""
        self.tables.pop(l, None)

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())
