"""Reads graphs in one `.npz` file of plain arrays.

Names say what most arrays are:

    edge_index [2, E]                                      the edges
    x, or x_data, x_indices, x_indptr, x_shape             features, dense or in CSR form
    y                                                      labels
    train_mask, val_idx, ...                               splits
    edge_NAME; weight, time, t or type with E rows         edge arrays
    meta                                                   a JSON text: name, num_nodes, edges, ...

Every other array that has one row per node becomes a table of the dataset (`Dataset.tables`). A warning
names the arrays that remain. All arrays are read into memory.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hopline.data.arrays import as_tensor, read_npy_header
from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.nodes import KNOWN_TASKS, usual_split
from hopline.data.options import merge
from hopline.data.paths import default_name
from hopline.tables import SparseTable
from hopline.util.config import format_size
from hopline.util.files import check_file
from hopline.util.host import host_memory
from hopline.util.log import logger

_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")
"""Arrays of features in CSR form."""
_EDGE_NAMES = {"t": "time", "time": "time", "weight": "weight", "type": "type"}
"""Name in the file -> name in the dataset, of arrays without "edge_" in their names.

They are edge arrays if they have a row per edge.
"""
_ALWAYS_EDGE = ("edge_type", "edge_weight", "edge_attr", "edge_time")
"""Arrays that are edge arrays in any case. `from_edges` refuses them if they have not one row per edge."""
_FIXED_KEYS = ("x", "y", "edge_index", "meta", *_SPARSE)
"""Arrays whose name alone says what they are, splits excepted."""
_SPLIT_KEYS = re.compile("(train|val|valid|validation|dev|test)_(mask|idx)")
_STORED_ONCE = "each edge once"
"""Words in the field "edges" of `meta` by which a file says that it stores one direction of undirected edges."""


def from_npz(
    path: str | os.PathLike[str],
    *,
    split_per_class: tuple[int, int] | None = (20, 30),
    seed: int = 0,
    **arguments: Any,
) -> Dataset:
    """Make a dataset from an `.npz` file.

    Its arrays are `edge_index` [2, num_edges], `x` (dense, or CSR in four arrays), `y`, masks, edge arrays
    and `meta`, a JSON text. Edges that `meta` calls undirected and stored once are symmetrized.

    Args:
        path: The file.
        split_per_class: Training and validation nodes per class that are drawn for a labelled graph without
            splits. None draws none.
        seed: Seed of this draw.
        arguments: Those of `from_edges`. They take precedence over what the file says.

    Returns:
        The dataset, in memory unless `folder=` is given.

    Raises:
        ValueError: The file is missing or damaged, or has no `edge_index`, or its arrays do not fit
            together.

    Example:
        >>> import numpy as np
        >>> np.savez("ring.npz", edge_index=[[0, 1, 2], [1, 2, 0]], x=np.ones((3, 2)), y=[0, 1, 0])
        >>> hl.from_npz("ring.npz", split_per_class=None)
        Dataset('ring', 3 nodes, 3 directed edges, 2 features, 2 classes, ...)
    """
    path = Path(path).expanduser()
    arrays = load_arrays(path)
    meta = _meta(arrays)
    if "edge_index" not in arrays:
        # Files of several node types have an array per kind of edge, such as edge_paper__author. A file with
        # edge_weight alone is taken for one too; the advice is the same.
        looks_heterogeneous = any(key.startswith("edge_") for key in arrays)
        kind = "several node types" if looks_heterogeneous else "no edge_index"
        raise ValueError(f"{path} has {kind}: hopline reads one edge_index [2, E]; join the types into one graph.")
    for key in ("x", "y", "edge_index"):
        if key in arrays and not as_tensor(arrays[key], f"{path}: array {key!r}").dim():  # `as_tensor` refuses texts
            raise ValueError(f"{path}: array {key!r} is a single number: give one row per node, and edges as [2, E].")

    name = str(meta.get("name", path.stem))
    task = KNOWN_TASKS.get(name)  # of well-known graphs; None: `from_edges` reads the task off the labels
    splits: dict[str, Any] = {key: array for key, array in arrays.items() if _SPLIT_KEYS.fullmatch(key)}
    x = _features(arrays, path)
    y = arrays.get("y")
    num_nodes = arguments.get("num_nodes") or _num_nodes(arrays, meta)

    edge_index = arrays["edge_index"]
    other_arrays = {key: array for key, array in arrays.items() if key not in {*_FIXED_KEYS, *splits}}
    # `from_edges` gets None if only the edges tell the number. It counts itself then, and refuses ids that are
    # far too large for so few edges. A number from here would pass for the user's own, and skip that check.
    num_table_rows = num_nodes or (int(edge_index.max()) + 1 if edge_index.size else 0)
    edge, tables = _separate_edge_arrays(other_arrays, num_table_rows, edge_index.shape[-1], path)

    origin = {"origin": path.name, **meta}
    if split_per_class and not splits:
        # The test set is all other labelled nodes. None: the nodes have no classes.
        drawn = usual_split(y, task, split_per_class, seed)
        if drawn is not None:
            splits, origin["split"] = drawn
    from_file: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), name),
        "x": x,
        "y": y,
        "splits": splits,
        "num_nodes": num_nodes,
        "meta": origin,
        "symmetrize": _STORED_ONCE in str(meta.get("edges", "")),
        "task": task,
        "edge": edge,
        "tables": tables,
    }
    return from_edges(edge_index, **merge(from_file, arguments))


def _separate_edge_arrays(
    arrays: dict[str, np.ndarray], num_nodes: int, num_edges: int, path: Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(edge arrays, tables), by name. arrays: all but those of `_FIXED_KEYS` and the splits.

    A warning names the arrays that are no edge array and no table. An array that could be both is refused.
    """
    edge: dict[str, np.ndarray] = {}
    tables: dict[str, np.ndarray] = {}
    unused: list[str] = []
    for key, array in arrays.items():
        # "fiub": floating-point, signed, unsigned and bool. Other types and single numbers have no rows: -1.
        num_rows = array.shape[0] if array.ndim and array.dtype.kind in "fiub" else -1
        has_edge_name = key in _EDGE_NAMES or key.startswith("edge_")
        is_edge = key in _ALWAYS_EDGE or (has_edge_name and num_rows == num_edges)
        if is_edge and num_nodes == num_edges and not key.startswith("edge_"):
            raise ValueError(
                f"{path}: array {key!r} has {num_rows} rows, one per node or one per edge: call it edge_{key} or "
                f"node_{key}."
            )
        if is_edge:
            name = _EDGE_NAMES.get(key, key.removeprefix("edge_"))
            if name in edge:
                raise ValueError(
                    f"{path} has two arrays for the edge array {name!r}, one of them {key!r}: leave one out."
                )
            edge[name] = array
        # A mask by an unknown name is left to the warning, which says how splits are called.
        elif num_rows == num_nodes and not key.endswith("_mask"):
            tables[key] = array
        else:
            unused.append(f"{key} {list(array.shape)} {array.dtype}")
    if unused:
        logger.warning(
            f"{path}: not taken: {', '.join(unused)} (tables have {num_nodes} rows, one per node; edge arrays are "
            f"called edge_NAME and have {num_edges} rows; splits are train_mask or train_idx, and the like)"
        )
    return edge, tables


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file by name. Nothing is unpickled.

    A file is refused before its arrays are allocated if their heads claim other sizes than the archive, or if they do
    not fit into memory: a file of a megabyte may unpack to a gigabyte.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            num_bytes = _num_bytes(file)
            free_bytes = host_memory().available
            if num_bytes <= free_bytes:
                with np.load(file, allow_pickle=False) as arrays:
                    return {key: arrays[key] for key in arrays.files}
    except Exception as error:  # NumPy and zipfile raise many types for damaged archives
        raise ValueError(f"{path} is damaged or not an .npz of plain arrays ({error}): copy it again.") from error
    raise ValueError(
        f"{path} unpacks to {format_size(num_bytes)}, and {format_size(free_bytes)} of memory are free: if it is no "
        "mistake, convert it on a machine with more memory, or save edge_index as an .npy file and convert that."
    )


