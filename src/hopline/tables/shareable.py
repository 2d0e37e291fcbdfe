"""`Shareable`: tables that are sent to other processes of the host as handles to shared memory, not copied.

Pickling a table calls its `__reduce__`, which moves its tensors into shared memory once (`share_arrays`)
and sends handles. `from_shared` opens them in the other process. From then on both processes read the same
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from hopline.device.pinned import is_registered
from hopline.distributed import shared_memory
from hopline.distributed.shared_memory import SharedArray, mapped_file


def share(tensor: Tensor) -> SharedArray:
    """A handle of shared memory with the tensor's values. They are copied unless they are a mapped file."""
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
        # A tensor is shared once, however often the table is sent. If the attribute was replaced since, it
        # is shared again.
        shared_arrays: dict[str, SharedArray] = self.__dict__.setdefault("_shared_arrays", {})
        for name in names:
            tensor = getattr(self, name)
            if name not in shared_arrays or shared_arrays[name].tensor is not tensor:
                shared_arrays[name] = share(tensor)
                setattr(self, name, shared_arrays[name].tensor)
        return {name: shared_arrays[name] for name in names}

    @classmethod
    def from_shared(cls, arrays: Mapping[str, SharedArray], attributes: Mapping[str, Any]) -> Self:
        """A table with the tensors behind these handles. attributes: its other attributes, by name."""
        table = cls.__new__(cls)
        table._receive(arrays, attributes)
        return table

    def _receive(self, arrays: Mapping[str, SharedArray], attributes: Mapping[str, Any]) -> None:
        tensors = {name: array.tensor for name, array in arrays.items()}
        self.__dict__.update(attributes, **tensors, _shared_arrays=dict(arrays))
