"""Memory that all processes of a host share: arrays whose pickle says where they lie, and zeros that all ranks map."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline.distributed.world import World
from hopline.util.config import format_size

_SENT: set[SharedArray] = set()
"""Arrays whose handle was given away: whoever got it may open it at any later time. Owned by this module, since pickle
says to nobody else what it sends; emptied by `release`, or with the process. Adding to it is atomic."""


class SharedArray:
    """A tensor in memory that other processes can map, or in a file that they can open.

    Its pickle is a handle of some hundred bytes. It leads to memory for as long as the process lives that made it;
    whoever has opened it by then keeps it.
    """

    def __init__(self, file: int | str, offset: int, tensor: Tensor, *, writable: bool) -> None:
        self.file = file
        """A descriptor of memory that has no name, or the path of a file."""
        self.offset = offset
        """Bytes before the array in its file."""
        self.tensor = tensor
        self.writable = writable
        if isinstance(file, int):
            weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        dtype, shape = str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape)
        if not self.tensor.numel():
            return _empty, (dtype, shape)
        _SENT.add(self)
        path = f"/proc/{os.getpid()}/fd/{self.file}" if isinstance(self.file, int) else self.file
        return _open, (path, _identity(path), self.offset, dtype, shape, self.writable)


def share(tensor: Tensor) -> SharedArray:
    """An array that other processes can open: the same memory if it lies in a mapped file, else one copy of it."""
    tensor = tensor.detach()
    found = mapped_file(tensor)
    if found is not None:
        path, offset, writable = found
        return SharedArray(path, offset, tensor, writable=writable)
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return SharedArray("", 0, tensor.cpu(), writable=True)
    file = new_file(num_bytes)
    handle = file if isinstance(file, int) else os.open(file, os.O_RDWR)
    shared = map_file(handle, 0, tensor.dtype, tuple(tensor.shape), writable=True)
    if not isinstance(file, int):
        os.close(handle)
    return SharedArray(file, 0, shared.copy_(tensor), writable=True)


def release() -> None:
    """Give back the memory of arrays that were sent and that nobody here uses: their handles lead nowhere then.

    Example:
        >>> hl.interop.release()
    """
    _SENT.clear()


def new_file(num_bytes: int) -> int | str:
    """Memory without a name where the system has that: it is gone with the last process that maps it."""
    if hasattr(os, "memfd_create"):
        # Unlike /dev/shm, which a container may limit to 64 MB; asked for now, since later it would be a bus error.
        handle = os.memfd_create("hopline")
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError:
            os.close(handle)
            raise
        return handle
    handle, path = tempfile.mkstemp(prefix="hopline-shared-")
    atexit.register(Path(path).unlink, missing_ok=True)
    os.truncate(handle, num_bytes)
    os.close(handle)
    return path


def map_file(file: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], *, writable: bool) -> Tensor:
    """The array at an offset of a file, mapped."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    count = torch.Size(shape).numel()
    buffer = mmap.mmap(file, offset + count * dtype.itemsize, access=access)
    with warnings.catch_warnings():
        # Torch cannot mark a tensor as read-only and says so.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size


def _open(
    path: str, identity: tuple[int, int], offset: int, dtype: str, shape: tuple[int, ...], writable: bool
) -> SharedArray:
    """The array behind a handle, in another process or in this one."""
    try:
        file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise ValueError(_gone(path)) from error
    found = os.fstat(file)
    if (found.st_ino, found.st_size) != identity:  # a process or a file that took the place of the one meant
        os.close(file)
        raise ValueError(_gone(path))
    tensor = map_file(file, offset, getattr(torch, dtype), shape, writable=writable)
    if path.startswith("/proc/"):
        return SharedArray(file, offset, tensor, writable=writable)
    os.close(file)
    return SharedArray(path, offset, tensor, writable=writable)


def _gone(path: str) -> str:
    return (
        f"what was shared is no longer there ({path}): the process that sent it must run on this host, and not have "
        "called hl.interop.release(), until it is opened"
    )


def _empty(dtype: str, shape: tuple[int, ...]) -> SharedArray:
    return SharedArray("", 0, torch.empty(shape, dtype=getattr(torch, dtype)), writable=True)


def mapped_file(tensor: Tensor) -> tuple[str, int, bool] | None:
    """(path, offset, writable) of the file in whose shared mapping a tensor lies; None if it does not, or is gone."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    start = tensor.data_ptr()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as maps:
        for line in maps:
            span, access, position, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= start < high:
                inside = start + tensor.numel() * tensor.element_size() <= high
                if not name or access[3] != "s" or not inside or os.stat(name[0]).st_ino != int(inode):
                    return None
                return name[0], int(position, 16) + start - low, access[1] == "w"
    return None


def shared_zeros(shape: Sequence[int], dtype: torch.dtype, world: World) -> Tensor:
    """Zeros in one memory for all ranks of a host, which goes with the last of them: every rank must call this."""
    if not world.any(world.local_size > 1):
        return torch.zeros(shape, dtype=dtype)
    firsts = world.sum([(world.node + 1) * (world.local_rank == 0 and r == world.rank) for r in range(world.size)])
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    file: int | str = ""
    problem: Exception | None = None
    try:
        if world.local_rank == 0:
            file = new_file(num_bytes)
    except OSError as error:
        problem = ValueError(
            f"a table of {format_size(num_bytes)} does not fit into shared memory ({error.strerror}): store less by "
            "method.storage=bf16, or keep tables in files by method.folder="
        )
    agree(problem, world, "make shared tables")
    own = f"/proc/{os.getpid()}/fd/{file}" if isinstance(file, int) else file
    paths = {int(node) - 1: world.broadcast_object(own, rank) for rank, node in enumerate(firsts) if node}
    opened: Tensor | None = None
    try:
        handle = os.open(paths[world.node], os.O_RDWR)
        opened = map_file(handle, 0, dtype, tuple(shape), writable=True)
        os.close(handle)
    except OSError as error:
        problem = error
    agree(problem, world, "open shared tables")
    if isinstance(file, int):
        os.close(file)  # those who have mapped it keep it
    assert opened is not None
    return opened


def agree(problem: Exception | None, world: World, verb: str) -> None:
    """Go on only if all ranks can, so that none waits for one that gave up."""
    failed = world.any(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"another rank could not {verb}: see its message")
