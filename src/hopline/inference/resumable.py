"""Rows of layer-wise inference in a folder: after a kill it goes on from the last chunks that are there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hopline.distributed.shared_memory import map_file
from hopline.tables.allocators import Allocator
from hopline.util.files import remove_unfinished, replacing

PROGRESS = "inference.json"
FORMAT = 2
SAVE_S = 5.0
"""Seconds from one mark of progress to the next: a kill loses no more than the work of so long."""


class LayerFiles(Allocator):
    """Tables of layers as files that are mapped, and a mark of how far they are filled.

    What is marked as done was brought to the disk before; the mark is replaced in one step. `identity` is what must be
    the same to go on: names and values of plain text.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.layer, self.chunks, self.chunk_edges = 0, 0, 0
        """The layer to compute; how many of its chunks are done, and of how many edges these are (0: not begun)."""
        self.shapes: dict[int, tuple[str, list[int]]] = {}
        """By layer of the tables that are there: type and shape."""
        self.saved = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        if (folder / PROGRESS).exists():
            self._read()

    def existing(self) -> dict[int, Tensor]:
        """By layer, the tables that are there."""
        return {layer: self._mapped(layer) for layer in self.shapes}

    def begin(self, layer: int, chunk_edges: int) -> int:
        """Begin a layer in chunks of that size; returns how many of them are done."""
        assert layer == self.layer
        assert self.chunk_edges in (0, chunk_edges)
        self.chunk_edges = chunk_edges
        return self.chunks

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        path = self._path(layer)
        try:
            with path.open("wb") as file:  # a disk that is full is noticed here, and not when the rows are written
                os.posix_fallocate(file.fileno(), 0, max(1, torch.Size(shape).numel() * dtype.itemsize))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"cannot write {path} ({reason}): free some space, or choose another folder=") from error
        self.shapes[layer] = (str(dtype).removeprefix("torch."), list(shape))
        return self._mapped(layer)

    def chunk_done(self) -> None:
        self.chunks += 1
        if time.monotonic() - self.saved >= SAVE_S:
            self._save()

    def layer_done(self, gone: Iterable[int] = ()) -> None:
        """Mark the layer, of which all chunks are done. gone: layers whose rows are not needed any more."""
        self._sync()
        self.layer, self.chunks, self.chunk_edges = self.layer + 1, 0, 0
        for layer in gone:
            del self.shapes[layer]
        self._save()
        for layer in gone:
            self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self.folder / (f"layer{layer}.bin" if layer >= 0 else "encoded.bin")

    def _mapped(self, layer: int) -> Tensor:
        path, (dtype, shape) = self._path(layer), self.shapes[layer]
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        if not path.exists() or path.stat().st_size < size:
            raise ValueError(f"{path} is missing or too short: remove {self.folder} to begin anew")
        handle = os.open(path, os.O_RDWR)
        try:
            return map_file(handle, 0, kind, tuple(shape), writable=True)
        finally:
            os.close(handle)

    def _sync(self) -> None:
        """Bring the rows of the layer that is computed to the disk; those of the encoder with the first."""
        for layer in self.shapes.keys() & ({-1, 0} if self.layer == 0 else {self.layer}):
            handle = os.open(self._path(layer), os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _save(self) -> None:
        self._sync()
        state = {"format": FORMAT, "identity": self.identity, "layer": self.layer, "chunks": self.chunks}
        state |= {"chunk_edges": self.chunk_edges, "shapes": self.shapes}
        with replacing(self.folder / PROGRESS) as file:
            file.write(json.dumps(state, indent=1).encode())
        self.saved = time.monotonic()

    def _read(self) -> None:
        path = self.folder / PROGRESS
        try:
            state = json.loads(path.read_text())
            identity, fits = state["identity"], state["format"] == FORMAT
            self.layer, self.chunks, self.chunk_edges = state["layer"], state["chunks"], state["chunk_edges"]
            self.shapes = {int(layer): what for layer, what in state["shapes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): remove {self.folder} to begin anew") from error
        differs = [name for name in self.identity if identity.get(name) != self.identity[name]]
        if differs or not fits:
            what = differs[0] if differs else "format"
            raise ValueError(
                f"{self.folder} holds another inference (other {what}): remove it, or choose another folder="
            )


def weights_checksum(model: nn.Module) -> str:
    """Of a model's parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
