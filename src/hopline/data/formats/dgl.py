"""Reads folders that `dgl.distributed.partition_graph` wrote, without DGL (`dgl_stream` reads its files).

A folder has a .json file with the parts and their ranges of ids, and three files per part: its graph, with
halo nodes, and the data of its own nodes and edges. Nodes have up to three ids:

    local id      number within the part, halo nodes included     the ends of edges
    DGL's id      number after partitioning, a range per part     node data "_ID"
    original id   number before partitioning                      node data "orig_id", which DGL 1.0 and newer leave
                                                                  out; `partition_graph(return_mapping=True)` returns it

The dataset has the original ids if the files or `ids=` tell them, else DGL's. Parts are loaded one at a time, twice:
first for node data (`_Parts.columns`), then for edges (`_Parts.edges`). With `folder=`, node data goes to scratch
files.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hopline.data.arrays import as_tensor, numpy_dtype
from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.formats.dgl_stream import read_graph, read_tensors
from hopline.data.manifest import is_array_name
from hopline.data.options import merge
from hopline.data.paths import default_name, dgl_config
from hopline.util.files import check_file, new_mapped_file
from hopline.util.log import logger

X = ("feat", "feats", "features", "x")
"""Names of features in DGL's datasets and examples. The first that exists is taken."""
Y = ("label", "labels", "y")
"""Names of labels in DGL's datasets and examples. The first that exists is taken."""
MASKS = ("train_mask", "val_mask", "valid_mask", "test_mask")
EDGE = {"w": "weight", "edge_weight": "weight", "feat": "attr", "feats": "attr", "edge_attr": "attr"}
"""Names of edge data in DGL, and those that convs look for."""
DGLS_OWN = ("_ID", "_TYPE", "inner_node", "inner_edge", "orig_id", "part_id", "trainer_id")
"""Columns that the partitioning itself adds. They are left out."""
PART = "part"
"""Name of the table that says which part each node was in."""


def from_dgl(path: str | os.PathLike[str], *, ids: str | os.PathLike[str] | None = None, **arguments: Any) -> Dataset:
    """Make a dataset from a graph that DGL has partitioned. One part is read at a time.

    Nodes have their original ids if the files or `ids` tell them. The table "part" says which part each node was in:
    `hopline partition FOLDER OUT shards=N how=labels labels=part` makes the same parts again.

    path: The folder, or its .json file.
    ids: An .npy or .pt file of the first array that `partition_graph(..., return_mapping=True)` returns: [num_nodes]
        whole numbers, the original id of each of DGL's node ids.
    arguments: Those of `from_edges`. They override what the parts say (`options.merge`).
        `folder` is for graphs larger than memory.
    """
    config = dgl_config(Path(path).expanduser())
    if config is None:
        raise ValueError(f"{path} is no graph partitioned by DGL: give the .json file that partition_graph wrote.")
    parts = _Parts(config, None if ids is None else Path(ids).expanduser())
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


