"""Exact inference on shards, layer by layer: each rank computes its own nodes, then sends the rows that others want."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.batch import Batch
from hopline.core.graph import PartialGraph
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.inference import evaluating, measure
from hopline.inference.layerwise_chunks import CHUNK_EDGES, Chunks
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import as_walkable
from hopline.shards.collective_sampler import CollectiveSampler, fetch
from hopline.shards.data import ShardedData
from hopline.shards.shard import Shard
from hopline.tables import SparseTable, Table, TensorTable
from hopline.util.config import parse_chunk_bytes

CHUNK = 1 << 22
"""Edges looked at in one go."""


class JoinedTable(Table):
    """Rows of one table, and behind them those of another, of which only some are there."""

    def __init__(self, first: Table, second: Table, known: Tensor, num_second: int) -> None:
        self.first, self.second, self.known, self.num_second = first, second, known, num_second
        # known: [len(second)] int64, ascending: the numbers of the second's rows among num_second.

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.first) + self.num_second, *self.first.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def read(self, ids: Tensor) -> Tensor:
        of_first = ids < len(self.first)
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        rows[of_first] = self.first.read(ids[of_first])
        rows[~of_first] = self.second.read(torch.searchsorted(self.known, ids[~of_first] - len(self.first)))
        return rows


def exact(
    model: nn.Module,
    shard: Shard,
    channel: Channel | None = None,
    rows: Tensor | None = None,
    *,
    chunk_edges: int = CHUNK_EDGES,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> Tensor:
    """The model's output for some of this rank's nodes (by row; all by default), over every edge: [n, ...].

    Every rank must call this, with rows of its own or none. Only what these rows need is computed, by whoever owns it,
    and only that travels. Memory is that of the hidden rows of the own nodes and of their sources,
    and of chunks as `hopline.inference.exact` has them.
    """
    most = parse_chunk_bytes(chunk_bytes)
    channel = Channel() if channel is None else channel
    walk = as_walkable(model)
    if not isinstance(walk, GNN):
        raise ValueError(f"{type(model).__name__} has no layers to compute one by one: build it as hl.nn.GNN([...])")
    walk.check_blocks(shard.num_features, shard.edge)
    with evaluating(walk):
        work = RankChunks(walk, shard, channel, chunk_edges, torch.device(device), most)
        rows = torch.arange(shard.num_own) if rows is None else rows
        # A rank that wants nothing computes a row all the same: from it, it learns how wide rows are.
        return work.run(rows if rows.numel() else torch.zeros(1, dtype=torch.int64), show)[: rows.numel()]


class _RemoteRows(NamedTuple):
    """Rows of others that a layer reads."""

    numbers: Tensor
    """[n] int64, ascending: among all nodes of others that edges lead from."""
    request: RowRequest


class RankChunks(Chunks):
    """The own nodes are 0 .. num_own - 1, and behind them come those of others that edges lead from, by owner."""

    by_graph_alone = False
    has_all_edges = False

    def __init__(
        self,
        model: GNN,
        shard: Shard,
        channel: Channel,
        chunk_edges: int,
        device: torch.device,
        chunk_bytes: int | None = None,
    ) -> None:
        self.shard, self.channel = shard, channel
        self.wanted: list[_RemoteRows] = []
        data = Dataset(name=shard.name, graph=_local(shard, channel))
        super().__init__(model, data, chunk_edges, device, chunk_bytes=chunk_bytes)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """Own nodes whose rows are needed after each layer, by this rank or another; first, all that the input is."""
        assert ids is not None
        layer_nodes, num_own = [ids.unique()], self.shard.num_own
        for _ in range(self.model.num_layers):
            sources = self._sources(layer_nodes[0])
            numbers = sources[sources >= num_own] - num_own
            request = RowRequest(self.channel, self.shard.ptr, self.shard.halo_positions[numbers])
            self.wanted.insert(0, _RemoteRows(numbers, request))
            layer_nodes.insert(0, torch.cat([sources[sources < num_own], request.rows]).unique())
        numbers = self.wanted[0].numbers
        if "x" in self.shard.tables:
            own = self.shard.tables["x"]
            rows = fetch(self.wanted[0].request, own)
            self.data.tables["x"] = _joined(own, rows, numbers, self.shard.halo_positions.numel())
        return [torch.cat([layer_nodes[0], numbers + num_own]), *layer_nodes[1:]]

    def _sources(self, rows: Tensor) -> Tensor:
        """The rows themselves and all that their edges lead from, ascending."""
        graph = self.data.graph
        marked = torch.zeros(graph.num_nodes, dtype=torch.bool)
        marked[rows] = True
        costs = (graph.in_degrees(rows) + 1).cumsum(0) // CHUNK
        for piece in rows.split(torch.bincount(costs).tolist()):
            marked[graph.indices[ops.row_positions(graph.indptr, piece)[1]].long()] = True
        return marked.nonzero().view(-1)

    def completed(self, l: int) -> None:
        """Fetch the rows of the next layer's sources that other ranks have computed."""
        if l == self.last:
            return
        del self.wanted[0]
        numbers, request = self.wanted[0]
        table = self.tables.of(l)
        home = table.rows.device
        rows = request.reply(table.read(request.rows.to(home)).cpu())
        table.write((numbers + self.shard.num_own).to(home), rows.to(home))


