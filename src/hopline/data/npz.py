"""Graphs in one `.npz` file of plain arrays."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.nodes import KNOWN_TASKS, split_name, usual_split
from hopline.data.paths import default_name
from hopline.tables import SparseTable

_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")
_EDGE_NAMES = {"edge_type": "type", "edge_weight": "weight", "edge_attr": "attr", "t": "time"}
_NODE_KEYS = ("x", "y", "edge_index", "meta", *_SPARSE)


def from_npz(
    path: str | os.PathLike[str],
    *,
    split_per_class: tuple[int, int] | None = (20, 30),
    seed: int = 0,
    **arguments: Any,
) -> Dataset:
    """A dataset from `edge_index`, `x` (dense, or CSR in four arrays), `y`, masks, edge arrays and `meta`.

    A labelled graph without masks gets a seeded split with so many training and validation nodes per class,
    unless `split_per_class` is None. Edges that `meta` calls undirected and stored once are symmetrized.
    `arguments` are those of `from_edges` and take precedence.
    """
    path = Path(path).expanduser()
    arrays = _load(path)
    meta = _meta(arrays)
    if "edge_index" not in arrays:
        kind = "several node types" if any(k.startswith("edge_") for k in arrays) else "no edge_index"
        raise ValueError(f"{path} has {kind}: hopline reads one edge_index [2, E]; join the types into one graph.")
    name = str(meta.get("name", path.stem))
    given: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), name),
        "x": _features(arrays),
        "y": arrays.get("y"),
        "edge": {ours: arrays[theirs] for theirs, ours in _EDGE_NAMES.items() if theirs in arrays},
        "splits": {split_name(k): v for k, v in arrays.items() if k in ("train_mask", "val_mask", "test_mask")},
        "num_nodes": _num_nodes(arrays, meta),
        "meta": {"origin": path.name, **meta},
        "symmetrize": "each edge once" in str(meta.get("edges", "")),
        "task": KNOWN_TASKS.get(name),
    }
    others = {k: v for k, v in arrays.items() if k not in {*_NODE_KEYS, *_EDGE_NAMES} and not k.endswith("_mask")}
    num_nodes = given["num_nodes"]
    given["tables"] = {k: v for k, v in others.items() if v.ndim and v.shape[0] == num_nodes and v.dtype.kind in "fiub"}
    drawn = usual_split(given["y"], given["task"], split_per_class, seed) if split_per_class else None
    if not given["splits"] and drawn is not None:
        given["splits"], given["meta"]["split"] = drawn
    return from_edges(arrays["edge_index"], **(given | arguments))


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {path}: check the path.") from error
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged or not an .npz of plain arrays ({error}): copy it again.") from error


def _meta(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except ValueError:
        return {"note": str(arrays["meta"])}
    return meta if isinstance(meta, dict) else {"note": str(meta)}


def _features(arrays: dict[str, np.ndarray]) -> Any:
    """Features as float32: dense, or a sparse table."""
    if "x" in arrays:
        return torch.from_numpy(arrays["x"]).float()
    if not all(key in arrays for key in _SPARSE):
        return None
    data, columns, indptr, shape = (arrays[key] for key in _SPARSE)
    return SparseTable(
        torch.from_numpy(indptr.astype(np.int64)),
        torch.from_numpy(columns.astype(np.int32)),
        torch.from_numpy(data.astype(np.float32)),
        int(shape[1]),
    )


def _num_nodes(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> int:
    for key in ("x", "y"):
        if key in arrays:
            return int(arrays[key].shape[0])
    if "x_shape" in arrays:
        return int(arrays["x_shape"][0])
    if isinstance(meta.get("num_nodes"), int):
        return meta["num_nodes"]
    return int(arrays["edge_index"].max()) + 1
