"""Rows in one dense tensor: in memory, or a memory map of a file."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.tables.base import Table


class TensorTable(Table):
    """Rows of a dense tensor [num_rows, ...]; a memory-mapped one is read page by page as it is touched."""

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
        self.rows[ids] = rows.to(self.rows.dtype)

    def storage(self) -> Tensor | None:
        return self.rows if self.rows.is_contiguous() else None
