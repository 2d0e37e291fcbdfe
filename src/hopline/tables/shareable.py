"""`Shareable`: tables that are sent to another process of the host as a handle to shared memory, not as a copy.

Pickling a table calls its `__reduce__`, which moves its tensors into shared memory once (`share_arrays`) and sends
handles. `from_shared` opens them in the other process. From then on both processes read the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from hopline.device.pinned import is_registered
from hopline.distributed import shared_memory
from hopline.distributed.shared_memory import SharedArray, mapped_file


def share(tensor: Tensor) -> SharedArray:
    """A handle of shared memory with the tensor's values: a copy, unless the tensor is a mapped file already."""
    if is_registered(tensor) and mapped_file(tensor) is None:
        raise ValueError(
            "these rows are pinned in memory of this process alone and cannot move any more: "
            "make the table for all processes at once, by hl.table(..., devices=[0, 1])"
        )
    return shared_memory.share(tensor)


class Shareable:
    """Base of tables whose tensors other processes of the host read in shared memory."""

    def share_arrays(self, *names: str) -> dict[str, SharedArray]:
        """Handles of the attributes `names`, which are tensors. From now on the table uses the shared memory too."""
        # A tensor is shared once, however often the table is sent. If the attribute was replaced since, it is shared
        # again.
        sent: dict[str, SharedArray] = self.__dict__.setdefault("_sent", {})
        for name in names:
            tensor = getattr(self, name)
            if name not in sent or sent[name].tensor is not tensor:
                sent[name] = share(tensor)
                setattr(self, name, sent[name].tensor)
        return {name: sent[name] for name in names}

    @classmethod
    def from_shared(cls, arrays: Mapping[str, SharedArray], others: Mapping[str, Any]) -> Self:
        """A table with the tensors behind these handles. others: its other attributes, by name."""
        table = cls.__new__(cls)
        table._receive(arrays, others)
        return table

    def _receive(self, arrays: Mapping[str, SharedArray], others: Mapping[str, Any]) -> None:
        """Set the attributes of a table that `from_shared` opens."""
        tensors = {name: array.tensor for name, array in arrays.items()}
        self.__dict__.update(others, **tensors, _sent=dict(arrays))
