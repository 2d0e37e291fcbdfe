"""Batches to a GPU, under the computation: through pinned buffers, on a stream of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hopline.device import pinned
from hopline.device.out_of_memory import free_memory
from hopline.device.streams import stream_for
from hopline.util import trace

ALIGNED = 256
"""Tensors begin at multiples of that many bytes in a buffer."""
ROOM = 1 << 16
"""Bytes of a buffer beyond those of the batch's tensors, for what lies between them."""


class Movable(Protocol):
    """What can be moved: a `hopline.core.batch.Batch`, for example."""

    @property
    def num_bytes(self) -> int: ...
    def to(self, device: torch.device, non_blocking: bool = False) -> Self: ...


B = TypeVar("B", bound=Movable)


class Copies(Protocol):
    """How bytes get to the device; a GPU's are `CudaCopies`."""

    def buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, from which copies can be under way while the host goes on."""
        ...

    def within(self) -> AbstractContextManager[object]:
        """Within, work given to the device goes where the copies go."""
        ...

    def copy(self, staged: Tensor) -> Tensor:
        """Begin to copy; the result is whole once a mark made later is done."""
        ...

    def mark(self) -> Any:
        """An event that is done when all copies begun so far are; `synchronize()` waits for it on the host."""
        ...

    def wait(self, event: Any, tensors: list[Tensor]) -> None:
        """Work given to the device from now on comes after the event, and the memory of the tensors outlives it."""
        ...


class CudaCopies:
    """Copies to a CUDA device on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = stream_for("copies", device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def within(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def copy(self, staged: Tensor) -> Tensor:
        return torch.empty_like(staged, device=self.device).copy_(staged, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event, tensors: list[Tensor]) -> None:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(compute)


@dataclass
class _Slot:
    """A staging buffer, and when it may be written again."""

    buffer: Tensor | None = None
    event: Any = None


@dataclass(frozen=True, eq=False)
class PendingBatch(Generic[B]):
    """A batch whose tensors are still on their way: `Mover.ready` gives the batch."""

    batch: B
    tensors: list[Tensor]
    event: Any


class Mover:
    """Moves batches from the host to a device, in any thread, without waiting for the copies to end.

    `move` is a stage of the pipeline; `ready` is called by whoever computes, right before it does. There are
    `look_ahead` staging buffers: with all of them in use, `move` waits for the oldest copy. On the CPU batches stay.
    """

    def __init__(self, device: torch.device | str, look_ahead: int = 2, copies: Copies | None = None) -> None:
        self.device = torch.device(device)
        self.copies = CudaCopies(self.device) if copies is None and self.device.type == "cuda" else copies
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(max(1, look_ahead)):
            self._slots.put(_Slot())

    def move(self, batch: B) -> B | PendingBatch[B]:
        """Begin to move a batch; without room on the device it stays, until the steps before it are done."""
        if self.copies is None:
            return batch.to(self.device)
        slot = self._slots.get()
        try:
            return self._move(batch, slot, self.copies)
        except torch.OutOfMemoryError:
            trace.count("batches.without_room", 1)
            return batch
        finally:
            self._slots.put(slot)

    def _move(self, batch: B, slot: _Slot, copies: Copies) -> PendingBatch[B]:
        if slot.event is not None:
            slot.event.synchronize()  # or else the bytes of an earlier batch would change on their way
        needed = batch.num_bytes + ROOM
        if slot.buffer is None or slot.buffer.numel() < needed:
            slot.buffer = copies.buffer(needed + needed // 4)
        try:
            with copies.within(), _CopyThroughBuffer(self.device, slot.buffer, copies) as staged:
                moved = batch.to(self.device, non_blocking=True)
        finally:
            slot.event = copies.mark()  # also where only some were begun
        trace.count("bytes.h2d", sum(t.nbytes for t in staged.tensors))
        return PendingBatch(moved, staged.tensors, slot.event)

    def ready(self, moved: B | PendingBatch[B]) -> B:
        """The batch, for the stream that is current: its work waits for the copies, the host does not."""
        if not isinstance(moved, PendingBatch):
            if self.copies is not None:
                free_memory(self.device)
            return moved.to(self.device)
        assert self.copies is not None
        self.copies.wait(moved.event, moved.tensors)
        return moved.batch


@dataclass(eq=False)
class _CopyThroughBuffer(TorchFunctionMode):
    """Within, `tensor.to(device)` of a tensor on the host goes through the buffer.

    So a batch is moved by its own `to`, whatever it consists of.
    """

    device: torch.device
    buffer: Tensor
    copies: Copies
    used: int = 0
    tensors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to or args[0].device.type != "cpu" or args[1:2] != (self.device,):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._through_buffer(args[0])

    def _through_buffer(self, tensor: Tensor) -> Tensor:
        start, stop = self.used, self.used + tensor.nbytes
        if pinned.is_readable(tensor):
            moved = self.copies.copy(tensor)
        elif stop > self.buffer.numel():
            moved = tensor.to(self.device)  # waits; the batch has more tensors than it counts
        else:
            self.used = (stop + ALIGNED - 1) // ALIGNED * ALIGNED
            staged = self.buffer[start:stop].view(tensor.dtype).view(tensor.shape)
            moved = self.copies.copy(staged.copy_(tensor))
        self.tensors.append(moved)
        return moved
