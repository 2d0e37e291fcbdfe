"""Where new tables lie: memory of a device, pinned memory, mapped files, memory that the ranks of a host share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hopline.device import pinned
from hopline.distributed.shared_memory import shared_zeros
from hopline.distributed.world import World

CPU = torch.device("cpu")


class Allocator(ABC):
    """Makes memory for tables."""

    @abstractmethod
    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the table of a layer, filled with zeros. Ranks that share tables must ask together."""

    def adopts(self, rows: Tensor) -> bool:
        """Whether computed rows of all nodes can become the table without a copy."""
        return False


class DeviceMemory(Allocator):
    """Memory of a device."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def adopts(self, rows: Tensor) -> bool:
        return rows.device == self.device


class PinnedMemory(Allocator):
    """Host memory that a GPU reads and writes itself."""

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned.zeros(shape, dtype)


class DeviceThenPinned(Allocator):
    """On a GPU while a table takes less than `room_bytes`, else in host memory that the GPU reads and writes itself."""

    def __init__(self, device: torch.device, room_bytes: int) -> None:
        self.device, self.room_bytes = device, room_bytes

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not filled: inference reads no row that it has not written, and a GPU would take time to clear them."""
        if self._fits(torch.Size(shape).numel() * dtype.itemsize):
            return torch.empty(shape, dtype=dtype, device=self.device)
        table = torch.empty(shape, dtype=dtype)
        if self.device.type == "cuda":
            pinned.register(table)  # where the system refuses it, the host reads and writes the table
        return table

    def _fits(self, num_bytes: int) -> bool:
        return self.device.type == "cpu" or num_bytes < self.room_bytes

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
        return mapped(path, shape, dtype)  # a new file reads as zeros

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
        return mapped(self.path(name, layer), shape, dtype)

    def path(self, name: str, layer: int) -> Path:
        path = super().path(name, layer)
        return path.with_suffix(f".host{self.world.node}.bin") if self.several_hosts else path


def mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A file as a tensor. All who map it see what any of them writes."""
    return torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)
