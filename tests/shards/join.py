"""Shards put together again, to be compared with the dataset that was cut."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.data.store import SHARDS
from hopline.shards.shard import Shard, read_about
from hopline.shards.verify import open_shards
from hopline.tables import SparseTable, Table, TensorTable


def join_shards(folder: str | os.PathLike[str]) -> Dataset:
    """The dataset that was cut, in memory."""
    _, manifest, about = read_about(folder)
    shards = open_shards(folder)
    first = shards[0]
    splits = tuple(
        {name: torch.cat([s.all_splits[k][name] for s in shards]).sort().values for name in split}
        for k, split in enumerate(first.all_splits)
    )
    return Dataset(
        name=first.name,
        graph=_join_graph(shards, about["num_nodes"], about["num_edges"]),
        tables={name: _join_tables([s.tables[name] for s in shards], shards) for name in first.tables},
        y=None if first.y is None else _scatter([s.labels for s in shards], [s.nodes for s in shards]),
        splits=splits[0] if splits else {},
        alternatives=splits if len(splits) > 1 else (),
        task=first.task,
        num_classes=first.num_classes,
        meta={key: value for key, value in manifest.meta.items() if key != SHARDS},
    )


def _scatter(pieces: list[Tensor], places: list[Tensor]) -> Tensor:
    total = sum(piece.size(0) for piece in pieces)
    whole = pieces[0].new_empty((total, *pieces[0].shape[1:]))
    for piece, at in zip(pieces, places, strict=True):
        whole[at] = piece
    return whole


def _join_graph(shards: list[Shard], num_nodes: int, num_edges: int) -> Graph:
    order = torch.cat([shard.nodes for shard in shards])
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indices = torch.empty(num_edges, dtype=index_dtype(num_nodes))
    for shard in shards:
        indptr[shard.nodes + 1] = shard.indptr.diff()
        sources = order[shard.sources(torch.arange(shard.edge_ids.numel()))]
        indices[shard.edge_ids] = sources.to(indices.dtype)
    ids = [shard.edge_ids for shard in shards]
    edge = {name: _scatter([s.edge[name] for s in shards], ids) for name in shards[0].edge}
    return Graph(indptr.cumsum(0), indices, edge)


def _join_tables(tables: list[Table], shards: list[Shard]) -> Table:
    nodes = [shard.nodes for shard in shards]
    sparse = [table for table in tables if isinstance(table, SparseTable)]
    if not sparse:
        return TensorTable(_scatter([table.read(torch.arange(len(table))) for table in tables], nodes))
    counts = torch.cat([table.indptr.diff() for table in sparse])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    columns, values = (torch.cat([getattr(t, name) for t in sparse]) for name in ("columns", "values"))
    stacked = SparseTable(indptr, columns, values, sparse[0].num_columns)
    return SparseTable(*stacked.read_csr(torch.cat(nodes).argsort()), stacked.num_columns)
