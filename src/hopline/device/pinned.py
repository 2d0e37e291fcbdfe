"""Host memory that a GPU reads in place: registered where it is, not copied."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
"""The driver locks whole pages, on which memory of other tensors may begin or end."""
MAPPED, READ_ONLY = 1 | 2, 8
"""cudaHostRegister's flags: readable by the kernels of every device; and where we ourselves may only read."""
_REGISTERED = "_hopline_registered"
"""Where a tensor keeps its registration, which must live as long as it does."""


class Registration:
    """A range of memory that the driver has locked; given back when nobody holds this any more."""

    def __init__(self, tensor: Tensor, cudart: Any) -> None:
        start, _ = _span(tensor)
        # The finalizer holds the storage: the memory cannot be freed while it is registered.
        undo = weakref.finalize(self, _unregister, cudart, start, tensor.untyped_storage())
        undo.atexit = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the tensor is other memory, which nobody has registered


class _Registrations:
    """Memory that is registered now. `_registrations` is the one object of the process, as the driver's own list is.

    This module owns it. Registering a range twice fails, so tensors over the same memory share one registration, which
    goes with the last of them. The lock is held while the driver is asked.
    """

    def __init__(self) -> None:
        self._by_span: weakref.WeakValueDictionary[tuple[int, int], Registration] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, tensor: Tensor, cudart: Any) -> Registration | str | None:
        """The registration of a tensor's memory; None for one that is pinned by others, or why it was refused."""
        span = _span(tensor)
        with self._lock:
            known = self._by_span.get(span)
            if known is None:
                if cudart is None:
                    if tensor.is_pinned():
                        return None
                    cudart = torch.cuda.cudart()
                reason = _try(cudart, *span)
                if reason is not None:
                    return reason
                self._by_span[span] = known = Registration(tensor, cudart)
            return known

    def hold_all(self, tensor: Tensor) -> bool:
        """Whether all of a tensor whose first page is locked may be read, and not only that page."""
        start, num_bytes = _span(tensor)
        stop, shares = start + num_bytes, False
        with self._lock:
            known = list(self._by_span)
        for first, num_bytes in known:
            low, high = first // PAGE * PAGE, -(-(first + num_bytes) // PAGE) * PAGE
            if low <= start and stop <= high:
                return True
            shares = shares or (low < stop and start < high)
        return not shares  # else others have locked it, and all of it: torch's `pin_memory` does


_registrations = _Registrations()


def pin(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """`tensor` itself, its memory registered so that kernels read it; views made of it later do not keep it so.

    copy: where the memory cannot be registered, as a memory-mapped file often cannot, give a pinned copy in RAM
    instead of an error.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here, so no memory can be pinned for one: use device='cpu'")
    if tensor.device.type != "cpu" or tensor.numel() == 0 or is_registered(tensor):
        return tensor
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    reason = register(tensor)
    if reason is None:
        return tensor
    if not copy:
        raise ValueError(
            f"this memory cannot be pinned where it is ({reason}), as is usual for a file that is mapped into memory: "
            "pass host_cache='all' to copy it into pinned memory, or host_cache='2G' to keep its hottest rows in RAM"
        )
    return zeros(tensor.shape, tensor.dtype).copy_(tensor)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New registered memory on pages of its own, so that no other tensor keeps the driver from locking them.

    The tensor begins where its storage does: `tensor.is_pinned()` asks about the first byte of the storage.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    # torch's pin_memory() would round the size up to a power of two. A new map begins at a page, and reads as zeros.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
    reason = register(tensor)
    if reason is not None:
        raise ValueError(f"the system refuses to pin {num_bytes} bytes ({reason}): raise `ulimit -l`, or pin less")
    return tensor


def register(tensor: Tensor, cudart: Any = None) -> str | None:
    """Register a contiguous tensor's memory for as long as the tensor lives; None, or why it was refused."""
    found = _registrations.add(tensor, cudart)
    if isinstance(found, Registration):
        setattr(tensor, _REGISTERED, found)
        return None
    return found  # None: somebody else has pinned it, who keeps it so


def is_registered(tensor: Tensor) -> bool:
    """Whether `tensor` was registered here, and so must stay at its address."""
    return getattr(tensor, _REGISTERED, None) is not None


def is_readable(tensor: Tensor) -> bool:
    """Whether kernels read all of a host tensor in place, and copies of it can be under way while the host goes on.

    `tensor.is_pinned()` asks about the first byte alone. That may lie on a page which the driver has locked for another
    tensor, and then a copy of the rest fails.
    """
    return is_registered(tensor) or (tensor.is_pinned() and _registrations.hold_all(tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _try(cudart: Any, start: int, num_bytes: int) -> str | None:
    reason = ""
    for flags in (MAPPED, MAPPED | READ_ONLY):
        error = int(cudart.cudaHostRegister(start, num_bytes, flags))
        if error == 0:
            return None
        reason = f"CUDA error {error}"
        _forget_error()
    return reason


def _unregister(cudart: Any, start: int, storage: torch.UntypedStorage) -> None:
    if int(cudart.cudaHostUnregister(start)):
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps a refused call's error for whoever asks next, which is the next kernel's launch: let that be ours."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
