"""Pinned host memory for zero-copy reads: a tensor's memory is registered with the driver, and not copied.

Kernels read registered memory over the bus, and copies from it run while the host continues. Torch's own
`pin_memory()` copies the tensor, and rounds its size up to a power of two. Here `pin` registers the memory that the
tensor has already, and `zeros` allocates new memory of the exact size.

    tensor --attribute--> Registration --finalizer--> storage
                                ^
    _registrations (weak) ------+        by (address, bytes)

The tensor holds its registration. When the last tensor that holds it is gone, the finalizer unregisters the memory,
and only then releases the storage. So memory is never freed while the driver has it locked.
"""

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
"""Bytes of a page. The driver locks whole pages, so the first and last may also hold memory of other tensors."""
MAPPED = 1 | 2
"""Flags of cudaHostRegister (portable and mapped): kernels of every device can read the memory."""
READ_ONLY = 8
"""Flag of cudaHostRegister for memory that this process itself can only read."""
_REGISTERED = "_hopline_registered"
"""Name of the tensor attribute that holds its `Registration`, so that both live equally long."""


class Registration:
    """A range of memory that the driver has locked. It is unregistered when nothing refers to this object any more.

    Tensors own it, by the attribute `_REGISTERED`. Several tensors over the same memory share one.
    """

    def __init__(self, tensor: Tensor, cudart: Any) -> None:
        start, _ = _span(tensor)
        # The finalizer holds the storage: the memory cannot be freed while it is registered.
        undo = weakref.finalize(self, _unregister, cudart, start, tensor.untyped_storage())
        undo.atexit = False  # the end of the process unlocks its memory anyway

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled or copied tensor has other memory, which nobody has registered: its attribute becomes None.
        return type(None), ()


class _Registrations:
    """The registrations that live now. Any thread may call it.

    There is one object per process, `_registrations`, because the driver has one list per process. This module owns
    it. The driver refuses to register a range twice, so tensors over the same memory share one registration.
    """

    def __init__(self) -> None:
        self._by_span: weakref.WeakValueDictionary[tuple[int, int], Registration] = weakref.WeakValueDictionary()
        """Registrations by (address, bytes). Weak references: the tensors own their registrations."""
        # Held from the lookup until the driver has answered, so that two threads cannot register one range.
        self._lock = threading.Lock()

    def add(self, tensor: Tensor, cudart: Any) -> Registration | str | None:
        """Register a tensor's memory, or find its registration.

        Returns None if somebody else has pinned the memory, and the reason as a string if the driver refuses.
        cudart: the CUDA runtime that registers. None for torch's; tests pass a stand-in.
        """
        span = _span(tensor)
        with self._lock:
            registration = self._by_span.get(span)
            if registration is not None:
                return registration
            if cudart is None:
                if tensor.is_pinned():
                    return None
                cudart = torch.cuda.cudart()
            start, num_bytes = span
            reason = _register_range(cudart, start, num_bytes)
            if reason is not None:
                return reason
            registration = Registration(tensor, cudart)
            self._by_span[span] = registration
            return registration

    def hold_all(self, tensor: Tensor) -> bool:
        """Whether the whole tensor is in locked memory, given that its first page is.

        That page may be locked only because a registered tensor shares it.
        """
        start, num_bytes = _span(tensor)
        stop = start + num_bytes
        with self._lock:
            spans = list(self._by_span)
        shares_a_page = False
        for address, span_bytes in spans:
            # Rounded outwards to whole pages, as the driver locks them.
            first_locked = address // PAGE * PAGE
            end_locked = -(-(address + span_bytes) // PAGE) * PAGE
            if first_locked <= start and stop <= end_locked:
                return True
            shares_a_page = shares_a_page or (first_locked < stop and start < end_locked)
        # No registration touches the tensor: others have locked its first page. They lock whole tensors, as torch's
        # `pin_memory` does.
        return not shares_a_page


_registrations = _Registrations()


def pin(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Register the memory of `tensor` for zero-copy reads, and return it. A tensor that is not contiguous is copied.

    The memory stays registered as long as the returned tensor lives. A view of it does not prolong that.

    copy: whether to return a pinned copy in RAM if the memory cannot be registered, as is common for memory-mapped
    files. Otherwise that is an error.
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
    """A new tensor of zeros in registered memory.

    It has pages of its own: no other tensor on them can keep the driver from locking them. The tensor begins where
    its storage begins, because `tensor.is_pinned()` asks about the first byte of the storage.
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
    """Register a contiguous tensor's memory for as long as the tensor lives. Returns the reason if it is refused."""
    registration = _registrations.add(tensor, cudart)
    if isinstance(registration, Registration):
        setattr(tensor, _REGISTERED, registration)
        return None
    # The reason as text. None: somebody else has pinned the memory, and is relied on to keep it pinned.
    return registration


def is_registered(tensor: Tensor) -> bool:
    """Whether this module registered `tensor`. Such a tensor must keep its address."""
    return getattr(tensor, _REGISTERED, None) is not None


def is_readable(tensor: Tensor) -> bool:
    """Whether all of a host tensor is pinned, for zero-copy reads and asynchronous copies.

    `tensor.is_pinned()` asks about the first byte alone. That byte may be on a page that the driver has locked for
    another tensor, and then a copy of the rest fails.
    """
    return is_registered(tensor) or (tensor.is_pinned() and _registrations.hold_all(tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    """(address of the first byte, bytes) of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def _register_range(cudart: Any, start: int, num_bytes: int) -> str | None:
    """Register a range. Returns the reason if the driver refuses."""
    reason = ""
    # The second try is for memory that this process may only read, such as a file mapped read-only.
    for flags in (MAPPED, MAPPED | READ_ONLY):
        error = int(cudart.cudaHostRegister(start, num_bytes, flags))
        if error == 0:
            return None
        reason = f"CUDA error {error}"
        _forget_error()
    return reason


def _unregister(cudart: Any, start: int, storage: torch.UntypedStorage) -> None:
    """Unregister a range. `storage` is an argument only so that the finalizer keeps the memory until here."""
    if int(cudart.cudaHostUnregister(start)):
        _forget_error()


def _forget_error() -> None:
    """Clear the error of a refused call: CUDA reports it at the next kernel launch, so launch one and ignore it."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
