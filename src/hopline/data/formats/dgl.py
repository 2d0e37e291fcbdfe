"""Reads folders that `dgl.distributed.partition_graph` wrote. DGL must be installed.

A folder has a .json file with the parts and their ranges of ids, and DGL's own files per part. Nodes have up
to three ids:

    local id      number within the part, halo nodes included     graph.edges()
    DGL's id      number after partitioning, a range per part     ndata["_ID"]
    original id   number before partitioning                      ndata["orig_id"], which DGL 2.1 leaves out

The dataset has the original ids if there are any, else DGL's. Parts are loaded one at a time, twice: first
for node data (`_Parts.columns`), then for edges (`_Parts.edges`). With `folder=`, node data goes to scratch
files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hopline.data.arrays import as_tensor, numpy_dtype
from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.manifest import is_array_name
from hopline.data.options import merge
from hopline.data.paths import default_name
from hopline.util.log import logger

X = ("feat", "feats", "features", "x")
"""Names of features in DGL's datasets and examples. The first that exists is taken."""
Y = ("label", "labels", "y")
"""Names of labels in DGL's datasets and examples. The first that exists is taken."""
MASKS = ("train_mask", "val_mask", "valid_mask", "test_mask")
"""Names of split masks."""
EDGE = {"w": "weight", "edge_weight": "weight", "feat": "attr", "feats": "attr", "edge_attr": "attr"}
"""Names of edge data in DGL, and those that convs look for."""
DGLS_OWN = ("_ID", "_TYPE", "inner_node", "inner_edge", "orig_id", "part_id", "trainer_id")
"""Columns that the partitioning itself adds. They are left out."""
PART = "part"
"""Name of the table that says which part each node was in."""


def is_dgl_folder(path: Path) -> bool:
    """Whether a path is the configuration of a partitioned DGL graph, or a folder with one."""
    return _find_config(path) is not None


def _find_config(path: Path) -> Path | None:
    """The .json file of a partitioned graph: `path` itself, or the first one in the folder.

    None if there is none.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    for file in files:
        if file.suffix != ".json" or not file.is_file():
            continue
        try:
            fields = json.loads(file.read_bytes())
        except ValueError:
            continue
        if isinstance(fields, dict) and {"num_parts", "part-0"} <= fields.keys():
            return file
    return None


def from_dgl(path: str | os.PathLike[str], **arguments: Any) -> Dataset:
    """Make a dataset from a graph that DGL has partitioned. One part is read at a time.

    Nodes have their original ids if the parts have them. The table "part" says which part each node was in:
    `hopline partition FOLDER OUT shards=N how=labels labels=part` makes the same parts again.

    path: The folder, or its .json file.
    arguments: Those of `from_edges`. They override what the parts say (`options.merge`).
        `folder` is for graphs larger than memory.
    """
    config = _find_config(Path(path).expanduser())
    if config is None:
        raise ValueError(f"{path} is no graph partitioned by DGL: give the .json file that partition_graph wrote.")
    parts = _Parts(config, _import_load_partition())
    # Scratch files lie next to the target folder. Without a target, node data stays in memory, and the
    # temporary folder below stays empty.
    parent = Path(arguments["folder"]).absolute().parent if "folder" in arguments else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dgl-", dir=parent) as scratch:
        columns = parts.columns(Path(scratch) if parent is not None else None)
        masks = {name: columns.pop(name) for name in MASKS if name in columns}
        x = _pop_first(columns, X)
        y = _pop_first(columns, Y)
        from_parts: dict[str, Any] = {
            "num_nodes": parts.num_nodes,
            "x": x,
            "y": y,
            "splits": {name: as_tensor(mask).reshape(-1).bool() for name, mask in masks.items()},
            "tables": {name: rows if rows.ndim > 1 else rows.reshape(-1, 1) for name, rows in columns.items()},
            "name": default_name(arguments.get("folder"), parts.name),
            "meta": {"origin": f"DGL partition {config.name} of {parts.num_parts} parts"},
        }
        return from_edges(parts.edges(), **merge(from_parts, arguments))


def _import_load_partition() -> Callable[[str, int], Any]:
    """DGL's `load_partition(config, part)`. Says what to do if DGL cannot be imported."""
    try:
        from dgl.distributed import load_partition  # type: ignore[import-not-found]
    except Exception as error:  # a DGL that does not fit the installed torch raises many types
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "dgl"
        if is_missing:
            state = "is not installed: type `pip install dgl`"
        else:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            state = f"cannot be imported ({reason}): mend that"
        raise ValueError(
            f"DGL, which alone reads its partitions, {state}. Or, on a machine where DGL runs, save the "
            "edges with numpy.save('edges.npy', torch.stack(g.edges())) and convert that file"
        ) from error
    return load_partition


