"""Checksums of a dataset's arrays, by which resumed runs and other ranks notice that the data are others.

Arrays of a dataset folder have their checksums in the manifest, so nothing is read. For arrays in memory, a
checksum is computed at the first call. It is cached until torch changes the array in place; for arrays made in
`torch.inference_mode`, whose changes torch does not count, it is computed each time. Changes past torch, such as
by a NumPy array over the same memory, are not noticed once a checksum is cached.

Ranks compare their datasets before they train (`facts_of`). They read no array whole: of one without a cached
checksum they compare `NUM_SAMPLED` rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hopline.core.graph import CHUNK_BYTES, checksum, version_of
from hopline.data.arrays import checksum_text
from hopline.distributed.agreement import Fact
from hopline.tables import SparseTable, Table

if TYPE_CHECKING:
    from hopline.data.dataset import Dataset


NUM_SAMPLED = 1000
"""Rows of an array that ranks compare if it has no cached checksum. A rule of thumb: some milliseconds."""

X = "table 'x'"
"""The name of the features in `contents_of`."""

MAX_IDS = 1_000_000
"""Node ids of a split that ranks read whole to compare them: some 10 ms."""


class _Entry(NamedTuple):
    """A cached checksum."""

    version: int
    """Version counter of the tensor when the checksum was computed. Another one means that torch changed the tensor."""
    checksum: str


_checksums = WeakIdKeyDictionary()
"""Cache of checksums, by the identity of a tensor.

Owned by this module, because one array may be in many datasets. An entry goes with its tensor. No lock: two
threads that compute the same checksum store equal entries.
"""


def remember(array: Tensor, checksum: str) -> None:
    """Cache the checksum that a manifest has for an array that was just mapped."""
    _checksums[array] = _Entry(version_of(array), checksum)


def _cached_checksum(array: Tensor) -> str | None:
    entry: _Entry | None = _checksums.get(array)
    return entry.checksum if entry is not None and entry.version == version_of(array) else None


def checksum_of(array: Tensor) -> str:
    """Dtype, shape and checksum of an array in one text, such as "int64 [3] crc32:0a1b2c3d".

    The checksum is the one that a manifest would have, so arrays in memory and in files can be compared.
    """
    text = _cached_checksum(array)
    if text is None:
        text = checksum_text(checksum(array))
        remember(array, text)
    return f"{_describe(array.shape, array.dtype)} {text}"


def contents_of(data: Dataset) -> dict[str, str]:
    """Dtype, shape and checksum of each array of a dataset, as `checksum_of` writes them.

    A key is the array's name in messages, such as "edge array 'weight'". The arrays are the edges, edge
    arrays, tables and labels. Splits are left out.
    """
    return {name: ", ".join(map(_checksum_of, arrays)) for name, (_, arrays) in _arrays_by_name(data).items()}


def _arrays_by_name(data: Dataset) -> dict[str, tuple[str, list[Tensor | Table]]]:
    """(size and type, arrays) by name. Of a table whose rows are in no array: the table itself, whose rows are read."""
    graph = data.graph
    named: dict[str, tuple[str, list[Tensor | Table]]] = {
        "edges": (f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges", [graph.indptr, graph.indices])
    }
    for name, array in graph.edge.items():
        named[f"edge array {name!r}"] = (_describe(array.shape, array.dtype), [array])
    for name, table in data.tables.items():
        named[f"table {name!r}"] = (_describe(table.shape, table.dtype), _arrays_of(table))
    if data.y is not None:
        named["labels"] = (_describe(data.y.shape, data.y.dtype), [data.y])
    return named


def before_features(contents: Mapping[str, str], data: Dataset) -> dict[str, str]:
    """`contents` of a dataset, with its features as they were before `Dataset.standardized` and the like."""
    made = data.meta.get("features")
    if made is None:
        return dict(contents)
    others = {name: text for name, text in contents.items() if name != X}
    return others | ({X: made["of"]} if "of" in made else {})


def fingerprint(data: Dataset) -> str:
    """32 hexadecimal digits: a hash of `contents_of`, so splits do not change it."""
    return hashlib.blake2b(repr(sorted(contents_of(data).items())).encode(), digest_size=16).hexdigest()


def table_checksum(table: Table) -> str:
    """Dtype, shape and checksum of all rows of a table."""
    return ", ".join(map(_checksum_of, _arrays_of(table)))


def _checksum_of(array: Tensor | Table) -> str:
    """As `checksum_of`. The rows of a table are read in chunks, and nothing is cached."""
    if isinstance(array, Tensor):
        return checksum_of(array)
    row_bytes = array.dtype.itemsize * torch.Size(array.shape[1:]).numel()
    crc = 0
    for ids in torch.arange(len(array)).split(max(1, CHUNK_BYTES // max(1, row_bytes))):
        crc = checksum(array.read(ids), crc)
    return f"{_describe(array.shape, array.dtype)} {checksum_text(crc)}"


def facts_of(data: Dataset) -> dict[str, Fact]:
    """The arrays of `contents_of`, by which ranks notice that they were given different data."""
    words = {"edges": "the edges", "labels": "the labels"}
    return {words.get(name, name): _fact(text, *arrays) for name, (text, arrays) in _arrays_by_name(data).items()}


def ids_fact(ids: Tensor) -> Fact:
    """Node ids that all ranks must have been given. Up to a million of them are read, of more a sample."""
    if ids.numel() <= MAX_IDS:
        checksum_of(ids)  # caches the checksum, which `_fact` takes
    advice = "give every rank all nodes, of which hopline gives each rank its share"
    return _fact(f"{ids.numel():,} nodes", ids)._replace(advice=advice)


def _fact(text: str, *arrays: Tensor | Table) -> Fact:
    """The fact of arrays that belong together. Its checksum is "" unless those of all arrays are cached."""
    cached = [_cached_checksum(array) if isinstance(array, Tensor) else None for array in arrays]
    known = [text for text in cached if text is not None]
    joined = ", ".join(known) if len(known) == len(arrays) else ""
    return Fact(text, checksum=joined, sample=lambda: ", ".join(map(sample, arrays)))


def _arrays_of(table: Table) -> list[Tensor | Table]:
    """The arrays that hold the rows of a table. If there are none, the table itself, whose rows are read."""
    if isinstance(table, SparseTable):
        return [table.indptr, table.columns, table.values]
    storage = table.storage()
    return [table if storage is None else storage]


def sample(rows: Tensor | Table, num_rows: int = NUM_SAMPLED) -> str:
    """A checksum of some rows that are spread evenly over an array or table. num_rows: the most that are read."""
    ids = torch.linspace(0, len(rows) - 1, min(len(rows), num_rows), dtype=torch.float64).round().long()
    device = rows.device if isinstance(rows, Tensor) else "cpu"
    return checksum_text(checksum(rows[ids.to(device)]))


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
