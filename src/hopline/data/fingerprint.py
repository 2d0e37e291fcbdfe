"""What a dataset holds, as a checksum of each of its arrays: results of other data are known by it.

A folder's manifest has the checksums, so that nothing is read. Of arrays in memory they are computed when they are
asked for, at some 3 GB a second, and kept until torch changes the array in place.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hopline.core.graph import version_of
from hopline.data.arrays import BYTES_AT_ONCE, as_bytes, checksum_text
from hopline.tables import SparseTable, Table

if TYPE_CHECKING:
    from hopline.data.dataset import Dataset


class _Entry(NamedTuple):
    version: int
    checksum: str


_checksums = WeakIdKeyDictionary()
"""By tensor: the version that it had, and its checksum then. Owned by this module: one array may be in many datasets,
and a tensor has no field for it. An entry goes with its tensor; threads that compute one twice store equal ones."""


def remember(array: Tensor, checksum: str) -> None:
    """The checksum of an array that was just opened, by its manifest."""
    _checksums[array] = _Entry(version_of(array), checksum)


def checksum_of(array: Tensor) -> str:
    """The checksum that the manifest of a folder with this array would have, after type and shape."""
    entry: _Entry | None = _checksums.get(array)
    if entry is not None and entry.version == version_of(array):
        checksum = entry.checksum
    else:
        chunks = array.split(_rows_at_once(array.shape, array.dtype))
        checksum = checksum_text(_crc(chunks))
        remember(array, checksum)
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)} {checksum}"


def contents_of(data: Dataset) -> dict[str, str]:
    """By the names of a dataset's arrays, what tells them from others: edges, edge arrays, tables and labels."""
    graph = data.graph
    contents = {"edges": f"{checksum_of(graph.indptr)}, {checksum_of(graph.indices)}"}
    for name, array in graph.edge.items():
        contents[f"edge array {name!r}"] = checksum_of(array)
    for name, table in data.tables.items():
        contents[f"table {name!r}"] = _table_checksum(table)
    if data.y is not None:
        contents["labels"] = checksum_of(data.y)
    return contents


def fingerprint(data: Dataset) -> str:
    """One short text for all of it."""
    return hashlib.blake2b(repr(sorted(contents_of(data).items())).encode(), digest_size=16).hexdigest()


def _table_checksum(table: Table) -> str:
    if isinstance(table, SparseTable):
        return ", ".join(checksum_of(array) for array in (table.indptr, table.columns, table.values))
    storage = table.storage()
    if storage is not None:
        return checksum_of(storage)
    id_chunks = torch.arange(len(table)).split(_rows_at_once(table.shape, table.dtype))
    crc = _crc(table.read(ids) for ids in id_chunks)
    return f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)} {checksum_text(crc)}"


def _crc(chunks: Iterable[Tensor]) -> int:
    """Of rows that come some at a time: they may be on a GPU, or larger than memory."""
    crc = 0
    for rows in chunks:
        crc = zlib.crc32(as_bytes(rows.detach().cpu().contiguous()), crc)
    return crc


def _rows_at_once(shape: Sequence[int], dtype: torch.dtype) -> int:
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
    return max(1, BYTES_AT_ONCE // max(1, row_bytes))
