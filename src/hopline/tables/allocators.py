"""Allocators: where the memory of a new table comes from.

    DeviceMemory           a device, by default the CPU
    PinnedMemory           host memory that a GPU reads and writes by zero-copy
    DeviceOrPinnedMemory   the device for small tables, pinned memory for large ones; the only one
                           whose tables are not filled with zeros
    MappedFiles            files of a folder
    SharedMemory           memory that all ranks of a host map
    SharedFiles            files that all ranks of a host map

`choose_where` picks a place for the setting "auto" by the bytes that are free, and `allocator_at` gives its
allocator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hopline.device import pinned
from hopline.device.meter import free_bytes
from hopline.distributed.shared_memory import agree, map_file, shared_zeros
from hopline.distributed.world import World
from hopline.util.files import new_mapped_file
from hopline.util.host import host_memory

CPU = torch.device("cpu")
Where = Literal["device", "pinned", "host"]
"""A place for the tables of a GPU: its own memory, pinned host memory, or other host memory and files."""
DEVICE_SHARE = 0.5
"""Share of the free device memory that tables may take."""
HOST_SHARE = 0.7
"""Share of the free host memory that pinned tables may take."""


class Allocator(ABC):
    """Allocates the memory of tables. The tables belong to the caller."""

    @abstractmethod
    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate the table of a layer. Collective if ranks share tables.

        The allocators of this file fill it with zeros, except `DeviceOrPinnedMemory`.

        name: Name of the table; with `layer` it names a file.
        """

    def adopts(self, rows: Tensor) -> bool:
        """Whether `rows`, the computed rows of all nodes, can become the table itself, without a copy."""
        return False

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate the accumulator of a layer's gradients: zeros, to which the caller adds gradients.

        It may reuse the memory of an earlier call for the same layer. Default: new host memory.
        """
        return torch.zeros(shape, dtype=dtype)


class DeviceMemory(Allocator):
    """Allocates tables in the memory of a device, by default the CPU."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def adopts(self, rows: Tensor) -> bool:
        return rows.device == self.device

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


class PinnedMemory(Allocator):
    """Allocates tables in pinned host memory, which a GPU reads and writes by zero-copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[int, Tensor] = {}
        """Pinned memory for sums of gradients, by layer. It is kept from call to call."""

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned.zeros(shape, dtype)

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        sums = self._sums.get(layer)
        if sums is None or sums.shape != tuple(shape) or sums.dtype != dtype:
            sums = pinned.zeros(shape, dtype)
            self._sums[layer] = sums
        else:
            # Clearing old memory takes less time than pinning new. The host clears it, and the GPU may
            # still be reading it or adding to it, so the host waits first.
            torch.cuda.synchronize(self.device)
            sums.zero_()
        return sums


class DeviceOrPinnedMemory(Allocator):
    """Allocates a table on the device if it takes less than `max_device_bytes`, else in pinned host memory.

    If the device is a CPU, all tables are in host memory.
    """

    def __init__(self, device: torch.device, max_device_bytes: int) -> None:
        self.device = device
        self.max_device_bytes = max_device_bytes

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not cleared: inference reads no row that it has not written, and clearing would take a GPU time."""
        if self._fits(torch.Size(shape).numel() * dtype.itemsize):
            return torch.empty(shape, dtype=dtype, device=self.device)
        table = torch.empty(shape, dtype=dtype)
        if self.device.type == "cuda":
            pinned.register(table)  # if the system refuses, the host reads and writes the table
        return table

    def _fits(self, num_bytes: int) -> bool:
        return self.device.type == "cpu" or num_bytes < self.max_device_bytes

    def adopts(self, rows: Tensor) -> bool:
        return rows.device == self.device and self._fits(rows.nbytes)


class MappedFiles(Allocator):
    """Allocates tables as mapped files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        path = self.path(name, layer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an earlier run may still have it mapped
        new_mapped_file(path, torch.Size(shape).numel() * dtype.itemsize)
        return map_tensor(path, shape, dtype)

    def path(self, name: str, layer: int) -> Path:
        """The file of the table of a layer."""
        return self.folder / f"{name}.{layer}.bin"


class SharedMemory(Allocator):
    """Allocates tables in memory that all ranks of a host map. Collective."""

    def __init__(self, world: World) -> None:
        self.world = world

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return shared_zeros(shape, dtype, self.world)


class SharedFiles(MappedFiles):
    """Allocates tables as files that one rank of a host creates and all its ranks map. Collective.

    several_hosts: whether ranks run on several hosts. The hosts may share the folder, so each gets files of
        its own.
    """

    def __init__(self, folder: Path, world: World, several_hosts: bool) -> None:
        super().__init__(folder)
        self.world = world
        self.several_hosts = several_hosts

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        problem: Exception | None = None
        try:
            if self.world.local_rank == 0:
                super().new(name, layer, shape, dtype)
        except (OSError, ValueError) as error:
            problem = error
        agree(problem, self.world, "write a table")  # the file must exist before the other ranks map it
        return map_tensor(self.path(name, layer), shape, dtype)

    def path(self, name: str, layer: int) -> Path:
        path = super().path(name, layer)
        # `with_suffix` replaces the ".bin" of NAME.LAYER.bin: NAME.LAYER.hostNODE.bin.
        return path.with_suffix(f".host{self.world.node}.bin") if self.several_hosts else path


def choose_where(num_bytes: int, device: torch.device, wanted: str, folder: Path | None) -> Where:
    """The place for tables of `num_bytes` in all.

    "auto" is the device if they take at most `DEVICE_SHARE` of its free memory. Else it is pinned memory if
    they take at most `HOST_SHARE` of what is free on the host, else other host memory. With a folder, or
    without a GPU, it is the host.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if folder is not None or device.type != "cuda":
        return "host"
    if num_bytes <= DEVICE_SHARE * free_bytes(device):
        return "device"
    host_free_bytes = host_memory().available
    return "pinned" if num_bytes <= HOST_SHARE * host_free_bytes else "host"


def allocator_at(where: Where, device: torch.device, folder: Path | None) -> Allocator:
    """The allocator for a place.

    Without a GPU, "pinned" is the same as "host": host memory, or with a folder mapped files.
    """
    if where == "device":
        return DeviceMemory(device)
    if where == "pinned" and device.type == "cuda":
        return PinnedMemory(device)
    return DeviceMemory() if folder is None else MappedFiles(folder)


def map_tensor(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A mapped file as a tensor: every process that maps it sees the writes of the others."""
    # Not `torch.from_file`: it takes no path that is not UTF-8.
    with path.open("r+b") as file:
        return map_file(file.fileno(), 0, dtype, tuple(shape), writable=True)
