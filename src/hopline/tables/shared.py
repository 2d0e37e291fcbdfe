"""Tensors that several processes of a host read from one memory: a handle travels, the numbers do not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hopline.pinned import is_registered
from hopline.spec import format_size

SHARED_MEMORY = Path("/dev/shm")
"""A folder that is kept in memory, where there is one."""
PREFIX = "hopline-shared-"
"""What the folders are called; one whose owner was killed is deleted by the next run that shares a dataset."""

_ours: dict[int, str] = {}
"""The files that were made here, by the address of their memory."""


@dataclass(frozen=True)
class Handle:
    """Where a file holds a tensor."""

    path: str
    """The file; empty for a tensor without elements."""
    offset: int
    """Bytes before the first element."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    writable: bool
    """Whether the memory is mapped to be written."""

    def open(self) -> Tensor:
        """The tensor over the same memory as that of every other process with this handle."""
        if not self.path:
            return torch.empty(self.shape, dtype=self.dtype)
        num_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        mode = "r+" if self.writable else "r"
        try:
            flat = np.memmap(self.path, dtype=np.uint8, mode=mode, offset=self.offset, shape=(num_bytes,))
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} is gone: keep the process that made the table until all have it") from error
        return _tensor(flat).view(self.dtype).view(self.shape)


def share(tensor: Tensor) -> tuple[Tensor, Handle]:
    """(tensor, handle): the same rows in memory that others can open, copied there only if they are not yet."""
    handle = find_file(tensor)
    if handle is not None:
        return tensor, handle
    if is_registered(tensor):
        raise ValueError(
            "these rows are pinned in memory of this process alone and cannot move any more: "
            "make the table for all processes at once, by hl.table(..., devices=[0, 1])"
        )
    shared = _to_shared_memory(tensor.contiguous())
    handle = find_file(shared)
    assert handle is not None
    return shared, handle


def find_file(tensor: Tensor) -> Handle | None:
    """The handle of a tensor whose memory is a file that others can map; None for memory of this process."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.numel():
        return Handle("", 0, shape, dtype, False)
    start = tensor.data_ptr()
    if start in _ours:
        return Handle(_ours[start], 0, shape, dtype, True)
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            bounds, permissions, offset, _, _, *path = line.rstrip("\n").split(None, 5)
            first, last = (int(n, 16) for n in bounds.split("-"))
            if not first <= start < last:
                continue
            # A private map may differ from its file, and a deleted file cannot be opened again.
            if permissions[3] != "s" or not path or path[0].endswith("(deleted)") or start + tensor.nbytes > last:
                return None
            return Handle(path[0], int(offset, 16) + start - first, shape, dtype, permissions[1] == "w")
    return None


def _to_shared_memory(tensor: Tensor) -> Tensor:
    needed = tensor.nbytes + (1 << 20)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    base = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    if shutil.disk_usage(base).free < needed:
        raise ValueError(f"{base} has no room for {format_size(needed)} to share: make /dev/shm larger")
    folder = base / f"{PREFIX}{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system however this process ends
    flat = np.memmap(folder / "rows", dtype=np.uint8, mode="w+", shape=(tensor.nbytes,))
    shared = _tensor(flat)
    _ours[shared.data_ptr()] = str(folder / "rows")
    weakref.finalize(flat, _remove, folder, lock, os.getpid(), shared.data_ptr())
    shared.copy_(tensor.reshape(-1).view(torch.uint8))
    return shared.view(tensor.dtype).view(tensor.shape)


def _remove(folder: Path, lock: int, owner: int, start: int) -> None:
    _ours.pop(start, None)
    if os.getpid() == owner:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Torch cannot mark a tensor as read-only and says so; tables that read a map do not write to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
