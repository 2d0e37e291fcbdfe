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
from typing import Any, NamedTuple

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
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape = tuple(self.tensor.shape)
        if not self.tensor.numel():
            return _make_empty, (dtype, shape)
        _SENT.add(self)
        path = _path_of(self.file)
        return _open, (path, _identity(os.stat(path)), self.offset, dtype, shape, self.writable)


def share(tensor: Tensor) -> SharedArray:
    """An array that other processes can open: the same memory if it lies in a mapped file, else one copy of it."""
    tensor = tensor.detach()
    mapped = mapped_file(tensor)
    if mapped is not None:
        return SharedArray(mapped.path, mapped.offset, tensor, writable=mapped.writable)
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return SharedArray("", 0, tensor.cpu(), writable=True)

    file = new_file(num_bytes)
    descriptor = file if isinstance(file, int) else os.open(file, os.O_RDWR)
    shared = map_file(descriptor, 0, tensor.dtype, tuple(tensor.shape), writable=True)
    if not isinstance(file, int):
        os.close(descriptor)
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
        descriptor = os.memfd_create("hopline")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    descriptor, path = tempfile.mkstemp(prefix="hopline-shared-")
    atexit.register(Path(path).unlink, missing_ok=True)
    os.truncate(descriptor, num_bytes)
    os.close(descriptor)
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


def _path_of(file: int | str) -> str:
    """The path under which other processes of this host can open a file."""
    return f"/proc/{os.getpid()}/fd/{file}" if isinstance(file, int) else file


def _identity(status: os.stat_result) -> tuple[int, int]:
    """What tells a file from one that took its path, or its process number, later."""
    return status.st_ino, status.st_size


def _open(
    path: str, identity: tuple[int, int], offset: int, dtype: str, shape: tuple[int, ...], writable: bool
) -> SharedArray:
    """The array behind a handle, in another process or in this one."""
    gone = (
        f"what was shared is no longer there ({path}): the process that sent it must run on this host, and not have "
        "called hl.interop.release(), until it is opened"
    )
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise ValueError(gone) from error
    if _identity(os.fstat(descriptor)) != identity:  # a process or a file that took the place of the one meant
        os.close(descriptor)
        raise ValueError(gone)
    tensor = map_file(descriptor, offset, getattr(torch, dtype), shape, writable=writable)
    if path.startswith("/proc/"):
        return SharedArray(descriptor, offset, tensor, writable=writable)
    os.close(descriptor)
    return SharedArray(path, offset, tensor, writable=writable)


def _make_empty(dtype: str, shape: tuple[int, ...]) -> SharedArray:
    return SharedArray("", 0, torch.empty(shape, dtype=getattr(torch, dtype)), writable=True)


class MappedFile(NamedTuple):
    """A file in whose shared mapping a tensor lies."""

    path: str
    """The file's path."""
    offset: int
    """Bytes of the file before the tensor."""
    writable: bool
    """Whether the mapping may be written."""


def mapped_file(tensor: Tensor) -> MappedFile | None:
    """The file in whose shared mapping a tensor lies; None if it does not, or is gone."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    start = tensor.data_ptr()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as maps:
        for line in maps:
            span, access, position, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(end, 16) for end in span.split("-"))
            if not low <= start < high:
                continue
            is_shared = access[3] == "s"
            is_within = start + tensor.numel() * tensor.element_size() <= high
            if not name or not is_shared or not is_within or os.stat(name[0]).st_ino != int(inode):
                return None
            return MappedFile(path=name[0], offset=int(position, 16) + start - low, writable=access[1] == "w")
    return None


def shared_zeros(shape: Sequence[int], dtype: torch.dtype, world: World) -> Tensor:
    """Zeros in one memory for all ranks of a host, which goes with the last of them: every rank must call this."""
    if not world.any(world.local_size > 1):
        return torch.zeros(shape, dtype=dtype)
    # Per rank: if it is the first of its host, the number of that host plus 1, else 0.
    is_first = world.local_rank == 0
    own_host = [world.node + 1 if is_first and rank == world.rank else 0 for rank in range(world.size)]
    host_of_first = world.sum(own_host)

    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    file: int | str = ""
    problem: Exception | None = None
    try:
        if is_first:
            file = new_file(num_bytes)
    except OSError as error:
        problem = ValueError(
            f"a table of {format_size(num_bytes)} does not fit into shared memory ({error.strerror}): store less by "
            "method.storage=bf16, or keep tables in files by method.folder="
        )
    agree(problem, world, "make shared tables")

    path_by_node: dict[int, str] = {}
    for rank, host in enumerate(host_of_first):
        if host:
            path_by_node[int(host) - 1] = world.broadcast_object(_path_of(file), rank)
    zeros: Tensor | None = None
    try:
        descriptor = os.open(path_by_node[world.node], os.O_RDWR)
        zeros = map_file(descriptor, 0, dtype, tuple(shape), writable=True)
        os.close(descriptor)
    except OSError as error:
        problem = error
    agree(problem, world, "open shared tables")

    if isinstance(file, int):
        os.close(file)  # those who have mapped it keep it
    assert zeros is not None
    return zeros


def agree(problem: Exception | None, world: World, verb: str) -> None:
    """Go on only if all ranks can, so that none waits for one that gave up."""
    failed = world.any(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"another rank could not {verb}: see its message")
