"""Rows in one dense tensor: in memory, or a memory map of a file."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import version_of
from hopline.device import pinned
from hopline.tables.base import Table, Tiers
from hopline.tables.shareable import Shareable


class TensorTable(Shareable, Table):
    """Rows of a dense tensor [num_rows, ...]; a memory-mapped one is read page by page as it is touched.

    Args:
        rows: Not copied.
        read_only: Refuse `write`, as of a file that is mapped for reading.

    Raises:
        TypeError: `write` is called on a table that is read-only.

    Example:
        >>> table = hl.extend.TensorTable(torch.zeros(3, 2))
        >>> table.write(torch.tensor([1]), torch.ones(1, 2))
        >>> table[torch.tensor([1])].tolist()
        [[1.0, 1.0]]
    """

    def __init__(self, rows: Tensor, *, read_only: bool = False) -> None:
        self.rows = rows
        self.read_only = read_only

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def read(self, ids: Tensor) -> Tensor:
        return ops.gather_rows(self.rows, ids)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        if self.read_only:
            super().write(ids, rows)
        ops.put_rows(self.rows, ids, rows.to(self.rows.dtype))
        if not self.rows.is_inference():
            torch.autograd.graph.increment_version(self.rows)  # a kernel of ours may have written

    @property
    def version(self) -> int | None:
        return version_of(self.rows)

    def storage(self) -> Tensor | None:
        return self.rows if self.rows.is_contiguous() else None

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        target = self.rows.device if device is None else torch.device(device)
        # A kernel reads pinned memory of the host as it reads its own.
        readable = self.rows.device.type == target.type or (
            self.rows.device.type == "cpu" and pinned.is_readable(self.rows)
        )
        return Tiers(self.rows, None, None) if readable and self.rows.is_contiguous() else None

    def __reduce__(self) -> tuple[object, ...]:
        """To other processes goes a handle: they read the same memory."""
        if self.rows.device.type != "cpu":
            return TensorTable, (self.rows,), {"read_only": self.read_only}
        return type(self).from_shared, (self.share_arrays("rows"), {"read_only": self.read_only})
