"""Handles to rows that are read where they are used: of a table, reduced, or with dropout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hopline import ops


class Readable(Protocol):
    """What a handle needs of a table; every `hopline.tables.Table` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, ids: Tensor) -> Tensor: ...
    def storage(self) -> Tensor | None: ...
    def tiers(self, device: torch.device | str | None = None) -> Any: ...
    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None: ...


class Handle(ABC):
    """Rows that are not there yet: made or read only where a computation has no way to do without them."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Rows(Handle):
    """A handle to rows of a table, which are read only where a computation has no way to do without them.

    Example:
        >>> rows = hl.extend.Rows(hl.extend.TensorTable(torch.eye(3)), torch.tensor([2, 0]))
        >>> rows
        Rows([2, 3] of TensorTable([3, 3] float32))
        >>> rows.read().argmax(1).tolist()
        [2, 0]
    """

    table: Readable
    ids: Tensor
    """[n] int64 row ids."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)} of {self.table!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.ids.numel(), *self.table.shape[1:])

    def read(self) -> Tensor:
        return self.table.read(self.ids)

    def is_near(self, device: torch.device) -> bool:
        """Whether the device reads the table itself: in its own memory, or in pinned memory of the host."""
        storage = self.table.storage()
        return (storage is not None and storage.device.type != "cpu") or self.table.tiers(device) is not None

    def read_on(self, device: torch.device) -> Tensor:
        """The rows on a device. It reads them itself if it can, else the host reads them for it."""
        storage = self.table.storage()
        if storage is not None and storage.device.type != "cpu":
            return self.table.read(self.ids.to(storage.device)).to(device)
        if device.type != "cpu" and self.table.tiers(device) is not None:
            return self.table.read(self.ids.to(device))
        return self.table.read(self.ids.cpu()).to(device)

    def read_csr(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(indptr, columns, values), where they are stored that way."""
        return self.table.read_csr(self.ids)

    def head(self, count: int) -> Rows:
        return Rows(self.table, self.ids[:count])


@dataclass(frozen=True, eq=False, repr=False)
class ReducedRows(Rows):
    """Input rows with all of them that a first layer needs, read ahead: the reduced ones, and its destinations' own."""

    reduced_and_own: Tensor
    """[num_dst, 2 * width] the sources' rows, reduced, and to their right the destinations' own."""
    how: str
    """"sum", "mean" or "max"."""

    @property
    def reduced(self) -> Tensor:
        return self.reduced_and_own[:, : self.table.shape[1]]

    @property
    def own(self) -> Tensor:
        return self.reduced_and_own[:, self.table.shape[1] :]


@dataclass(frozen=True, eq=False, repr=False)
class DroppedRows(Rows):
    """Input rows with keyed dropout, which a product takes of the stored columns alone."""

    p: float
    key: int | Tensor
    keys: Tensor
    """[n] what each row's draws are keyed by."""

    def read(self) -> Tensor:
        return ops.keyed_dropout(super().read(), self.p, self.key, self.keys)

    def head(self, count: int) -> Rows:
        return DroppedRows(self.table, self.ids[:count], self.p, self.key, self.keys[:count])

    def read_csr(self) -> tuple[Tensor, Tensor, Tensor]:
        found = self.table.read_csr(self.ids)
        assert found is not None
        indptr, columns, values = found
        return indptr, columns, ops.keyed_dropout_stored(values, indptr, columns, self.p, self.key, self.keys)


def _lies_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def as_tensor(rows: Handle | Tensor) -> Tensor:
    """The rows themselves, read now if they were not yet."""
    return rows.read() if isinstance(rows, Handle) else rows


def as_dtype(rows: Handle | Tensor, dtype: torch.dtype) -> Tensor:
    """The rows themselves; stored features are brought to the model's precision, whole numbers are left alone.

    Under autocast hidden rows come in half precision on purpose: what has a gradient is left as it is.
    """
    rows = as_tensor(rows)
    same = rows.requires_grad or rows.dtype == dtype or not rows.is_floating_point()
    return rows if same else rows.to(dtype)
