"""Exact inference over shards in one process, for graphs larger than memory.

A node's *position* is its index when the rows of all shards stand one behind the other. Inference numbers
nodes by position. The nodes of a shard are then contiguous, and the chunks of a layer go through one shard
after the other:

    shard 0 (opened)  ->  chunks of its nodes  ->  rows into the layer's table
    shard 1 (opened)  ->  ...

Only one shard's edges are open at a time. Features are read from all shards. In memory are the embeddings
between two layers (with `folder` in mapped files), one chunk, and some 40 bytes per node.

Sources of a chunk may be in any shard. Their embeddings come from the layer's table, which holds all nodes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph, PartialGraph
from hopline.core.row_handles import Rows
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset
from hopline.device.snapshots import evaluating
from hopline.inference.exact_inference import check_node_ids, identity
from hopline.inference.layerwise_chunks import CPU, Chunks
from hopline.inference.resumable import LayerFiles
from hopline.inference.without_layers import ReadRows
from hopline.nn.layered import Layered
from hopline.nn.whole_module import as_batch_model
from hopline.shards.all_shards import RowsOfShards
from hopline.shards.collective_sampler import weights_of_shard
from hopline.shards.data import copy_with, refuse_change
from hopline.shards.shard import ADVICE, Shard, open_shard, read_shard_record
from hopline.tables import Table
from hopline.util.config import parse_chunk_bytes

CHUNK = 1 << 22
"""In-edges per chunk when sources are marked (`ShardChunks._with_sources`)."""


class StackedTable(Table):
    """The rows of several tables, one behind the other, as one table."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.ptr = torch.tensor([0, *map(len, tables)]).cumsum(0)  # [num_tables + 1] int64: first row of each table

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.ptr[-1]), *self.tables[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    def _by_table(self, ids: Tensor) -> list[_TableRows]:
        """The rows `ids`, grouped by table. Tables without any of them are left out."""
        table_of = torch.bucketize(ids, self.ptr[1:-1], right=True)
        group_ptr, order = ops.group_by_key(table_of, len(self.tables))
        group_sizes = group_ptr.diff().tolist()
        row_groups = (ids - self.ptr[table_of])[order].split(group_sizes)
        position_groups = order.split(group_sizes)
        groups = map(_TableRows, self.tables, row_groups, position_groups)
        return [group for group in groups if group.rows.numel()]

    def read(self, ids: Tensor) -> Tensor:
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        for group in self._by_table(ids):
            rows[group.positions] = group.table.read(group.rows)
        return rows

    def read_csr(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        # Without ids the first table tells whether rows are sparse, and their dtypes.
        groups = self._by_table(ids) or [_TableRows(self.tables[0], ids, ids)]
        counts: list[Tensor] = []
        columns: list[Tensor] = []
        values: list[Tensor] = []
        for group in groups:
            csr = group.table.read_csr(group.rows)
            if csr is None:
                return None
            group_indptr, group_columns, group_values = csr
            counts.append(group_indptr.diff())
            columns.append(group_columns)
            values.append(group_values)

        # Rows come grouped by table. The inverse of `order` brings them back into the order of `ids`.
        order = torch.cat([group.positions for group in groups])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        grouped_counts = torch.cat(counts)
        grouped_indptr = torch.cat([grouped_counts.new_zeros(1), grouped_counts.cumsum(0)])
        indptr, positions = ops.row_entries(grouped_indptr, inverse)
        return indptr, torch.cat(columns)[positions], torch.cat(values)[positions]


class _TableRows(NamedTuple):
    """Rows of one table of a `StackedTable`."""

    table: Table
    rows: Tensor
    """[n] int64: numbers of the rows in `table`."""
    positions: Tensor
    """[n] int64: positions of these rows among the ids that were asked for."""


class AllShards(Dataset):
    """A dataset in shards that one process has all of.

    Sizes, splits and features of all shards are open all the time. Edges are open of one shard at a time
    (`shard`), so one thread at a time may read them. The property `graph` raises a ValueError.

    split: which published split is the current one, for datasets that have several.
    """

    def __init__(self, folder: str | os.PathLike[str], *, split: int = 0) -> None:
        self.folder, _manifest, record = read_shard_record(folder)
        self.split = split
        self.num_shards = record["num_shards"]
        self._opened: Shard | None = None
        shards = [open_shard(self.folder, rank, split=split) for rank in range(self.num_shards)]
        first = shards[0]
        for shard in shards:
            if shard.cut != first.cut or shard.num_shards != self.num_shards:
                raise ValueError(f"shards 0 and {shard.rank} in {folder} are of different cuts: {ADVICE}")
        self.name = first.name
        self.task = first.task
        self.num_classes = first.num_classes
        self.cut = first.cut  # a hash of the dataset and its partition
        # Of the tables it has only the ids that nodes had in their file. Features are in `rows`.
        self.tables = {}
        self.alternatives = ()
        self.meta = first.meta
        self._edge_arrays = first.edge
        self.splits = {name: torch.cat([s.splits[name] for s in shards]).sort().values for name in first.splits}
        self.ptr = first.ptr  # [num_shards + 1] int64: the first position of each shard
        self._num_edges = first.num_edges
        self.nodes = torch.cat([shard.nodes for shard in shards])
        """[num_nodes] int64: the node id at each position."""
        position = self.nodes.argsort()
        self.y = None if first.y is None else torch.cat([shard.labels for shard in shards])[position]
        if "node_ids" in first.tables:
            self.tables["node_ids"] = RowsOfShards([shard.tables["node_ids"] for shard in shards], position)
        self.rows = StackedTable([s.tables["x"] for s in shards]) if "x" in first.tables else None
        """The table of features by position; None if there are none."""

    @property
    def x(self) -> Table:
        """Refused: features are in the shards."""
        raise refuse_change(self)

    @property
    def edge_arrays(self) -> Mapping[str, Tensor]:
        return self._edge_arrays

    @property
    def is_symmetric(self) -> bool | None:
        return True if self.meta.get("symmetric") is True else None

    def with_fields(self, **fields: Any) -> AllShards:
        return copy_with(self, fields)

    def map_features(self, function: Callable[[Table], Table]) -> AllShards:
        copied = copy.copy(self)
        copied.rows = None if self.rows is None else function(self.rows)
        return copied

    def contents(self) -> dict[str, str]:
        """The hash that all shards of one cut share. It stands for the arrays of the whole dataset."""
        return {"cut": self.cut}

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        raise ValueError(
            f"dataset {self.name!r} is in shards, and this needs the whole graph: open the dataset that was "
            f"partitioned, or start one process per shard (devices={self.num_shards})"
        )

    @property
    def num_nodes(self) -> int:
        return self.nodes.numel()

    @property
    def num_edges(self) -> int:
        return self._num_edges

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


class _ByPosition(PartialGraph):
    """Degrees and weights of all nodes, by position, without edges. Edges are read shard by shard.

    A node's number is its position, so there is nothing to look up.
    """

    def _positions(self, ids: Tensor) -> Tensor:
        return ids.cpu()


def _graph_of(data: AllShards) -> _ByPosition:
    """The graph of a `ShardChunks`: degrees and sums of edge weights (`PartialGraph.weights`) of all nodes."""
    has_loops = False
    degrees = []
    for rank in range(data.num_shards):
        shard = data.shard(rank)
        own_part = shard.layout.parts[0]
        has_loops = has_loops or ops.self_loops(own_part.indptr, own_part.src_idx).numel() > 0
        degrees.append(shard.layout.degrees)
    weights = []
    if has_loops or "weight" in data.shard(0).edge:
        weights = [weights_of_shard(data.shard(rank)) for rank in range(data.num_shards)]
    return _ByPosition(
        torch.zeros(1, dtype=torch.int64).expand(data.num_nodes + 1),  # no edges, and one number in memory
        torch.zeros(0, dtype=torch.int64),
        {name: rows[:0] for name, rows in data.shard(0).edge.items()},
        ids=torch.zeros(0, dtype=torch.int64),
        degrees=torch.cat(degrees),
        has_loops=has_loops,
        weights=torch.cat(weights) if weights else None,
    )


class ShardChunks(Chunks):
    """Exact inference over shards. Nodes are numbered by position, and no chunk has nodes of two shards.

    Chunks in ascending order thus open each shard once per layer.
    """

    depends_on_graph_alone = False  # `data.graph` has no edges from which the nodes of a layer would follow
    has_all_edges = False

    def __init__(
        self,
        model: Layered,
        shards: AllShards,
        chunk_edges: int | None,
        device: torch.device,
        chunk_bytes: int | None,
        files: LayerFiles | None,
    ) -> None:
        self.shards = shards
        data = Dataset(name=shards.name, graph=_graph_of(shards))
        if shards.rows is not None:
            data.tables["x"] = shards.rows
        super().__init__(model, data, chunk_edges, device, chunk_bytes=chunk_bytes, files=files)
        self.id_map = ops.new_id_map(shards.num_nodes, CPU)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        if ids is None:
            return [torch.arange(self.data.num_nodes)] * (self.model.num_layers + 1)
        # From the output backwards: a layer reads its own nodes and their in-neighbours.
        layer_nodes = [ids.unique()]
        for _ in range(self.model.num_layers):
            nodes = layer_nodes[0]
            if nodes.numel() < self.data.num_nodes:
                nodes = self._with_sources(nodes)
            layer_nodes.insert(0, nodes)
        return layer_nodes

    def _with_sources(self, positions: Tensor) -> Tensor:
        """Some nodes and all their in-neighbours: ascending positions."""
        is_source = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        is_source[positions] = True
        for chunk in self.chunks(positions, CHUNK):
            _indptr, sources, _edge_arrays = self._edges(chunk)
            is_source[sources] = True
        return is_source.nonzero().view(-1)

    def _shard_of(self, positions: Tensor) -> Shard:
        """The shard of these positions, which must all be of one shard."""
        rank = int(torch.searchsorted(self.shards.ptr, positions[0], right=True)) - 1
        return self.shards.shard(rank)

    def _edges(self, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(indptr, positions of the sources, edge arrays) of the in-edges of nodes of one shard."""
        # `shard.edge_numbers` lists the numbers of the shard's edges by destination. `entries` are indices into it.
        shard = self._shard_of(positions)
        indptr, entries = ops.row_entries(shard.indptr, positions - shard.ptr[shard.rank])
        edges = ops.gather_rows(shard.edge_numbers, entries).long()
        edge_arrays = {name: ops.gather_rows(rows, edges) for name, rows in shard.edge.items()}
        return indptr, shard.sources(edges), edge_arrays

    def block(self, nodes: Tensor) -> Block:
        indptr, sources, edge = self._edges(nodes)
        try:
            self.id_map.add(nodes)
            src_idx = self.id_map.add(sources)
            src_ids = self.id_map.ids()
        finally:
            self.id_map.clear()
        return Block(src_ids, nodes.numel(), (Part(indptr, src_idx, edge),), self.data.graph)

    def _by_shard(self, nodes: Tensor) -> list[Tensor]:
        """Ascending positions, divided by shard. Shards without any of them are left out."""
        bounds = torch.searchsorted(nodes, self.shards.ptr)
        return [group for group in nodes.split(bounds.diff().tolist()) if group.numel()]

    def probe_nodes(self, nodes: Tensor) -> Tensor:
        """A few nodes of one shard, at which a layer's memory is measured."""
        largest_group = max(self._by_shard(nodes), key=len)
        probed = super().probe_nodes(largest_group)
        self._shard_of(probed)  # opened now, so that the probe does not measure the opening of a shard
        return probed

    def chunks(self, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        """Chunks of nodes as in `Chunks.chunks`, none of which has nodes of two shards."""
        chunks: list[Tensor] = []
        for group in self._by_shard(nodes):
            chunks += super().chunks(group, chunk_edges)
        return chunks


def exact_rows(
    model: nn.Module,
    data: AllShards,
    ids: NodeIds | str | None = None,
    *,
    chunk_edges: int | None = None,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    folder: Path | str | None = None,
) -> ReadRows:
    """Compute as `hopline.inference.exact_rows` does, over shards.

    Returns a function from node ids to output rows.

    In memory are the embeddings between two layers (with `folder` in mapped files instead), a chunk, and
    some 40 bytes per node. Features and edges are read from the shards.
    """
    ids = check_node_ids(data, ids)
    max_bytes = parse_chunk_bytes(chunk_bytes)
    batch_model = as_batch_model(model)
    if not isinstance(batch_model, Layered):
        raise ValueError(f"{type(model).__name__} has no layers to compute one by one: build it as hl.nn.GNN([...])")
    batch_model.check_blocks(data.num_features, data.shard(0).edge)
    files = None
    if folder is not None:
        contents = {"cut of the dataset": data.cut}
        files = LayerFiles(Path(folder), identity(model, contents, ids, chunk_edges, max_bytes))
    with evaluating(batch_model):
        work = ShardChunks(batch_model, data, chunk_edges, torch.device(device), chunk_bytes=max_bytes, files=files)
        outputs = work.outputs(None if ids is None else data.position[ids], show)
    return lambda node_ids: Rows(outputs, data.position[node_ids]).read_on(CPU)
