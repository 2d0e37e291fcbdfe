"""A dataset as a folder: `manifest.json` and plain `.npy` files, opened by memory map.

    save           Dataset -> folder, replaced in one step (`writer.FolderWriter`)
    open_folder    folder -> Dataset; reads the manifest and the headers, and maps the arrays
    verify         reads every byte: checksums first, then the conditions of `checks`

Opening costs no time for the data: pages are read when they are touched, and processes of a host share
them. A missing, truncated or grown file is refused at once. Damage inside a file is found by `verify`
alone.

docs/data.md describes the format. A folder with another version's number is refused (`manifest`).
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.arrays import BYTES_AT_ONCE, DTYPES, HEADER_BYTES, checksum_text, map_npy, npy_header
from hopline.data.checks import SHOWN_BYTES, check_dataset
from hopline.data.dataset import Dataset
from hopline.data.fingerprint import remember
from hopline.data.manifest import ArrayEntry, Manifest, read_manifest
from hopline.data.paths import existing
from hopline.data.writer import FolderWriter
from hopline.tables import SparseTable, Table, TensorTable
from hopline.util.progress import progress

ADVICE = "convert or copy the dataset again"
SHARDS = "shards"
"""Key in the `meta` of a manifest. A folder that has it holds shards of a dataset, or is a shard itself."""
SPARSE = ("indptr", "columns", "values")
"""Arrays of a sparse table, which are also its attributes: array "table.NAME.indptr", and so on."""


def save(dataset: Dataset, folder: str | os.PathLike[str]) -> None:
    """Write a dataset to a folder. A dataset that the folder holds already is replaced in one step."""
    with FolderWriter(folder) as out:
        out.add("indptr", dataset.graph.indptr)
        out.add("indices", dataset.graph.indices)
        for name, array in dataset.graph.edge.items():
            out.add(f"edge.{name}", array)
        columns = write_nodes(out, dataset.tables, dataset.y, dataset.all_splits)
        out.commit(
            name=dataset.name,
            num_nodes=dataset.num_nodes,
            num_edges=dataset.num_edges,
            task=dataset.task,
            num_classes=dataset.num_classes,
            num_splits=len(dataset.all_splits),
            tables=columns,
            meta=dataset.meta,
        )


def write_nodes(
    out: FolderWriter, tables: dict[str, Table], y: Tensor | None, splits: tuple[dict[str, Tensor], ...]
) -> dict[str, int]:
    """Write tables, labels and splits.

    Returns `Manifest.tables`: table name -> number of columns of a sparse table, -1 for a dense one.
    """
    columns: dict[str, int] = {}
    for name, table in tables.items():
        columns[name] = table.num_columns if isinstance(table, SparseTable) else -1
        if isinstance(table, SparseTable):
            for part in SPARSE:
                out.add(f"table.{name}.{part}", getattr(table, part))
        else:
            _write_dense(out, f"table.{name}", table)
    if y is not None:
        out.add("y", y)
    for k, split in enumerate(splits):
        for name, ids in split.items():
            out.add(f"split.{k}.{name}", ids)
    return columns


def _write_dense(out: FolderWriter, array_name: str, table: Table) -> None:
    """Write all rows of a table. Rows that are not in one tensor are read about `BYTES_AT_ONCE` at a time."""
    storage = table.storage()
    if storage is not None:
        out.add(array_name, storage)
        return
    row_bytes = max(1, table.num_bytes // max(1, len(table)))
    out.array(array_name, table.dtype, table.shape[1:])
    for ids in torch.arange(len(table)).split(max(1, BYTES_AT_ONCE // row_bytes)):
        out.append(array_name, table.read(ids))


def open_folder(folder: str | os.PathLike[str], *, split: int = 0) -> Dataset:
    """Open a dataset folder by memory map. Sizes, headers and shapes are checked; the data is not read.

    split: Index, from 0, of the split that becomes the current one. A folder may hold several.
    """
    # The folder itself, or the backup that a killed writer left. If neither exists, it is the folder.
    path = existing(Path(folder).expanduser())
    if not path.is_dir():
        raise ValueError(f"There is no dataset folder {folder}: check the path, or make it with save().")
    manifest = read_manifest(path)
    if SHARDS in manifest.meta:
        raise ValueError(
            f"{folder} holds shards of a dataset: open all of them with hl.shards.join(folder), or one with "
            "hl.shards.open_shard(folder, rank)."
        )
    arrays = map_arrays(path, manifest)
    try:
        dataset = _assemble(path, manifest, arrays)
    except (ValueError, KeyError) as error:
        reason = f"the array {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"The arrays of {path} do not fit together ({reason}): {ADVICE}.") from error
    return dataset.with_split(split)


def map_arrays(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """All arrays of a folder by name, as memory-mapped tensors."""
    return {name: _map_array(folder, name, entry) for name, entry in manifest.arrays.items()}


def _map_array(folder: Path, name: str, entry: ArrayEntry) -> Tensor:
    """One array as a memory-mapped tensor. A file whose size or header is not the manifest's is refused."""
    path = folder / entry.file
    dtype = DTYPES[entry.dtype]
    try:
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise ValueError(f"{path} has {size} bytes instead of {entry.num_bytes}: {ADVICE}.")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if header != npy_header(dtype, entry.shape):
            raise ValueError(f"{path} is damaged (its header is not the manifest's): {ADVICE}.")
        # Users may change labels and splits in place. They are mapped copy-on-write: a page that is written
        # becomes a private copy, and the file keeps its numbers. All other arrays are mapped read-only.
        is_private = name == "y" or name.startswith("split.")
        array = map_npy(path, dtype, entry.shape, copy_on_write=is_private)
        # The fingerprint of the dataset takes the checksum from here, and need not read the data.
        remember(array, entry.checksum)
        return array
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {ADVICE}.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): {ADVICE}.") from error


