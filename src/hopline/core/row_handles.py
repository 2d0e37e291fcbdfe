"""Handles to rows: a table and row ids in place of the rows, which are read where a computation needs them.

A batch holds handles and not feature rows, because many computations never need the rows as a tensor. A fused conv
reads them from the table straight into its reduction, and a product with sparse features reads the stored columns
only. What cannot use a handle calls `as_tensor`.

    Rows           rows of a table
    ReducedRows    rows of a table, with the first layer's reduction over them computed already
    DroppedRows    rows of a table with keyed dropout
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hopline import ops


class Readable(Protocol):
    """The methods of a table that handles call. Every `hopline.tables.Table` has them, and documents them.

    `storage` is the tensor that holds all rows, or None. `tiers` is the memory from which kernels on a device can read
    all rows, or None if they cannot.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, ids: Tensor) -> Tensor: ...
    def storage(self) -> Tensor | None: ...
    def tiers(self, device: torch.device | str | None = None) -> Any: ...
    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None: ...


class Handle(ABC):
    """Rows that are not computed or read yet. `read` does that, for computations that need them as a tensor."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor of `read` has."""
        ...

    @abstractmethod
    def read(self) -> Tensor:
        """The rows as a tensor."""
        ...


@dataclass(frozen=True, eq=False)
class Rows(Handle):
    """A handle to rows of a table. They are read only if a computation needs them as a tensor.

    Example:
        >>> rows = hl.extend.Rows(hl.extend.TensorTable(torch.eye(3)), torch.tensor([2, 0]))
        >>> rows
        Rows([2, 3] of TensorTable([3, 3] float32))
        >>> rows.read().argmax(1).tolist()
        [2, 0]
    """

    table: Readable
    """The table that holds the rows."""
    ids: Tensor
    """[n] int64: row ids in the table."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)} of {self.table!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.ids.numel(), *self.table.shape[1:])

    def read(self) -> Tensor:
        return self.table.read(self.ids)

    def is_near(self, device: torch.device) -> bool:
        """Whether the device can read the table itself, in its own memory or by zero-copy reads."""
        storage = self.table.storage()
        return (storage is not None and storage.device.type != "cpu") or self.table.tiers(device) is not None

    def read_on(self, device: torch.device) -> Tensor:
        """The rows on a device. The device reads them itself if it can; otherwise the host reads and copies them."""
        storage = self.table.storage()
        if storage is not None and storage.device.type != "cpu":
            return self.table.read(self.ids.to(storage.device)).to(device)
        if device.type != "cpu" and self.table.tiers(device) is not None:
            return self.table.read(self.ids.to(device))
        return self.table.read(self.ids.cpu()).to(device)

    def read_csr(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The rows as (indptr [n + 1], columns, values) if the table stores them as sparse rows; None otherwise."""
        return self.table.read_csr(self.ids)

    def head(self, count: int) -> Rows:
        """A handle to the first `count` rows."""
        return Rows(self.table, self.ids[:count])


@dataclass(frozen=True, eq=False, repr=False)
class ReducedRows(Rows):
    """Input rows whose reduction over the edges of the first layer is computed already.

    The reduction of raw features needs no weight, so it can be prefetched. A first layer that reduces before it
    multiplies takes `reduced` and `own`, and reads no other row.
    """

    reduced_and_own: Tensor
    """[num_dst, 2 * width]: on the left the reduced rows of each destination's sources, on the right its own row.

    For GCNConv it is [num_dst, width], the reduced rows alone.
    """
    how: str
    """The reduction: "sum", "mean" or "max", or for GCNConv a text that names its settings."""

    @property
    def reduced(self) -> Tensor:
        """[num_dst, width]: the reduction of the rows of each destination's sources."""
        return self.reduced_and_own[:, : self.table.shape[1]]

    @property
    def own(self) -> Tensor:
        """[num_dst, width]: the destinations' own rows. Not for GCNConv."""
        return self.reduced_and_own[:, self.table.shape[1] :]


@dataclass(frozen=True, eq=False, repr=False)
class DroppedRows(Rows):
    """Input rows with keyed dropout. If they are sparse, `read_csr` draws dropout for the stored values alone."""

    p: float
    """The probability that a value is dropped."""
    key: int | Tensor
    """Key of this step's draws."""
    keys: Tensor
    """[n] int64: the number of each row that, together with `key`, decides its draws."""

    def read(self) -> Tensor:
        """The rows with dropout, as a dense tensor."""
        return ops.keyed_dropout(super().read(), self.p, self.key, self.keys)

    def head(self, count: int) -> Rows:
        return DroppedRows(self.table, self.ids[:count], self.p, self.key, self.keys[:count])

    def read_csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows with dropout as (indptr [n + 1], columns, values). The table must store sparse rows."""
        csr = self.table.read_csr(self.ids)
        assert csr is not None
        indptr, columns, values = csr
        return indptr, columns, ops.keyed_dropout_sparse(values, indptr, columns, self.p, self.key, self.keys)


def _lies_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device. A device without an index stands for any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def as_tensor(rows: Handle | Tensor) -> Tensor:
    """The rows as a tensor; a handle is read now."""
    return rows.read() if isinstance(rows, Handle) else rows


def as_dtype(rows: Handle | Tensor, dtype: torch.dtype) -> Tensor:
    """The rows as a tensor of `dtype`, the model's. Integer rows keep their own dtype.

    Rows with a gradient keep theirs too: under autocast, embeddings are in half precision on purpose.
    """
    rows = as_tensor(rows)
    must_convert = rows.is_floating_point() and rows.dtype != dtype and not rows.requires_grad
    return rows.to(dtype) if must_convert else rows
