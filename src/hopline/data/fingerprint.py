"""What a dataset holds, as a checksum of each of its arrays: results of other data are known by it.

A folder's manifest has the checksums, so that nothing is read. Of arrays in memory they are computed when they are
asked for, at some 3 GB a second, and kept until torch changes the array in place.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hopline.data.arrays import PIECE_BYTES, as_bytes, checksum_text
from hopline.graph import version_of
from hopline.tables import SparseTable, Table

if TYPE_CHECKING:
    from hopline.data.dataset import Dataset

_known = WeakIdKeyDictionary()
"""By tensor: the version that it had, and its checksum then."""


def remember(array: Tensor, checksum: str) -> None:
    """The checksum of an array that was just opened, by its manifest."""
    _known[array] = version_of(array), checksum


def checksum_of(array: Tensor) -> str:
    """The checksum that the manifest of a folder with this array would have, after type and shape."""
    known: tuple[int, str] | None = _known.get(array)
    if known is None or known[0] != version_of(array):
        checksum = checksum_text(_crc(TensorRows(array)))
        remember(array, checksum)
    else:
        checksum = known[1]
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)} {checksum}"


def contents_of(data: Dataset) -> dict[str, str]:
    """By the names of a dataset's arrays, what tells them from others: edges, edge arrays, tables and labels."""
    graph = data.graph
    found = {"edges": f"{checksum_of(graph.indptr)}, {checksum_of(graph.indices)}"}
    found |= {f"edge array {name!r}": checksum_of(array) for name, array in graph.edge.items()}
    found |= {f"table {name!r}": _of_table(table) for name, table in data.tables.items()}
    return found if data.y is None else {**found, "labels": checksum_of(data.y)}


def fingerprint(data: Dataset) -> str:
    """One short text for all of it."""
    return hashlib.blake2b(repr(sorted(contents_of(data).items())).encode(), digest_size=16).hexdigest()


def _of_table(table: Table) -> str:
    if isinstance(table, SparseTable):
        return ", ".join(checksum_of(array) for array in (table.indptr, table.columns, table.values))
    stored = table.storage()
    if stored is not None:
        return checksum_of(stored)
    return f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)} {checksum_text(_crc(table))}"


class TensorRows:
    """A tensor's rows by their positions."""

    def __init__(self, array: Tensor) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, ids: Tensor) -> Tensor:
        return self.array[int(ids[0]) : int(ids[-1]) + 1] if ids.numel() else self.array[:0]


def _crc(rows: Table | TensorRows) -> int:
    """Of all rows, read some at a time: they may be on a GPU, or larger than memory."""
    crc, row_bytes = 0, max(1, rows.dtype.itemsize * torch.Size(rows.shape[1:]).numel())
    for ids in torch.arange(rows.shape[0]).split(max(1, PIECE_BYTES // row_bytes)):
        crc = zlib.crc32(as_bytes(rows.read(ids).detach().cpu().contiguous()), crc)
    return crc
