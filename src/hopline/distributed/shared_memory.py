"""Memory that the processes of a host share.

`share` puts a tensor into memory that others can map. The pickle of the resulting `SharedArray` is a
handle: a path, an offset, a dtype and a shape. Whoever unpickles it maps the same memory.

    process A                                       process B
    share(tensor) -> memfd 7, mapped                unpickle -> open /proc/A/fd/7, mmap
    pickle: ("/proc/A/fd/7", offset, ...)   ---->   a tensor over the same pages

A memfd is a file in memory without a name. It needs no /dev/shm, and the system frees it when the last
process that maps it ends. Other processes open it through the /proc entry of the process that made it. So
that process must be alive, and keep the descriptor, until they have opened it. A tensor that lies in a
memory-mapped file already is not copied: its handle names that file.

`shared_zeros` gives all ranks of a host one array, without pickling.
"""

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
from hopline.util.files import reserve

_SENT: set[SharedArray] = set()
"""Arrays that were pickled. They stay alive, because the receiver may open them at any later time.

Owned by this module: pickle does not tell anybody else what it sends. `release` empties it. Adding is
atomic, so it needs no lock.
"""


class SharedArray:
    """A tensor in memory that other processes can map, or in a file that they can open.

    Its pickle is a handle of some hundred bytes. A handle to memory can be opened until the process that
    made it ends or releases it (`release`). A process that has opened it keeps the memory.

    The array owns its descriptor, and closes it at its end.
    """

    def __init__(self, file: int | str, offset: int, tensor: Tensor, *, writable: bool) -> None:
        self.file = file
        """A descriptor of a memfd, or the path of a file. "" if the array is empty."""
        self.offset = offset
        self.tensor = tensor
        self.writable = writable
        """Whether processes that open it may write."""
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
    """The tensor as an array that other processes can open.

    It is the same memory if the tensor lies in a memory-mapped file, else a copy in shared memory.
    """
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
    """Free the memory of arrays that were sent, unless this process still uses them.

    Handles of freed arrays cannot be opened any more. Processes that have opened one keep the memory.

    Example:
        >>> hl.interop.release()
    """
    _SENT.clear()


