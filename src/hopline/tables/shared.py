"""Tables seen from another process of the host: a pickled table is a handle to shared memory, not a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from hopline.device.pinned import is_registered
from hopline.distributed import shared_memory
from hopline.distributed.shared_memory import SharedArray, mapped_file

T = TypeVar("T")


def share(tensor: Tensor) -> SharedArray:
    """The tensor in memory that others can open, copied there unless it is a mapped file already."""
    if is_registered(tensor) and mapped_file(tensor) is None:
        raise ValueError(
            "these rows are pinned in memory of this process alone and cannot move any more: "
            "make the table for all processes at once, by hl.table(..., devices=[0, 1])"
        )
    return shared_memory.share(tensor)


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
