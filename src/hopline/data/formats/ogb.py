"""Reads OGB node-prediction folders on disk, without the `ogb` package.

    raw/     CSV files (edge.csv.gz, node-feat.csv.gz, ...), or data.npz and node-label.npz (papers100M)
    split/   one folder with train.csv.gz, valid.csv.gz and test.csv.gz

Edges in CSV are read in chunks, unless there are edge features. Arrays of the binary layout are unpacked
first. If the dataset is written to a folder, they are memory-mapped, so that papers100M needs disk space
instead of memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import read_csv
from hopline.data.formats.npz import load_arrays
from hopline.data.options import merge
from hopline.data.paths import default_name, is_ogb_folder
from hopline.util.config import format_size

STORED_ONCE = {
    "products": True,
    "proteins": True,
    "arxiv": False,
    "mag": False,
    "papers100m": False,
}
"""Whether OGB stores each undirected edge once and adds the reverse while loading. No file says it."""


def from_ogb_folder(path: str | os.PathLike[str], **arguments: Any) -> Dataset:
    """Make a dataset from an OGB folder with `raw/` (CSV, or binary as in papers100M) and `split/`.

    Edges are symmetrized if OGB does so while loading.

    path: The folder. Its name tells whether OGB symmetrizes the dataset, unless `symmetrize` is given.
    arguments: Those of `from_edges`, which take precedence. `folder` is for graphs larger than memory.
    """
    root = Path(path).expanduser()
    if not is_ogb_folder(root):
        raise ValueError(f"{root} is not an OGB folder: it needs raw/edge.csv.gz or raw/data.npz, and split/.")
    if arguments.get("symmetrize") is None:
        arguments = {**arguments, "symmetrize": _is_stored_once(root)}
    from_root: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), root.name.replace("_", "-")),
        "splits": _read_splits(root / "split"),
        "meta": {"origin": f"OGB folder {root.name}"},
    }
    if (root / "raw" / "data.npz").is_file():
        with _unpack_binary(root / "raw", mapped="folder" in arguments) as (edges, from_raw):
            return from_edges(edges, **merge(from_root | from_raw, arguments))
    edges, from_raw = _read_csv_files(root / "raw")
    return from_edges(edges, **merge(from_root | from_raw, arguments))


def _is_stored_once(root: Path) -> bool:
    """Whether OGB stores each undirected edge once in this dataset, by the folder's name."""
    name = root.resolve().name.lower().replace("-", "_").removeprefix("ogbn_").removesuffix("_bin")
    if name not in STORED_ONCE:
        raise ValueError(
            f"The name of the folder {root} does not say whether OGB stores each edge once: type `hopline convert "
            f"{root} OUT symmetrize=true` for ogbn-products and ogbn-proteins, whose inverse edges OGB adds, else "
            "symmetrize=false."
        )
    return STORED_ONCE[name]


def _read_splits(folder: Path) -> dict[str, np.ndarray]:
    """[n] int64 node ids of "train", "valid" and "test"."""
    split_folders = sorted(path for path in folder.iterdir() if path.is_dir() and (path / "train.csv.gz").is_file())
    if len(split_folders) != 1:
        raise ValueError(f"{folder} must hold one split folder with train.csv.gz, not {len(split_folders)}: keep one.")
    splits = {}
    for name in ("train", "valid", "test"):
        splits[name] = _read_matrix(split_folders[0] / f"{name}.csv.gz")[:, 0].astype(np.int64)
    return splits


def _read_matrix(path: Path) -> np.ndarray:
    """[num_rows, num_columns]: a whole CSV file without a line of names. Floats are float32."""
    chunks = [np.column_stack(list(chunk.values())) for chunk in read_csv(path, header=())]
    if not chunks:
        return np.empty((0, 1))
    matrix = np.concatenate(chunks)
    if matrix.dtype.kind not in "iufb":
        raise ValueError(f"{path} holds text where numbers should be: download the dataset again.")
    return matrix.astype(np.float32) if matrix.dtype.kind == "f" else matrix


class _EdgeFile:
    """The edges of `edge.csv.gz` as chunks [2, n]. It can be iterated several times."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in read_csv(self.path, header=("src", "dst")):
            yield np.stack([chunk["src"], chunk["dst"]])


def _read_csv_files(raw: Path) -> tuple[Any, dict[str, Any]]:
    """(edges, other arguments of `from_edges`) of the CSV layout."""
    edges: Any = _EdgeFile(raw / "edge.csv.gz")
    arguments: dict[str, Any] = {"num_nodes": int(_read_matrix(raw / "num-node-list.csv.gz").sum())}
    if (raw / "node-feat.csv.gz").is_file():
        arguments["x"] = _read_matrix(raw / "node-feat.csv.gz").astype(np.float32)
    if (raw / "node-label.csv.gz").is_file():
        arguments["y"] = _read_matrix(raw / "node-label.csv.gz")
    if (raw / "edge-feat.csv.gz").is_file():
        # Edges and their features, two files, are both read as a whole. Only proteins has edge features, and
        # it fits.
        arguments["edge"] = {"attr": _read_matrix(raw / "edge-feat.csv.gz")}
        edges = np.concatenate(list(edges), axis=1)
    tables = {}
    for path in sorted(raw.glob("node_*.csv.gz")):
        tables[path.name.removesuffix(".csv.gz")] = _read_matrix(path)[:, 0]
    arguments["tables"] = tables
    return edges, arguments


@contextmanager
def _unpack_binary(raw: Path, mapped: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(edges, other arguments of `from_edges`) of the binary layout, valid within the context.

    mapped: Whether to map the unpacked arrays instead of reading them. Then they are unpacked into `raw`,
        next to the archive, else into the system's temporary folder. Edges are the path of a file either
        way.
    """
    with tempfile.TemporaryDirectory(dir=raw if mapped else None, prefix=".unpacked-") as scratch:
        file = raw / "data.npz"  # the file being read, for the error message
        try:
            with zipfile.ZipFile(file) as archive:
                num_bytes = sum(info.file_size for info in archive.infolist())
                if num_bytes > shutil.disk_usage(scratch).free:
                    raise ValueError(f"it unpacks to {format_size(num_bytes)}, more than is free in {scratch}")
                files = {Path(member).stem: _unpack(archive, member, Path(scratch)) for member in archive.namelist()}
            # Mapped in any case: a head that claims more than its file has is refused then, and not allocated.
            maps = {
                name: np.load(path, mmap_mode="r", allow_pickle=False)
                for name, path in files.items()
                if name != "edge_index"
            }
            arrays = maps if mapped else {name: np.array(array) for name, array in maps.items()}
            edges = files["edge_index"]
            num_nodes = int(np.asarray(arrays["num_nodes_list"]).sum())
            file = raw / "node-label.npz"
            labels = load_arrays(file)["node_label"]
        except Exception as error:  # NumPy and zipfile raise many types for damaged archives
            raise ValueError(f"{file} cannot be unpacked ({error}): download it again.") from error

        tables = {
            name: np.asarray(array).reshape(num_nodes)
            for name, array in arrays.items()
            if name.startswith("node_") and name != "node_feat" and array.size == num_nodes
        }
        yield edges, {"num_nodes": num_nodes, "x": arrays.get("node_feat"), "y": labels, "tables": tables}


def _unpack(archive: zipfile.ZipFile, member: str, folder: Path) -> Path:
    """Unpack one file of an archive into a folder, 16 MiB at a time. Returns its path."""
    target = folder / Path(member).name
    with archive.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 24)
    return target
