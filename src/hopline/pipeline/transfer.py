"""`Mover`: copies batches to a GPU while the GPU computes.

    thread of the pipeline, `Mover.move`                           thread that computes, `Mover.ready`
    batch on the host --memcpy--> pinned buffer --copies--> GPU    its stream waits for the copies

A copy from ordinary host memory blocks the host, so each tensor first goes into a pinned buffer. Copies run
on a stream of their own, and an event marks their end. The host waits in three cases: other threads hold all
buffers, earlier copies from the buffer are not done, or a tensor does not fit into it.

The price is a `memcpy` of every batch on the host, and `look_ahead` pinned buffers, each as large as a
batch.
"""

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

ALIGN_BYTES = 256
"""Tensors begin at multiples of this in a buffer."""
GAP_BYTES = 1 << 16
"""Bytes of a buffer beyond those of the batch's tensors, for the gaps that `ALIGN_BYTES` leaves."""


class Movable(Protocol):
    """Something that can be moved, such as a `hopline.core.batch.Batch`."""

    @property
    def num_bytes(self) -> int: ...
    def to(self, device: torch.device, non_blocking: bool = False) -> Self: ...


B = TypeVar("B", bound=Movable)


class CudaCopies:
    """Copies to a CUDA device on a stream of their own. Tests have a subclass that needs no device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = stream_for("copies", device)

    def buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, from which the device copies while the host does other work."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def within(self) -> AbstractContextManager[object]:
        """A context in which work given to the device goes to the stream of the copies."""
        return torch.cuda.stream(self.stream)

    def copy(self, staged: Tensor) -> Tensor:
        """Begin to copy a tensor to the device. The result is complete when a mark that is made later is done."""
        return torch.empty_like(staged, device=self.device).copy_(staged, non_blocking=True)

    def mark(self) -> Any:
        """An event that is done when all copies begun so far are done. Its `synchronize()` makes the host wait."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Any, tensors: list[Tensor]) -> None:
        """Let work that is given to the device from now on wait for the event; the host does not wait."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        # They were allocated on the copy stream. Without this, the allocator would give their memory to the
        # next copy as soon as Python drops them, while the computation still reads it.
        for tensor in tensors:
            tensor.record_stream(compute)


@dataclass
class _Slot:
    """A staging buffer, and the event after which it may be written again."""

    buffer: Tensor | None = None
    """[n] uint8 in pinned host memory. None before its first use."""
    event: Any = None
    """A mark behind the last copies from this buffer. None before its first use."""


@dataclass(frozen=True, eq=False)
class PendingBatch(Generic[B]):
    """A batch whose tensors are still on their way. Nothing may use it before `Mover.ready` returns the batch."""

    batch: B
    tensors: list[Tensor]
    """All tensors on the device that copies write to."""
    event: Any
    """The mark behind these copies."""


class Mover:
    """Moves batches from the host to a device, without waiting for the copies to end.

    `move` is a stage of the pipeline, and may run in any thread. `ready` is for the thread that computes,
    right before it uses the batch. A mover owns `look_ahead` staging buffers. If copies from all of them
    are under way, `move` waits for the oldest. On the CPU a batch stays where it is.
    """

    def __init__(self, device: torch.device | str, look_ahead: int = 2, copies: CudaCopies | None = None) -> None:
        self.device = torch.device(device)
        if copies is None and self.device.type == "cuda":
            copies = CudaCopies(self.device)
        self.copies = copies
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(max(1, look_ahead)):
            self._slots.put(_Slot())

    def move(self, batch: B) -> B | PendingBatch[B]:
        """Begin to move a batch.

        If the device has no memory for it, the batch is returned as it is, on the host.

        `ready` then moves it, when the steps before it are done and have freed their memory.
        """
        if self.copies is None:
            return batch.to(self.device)
        # Taken out of the queue, a slot belongs to this thread. The queue returns the one used the longest
        # time ago.
        slot = self._slots.get()
        try:
            return self._move(batch, slot, self.copies)
        except torch.OutOfMemoryError:
            trace.count("batches.without_room", 1)
            return batch
        finally:
            self._slots.put(slot)

    def _move(self, batch: B, slot: _Slot, copies: CudaCopies) -> PendingBatch[B]:
        if slot.event is not None:
            slot.event.synchronize()  # else the bytes of an earlier batch would be overwritten on their way
        needed_bytes = batch.num_bytes + GAP_BYTES
        if slot.buffer is None or slot.buffer.numel() < needed_bytes:
            # A quarter more, so that a slightly larger batch does not pin memory again. A rule of thumb.
            slot.buffer = copies.buffer(needed_bytes + needed_bytes // 4)
        try:
            with copies.within(), _CopyThroughBuffer(self.device, slot.buffer, copies) as copied:
                moved = batch.to(self.device, non_blocking=True)
        finally:
            slot.event = copies.mark()  # also after a failure: some copies may have begun
        trace.count("bytes.h2d", sum(t.nbytes for t in copied.tensors))
        return PendingBatch(moved, copied.tensors, slot.event)

    def ready(self, moved: B | PendingBatch[B]) -> B:
        """The batch, on the device. Work on the current stream waits for its copies; the host does not."""
        if not isinstance(moved, PendingBatch):
            if self.copies is not None:  # there was no memory for the batch before: free what can be freed
                free_memory(self.device)
            return moved.to(self.device)
        assert self.copies is not None
        self.copies.wait(moved.event, moved.tensors)
        return moved.batch


@dataclass(eq=False)
class _CopyThroughBuffer(TorchFunctionMode):
    """A context in which `tensor.to(device)` of a tensor on the host goes through a buffer.

    So the mover calls the batch's own `to`, and need not know which tensors a batch has.
    """

    device: torch.device
    """The device to which tensors are moved. Calls of `to` for any other device are left alone."""
    buffer: Tensor
    """[n] uint8 in pinned host memory."""
    copies: CudaCopies
    used_bytes: int = 0
    """Bytes of the buffer that hold tensors, a multiple of `ALIGN_BYTES`."""
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors on the device that were made so far."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # args: the tensor, then the positional arguments of `to`. In a move the first of these is the device.
        is_move = func is torch.Tensor.to and args[0].device.type == "cpu" and args[1:2] == (self.device,)
        if not is_move:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # what the copy calls must not come here again
            return self._copy(args[0])

    def _copy(self, tensor: Tensor) -> Tensor:
        start = self.used_bytes
        stop = start + tensor.nbytes
        if pinned.is_readable(tensor):  # pinned already: it needs no buffer
            moved = self.copies.copy(tensor)
        elif stop > self.buffer.numel():
            # The buffer is full, because the batch has tensors that `num_bytes` does not count. The host
            # waits.
            moved = tensor.to(self.device)
        else:
            self.used_bytes = (stop + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
            staged = self.buffer[start:stop].view(tensor.dtype).view(tensor.shape)
            moved = self.copies.copy(staged.copy_(tensor))
        self.tensors.append(moved)
        return moved
