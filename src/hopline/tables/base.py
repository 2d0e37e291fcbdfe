"""What every table offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Tiers(NamedTuple):
    """Where a kernel finds rows: hot[place[id]] where that is a slot, else cold[id]."""

    hot: Tensor
    """[num_hot, ...] near the kernel; where `hot_slot` is None, all rows by their ids."""
    cold: Tensor | None
    """[num_rows, ...] further away, but readable by the kernel; None where there is none such."""
    hot_slot: Tensor | None
    """[num_rows] int32: each row's slot in `hot`, -1 for the others; None where every row is hot."""


class Table(ABC):
    """Rows addressed by node id. A table may wrap another one; it never owns a thread or a stream.

    A table of your own needs `shape`, `dtype` and `read`. The rest makes it faster, or writable.

    Example:
        >>> class Degrees(hl.extend.Table):
        ...     def __init__(self, graph):
        ...         self.graph = graph
        ...
        ...     @property
        ...     def shape(self):
        ...         return (self.graph.num_nodes, 1)
        ...
        ...     @property
        ...     def dtype(self):
        ...         return torch.float32
        ...
        ...     def read(self, ids):
        ...         return self.graph.in_degrees(ids).float()[:, None]
        >>> data = hl.from_edges(torch.tensor([[0, 1, 0], [1, 2, 2]]))
        >>> data.tables["x"] = Degrees(data.graph)
        >>> data.x[torch.tensor([2])].tolist()
        [[2.0]]
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(num_rows, *row_shape)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def read(self, ids: Tensor) -> Tensor:
        """The rows of `ids` [n] int64, as a dense tensor [n, *row_shape]."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)} {str(self.dtype).removeprefix('torch.')})"

    def write(self, ids: Tensor, rows: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} is read-only: copy it with TensorTable(table.read(ids)) first")

    def storage(self) -> Tensor | None:
        """The dense tensor [num_rows, ...] that holds every row, where there is one.

        Kernels that read rows straight into a reduction use it; without it the rows are read first.
        """
        return None

    @property
    def version(self) -> int | None:
        """A number that changes with the rows, if torch or this table changes them; None if they may change unseen."""
        return None

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        """Memory from which kernels on `device` (by default the table's own) read all rows; None if there is none."""
        return None

    def concurrent_view(self) -> Table:
        """The same rows for somebody who reads them while others train."""
        return self

    def end_epoch(self) -> None:  # noqa: B027 - most tables have nothing to say
        """Called after every epoch: counters are reported, and what was observed in it is put to use."""

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The rows of `ids` as (indptr [n + 1], columns, values), where they are stored that way."""
        return None

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.read(torch.as_tensor(ids))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes that this table itself keeps, without those of a table below it."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize
