"""OGB node-prediction folders already on disk, read without the `ogb` package."""

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
from hopline.data.formats.npz import DAMAGED
from hopline.data.options import merge
from hopline.data.paths import default_name, is_ogb_folder

STORED_ONCE = {
    "products": True,
    "proteins": True,
    "arxiv": False,
    "mag": False,
    "papers100m": False,
}
"""Whether OGB stores each undirected edge once and adds the reverse when it loads the dataset; no file says it."""


def from_ogb_folder(path: str | os.PathLike[str], **arguments: Any) -> Dataset:
    """A dataset from an OGB folder with `raw/` (CSV, or binary as in papers100M) and `split/`.

    Edges that OGB itself symmetrizes on loading are symmetrized; `arguments` are those of `from_edges` and
    take precedence, among them `folder` for graphs larger than memory.
    """
    root = Path(path).expanduser()
    if not is_ogb_folder(root):
        raise ValueError(f"{root} is not an OGB folder: it needs raw/edge.csv.gz or raw/data.npz, and split/.")
    if arguments.get("symmetrize") is None:
        arguments = {**arguments, "symmetrize": _is_stored_once(root)}
    given: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), root.name.replace("_", "-")),
        "splits": _splits(root / "split"),
        "meta": {"origin": f"OGB folder {root.name}"},
    }
    if (root / "raw" / "data.npz").is_file():
        with _binary(root / "raw", mapped="folder" in arguments) as (edges, found):
            return from_edges(edges, **merge(given | found, arguments))
    edges, found = _csv(root / "raw")
    return from_edges(edges, **merge(given | found, arguments))


def _is_stored_once(root: Path) -> bool:
    name = root.resolve().name.lower().replace("-", "_").removeprefix("ogbn_").removesuffix("_bin")
    if name not in STORED_ONCE:
        raise ValueError(
            f"The name of the folder {root} does not say whether OGB stores each edge once: type `hopline convert "
            f"{root} OUT symmetrize=true` for ogbn-products and ogbn-proteins, whose inverse edges OGB adds, else "
            "symmetrize=false."
        )
    return STORED_ONCE[name]


def _splits(folder: Path) -> dict[str, np.ndarray]:
    kinds = sorted(p for p in folder.iterdir() if p.is_dir() and (p / "train.csv.gz").is_file())
    if len(kinds) != 1:
        raise ValueError(f"{folder} must hold one split folder with train.csv.gz, not {len(kinds)}: keep one.")
    names = ("train", "valid", "test")
    return {name: _matrix(kinds[0] / f"{name}.csv.gz")[:, 0].astype(np.int64) for name in names}


def _matrix(path: Path) -> np.ndarray:
    """A whole CSV file without header: [rows, columns]."""
    chunks = [np.column_stack(list(chunk.values())) for chunk in read_csv(path, header=())]
    if not chunks:
        return np.empty((0, 1))
    matrix = np.concatenate(chunks)
    if matrix.dtype.kind not in "iufb":
        raise ValueError(f"{path} holds text where numbers should be: download the dataset again.")
    return matrix.astype(np.float32) if matrix.dtype.kind == "f" else matrix


class _EdgeFile:
    """Chunks [2, n] of `edge.csv.gz`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in read_csv(self.path, header=("src", "dst")):
            yield np.stack([chunk["src"], chunk["dst"]])


def _csv(raw: Path) -> tuple[Any, dict[str, Any]]:
    """(edges, arguments for `from_edges`) of the CSV layout."""
    edges: Any = _EdgeFile(raw / "edge.csv.gz")
    found: dict[str, Any] = {"num_nodes": int(_matrix(raw / "num-node-list.csv.gz").sum())}
    if (raw / "node-feat.csv.gz").is_file():
        found["x"] = _matrix(raw / "node-feat.csv.gz").astype(np.float32)
    if (raw / "node-label.csv.gz").is_file():
        found["y"] = _matrix(raw / "node-label.csv.gz")
    if (raw / "edge-feat.csv.gz").is_file():
        # Two files are read side by side only here, for a graph (proteins) that fits.
        found["edge"] = {"attr": _matrix(raw / "edge-feat.csv.gz")}
        edges = np.concatenate(list(edges), axis=1)
    extra = {p.name.removesuffix(".csv.gz"): p for p in sorted(raw.glob("node_*.csv.gz"))}
    found["tables"] = {name: _matrix(path)[:, 0] for name, path in extra.items()}
    return edges, found


@contextmanager
def _binary(raw: Path, mapped: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(edges, arguments for `from_edges`) of the binary layout; large members are unpacked and mapped."""
    with tempfile.TemporaryDirectory(dir=raw if mapped else None, prefix=".unpacked-") as scratch:
        file = raw / "data.npz"
        try:
            with zipfile.ZipFile(file) as archive:
                files = {Path(n).stem: _unpack(archive, n, Path(scratch)) for n in archive.namelist()}
            arrays = {
                name: np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
                for name, path in files.items()
                if name != "edge_index"
            }
            edges, num_nodes = files["edge_index"], int(np.asarray(arrays["num_nodes_list"]).sum())
            found: dict[str, Any] = {"num_nodes": num_nodes, "x": arrays.get("node_feat")}
            file = raw / "node-label.npz"
            with np.load(file, allow_pickle=False) as labels:
                found["y"] = labels["node_label"]
        except DAMAGED as error:
            raise ValueError(f"{file} cannot be unpacked ({error}): download it again.") from error
        found["tables"] = {
            name: np.asarray(array).reshape(num_nodes)
            for name, array in arrays.items()
            if name.startswith("node_") and name != "node_feat" and array.size == num_nodes
        }
        yield edges, found


def _unpack(archive: zipfile.ZipFile, member: str, folder: Path) -> Path:
    target = folder / Path(member).name
    with archive.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 24)
    return target