def _assemble(folder: Path, manifest: Manifest, arrays: dict[str, Tensor]) -> Dataset:
    """The dataset of a folder, over its mapped arrays.

    Shapes that do not fit together are refused here, before a kernel could read outside an array.
    """
    edge = {name.removeprefix("edge."): array for name, array in arrays.items() if name.startswith("edge.")}
    graph = Graph(arrays["indptr"], arrays["indices"], edge)
    if (graph.num_nodes, graph.num_edges) != (manifest.num_nodes, manifest.num_edges):
        raise ValueError(f"the graph has {graph.num_nodes} nodes and {graph.num_edges} edges")
    splits = splits_of(manifest, arrays)
    return Dataset(
        name=manifest.name,
        graph=graph,
        tables=tables_of(manifest, arrays),
        y=arrays.get("y"),
        splits=splits[0] if splits else {},
        # All of them, the current one too, if there is a choice.
        alternatives=tuple(splits) if len(splits) > 1 else (),
        task=manifest.task,
        num_classes=manifest.num_classes,
        meta=manifest.meta,
        folder=folder,
    )


def splits_of(manifest: Manifest, arrays: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The splits of a folder by number, each with its node ids by name."""
    # A damaged manifest may claim any number of splits. A folder has no more splits than arrays.
    splits: list[dict[str, Tensor]] = [{} for _ in range(min(manifest.num_splits, len(arrays)))]
    for array_name, ids in arrays.items():
        if not array_name.startswith("split."):
            continue
        number, _, split_name = array_name.removeprefix("split.").partition(".")
        if not number.isdecimal() or int(number) >= len(splits):
            raise ValueError(f"there is no split {number}")
        splits[int(number)][split_name] = ids
    return splits


def tables_of(manifest: Manifest, arrays: dict[str, Tensor]) -> dict[str, Table]:
    """The tables of a folder by name, over its mapped arrays."""
    return {name: _open_table(name, num_columns, arrays) for name, num_columns in manifest.tables.items()}


def _open_table(name: str, num_columns: int, arrays: dict[str, Tensor]) -> Table:
    """One table. num_columns: width of a sparse table, -1 for a dense one."""
    if num_columns < 0:
        return TensorTable(arrays[f"table.{name}"], read_only=True)
    indptr, columns, values = (arrays[f"table.{name}.{part}"] for part in SPARSE)
    if columns.dtype not in (torch.int32, torch.int64) or indptr.dtype != torch.int64:
        raise ValueError(f"sparse table {name!r} has arrays of the wrong type")
    if indptr.dim() != 1 or columns.dim() != 1 or values.shape != columns.shape:
        raise ValueError(f"sparse table {name!r} has arrays of different sizes")
    if indptr.numel() < 1 or int(indptr[0]) != 0 or int(indptr[-1]) != columns.numel():
        raise ValueError(f"sparse table {name!r} has {columns.numel()} entries, its indptr says otherwise")
    return SparseTable(indptr=indptr, columns=columns, values=values, num_columns=num_columns)


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Check a dataset folder: read every file and compare its checksum, then check every value.

    Args:
        folder: Written by `Dataset.save` or by `folder=` of `hl.from_*`.

    Returns:
        A sentence per check.

    Raises:
        ValueError: There is no dataset, a file is damaged, or a value is not allowed. The message names the
            array and the position.

    Example:
        >>> hl.from_edges(torch.tensor([[0, 1], [1, 2]]), x=torch.ones(3, 2)).save("path")
        >>> "table x is finite" in hl.verify("path")
        True
    """
    path = existing(Path(folder).expanduser())
    dataset = open_folder(path)
    checked = check_checksums(path, read_manifest(path))
    # Error messages name the file of an array. `read_manifest` has refused every other file name than this.
    return checked + check_dataset(dataset, lambda array_name: str(path / f"{array_name}.npy"))


def check_checksums(path: Path, manifest: Manifest) -> list[str]:
    """Compare the checksum of every file with the manifest. Returns a sentence per check.

    Sizes and headers are not compared again: whoever calls this has mapped the arrays.
    """
    total_bytes = sum(entry.num_bytes for entry in manifest.arrays.values())
    with progress("checking sums", total_bytes, "B", enabled=total_bytes > SHOWN_BYTES) as bar:
        for entry in manifest.arrays.values():
            crc = 0
            with (path / entry.file).open("rb") as file:
                file.seek(HEADER_BYTES)
                while chunk := file.read(BYTES_AT_ONCE):
                    crc = zlib.crc32(chunk, crc)
                    bar.advance(len(chunk))
            if checksum_text(crc) != entry.checksum:
                raise ValueError(f"{path / entry.file} is damaged (its checksum does not match): {ADVICE}.")
    count = len(manifest.arrays)
    return [f"{count} arrays have their sizes and headers", f"{count} arrays have their checksums"]
