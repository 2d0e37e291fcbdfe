"""A folder of shards as one dataset again, for a process that trains on all of them."""

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
from hopline.shards.shard import Shard, read_about
from hopline.shards.verify import open_shards
from hopline.tables import SparseTable, Table
from hopline.tables.shareable import Shareable

CHUNK = 1 << 22
"""Edges put in their places at a time."""


class RowsOfShards(Shareable, Table):
    """The rows of all shards by node id, read from the shards when they are asked for.

    place: [num_nodes] int64: where each node is when all shards stand one behind the other.
    """

    def __init__(self, tables: Sequence[Table], place: Tensor) -> None:
        self.tables, self.place = list(tables), place
        self.ends = list(accumulate(len(table) for table in tables))
        """Where the rows of each shard end among all."""

    def __reduce__(self) -> tuple[object, ...]:
        others = {"tables": self.tables, "ends": self.ends}
        return RowsOfShards.from_shared, (self.share_arrays("place"), others)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.place.numel(), *self.tables[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    @property
    def version(self) -> int | None:
        versions = [table.version for table in self.tables]
        known = [version for version in versions if version is not None]
        return sum(known) if len(known) == len(versions) else None

    def read(self, ids: Tensor) -> Tensor:
        positions = self.place[ids]
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        first = 0
        for table, end in zip(self.tables, self.ends, strict=True):
            own = ((positions >= first) & (positions < end)).nonzero().view(-1)
            if own.numel():
                rows[own] = table.read(positions[own] - first)
            first = end
        return rows


def join_shards(folder: str | os.PathLike[str], *, split: int = 0) -> Dataset:
    """Open all shards of a folder as the dataset that was cut, in one process: any method trains on it.

    Node ids, the order of edges, labels and splits are those of the dataset, so its losses are too. Features are read
    from the shards when they are needed. Edges and labels are put together in memory: 4 bytes per edge (8 above 2^31
    nodes) with the edge arrays, and 24 bytes per node. With a process per shard, use `hl.shards.open`.

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
    _, manifest, about = read_about(folder)
    shards = open_shards(folder)
    first = shards[0]
    order = torch.cat([shard.nodes for shard in shards])
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    splits = tuple(
        {name: torch.cat([s.all_splits[k][name] for s in shards]).sort().values for name in one}
        for k, one in enumerate(first.all_splits)
    )
    data = Dataset(
        name=first.name,
        graph=_graph(shards, order, about["num_edges"]),
        tables={name: _table([s.tables[name] for s in shards], place) for name in first.tables},
        y=None if first.y is None else torch.cat([s.labels for s in shards])[place],
        splits=splits[0] if splits else {},
        alternatives=splits if len(splits) > 1 else (),
        task=first.task,
        num_classes=first.num_classes,
        meta={key: value for key, value in manifest.meta.items() if key != SHARDS},
    )
    return data.with_split(split)


def _graph(shards: Sequence[Shard], order: Tensor, num_edges: int) -> Graph:
    """order: [num_nodes] the node at each place."""
    num_nodes = order.numel()
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indices = torch.empty(num_edges, dtype=index_dtype(num_nodes))
    edge = {name: a.new_empty((num_edges, *a.shape[1:])) for name, a in shards[0].edge.items()}
    for shard in shards:
        indptr[shard.nodes + 1] = shard.indptr.diff()
        for start in range(0, shard.edge_ids.numel(), CHUNK):
            at = torch.arange(start, min(start + CHUNK, shard.edge_ids.numel()))
            ids = ops.gather_rows(shard.edge_ids, at)
            indices[ids] = order[shard.sources(at)].to(indices.dtype)
            for name, array in shard.edge.items():
                edge[name][ids] = ops.gather_rows(array, at)
    return Graph(indptr.cumsum(0), indices, edge)


def _table(tables: Sequence[Table], place: Tensor) -> Table:
    """Dense rows stay in the shards; sparse ones are put together."""
    sparse = [table for table in tables if isinstance(table, SparseTable)]
    if not sparse:
        return RowsOfShards(tables, place)
    counts = torch.cat([table.indptr.diff() for table in sparse])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    columns, values = (torch.cat([getattr(t, name) for t in sparse]) for name in ("columns", "values"))
    stacked = SparseTable(indptr, columns, values, sparse[0].num_columns)
    return SparseTable(*stacked.read_csr(place), stacked.num_columns)