def _pop_first(columns: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Remove and return the first of these columns that exists, else None."""
    for name in names:
        if name in columns:
            return columns.pop(name)
    return None


class _Parts:
    """The parts of a graph, loaded one at a time.

    Call `columns` before `edges`: it learns the original ids.
    """

    def __init__(self, config: Path, load_partition: Callable[[str, int], Any]) -> None:
        fields = json.loads(config.read_bytes())
        self.config = config
        self.load_partition = load_partition
        self.name = str(fields.get("graph_name", config.stem))
        self.num_parts = int(fields["num_parts"])
        self.node_ranges = _parse_ranges(fields.get("node_map"), "node_map")
        self.edge_ranges = _parse_ranges(fields.get("edge_map"), "edge_map")
        self.num_nodes = int(fields["num_nodes"])
        self.original_ids: Tensor | None = None
        """[num_nodes] int64: the original id of each of DGL's ids.

        Where the parts have no original ids, these are DGL's ids themselves. None until `columns` was called.
        """

    def columns(self, scratch: Path | None) -> dict[str, np.ndarray]:
        """Node data by name, each [num_nodes, ...] by original id, or by DGL's id where there are no original ids.

        scratch: Folder for the arrays, as memory-mapped files. None keeps them in memory.
        """
        columns: dict[str, np.ndarray] = {}
        original_ids = torch.full((self.num_nodes,), -1)
        parts_with_original_ids: list[int] = []
        for part in range(self.num_parts):
            graph, node_columns, *_ = self.load_partition(str(self.config), part)
            node_data = _as_tensors(graph.ndata)
            is_inner = node_data["inner_node"].bool()  # False for halo nodes
            dgl_ids = node_data["_ID"][is_inner]
            if "orig_id" in node_data:
                parts_with_original_ids.append(part)
            original_ids[dgl_ids] = node_data.get("orig_id", node_data["_ID"])[is_inner]

            # `node_columns` is a dict by name. Each column has a row for each of the part's own nodes, in the order
            # of DGL's ids, which are a range.
            first, last = self.node_ranges[part]
            row_ids = original_ids[first:last].numpy()
            part_columns: dict[str, Tensor] = {}
            for full_name, values in node_columns.items():
                name = _column_name(full_name)
                if name not in DGLS_OWN:
                    part_columns[name] = _storable(values)
            part_columns[PART] = torch.full((last - first,), part, dtype=torch.int32)
            for name, values in part_columns.items():
                if name not in columns:
                    file = None if scratch is None else scratch / name
                    columns[name] = _allocate(self.num_nodes, values, file)
                columns[name][row_ids] = values.numpy()

        if 0 < len(parts_with_original_ids) < self.num_parts:
            raise ValueError(
                f"Only the parts {parts_with_original_ids} of the {self.num_parts} in {self.config} have orig_id, the "
                "ids from before the partition: partition the graph again."
            )
        if not parts_with_original_ids:
            logger.warning(
                f"the parts of {self.config} do not say which ids nodes had before DGL numbered them anew (DGL 2.1 "
                "leaves orig_id out): nodes have DGL's ids; partition_graph(..., return_mapping=True) returns the "
                "original ids"
            )
        if not torch.equal(original_ids.sort().values, torch.arange(self.num_nodes)):
            raise ValueError(f"The parts of {self.config} do not hold every node once: partition the graph again.")
        self.original_ids = original_ids
        return columns

    def edges(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """([2, n] ids as in `original_ids`, edge arrays) of each part: the in-edges of its own nodes.

        They are ordered by their original edge ids if the part has them, else by DGL's.
        """
        assert self.original_ids is not None
        for part in range(self.num_parts):
            graph, _, edge_columns, *_ = self.load_partition(str(self.config), part)
            edge_data = _as_tensors(graph.edata)
            is_inner = edge_data["inner_edge"].bool()  # False for edges into halo nodes
            dgl_ids = edge_data["_ID"][is_inner]
            order = edge_data.get("orig_id", edge_data["_ID"])[is_inner].argsort()

            original_ids = self.original_ids[_as_tensors(graph.ndata)["_ID"]]
            local_src, local_dst = graph.edges()
            src = original_ids[local_src.long()][is_inner]
            dst = original_ids[local_dst.long()][is_inner]

            # `edge_columns` is a dict by name. Each column is in the order of DGL's edge ids, which are a range.
            row_ids = (dgl_ids - self.edge_ranges[part][0])[order]
            arrays: dict[str, Tensor] = {}
            for full_name, values in edge_columns.items():
                name = _column_name(full_name)
                if name not in DGLS_OWN:
                    arrays[EDGE.get(name, name)] = as_tensor(values)[row_ids]
            if "weight" in arrays:
                arrays["weight"] = arrays["weight"].reshape(-1)
            yield torch.stack([src, dst])[:, order], arrays


def _as_tensors(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Node or edge data of a DGL graph by name, as tensors."""
    return {name: as_tensor(values) for name, values in data.items()}


def _storable(values: Any) -> Tensor:
    """Values in a dtype that NumPy has: bfloat16 becomes float32."""
    rows = as_tensor(values)
    return rows.float() if rows.dtype == torch.bfloat16 else rows


def _parse_ranges(ranges_by_type: Any, key: str) -> list[tuple[int, int]]:
    """(first id, last id + 1) of every part. A graph of several node or edge types is refused."""
    lists = list(ranges_by_type.values()) if isinstance(ranges_by_type, dict) else [ranges_by_type]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise ValueError(
            f"The graph has {len(lists)} types in its {key}, and hopline reads graphs of one node and one edge type: "
            "make it so by dgl.to_homogeneous before partition_graph."
        )
    return [(int(first), int(last)) for first, last in lists[0]]


def _column_name(name: str) -> str:
    """The name of a column without its node or edge type: "feat" for "_N/feat"."""
    short = name.rsplit("/", 1)[-1]
    # `is_array_name`: whether it may name an array of a dataset. DGL's own columns are left out, so any name will do.
    if not is_array_name(short) and short not in DGLS_OWN:
        raise ValueError(f"{name!r} cannot name an array: rename it in DGL with letters, digits, '_' and '-' only.")
    return short


def _allocate(num_nodes: int, like: Tensor, file: Path | None) -> np.ndarray:
    """An array of zeros with a row per node and the row shape and dtype of `like`.

    file: The file to map; None for memory. Its space on the disk is allocated now, so a full disk raises an
        error here, not at a later write to the map.
    """
    shape = (num_nodes, *like.shape[1:])
    dtype = numpy_dtype(like.dtype)
    if file is None:
        return np.zeros(shape, dtype)
    num_bytes = max(1, int(np.prod(shape)) * dtype.itemsize)
    with file.open("wb") as out:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, num_bytes)
        else:
            out.truncate(num_bytes)
    return np.memmap(file, dtype, "r+", shape=shape)
