"""Folders that `dgl.distributed.partition_graph` wrote, read through DGL where it is installed."""

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
from hopline.data.manifest import is_part
from hopline.data.options import merge
from hopline.data.paths import default_name
from hopline.util.log import logger

X = ("feat", "feats", "features", "x")
"""What features are called by DGL's datasets and examples."""
Y = ("label", "labels", "y")
"""What labels are called by DGL's datasets and examples."""
MASKS = ("train_mask", "val_mask", "valid_mask", "test_mask")
EDGE = {"w": "weight", "edge_weight": "weight", "feat": "attr", "feats": "attr", "edge_attr": "attr"}
"""Edge data -> the name that convs look for."""
DGLS_OWN = ("_ID", "_TYPE", "inner_node", "inner_edge", "orig_id", "part_id", "trainer_id")
"""Columns that the partitioning itself adds."""
PART = "part"
"""The table that keeps which part a node was in."""


def is_dgl_folder(path: Path) -> bool:
    """Whether a path is the configuration of a partitioned DGL graph, or a folder with one."""
    return _find_config(path) is not None


def _find_config(path: Path) -> Path | None:
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
    """A dataset from the folder, or the .json file, of a graph that DGL has partitioned; one part is read at a time.

    Nodes have the ids they had before DGL numbered them anew, where the parts say them. Which part a node was in is in
    the table "part": `hopline partition FOLDER OUT shards=N how=labels labels=part` cuts the same parts again.
    `arguments` are those of `from_edges`, among them `folder` for graphs larger than memory.
    """
    config = _find_config(Path(path).expanduser())
    if config is None:
        raise ValueError(f"{path} is no graph partitioned by DGL: give the .json file that partition_graph wrote.")
    parts = _Parts(config, _import_load_partition())
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
    try:
        from dgl.distributed import load_partition  # type: ignore[import-not-found]
    except Exception as error:  # DGL that does not fit the installed torch fails in many ways
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "dgl"
        if is_missing:
            state = "is not installed: type `pip install dgl`"
        else:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            state = f"cannot be imported ({reason}): mend that"
        raise ValueError(
            f"DGL, which alone reads its partitions, {state}, or save the edges where DGL runs by "
            "numpy.save('edges.npy', torch.stack(g.edges())) and convert that file"
        ) from error
    return load_partition


def _pop_first(columns: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in columns:
            return columns.pop(name)
    return None


class _Parts:
    """The parts of a graph, loaded one by one."""

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
        """[N] by DGL's ids: those from before, once `columns` has seen all parts that say them."""

    def columns(self, scratch: Path | None) -> dict[str, np.ndarray]:
        """Node data by original id, in memory or in files of a folder."""
        columns: dict[str, np.ndarray] = {}
        original_ids = torch.full((self.num_nodes,), -1)
        has_original_ids = True
        for part in range(self.num_parts):
            graph, rows, *_ = self.load_partition(str(self.config), part)
            node_data = _as_tensors(graph.ndata)
            is_inner = node_data["inner_node"].bool()
            dgl_ids = node_data["_ID"][is_inner]
            has_original_ids = "orig_id" in node_data
            original_ids[dgl_ids] = node_data["orig_id"][is_inner] if has_original_ids else dgl_ids

            first, last = self.node_ranges[part]
            row_ids = original_ids[first:last].numpy()
            part_columns: dict[str, Tensor] = {}
            for full_name, values in rows.items():
                name = _column_name(full_name)
                if name not in DGLS_OWN:
                    part_columns[name] = _storable(values)
            part_columns[PART] = torch.full((last - first,), part, dtype=torch.int32)
            for name, values in part_columns.items():
                if name not in columns:
                    file = None if scratch is None else scratch / name
                    columns[name] = _allocate(self.num_nodes, values, file)
                columns[name][row_ids] = values.numpy()

        if not has_original_ids:
            logger.warning(
                f"the parts of {self.config} do not say which ids nodes had before DGL numbered them anew (DGL 2.1 "
                "leaves orig_id out): nodes have DGL's ids; partition_graph(..., return_mapping=True) returns those "
                "from before"
            )
        if not torch.equal(original_ids.sort().values, torch.arange(self.num_nodes)):
            raise ValueError(f"The parts of {self.config} do not hold every node once: partition the graph again.")
        self.original_ids = original_ids
        return columns

    def edges(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """The in-edges of each part's own nodes, in the order they had before."""
        assert self.original_ids is not None
        for part in range(self.num_parts):
            graph, _, rows, *_ = self.load_partition(str(self.config), part)
            edge_data = _as_tensors(graph.edata)
            is_inner = edge_data["inner_edge"].bool()
            dgl_ids = edge_data["_ID"][is_inner]
            order = edge_data.get("orig_id", edge_data["_ID"])[is_inner].argsort()

            original_ids = self.original_ids[_as_tensors(graph.ndata)["_ID"]]
            local_src, local_dst = graph.edges()
            src = original_ids[local_src.long()][is_inner]
            dst = original_ids[local_dst.long()][is_inner]

            row_ids = (dgl_ids - self.edge_ranges[part][0])[order]
            arrays: dict[str, Tensor] = {}
            for full_name, values in rows.items():
                name = _column_name(full_name)
                if name not in DGLS_OWN:
                    arrays[EDGE.get(name, name)] = as_tensor(values)[row_ids]
            if "weight" in arrays:
                arrays["weight"] = arrays["weight"].reshape(-1)
            yield torch.stack([src, dst])[:, order], arrays


def _as_tensors(data: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: as_tensor(values) for name, values in data.items()}


def _storable(values: Any) -> Tensor:
    """Numbers that NumPy has a type for."""
    rows = as_tensor(values)
    return rows.float() if rows.dtype == torch.bfloat16 else rows


def _parse_ranges(ranges_by_type: Any, key: str) -> list[tuple[int, int]]:
    """(first id, last id + 1) of every part, in a graph of one type."""
    lists = list(ranges_by_type.values()) if isinstance(ranges_by_type, dict) else [ranges_by_type]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise ValueError(
            f"The graph has {len(lists)} types in its {key}, and hopline reads graphs of one node and one edge type: "
            "make it so by dgl.to_homogeneous before partition_graph."
        )
    return [(int(first), int(last)) for first, last in lists[0]]


def _column_name(name: str) -> str:
    """A column's own name, without its type: "_N/feat" is "feat"."""
    short = name.rsplit("/", 1)[-1]
    if not is_part(short) and short not in DGLS_OWN:
        raise ValueError(f"{name!r} cannot name an array: rename it in DGL with letters, digits, '_' and '-' only.")
    return short


def _allocate(num_nodes: int, like: Tensor, file: Path | None) -> np.ndarray:
    """An array of one row per node: in memory, or in a file whose room on the disk is taken now."""
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
