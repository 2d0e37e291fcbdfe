"""Tables that are another table seen otherwise: under other row numbers, or from another process of the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hopline import ops
from hopline.device.pinned import is_registered
from hopline.distributed import shared_memory as handles
from hopline.distributed.shared_memory import SharedArray, mapped_file
from hopline.tables.base import Table


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


T = TypeVar("T")


def share(tensor: Tensor) -> SharedArray:
    """The tensor in memory that others can open, copied there unless it is a mapped file already."""
    if is_registered(tensor) and mapped_file(tensor) is None:
        raise ValueError(
            "these rows are pinned in memory of this process alone and cannot move any more: "
            "make the table for all processes at once, by hl.table(..., devices=[0, 1])"
        )
    return handles.share(tensor)


def send(table: object, *names: str) -> dict[str, SharedArray]:
    """Handles of a table's tensors of these names. From then on it reads them from the shared memory itself."""
    sent: dict[str, SharedArray] = table.__dict__.setdefault("_sent", {})
    for name in names:
        tensor = getattr(table, name)
        if name not in sent or sent[name].tensor is not tensor:
            sent[name] = share(tensor)
            setattr(table, name, sent[name].tensor)
    return {name: sent[name] for name in names}


def receive(kind: type[T], arrays: Mapping[str, SharedArray], others: Mapping[str, Any]) -> T:
    """A table of that kind with the tensors behind these handles, and other attributes as they were."""
    table = kind.__new__(kind)
    table.__dict__.update(others, _sent=dict(arrays))
    for name, array in arrays.items():
        setattr(table, name, array.tensor)
    return table
