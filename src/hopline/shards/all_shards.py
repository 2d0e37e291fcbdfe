"""A folder of shards as one dataset again, for a process that has all of them.

To train on it, `join_shards` makes a usual dataset:

    edges, edge arrays, labels, splits, sparse tables    put together in memory, in the dataset's order
    dense tables (features)                              stay in the memory-mapped shards: `StackedTable`

For inference, `AllShards` opens the edges of one shard at a time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.data.store import SHARDS
from hopline.shards.data import DatasetInShards
from hopline.shards.shard import Shard, open_shard, read_shard_record
from hopline.shards.verify import open_shards
from hopline.tables import SparseTable, Table
from hopline.tables.stacked import StackedTable

CHUNK = 1 << 22
"""Edges that are copied at a time, which limits the memory of temporary arrays."""


class AllShards(DatasetInShards):
    """A dataset in shards that one process has all of.

    Sizes, splits and features of all shards are open all the time. Edges are open of one shard at a time
    (`shard`), so one thread at a time may read them. The property `graph` raises a ValueError.

    split: which published split is the current one, for datasets that have several.
    """

    def __init__(self, folder: str | os.PathLike[str], *, split: int = 0) -> None:
        self.folder = read_shard_record(folder)[0]
        shards = open_shards(folder, split=split)
        first = shards[0]
        super().__init__(first)
        self.split = split
        self.num_shards = len(shards)
        self._advice = (
            "and this needs the whole graph: open the dataset that was partitioned, or start one process per shard "
            f"(devices={self.num_shards})"
        )
        self._opened: Shard | None = None
        self.splits = {name: torch.cat([s.splits[name] for s in shards]).sort().values for name in first.splits}
        self.ptr = first.ptr  # [num_shards + 1] int64: the first position of each shard
        self.nodes = torch.cat([shard.nodes for shard in shards])
        """[num_nodes] int64: the node id at each position."""
        # Of the tables it has only the ids that nodes had in their file. Features are in `rows`.
        if "node_ids" in first.tables:
            self.tables["node_ids"] = StackedTable([shard.tables["node_ids"] for shard in shards], self.position)
        self.y = None if first.y is None else torch.cat([shard.labels for shard in shards])[self.position]
        self.rows = StackedTable([s.tables["x"] for s in shards]) if "x" in first.tables else None
        """The table of features by position; None if there are none."""

    def map_features(self, function: Callable[[Table], Table]) -> AllShards:
        copied = copy.copy(self)
        copied.rows = None if self.rows is None else function(self.rows)
        return copied

    @property
    def num_features(self) -> int:
        return 0 if self.rows is None else self.rows.shape[1]

    def shard(self, rank: int) -> Shard:
        """The shard of a rank. The shard that was open before is closed first, so that memory holds one."""
        if self._opened is None or self._opened.rank != rank:
            self._opened = None
            assert self.folder is not None
            self._opened = open_shard(self.folder, rank, split=self.split)
        return self._opened

    @cached_property
    def position(self) -> Tensor:
        """[num_nodes] int64: the position of each node id."""
        position = torch.empty_like(self.nodes)
        position[self.nodes] = torch.arange(self.num_nodes)
        return position

    def __repr__(self) -> str:
        return f"AllShards({self.name!r}, {self.num_shards} shards, {self.num_nodes:,} nodes, {self.num_edges:,} edges)"


def join_shards(folder: str | os.PathLike[str], *, split: int = 0) -> Dataset:
    """Open all shards of a folder as the dataset that was cut, in one process. Any method trains on it.

    Node ids, the order of edges, labels and splits are those of the dataset, so losses are the same too.
    Features are read from the shards when they are needed. Edges and labels are put together in memory: 4
    bytes per edge (8 above 2^31 nodes), the edge arrays, and 24 bytes per node. With a process per shard, use
    `hl.shards.open`.

    Args:
        folder: Made by `hl.shards.cut` or `hopline partition`, with all its shards.
        split: Which published split is the current one, for datasets that have several.

    Raises:
        ValueError: A shard is missing, or the shards are of several cuts.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4))
        >>> hl.shards.cut(data, "shards", 2, how="random")
        >>> joined = hl.shards.join("shards")
        >>> joined.graph.edge_index().tolist() == data.graph.edge_index().tolist()
        True
    """
    _, manifest, about = read_shard_record(folder)
    shards = open_shards(folder)
    first = shards[0]
    order = torch.cat([shard.nodes for shard in shards])
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    splits = []
    for k, names in enumerate(first.all_splits):
        splits.append({name: torch.cat([s.all_splits[k][name] for s in shards]).sort().values for name in names})
    data = Dataset(
        name=first.name,
        graph=_join_graphs(shards, order, about["num_edges"]),
        tables={name: _join_tables([s.tables[name] for s in shards], position) for name in first.tables},
        y=None if first.y is None else torch.cat([s.labels for s in shards])[position],
        splits=splits[0] if splits else {},
        alternatives=tuple(splits) if len(splits) > 1 else (),
        task=first.task,
        num_classes=first.num_classes,
        meta={key: value for key, value in manifest.meta.items() if key != SHARDS},
    )
    return data.with_split(split)


def _join_graphs(shards: Sequence[Shard], order: Tensor, num_edges: int) -> Graph:
    """The graph of all shards. order: [num_nodes] int64, the id of the node at each position.

    A shard's edge arrays are indexed by edge number (`Shard`), those of the graph by edge id.
    """
    num_nodes = order.numel()
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indices = torch.empty(num_edges, dtype=index_dtype(num_nodes))
    edge = {name: array.new_empty((num_edges, *array.shape[1:])) for name, array in shards[0].edge.items()}
    for shard in shards:
        indptr[shard.nodes + 1] = shard.indptr.diff()
        num_shard_edges = shard.edge_ids.numel()
        for start in range(0, num_shard_edges, CHUNK):
            edge_numbers = torch.arange(start, min(start + CHUNK, num_shard_edges))
            edge_ids = ops.gather_rows(shard.edge_ids, edge_numbers)
            indices[edge_ids] = order[shard.sources(edge_numbers)].to(indices.dtype)
            for name, array in shard.edge.items():
                edge[name][edge_ids] = ops.gather_rows(array, edge_numbers)
    return Graph(indptr.cumsum(0), indices, edge)


def _join_tables(tables: Sequence[Table], position: Tensor) -> Table:
    """One table by node id. Dense rows stay in the shards; sparse ones are put together in memory.

    position: [num_nodes] int64, by node id.
    """
    joined = StackedTable(tables, position)
    csr = joined.read_csr(torch.arange(position.numel()))
    return joined if csr is None else SparseTable(*csr, joined.shape[1])
