"""Where new tables lie: memory of a device, pinned memory, mapped files, memory that the ranks of a host share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import Tensor

from hopline.device import pinned
from hopline.device.meter import free_bytes
from hopline.distributed.shared_memory import shared_zeros
from hopline.distributed.world import World

CPU = torch.device("cpu")
Where = Literal["device", "pinned", "host"]
"""Where tables of a GPU lie: on it, in host memory that it reads itself, or in any other host memory."""
DEVICE_SHARE = 0.5
"""Share of the free device memory that tables may take. A rule of thumb."""
HOST_SHARE = 0.7
"""Share of the free host memory that pinned tables may take. A rule of thumb."""


class Allocator(ABC):
    """Makes memory for tables."""

    @abstractmethod
    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the table of a layer, filled with zeros. Ranks that share tables must ask together."""

    def adopts(self, rows: Tensor) -> bool:
        """Whether computed rows of all nodes can become the table without a copy."""
        return False

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros to add the gradients of a layer to, in host memory by default.

        Those of an earlier call for this layer may be the same memory.
        """
        return torch.zeros(shape, dtype=dtype)


class DeviceMemory(Allocator):
    """Memory of a device."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def adopts(self, rows: Tensor) -> bool:
        return rows.device == self.device

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


class PinnedMemory(Allocator):
    """Host memory that a GPU reads and writes itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[int, Tensor] = {}

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned.zeros(shape, dtype)

    def sums(self, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        sums = self._sums.get(layer)
        if sums is None or sums.shape != tuple(shape) or sums.dtype != dtype:
            sums = self._sums[layer] = pinned.zeros(shape, dtype)
        else:
            # To clear it takes less than to pin new memory. The GPU may still add to it or read it.
            torch.cuda.synchronize(self.device)
            sums.zero_()
        return sums


class DeviceOrPinnedMemory(Allocator):
    """On a GPU while a table takes less than `max_device_bytes`, else in host memory that the GPU reads and writes
    itself."""

    def __init__(self, device: torch.device, max_device_bytes: int) -> None:
        self.device, self.max_device_bytes = device, max_device_bytes

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not filled: inference reads no row that it has not written, and a GPU would take time to clear them."""
        if self._fits(torch.Size(shape).numel() * dtype.itemsize):
            return torch.empty(shape, dtype=dtype, device=self.device)
        table = torch.empty(shape, dtype=dtype)
        if self.device.type == "cuda":
            pinned.register(table)  # where the system refuses it, the host reads and writes the table
        return table

    def _fits(self, num_bytes: int) -> bool:
        return self.device.type == "cpu" or num_bytes < self.max_device_bytes

    def adopts(self, rows: Tensor) -> bool:
        return rows.device == self.device and self._fits(rows.nbytes)


class MappedFiles(Allocator):
    """Files of a folder, mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        path = self.path(name, layer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return map_tensor(path, shape, dtype)  # a new file reads as zeros

    def path(self, name: str, layer: int) -> Path:
        """The file of a table."""
        return self.folder / f"{name}.{layer}.bin"


class SharedMemory(Allocator):
    """Memory that all ranks of a host map."""

    def __init__(self, world: World) -> None:
        self.world = world

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return shared_zeros(shape, dtype, self.world)


class SharedFiles(MappedFiles):
    """Files that one rank of a host creates and all its ranks map.

    several_hosts: hosts may have the folder in common, so each has files of its own in it.
    """

    def __init__(self, folder: Path, world: World, several_hosts: bool) -> None:
        super().__init__(folder)
        self.world, self.several_hosts = world, several_hosts

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.world.local_rank == 0:
            super().new(name, layer, shape, dtype)
        self.world.barrier()
        return map_tensor(self.path(name, layer), shape, dtype)

    def path(self, name: str, layer: int) -> Path:
        path = super().path(name, layer)
        return path.with_suffix(f".host{self.world.node}.bin") if self.several_hosts else path


def choose_where(num_bytes: int, device: torch.device, wanted: str, folder: Path | None) -> Where:
    """Where tables of `num_bytes` in all go. "auto": on the device if they fit there, else pinned, else on the host."""
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if folder is not None or device.type != "cuda":
        return "host"
    if num_bytes <= DEVICE_SHARE * free_bytes(device):
        return "device"
    return "pinned" if num_bytes <= HOST_SHARE * psutil.virtual_memory().available else "host"


def allocator_at(where: Where, device: torch.device, folder: Path | None) -> Allocator:
    """The allocator of a GPU's tables."""
    if where == "device":
        return DeviceMemory(device)
    if where == "pinned" and device.type == "cuda":
        return PinnedMemory(device)
    return DeviceMemory() if folder is None else MappedFiles(folder)


def map_tensor(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A file as a tensor. All who map it see what any of them writes."""
    return torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)