def _num_bytes(file: BinaryIO) -> int:
    """Bytes that the arrays of an archive take, which is then at its beginning again."""
    total = 0
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                shape, _, dtype = read_npy_header(member)
                claimed = member.tell() + prod(shape) * dtype.itemsize
            if claimed != info.file_size and not dtype.hasobject:  # NumPy itself refuses objects
                raise ValueError(f"{info.filename} says that it has {claimed} bytes, and has {info.file_size}")
            total += info.file_size
    file.seek(0)
    return total


def _meta(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The fields of the JSON text "meta". Any other text becomes the field "note"."""
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except ValueError:
        return {"note": str(arrays["meta"])}
    return meta if isinstance(meta, dict) else {"note": str(meta)}


def _features(arrays: dict[str, np.ndarray], path: Path) -> Any:
    """Features in float32: a dense tensor, a sparse table, or None if the file has none."""
    if "x" in arrays:
        return as_tensor(arrays["x"]).float()
    missing = [key for key in _SPARSE if key not in arrays]
    if len(missing) == len(_SPARSE):
        return None
    if missing:
        raise ValueError(f"{path} has no {' and '.join(missing)}: sparse features are {', '.join(_SPARSE)}.")

    data, columns, indptr, shape = (as_tensor(arrays[key], f"{path}: array {key!r}") for key in _SPARSE)
    fits_shape = shape.numel() == 2 and indptr.shape == (int(shape[0]) + 1,)
    if not fits_shape or columns.dim() != 1 or data.shape != columns.shape:
        raise ValueError(
            f"{path}: x_data {list(data.shape)}, x_indices {list(columns.shape)} and x_indptr {list(indptr.shape)} are "
            f"no CSR matrix of x_shape {shape.tolist()}: write them again."
        )
    num_columns = int(shape[1])
    is_outside = (columns < 0) | (columns >= min(num_columns, 2**31))
    if bool(is_outside.any()):
        position = int(is_outside.nonzero()[0])
        raise ValueError(
            f"{path}: x_indices holds {int(columns[position])} at position {position}: columns go from 0 to "
            "x_shape[1] - 1, and are fewer than 2^31."
        )
    return SparseTable(indptr=indptr.long(), columns=columns.int(), values=data.float(), num_columns=num_columns)


def _num_nodes(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> int | None:
    """The number of nodes by features, labels or `meta`. None if only the edges tell it."""
    for key in ("x", "y"):
        if key in arrays:
            return int(arrays[key].shape[0])
    if "x_shape" in arrays:
        return int(arrays["x_shape"][0])
    if isinstance(meta.get("num_nodes"), int):
        return meta["num_nodes"]
    return None
