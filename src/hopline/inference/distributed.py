"""Exact inference with a shard per rank: each rank computes its own nodes, layer by layer, and sends rows of halos.

A rank numbers its own nodes 0 .. num_own - 1, and behind them the halo: nodes of other ranks that have an edge into
the shard, by owner. Before the first layer the ranks find out, from the output backwards, which rows are needed:

    own nodes needed after layer l  ->  their sources  ->  halo: ask the owners   (all-to-all)
                                                       ->  own, and asked for by others: needed after layer l - 1

Then each layer is computed over chunks of the own nodes. After it the ranks send the requested rows in one
all-to-all, into the halo's part of the table that the next layer reads. The features of the halo travel once, before
the first layer.

All calls here are collective: every rank must make them, in the same order.
"""

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
"""Edges per pass over the edge list, which bounds temporary memory. A rule of thumb."""


class JoinedTable(Table):
    """The rows of one table, and behind them num_second rows of which a second table holds some.

    Only rows that the second table holds may be read.
    """

    def __init__(self, first: Table, second: Table, known: Tensor, num_second: int) -> None:
        self.first, self.second, self.known, self.num_second = first, second, known, num_second
        # known: [len(second)] int64, ascending: which of the num_second rows the second table holds.

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
    """The model's output for some of this rank's nodes, over every edge: [n, num_outputs] on the host.

    Collective: every rank must call it, with rows of its own or with none. Only rows that the outputs depend on are
    computed, by the ranks that own them, and only those travel. Memory holds the embeddings of the own nodes and of
    the halo, and chunks as in `hopline.inference.exact`.

    rows: [n] int64, rows of the shard's own nodes; None for all of them.
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
        # A rank without rows computes one all the same: it tells the rank the width of the rows of each layer.
        return work.run(rows if rows.numel() else torch.zeros(1, dtype=torch.int64), show)[: rows.numel()]


class _RemoteRows(NamedTuple):
    """The halo rows that a layer reads, and the request by which they come."""

    numbers: Tensor
    """[n] int64, ascending: numbers of these rows in the halo."""
    request: RowRequest
    """The request to the owners of these rows. It also holds the own rows that other ranks ask for."""


class RankChunks(Chunks):
    """Exact inference of one rank. Own nodes are 0 .. num_own - 1, and behind them comes the halo, by owner.

    All ranks must run it at once, since `layer_nodes` and `completed` call an all-to-all.
    """

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
        """The halo rows of each layer that is still to be computed; `completed` removes the first."""
        data = Dataset(name=shard.name, graph=_local(shard, channel))
        super().__init__(model, data, chunk_edges, device, chunk_bytes=chunk_bytes)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """The own nodes whose rows are needed after each layer, by this rank or another. Entry 0: all input rows.

        Entry 0 has the own nodes and the halo that the first layer reads. Also fetches the halo's features.
        """
        assert ids is not None
        layer_nodes, num_own = [ids.unique()], self.shard.num_own
        for _ in range(self.model.num_layers):
            sources = self._sources(layer_nodes[0])
            numbers = sources[sources >= num_own] - num_own
            # Collective. `request.rows` are the own rows that other ranks need before this layer.
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
        """The nodes `rows` and their in-neighbours: ascending local numbers. Reads about `CHUNK` edges at a time."""
        graph = self.data.graph
        marked = torch.zeros(graph.num_nodes, dtype=torch.bool)
        marked[rows] = True
        costs = (graph.in_degrees(rows) + 1).cumsum(0) // CHUNK
        for piece in rows.split(torch.bincount(costs).tolist()):
            marked[graph.indices[ops.row_positions(graph.indptr, piece)[1]].long()] = True
        return marked.nonzero().view(-1)

    def completed(self, l: int) -> None:
        """Fetch the halo rows that the next layer reads, by one all-to-all with the ranks that computed them."""
        if l == self.last:
            return
        del self.wanted[0]
        numbers, request = self.wanted[0]
        table = self.tables.of(l)
        home = table.rows.device
        rows = request.reply(table.read(request.rows.to(home)).cpu())
        table.write((numbers + self.shard.num_own).to(home), rows.to(home))


def _local(shard: Shard, channel: Channel) -> PartialGraph:
    """The graph of one rank: own nodes with all their in-edges, then the halo without edges.

    Degrees and weights of the halo are those in the whole graph. The owners send them.
    """
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
    """The own rows and the fetched halo rows as one table. Sparse rows stay sparse.

    known: [len(others)] int64, ascending: the halo numbers of the fetched rows.
    """
    if isinstance(own, SparseTable) and isinstance(others, SparseTable):
        counts = torch.zeros(num_others, dtype=torch.int64)
        counts[known] = others.indptr.diff()
        indptr = torch.cat([own.indptr, counts.cumsum(0) + own.indptr[-1]])
        columns, values = (torch.cat([getattr(own, name), getattr(others, name)]) for name in ("columns", "values"))
        return SparseTable(indptr, columns, values, own.num_columns)
    return JoinedTable(own, TensorTable(others) if isinstance(others, Tensor) else others, known, num_others)


def sampled(model: nn.Module, channel: Channel, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids, outputs, labels) of the seeds of this rank's batches, over sampled edges. labels: None without labels.

    Collective. A rank without seeds learns the width of the outputs from the others.
    """
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
    """The metric of a split, equal on every rank. Collective. batches: sampled batches of the split; None: exact."""
    shard, channel = data.shard, data.channel
    if batches is None:
        ids = shard.splits[split]
        rows = shard.rows_of(ids)
        scores, labels = exact(model, shard, channel, rows, device=device), shard.labels[rows]
    else:
        ids, scores, labels = sampled(model, channel, batches)
        assert labels is not None
    # By node id, as a single process has them: ties in a metric are then broken in the same way.
    order = channel.all(ids).argsort()
    return measure(data, channel.all(scores.float())[order], channel.all(labels)[order])
