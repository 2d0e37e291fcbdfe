"""`Table`, the contract of all tables, and `Tiers`, the form in which kernels read one.

A table maps node ids to rows. `read` is the one method that every table has. Others, such as `storage` and
`tiers`, let kernels read rows without a copy first. They return None by default, and the caller then uses
`read`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Tiers(NamedTuple):
    """The memory in which a kernel finds rows: hot[hot_slot[id]] if that is a slot, else cold[id]."""

    hot: Tensor
    """[num_hot, ...] in memory that is fast for the kernel. If `hot_slot` is None, it holds all rows, by id."""
    cold: Tensor | None
    """[num_rows, ...] in slower memory that the kernel can read, such as pinned host memory. None: no such memory."""
    hot_slot: Tensor | None
    """[num_rows] int32: the slot of each row in `hot`, -1 for a cold row. None if all rows are hot.

    A value of -2 - slot is the slot of a staged row (`tables/gpu_cache.py`).
    """


class Table(ABC):
    """Rows addressed by node id.

    A table may wrap another table. It never owns a thread or a stream.

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
        """Shape of all rows: (num_rows, *row_shape)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def read(self, ids: Tensor) -> Tensor:
        """[n, *row_shape]: the rows of `ids` [n] int64, as a dense tensor."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)} {str(self.dtype).removeprefix('torch.')})"

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of `ids` [n] int64 by `rows` [n, *row_shape]. Default: refuse with a `TypeError`."""
        raise TypeError(f"{type(self).__name__} is read-only: copy it with TensorTable(table.read(ids)) first")

    def storage(self) -> Tensor | None:
        """[num_rows, ...]: the dense tensor that holds every row. None if there is none.

        Kernels that reduce rows without copying them first read it. Without it the rows are copied by `read`.
        """
        return None

    @property
    def version(self) -> int | None:
        """A number that changes whenever torch or this table changes a row; caches compare it.

        None if rows may change without notice.
        """
        return None

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        """The memory from which kernels on `device` can read all rows. None if they cannot.

        device: Default: the device of the table.
        """
        return None

    def concurrent_view(self) -> Table:
        """A table with these rows that a thread may read while another one trains."""
        return self

    def end_epoch(self) -> None:  # noqa: B027 - most tables have nothing to say
        """Report counters, and use what was observed in the epoch. Called after every epoch."""

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The rows of `ids` [n] in CSR form: (indptr [n + 1], columns [nnz], values [nnz]). None if stored dense."""
        return None

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.read(torch.as_tensor(ids))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that this table itself holds, without those of a table that it wraps."""
        return math.prod(self.shape) * self.dtype.itemsize


class WrappedTable(Table):
    """A table over another one, `below`, which has all rows. Shape, dtype and version are those of `below`."""

    below: Table

    @property
    def shape(self) -> tuple[int, ...]:
        return self.below.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.below.dtype

    @property
    def version(self) -> int | None:
        return self.below.version