def new_file(num_bytes: int) -> int | str:
    """A descriptor of a new memfd of `num_bytes` zeros.

    On systems without memfd it is the path of a temporary file, which is removed when this process ends.
    Raises an OSError if there is not enough memory.
    """
    if hasattr(os, "memfd_create"):
        # Not in /dev/shm, which a container may limit to 64 MB.
        descriptor = os.memfd_create("hopline")
        try:
            # All memory is allocated now. If some were missing later, touching it would be a bus error.
            reserve(descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    descriptor, path = tempfile.mkstemp(prefix="hopline-shared-")
    atexit.register(Path(path).unlink, missing_ok=True)
    try:
        reserve(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    return path


def map_file(file: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], *, writable: bool) -> Tensor:
    """A tensor over a memory map of an open file, from `offset` bytes on. The map ends with the tensor."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    count = torch.Size(shape).numel()
    buffer = mmap.mmap(file, offset + count * dtype.itemsize, access=access)
    with warnings.catch_warnings():
        # Torch has no read-only tensors, and warns.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _path_of(file: int | str) -> str:
    """The path by which other processes of this host can open a file, given by its descriptor here or its path."""
    return f"/proc/{os.getpid()}/fd/{file}" if isinstance(file, int) else file


def _identity(status: os.stat_result) -> tuple[int, int]:
    """(inode, bytes), since a path in /proc may lead to another file when the sender has ended."""
    return status.st_ino, status.st_size


def _open(
    path: str, identity: tuple[int, int], offset: int, dtype: str, shape: tuple[int, ...], writable: bool
) -> SharedArray:
    """Unpickle a `SharedArray`: open the file of a handle and map it. identity: `_identity` at pickling."""
    gone = (
        f"what was shared is no longer there ({path}): the process that sent it must run on this host, and not have "
        "called hl.interop.release(), until it is opened"
    )
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise ValueError(gone) from error
    if _identity(os.fstat(descriptor)) != identity:
        os.close(descriptor)
        raise ValueError(gone)
    tensor = map_file(descriptor, offset, getattr(torch, dtype), shape, writable=writable)
    if path.startswith("/proc/"):
        # The descriptor stays open: this array can be pickled again after the sender has ended.
        return SharedArray(descriptor, offset, tensor, writable=writable)
    os.close(descriptor)
    return SharedArray(path, offset, tensor, writable=writable)


def _make_empty(dtype: str, shape: tuple[int, ...]) -> SharedArray:
    return SharedArray("", 0, torch.empty(shape, dtype=getattr(torch, dtype)), writable=True)


class MappedFile(NamedTuple):
    """The file whose memory map holds a tensor."""

    path: str
    offset: int
    writable: bool


def mapped_file(tensor: Tensor) -> MappedFile | None:
    """The file whose shared memory map holds a tensor, by /proc/self/maps.

    None if the tensor lies in ordinary memory or in a private map, if the file was removed or replaced, or
    on systems without /proc.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    # A second time, since a map may be missing in a file that is read while another thread maps memory.
    return _map_of(tensor) or _map_of(tensor)


def _map_of(tensor: Tensor) -> MappedFile | None:
    """One reading of /proc/self/maps, for `mapped_file`."""
    start = tensor.data_ptr()
    # An OSError: there is no /proc, or the file was removed. A ValueError: a line has another form.
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as maps:
        for line in maps:
            # Such as "7f10a000-7f20a000 rw-s 00001000 08:01 4711 /data/x.bin"; s means shared.
            addresses, access, file_offset, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
            map_start, map_end = (int(address, 16) for address in addresses.split("-"))
            if not map_start <= start < map_end:
                continue
            is_shared = access[3] == "s"
            is_within = start + tensor.numel() * tensor.element_size() <= map_end
            if not name or not is_shared or not is_within or os.stat(name[0]).st_ino != int(inode):
                return None
            offset = int(file_offset, 16) + start - map_start
            return MappedFile(path=name[0], offset=offset, writable=access[1] == "w")
    return None


def shared_zeros(shape: Sequence[int], dtype: torch.dtype, world: World) -> Tensor:
    """[shape] zeros that all ranks of a host share. The system frees the memory when the last of them ends.

    Every rank must call this. The first rank of each host makes the memory, the others open it through
    /proc.

    Raises an error on every rank if one cannot make or open the memory.
    """
    if not world.any(world.local_size > 1):
        return torch.zeros(shape, dtype=dtype)
    # Every rank learns which ranks are the first of a host, and of which one. Entry r of the sum is 0
    # unless rank r is the first of its host. Then it is the number of that host plus 1.
    is_first = world.local_rank == 0
    own_entry = [0] * world.size
    if is_first:
        own_entry[world.rank] = world.node + 1
    node_plus_1 = world.sum(own_entry)

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
    for rank, entry in enumerate(node_plus_1):
        if entry:
            path_by_node[int(entry) - 1] = world.broadcast_object(_path_of(file), rank)
    zeros: Tensor | None = None
    try:
        descriptor = os.open(path_by_node[world.node], os.O_RDWR)
        zeros = map_file(descriptor, 0, dtype, tuple(shape), writable=True)
        os.close(descriptor)
    except OSError as error:
        problem = error
    agree(problem, world, "open shared tables")

    if isinstance(file, int):
        os.close(file)  # all ranks of the host have mapped it, and a map keeps the memory
    assert zeros is not None
    return zeros


def agree(problem: Exception | None, world: World, verb: str) -> None:
    """Raise an error on every rank if one has a problem, so that no rank waits for one that gave up.

    Every rank must call this. problem: the error of this rank, which it raises. None if it has none.
    verb: What the rank did, for the error on the others: "another rank could not ...".
    """
    failed = world.any(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"another rank could not {verb}: see its message")
