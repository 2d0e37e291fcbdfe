"""`TensorTable`: rows in one dense tensor, in memory or mapped from a file."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import version_of
from hopline.device import pinned
from hopline.tables.base import Table, Tiers
from hopline.tables.shareable import Shareable


class TensorTable(Shareable, Table):
    """Rows of a dense tensor. If it is mapped from a file, the system reads a page when it is first touched.

    Args:
        rows: [num_rows, ...], on any device. It is not copied.
        read_only: Whether to refuse `write`, for example because the file is mapped for reading only.

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
            super().write(ids, rows)  # raises TypeError
        ops.put_rows(self.rows, ids, rows.to(self.rows.dtype))
        # Our own kernels write without torch's knowledge, and `version` must change. Inference tensors have no
        # version.
        if not self.rows.is_inference():
            torch.autograd.graph.increment_version(self.rows)

    @property
    def version(self) -> int | None:
        return version_of(self.rows)

    def storage(self) -> Tensor | None:
        return self.rows if self.rows.is_contiguous() else None

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        target = self.rows.device if device is None else torch.device(device)
        # A GPU's kernel reads pinned host memory as it reads its own.
        is_readable = self.rows.device.type == target.type or (
            self.rows.device.type == "cpu" and pinned.is_readable(self.rows)
        )
        can_read_rows = is_readable and self.rows.is_contiguous()
        return Tiers(hot=self.rows, cold=None, hot_slot=None) if can_read_rows else None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a handle: another process reads the same memory. A tensor on a GPU is pickled by torch."""
        if self.rows.device.type != "cpu":
            return TensorTable, (self.rows,), {"read_only": self.read_only}
        return type(self).from_shared, (self.share_arrays("rows"), {"read_only": self.read_only})
