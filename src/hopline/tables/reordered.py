"""A table under other row numbers, for rows that cannot be copied into their new order."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.tables.base import Table
from hopline.tables.shared import receive, send


class ReorderedTable(Table):
    """Row i is row order[i] of `below`."""

    def __init__(self, below: Table, order: Tensor) -> None:
        if order.numel() != len(below):
            raise ValueError(f"there are {len(below)} rows, but the order names {order.numel()}: give each row once")
        self.below = below
        self.order = order  # [num_rows] int64

    @property
    def shape(self) -> tuple[int, ...]:
        return self.below.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.below.dtype

    @property
    def num_bytes(self) -> int:
        return self.order.numel() * self.order.element_size()

    def read(self, ids: Tensor) -> Tensor:
        return self.below.read(self._below(ids))

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.below.read_csr(self._below(ids))

    @property
    def version(self) -> int | None:
        return self.below.version

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self.below.write(self._below(ids), rows)

    def end_epoch(self) -> None:
        self.below.end_epoch()

    def _below(self, ids: Tensor) -> Tensor:
        # Looked up on the host, which also refuses ids that are not there.
        return ops.gather_rows(self.order, ids.to(self.order.device)).to(ids.device)

    def __reduce__(self) -> tuple[object, ...]:
        """To other processes goes a handle: they read the same order, and the same rows below."""
        return receive, (ReorderedTable, send(self, "order"), {"below": self.below})