def _pop_first(columns: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in columns:
            return columns.pop(name)
    return None


class _Parts:
    """The parts of a graph, loaded one at a time. Call `columns` before `edges`: it learns the original ids."""

    def __init__(self, config: Path, ids: Path | None) -> None:
        try:
            fields = json.loads(config.read_bytes())
            self.name = str(fields.get("graph_name", config.stem))
            self.num_parts = index(fields["num_parts"])
            self.num_nodes = index(fields["num_nodes"])
            parts = [fields[f"part-{part}"] for part in range(self.num_parts)]
            if parts and not all("part_graph" in part for part in parts):
                raise ValueError(f"{config} has files of GraphBolt alone: partition again with use_graphbolt=False.")
            kinds = ("part_graph", "node_feats", "edge_feats")
            self.files = [tuple(config.parent / part[kind] for kind in kinds) for part in parts]
            self.node_ranges = _parse_ranges(fields["node_map"], "node_map", self.num_parts, self.num_nodes)
            self.edge_ranges = _parse_ranges(fields["edge_map"], "edge_map", self.num_parts, index(fields["num_edges"]))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{config} is damaged ({error!r}): copy it again, or partition the graph again."
            ) from error
        self.config = config
        self.ids = ids
        # Every node has an id of 8 bytes in the graph of its part. A wrong number would be allocated.
        for file in itertools.chain.from_iterable(self.files):
            check_file(file)
        self._check(8 * self.num_nodes <= sum(graph.stat().st_size for graph, *_ in self.files), config, "num_nodes")
        self.original_ids: Tensor | None = None
        """[num_nodes] int64: the original id of each of DGL's ids.

        Where the parts have no original ids, these are DGL's ids themselves. None until `columns` was called.
        """

    def columns(self, scratch: Path | None) -> dict[str, np.ndarray]:
        """Node data by name, each [num_nodes, ...] by original id, or by DGL's id where there are no original ids.

        scratch: Folder for the arrays, as memory-mapped files. None keeps them in memory.
        """
        columns: dict[str, np.ndarray] = {}
        names: set[str] = set()
        original_ids = torch.arange(self.num_nodes) if self.ids is None else _read_ids(self.ids, self.num_nodes)
        parts_with_original_ids: list[int] = []
        for part, ((graph_file, node_file, _), (first, last)) in enumerate(
            zip(self.files, self.node_ranges, strict=True)
        ):
            node_data = read_graph(graph_file).node_data
            is_inner = self._own(node_data, "inner_node", first, last, graph_file)
            if "orig_id" in node_data:
                parts_with_original_ids.append(part)
                if self.ids is not None:
                    raise ValueError(f"{graph_file} has the original ids itself: leave out ids={self.ids}.")
                original_ids[first:last] = node_data["orig_id"].long()[is_inner]
                in_range = bool(((original_ids >= 0) & (original_ids < self.num_nodes)).all())
                self._check(in_range, graph_file, "orig_id")

            # Each column has a row for each of the part's own nodes, in the order of DGL's ids.
            row_ids = original_ids[first:last].numpy()
            part_columns = _named(read_tensors(node_file))
            part_columns[PART] = torch.full((last - first,), part, dtype=torch.int32)
            self._check(part == 0 or part_columns.keys() == names, node_file, "other columns than the parts before")
            names = set(part_columns)
            for name, column in part_columns.items():
                values = _storable(column)
                if name not in columns:
                    file = None if scratch is None else scratch / name
                    columns[name] = _allocate(self.num_nodes, values, file)
                fits = values.shape == (last - first, *columns[name].shape[1:])
                is_same = numpy_dtype(values.dtype) == columns[name].dtype
                self._check(fits and is_same, node_file, f"shape or type of {name!r}")
                columns[name][row_ids] = values.numpy()

        if 0 < len(parts_with_original_ids) < self.num_parts:
            raise ValueError(
                f"Only the parts {parts_with_original_ids} of the {self.num_parts} in {self.config} have orig_id, the "
                "ids from before the partition: partition the graph again."
            )
        if not parts_with_original_ids and self.ids is None:
            logger.warning(
                f"the parts of {self.config} do not say which ids nodes had before DGL numbered them anew (DGL 2.1 "
                "leaves orig_id out), so nodes have DGL's ids: save the first array that partition_graph(..., "
                "return_mapping=True) returns with torch.save, and give it with ids=FILE"
            )
        if not torch.equal(original_ids.sort().values, torch.arange(self.num_nodes)):
            where = f"The parts of {self.config} do" if self.ids is None else f"{self.ids} does"
            raise ValueError(f"{where} not hold every node once: partition the graph again, and save its node ids.")
        self.original_ids = original_ids
        return columns

    def edges(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """([2, n] ids as in `original_ids`, edge arrays) of each part: the in-edges of its own nodes.

        They are ordered by their original edge ids if the part has them, else by DGL's.
        """
        assert self.original_ids is not None
        kinds: dict[str, Any] = {}
        for (graph_file, _, edge_file), (first, last) in zip(self.files, self.edge_ranges, strict=True):
            graph = read_graph(graph_file)
            is_inner = self._own(graph.edge_data, "inner_edge", first, last, graph_file)
            dgl_ids = graph.node_data["_ID"]
            in_range = bool(((dgl_ids >= 0) & (dgl_ids < self.num_nodes)).all())
            self._check(in_range and bool(graph.node_data["inner_node"][graph.dst[is_inner]].all()), graph_file, "halo")
            original_ids = self.original_ids[dgl_ids]
            ends = torch.stack([original_ids[graph.src], original_ids[graph.dst]])[:, is_inner]
            order = graph.edge_data.get("orig_id", graph.edge_data["_ID"])[is_inner].argsort()

            # Each column is in the order of DGL's edge ids.
            arrays: dict[str, Tensor] = {}
            for name, values in _named(read_tensors(edge_file)).items():
                self._check(values.shape[:1] == order.shape, edge_file, f"shape of {name!r}")
                ours = EDGE.get(name, name)
                if ours in arrays:
                    raise ValueError(f"{edge_file} has two columns for the edge array {ours!r}: leave one of them out.")
                arrays[ours] = values[order]
            part_kinds = {name: (values.dtype, values.shape[1:]) for name, values in arrays.items()}
            self._check(part_kinds == (kinds or part_kinds), edge_file, "other columns than the parts before")
            kinds = part_kinds
            if "weight" in arrays:
                arrays["weight"] = arrays["weight"].reshape(-1)
            yield ends[:, order], arrays

    def _own(self, data: Mapping[str, Tensor], mark: str, first: int, last: int, file: Path) -> Tensor:
        """[n] bool: which nodes or edges of a part are its own. They have DGL's ids first, ..., last - 1, in order."""
        self._check({mark, "_ID"} <= data.keys(), file, f"_ID or {mark}")
        is_inner = data[mark].bool()
        self._check(torch.equal(data["_ID"][is_inner], torch.arange(first, last)), file, "ids of another range")
        return is_inner

    @staticmethod
    def _check(is_right: bool, file: Path, what: str) -> None:
        if not is_right:
            raise ValueError(
                f"{file} does not fit the other files ({what}): copy it again, or partition the graph again."
            )


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {_column_name(name): values for name, values in tensors.items()}
    return {name: values for name, values in named.items() if name not in DGLS_OWN}


def _read_ids(path: Path, num_nodes: int) -> Tensor:
    """[num_nodes] int64: the original ids that a user saved."""
    check_file(path)
    try:
        if path.suffix == ".pt":
            ids = as_tensor(torch.load(path, weights_only=True, map_location="cpu"), str(path))
        else:
            ids = as_tensor(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
    except Exception as error:  # torch raises many types for a file that is not its own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read as an .npy or .pt file of node ids ({reason}): save it again."
        ) from error
    if ids.shape != (num_nodes,) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise ValueError(
            f"{path} holds {list(ids.shape)} {str(ids.dtype).removeprefix('torch.')}, and ids= is for whole numbers "
            f"[{num_nodes}]: save the first array that partition_graph(..., return_mapping=True) returns."
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
        raise ValueError(f"{path} does not hold every node once: save the node ids of this partition.")
    return ids.long()


def _storable(rows: Tensor) -> Tensor:
    return rows.float() if rows.dtype == torch.bfloat16 else rows


def _parse_ranges(ranges_by_type: Any, key: str, num_parts: int, total: int) -> list[tuple[int, int]]:
    """(first id, last id + 1) of every part. A graph of several node or edge types is refused."""
    lists = list(ranges_by_type.values()) if isinstance(ranges_by_type, dict) else [ranges_by_type]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise ValueError(
            f"The graph has {len(lists)} types in its {key}, and hopline reads graphs of one node and one edge type: "
            "make it so by dgl.to_homogeneous before partition_graph."
        )
    ranges = [(index(first), index(last)) for first, last in lists[0]]
    bounds = [0, *(last for _, last in ranges)]
    if len(ranges) != num_parts or ranges != list(itertools.pairwise(sorted(bounds))) or bounds[-1] != total:
        raise ValueError(f"The ranges of {key} do not hold every id once: partition the graph again.")
    return ranges


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
    new_mapped_file(file, int(np.prod(shape)) * dtype.itemsize)
    return np.memmap(file, dtype, "r+", shape=shape)
