"""A folder of shards as one dataset again, for a process that trains on all of them.

edges, edge arrays, labels, splits, sparse tables    put together in memory, in the dataset's order
dense tables (features)                              stay in the memory-mapped shards: `RowsOfShards`
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.data.store import SHARDS
from hopline.shards.shard import Shard, read_shard_record
from hopline.shards.verify import open_shards
from hopline.tables import SparseTable, Table
from hopline.tables.shareable import Shareable

CHUNK = 1 << 22
"""Edges that are copied at a time, which limits the memory of temporary arrays."""


class RowsOfShards(Shareable, Table):
    """One table over the same tables of all shards. Rows are read from the shards on every `read`.

    tables: by shard, with a row per own node.
    position: [num_nodes] int64, by node id: the node's number if the nodes of all shards are counted shard
        after shard.
    """

    def __init__(self, tables: Sequence[Table], position: Tensor) -> None:
        self.tables = list(tables)
        self.position = position
        self.stops = list(accumulate(len(table) for table in tables))

    def __reduce__(self) -> tuple[object, ...]:
        others = {"tables": self.tables, "stops": self.stops}
        return RowsOfShards.from_shared, (self.share_arrays("position"), others)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.position.numel(), *self.tables[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    @property
    def version(self) -> int | None:
        """The sum of the shards' versions: it changes with each of them. None if one of them has none."""
        total = 0
        for table in self.tables:
            version = table.version
            if version is None:
                return None
            total += version
        return total

    def read(self, ids: Tensor) -> Tensor:
        positions = self.position[ids]
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        first = 0
        for table, stop in zip(self.tables, self.stops, strict=True):
            is_in_shard = (positions >= first) & (positions < stop)
            idx = is_in_shard.nonzero().view(-1)
            if idx.numel():
                rows[idx] = table.read(positions[idx] - first)
            first = stop
        return rows


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
    sparse = [table for table in tables if isinstance(table, SparseTable)]
    if not sparse:
        return RowsOfShards(tables, position)
    counts = torch.cat([table.indptr.diff() for table in sparse])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    columns = torch.cat([table.columns for table in sparse])
    values = torch.cat([table.values for table in sparse])
    by_position = SparseTable(indptr, columns, values, sparse[0].num_columns)
    return SparseTable(*by_position.read_csr(position), by_position.num_columns)
