"""Layer-wise inference with its tables in a folder, which resumes after a kill.

The folder holds

    encoded.bin, layer0.bin, ...   the tables of embeddings, mapped; removed once no later layer reads them
    inference.json                 the progress: the layer, its finished chunks, and the identity of the inference

Rows are written through the mapping. Progress is saved every `SAVE_S` seconds and after each layer, in this
order:

    fsync the rows  ->  write a new inference.json  ->  replace the old one in one step

Rows that the progress counts as finished are thus always on the disk. A chunk that was finished after the
last save is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hopline.nn.structure import hash_of
from hopline.tables.allocators import Allocator, map_tensor
from hopline.util.files import new_mapped_file, remove_unfinished, replacing

PROGRESS = "inference.json"
"""The name of the progress file in the folder."""
FORMAT = 2
"""The version of the progress file. Files of other versions are refused."""
SAVE_S = 5.0
"""Seconds between two saves of the progress: the time of work that a kill may lose."""


class LayerFiles(Allocator):
    """The tables of an inference as mapped files, and the progress of filling them.

    Rows that the progress counts as finished were synced to the disk before it was saved.

    identity: names and values, in plain text, of all that must be equal to resume: data, model, weights,
    nodes, chunk size. A folder with another identity is refused with a ValueError.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self.layer = 0
        """The layer being computed."""
        self.chunks = 0
        """The number of finished chunks of that layer."""
        self.chunk_edges = 0
        """The edges per chunk of that layer; 0 before the layer has begun."""
        self.shapes: dict[int, tuple[str, list[int]]] = {}
        """The dtype (as a name) and shape of each table in the folder, by layer. Layer -1: the encoded rows."""
        self.saved = time.monotonic()
        """The time of the last save, by `time.monotonic()`."""
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        if (folder / PROGRESS).exists():
            self._read()

    def existing(self) -> dict[int, Tensor]:
        """The tables in the folder by layer, mapped and writable."""
        return {layer: self._map_table(layer) for layer in self.shapes}

    def begin(self, layer: int, chunk_edges: int) -> int:
        """Begin or resume a layer in chunks of that size. Returns the number of chunks that are finished.

        A resumed layer must have chunks of the same size, since finished ones are known by their number
        alone.
        """
        assert layer == self.layer
        assert self.chunk_edges in (0, chunk_edges)
        self.chunk_edges = chunk_edges
        return self.chunks

    def new(self, name: str, layer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        new_mapped_file(self._path(layer), torch.Size(shape).numel() * dtype.itemsize)
        self.shapes[layer] = (str(dtype).removeprefix("torch."), list(shape))
        return self._map_table(layer)

    def mark_chunk(self) -> None:
        """Count a finished chunk, and save the progress if `SAVE_S` seconds have passed."""
        self.chunks += 1
        if time.monotonic() - self.saved >= SAVE_S:
            self._save()

    def mark_layer(self, gone: Iterable[int] = ()) -> None:
        """Save that all chunks of the layer are finished, and remove the files of layers that nobody reads
        any more.

        Files go after the save: progress never names a table that is missing. gone: the layers to remove.
        """
        self._sync()  # the finished layer's rows: `_save` below syncs those of the next layer
        self.layer += 1
        self.chunks = 0
        self.chunk_edges = 0
        for layer in gone:
            del self.shapes[layer]
        self._save()
        for layer in gone:
            self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self.folder / (f"layer{layer}.bin" if layer >= 0 else "encoded.bin")

    def _map_table(self, layer: int) -> Tensor:
        """The table of a layer as a tensor over its file."""
        path = self._path(layer)
        dtype_name, shape = self.shapes[layer]
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not path.exists() or path.stat().st_size < num_bytes:
            raise ValueError(f"{path} is missing or too short: remove {self.folder} to begin anew")
        return map_tensor(path, shape, dtype)

    def _sync(self) -> None:
        """Sync the rows of the current layer to the disk, and with those of layer 0 the encoded rows."""
        written_layers = {-1, 0} if self.layer == 0 else {self.layer}
        for layer in self.shapes.keys() & written_layers:
            handle = os.open(self._path(layer), os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _save(self) -> None:
        """Sync the rows, then replace the progress file."""
        self._sync()
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "layer": self.layer,
            "chunks": self.chunks,
            "chunk_edges": self.chunk_edges,
            "shapes": self.shapes,
        }
        with replacing(self.folder / PROGRESS) as file:
            file.write(json.dumps(state, indent=1).encode())
        self.saved = time.monotonic()

    def _read(self) -> None:
        """Read the progress file. Raises a ValueError if it is damaged, or of another inference or format."""
        path = self.folder / PROGRESS
        try:
            state = json.loads(path.read_text())
            saved_identity = state["identity"]
            is_other_format = state["format"] != FORMAT
            self.layer = state["layer"]
            self.chunks = state["chunks"]
            self.chunk_edges = state["chunk_edges"]
            self.shapes = {int(layer): dtype_and_shape for layer, dtype_and_shape in state["shapes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): remove {self.folder} to begin anew") from error
        differences = [name for name in self.identity if saved_identity.get(name) != self.identity[name]]
        if is_other_format:
            differences.append("format")
        if differences:
            raise ValueError(
                f"{self.folder} holds another inference (other {differences[0]}): remove it, or choose another folder="
            )


def weights_checksum(model: nn.Module) -> str:
    """The SHA-256 of a model's parameters and buffers, with their names, dtypes and shapes."""
    checksum = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):  # of `get_extra_state`
            checksum.update(f"{name} {hash_of(tensor)}".encode())
            continue
        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        checksum.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()
