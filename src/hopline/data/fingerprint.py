"""Checksums of a dataset's arrays, by which a run that resumes notices that the data are others.

Arrays of a dataset folder have their checksums in the manifest, so nothing is read. For arrays in memory, a
checksum is computed at the first call. It is cached until torch changes the array in place. Changes past
torch, such as by a NumPy array over the same memory, are not noticed once a checksum is cached.
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
    """A cached checksum."""

    version: int
    """Version counter of the tensor when the checksum was computed.

    Another one means that torch changed the tensor.
    """
    checksum: str
    """CRC-32 as `checksum_text` writes it."""


_checksums = WeakIdKeyDictionary()
"""Cache of checksums, by the identity of a tensor.

Owned by this module, because one array may be in many datasets. An entry goes with its tensor. No lock: two
threads that compute the same checksum store equal entries.
"""


def remember(array: Tensor, checksum: str) -> None:
    """Cache the checksum that a manifest has for an array that was just mapped."""
    _checksums[array] = _Entry(version_of(array), checksum)


def checksum_of(array: Tensor) -> str:
    """Dtype, shape and checksum of an array in one text, such as "int64 [3] crc32:0a1b2c3d".

    The checksum is the one that a manifest would have, so arrays in memory and in files can be compared.
    """
    entry: _Entry | None = _checksums.get(array)
    if entry is not None and entry.version == version_of(array):
        checksum = entry.checksum
    else:
        chunks = array.split(_rows_at_once(array.shape, array.dtype))
        checksum = checksum_text(_crc(chunks))
        remember(array, checksum)
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)} {checksum}"


def contents_of(data: Dataset) -> dict[str, str]:
    """Dtype, shape and checksum of each array of a dataset, as `checksum_of` writes them.

    A key is the array's name in messages, such as "edge array 'weight'". The arrays are the edges, edge
    arrays, tables and labels. Splits are left out.
    """
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
    """32 hexadecimal digits: a hash of `contents_of`, so splits do not change it."""
    return hashlib.blake2b(repr(sorted(contents_of(data).items())).encode(), digest_size=16).hexdigest()


def _table_checksum(table: Table) -> str:
    """Dtype, shape and checksum of all rows of a table.

    Some tables do not hold all rows in one tensor (`storage` is None). Their rows are read in chunks, and
    nothing is cached.
    """
    if isinstance(table, SparseTable):
        return ", ".join(checksum_of(array) for array in (table.indptr, table.columns, table.values))
    storage = table.storage()
    if storage is not None:
        return checksum_of(storage)
    id_chunks = torch.arange(len(table)).split(_rows_at_once(table.shape, table.dtype))
    crc = _crc(table.read(ids) for ids in id_chunks)
    return f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)} {checksum_text(crc)}"


def _crc(chunks: Iterable[Tensor]) -> int:
    """CRC-32 of the rows of all chunks, which may be on a GPU."""
    crc = 0
    for rows in chunks:
        crc = zlib.crc32(as_bytes(rows.detach().cpu().contiguous()), crc)
    return crc


def _rows_at_once(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The number of rows that take about `BYTES_AT_ONCE`, at least 1."""
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
    return max(1, BYTES_AT_ONCE // max(1, row_bytes))