def _local(shard: Shard, channel: Channel) -> PartialGraph:
    """The own nodes with all their in-edges, and the sources of others."""
    request = RowRequest(channel, shard.ptr, shard.halo_positions)
    num_all = shard.num_own + shard.halo_positions.numel()
    first = torch.where(torch.arange(shard.num_shards) == shard.rank, 0, shard.num_own + shard.halo_ptr[:-1])
    indices = torch.empty(shard.at.numel(), dtype=index_dtype(num_all))
    for start in range(0, shard.at.numel(), CHUNK):
        at = shard.at[start : start + CHUNK].long()
        owner = torch.bucketize(at, shard.part_ptr[1:-1], right=True)
        indices[start : start + CHUNK] = (shard.src_idx[at] + first[owner]).to(indices.dtype)
    indptr = torch.full((num_all + 1,), int(shard.indptr[-1]))
    indptr[: shard.num_own + 1] = shard.indptr
    known = CollectiveSampler(shard, channel, (-1,))
    degrees, weights = shard.layout.degrees, known.weights
    return PartialGraph(
        indptr,
        indices,
        {name: ops.gather_rows(array, shard.at) for name, array in shard.edge.items()},
        ids=torch.arange(num_all),
        degrees=torch.cat([degrees, request.reply(degrees[request.rows])]),
        has_loops=known.has_loops,
        weights=None if weights is None else torch.cat([weights, request.reply(weights[request.rows])]),
    )


def _joined(own: Table, others: Table | Tensor, known: Tensor, num_others: int) -> Table:
    """Both as one table; sparse rows stay sparse."""
    if isinstance(own, SparseTable) and isinstance(others, SparseTable):
        counts = torch.zeros(num_others, dtype=torch.int64)
        counts[known] = others.indptr.diff()
        indptr = torch.cat([own.indptr, counts.cumsum(0) + own.indptr[-1]])
        columns, values = (torch.cat([getattr(own, name), getattr(others, name)]) for name in ("columns", "values"))
        return SparseTable(indptr, columns, values, own.num_columns)
    return JoinedTable(own, TensorTable(others) if isinstance(others, Tensor) else others, known, num_others)


def sampled(model: nn.Module, channel: Channel, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids, outputs, labels where there are some) of the seeds that this rank was dealt, over sampled edges."""
    found, walk = [], as_walkable(model)
    with evaluating(walk):
        for batch in batches:
            out = walk(batch).float().cpu() if batch.num_seeds else torch.empty(0, 0)
            found.append((batch.seeds.cpu(), out, batch.y))
    width = int(channel.max(torch.tensor([max(out.size(1) for _, out, _ in found)])))
    labels = [y.cpu() for _, _, y in found if y is not None]
    scores = torch.cat([out.view(-1, width) for _, out, _ in found])
    return torch.cat([ids for ids, _, _ in found]), scores, torch.cat(labels) if labels else None


def evaluate(
    model: nn.Module, data: ShardedData, split: str, batches: Iterable[Batch] | None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The metric of a split, the same on every rank: exact, or over sampled batches of its nodes."""
    shard, channel = data.shard, data.channel
    if batches is None:
        ids = shard.splits[split]
        rows = shard.rows_of(ids)
        scores, labels = exact(model, shard, channel, rows, device=device), shard.labels[rows]
    else:
        ids, scores, labels = sampled(model, channel, batches)
        assert labels is not None
    order = channel.all(ids).argsort()  # as one process has them, so that ties in a metric fall the same way
    return measure(data, channel.all(scores.float())[order], channel.all(labels)[order])
