"""Exact inference on shards, layer by layer: each rank computes its own nodes, then sends the rows that others want."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.batch import Batch
from hopline.collective import CollectiveSampler, fetch
from hopline.data.dataset import Dataset
from hopline.exchange import Channel, Question
from hopline.infer import CHUNK_EDGES, Layerwise, Tables, evaluating, measure
from hopline.nn.gnn import GNN
from hopline.nn.whole import as_walkable
from hopline.partial import PartialGraph
from hopline.shard_data import ShardedData
from hopline.shards import Shard
from hopline.tables import Table, TensorTable


class JoinedTable(Table):
    """Rows of one table, and behind them those of another."""

    def __init__(self, first: Table, second: Table) -> None:
        self.first, self.second = first, second

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.first) + len(self.second), *self.first.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def read(self, ids: Tensor) -> Tensor:
        of_first = ids < len(self.first)
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        rows[of_first] = self.first.read(ids[of_first])
        rows[~of_first] = self.second.read(ids[~of_first] - len(self.first))
        return rows


def exact(
    model: nn.Module,
    shard: Shard,
    channel: Channel | None = None,
    *,
    chunk_edges: int = CHUNK_EDGES,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The model's output for this rank's nodes, over every edge: [num_own, ...]. Every rank must call this.

    Memory is that of the hidden rows of the own nodes and of those that their edges come from.
    """
    channel = Channel() if channel is None else channel
    walk = as_walkable(model)
    if not isinstance(walk, GNN):
        raise ValueError(f"{type(model).__name__} has no layers to compute one by one: build it as hl.nn.GNN([...])")
    walk.check_blocks()
    with evaluating(walk):
        work = _OnShard(walk, shard, channel, chunk_edges, torch.device(device))
        return work.run(torch.arange(shard.num_own), show=False)


class _OnShard(Layerwise):
    """The own nodes are 0 .. num_own - 1, and behind them come those of others that edges lead from, by owner."""

    def __init__(self, model: GNN, shard: Shard, channel: Channel, chunk_edges: int, device: torch.device) -> None:
        self.shard, self.channel = shard, channel
        super().__init__(model, _local(shard, channel), chunk_edges, device)

    def needed(self, ids: Tensor | None) -> list[Tensor]:
        own = torch.arange(self.shard.num_own)
        return [torch.arange(self.data.num_nodes), *[own] * self.model.num_layers]

    def completed(self, tables: Tables) -> Tables:
        """The same tables, with the rows that other ranks have computed."""
        layout, rank, size = self.shard.layout, self.channel.rank, self.channel.size
        assert isinstance(tables.h, TensorTable)
        # The layout speaks of rounds: shard r receives in round (r - rank), and sends in round (rank - r).
        wanted = [layout.sends[(r - rank) % size] if r != rank else torch.empty(0).long() for r in range(size)]
        giving, coming = [rows.numel() for rows in wanted], self.shard.halo_ptr.diff().tolist()
        home = tables.h.rows.device
        rows = self.channel.send(tables.h.read(torch.cat(wanted).to(home)).cpu(), giving, coming)
        tables.h.rows[self.shard.num_own :] = rows.to(home)
        return tables


def _local(shard: Shard, channel: Channel) -> Dataset:
    """The own nodes with all their in-edges, and the sources of others."""
    question = Question(channel, shard.ptr, shard.halo_places)
    num_all = shard.num_own + shard.halo_places.numel()
    at = shard.at.long()
    owner = torch.bucketize(at, shard.part_ptr[1:-1], right=True)
    first = torch.where(torch.arange(shard.num_shards) == shard.rank, 0, shard.num_own + shard.halo_ptr[:-1])
    indptr = torch.full((num_all + 1,), int(shard.indptr[-1]))
    indptr[: shard.num_own + 1] = shard.indptr
    known = CollectiveSampler(shard, channel, (-1,))
    degrees = shard.layout.degrees
    weights = known.weights
    graph = PartialGraph(
        indptr,
        ops.gather_rows(shard.src_idx, at) + first[owner],
        {name: ops.gather_rows(array, at) for name, array in shard.edge.items()},
        ids=torch.arange(num_all),
        degrees=torch.cat([degrees, question.answer(degrees[question.rows])]),
        has_loops=known.has_loops,
        weights=None if weights is None else torch.cat([weights, question.answer(weights[question.rows])]),
    )
    tables: dict[str, Table] = {}
    if "x" in shard.tables:
        tables["x"] = JoinedTable(shard.tables["x"], TensorTable(fetch(question, shard.tables["x"])))
    return Dataset(name=shard.name, graph=graph, tables=tables)


def evaluate(
    model: nn.Module, data: ShardedData, split: str, batches: Iterable[Batch] | None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The metric of a split, the same on every rank: exact, or over sampled batches of its nodes."""
    shard, channel = data.shard, data.channel
    if batches is None:
        ids = shard.splits[split]
        rows = shard.rows_of(ids)
        scores, labels = exact(model, shard, channel, device=device)[rows], shard.labels[rows]
    else:
        found = []
        with evaluating(as_walkable(model)):
            for batch in batches:
                out = as_walkable(model)(batch).cpu() if batch.num_seeds else torch.empty(0, data.num_outputs)
                found.append((batch.seeds.cpu(), out.float(), batch.labels.cpu()))
        ids, scores, labels = (torch.cat(rows) for rows in zip(*found, strict=True))
    order = channel.all(ids).argsort()  # as one process has them, so that ties in a metric fall the same way
    return measure(data, channel.all(scores.float())[order], channel.all(labels)[order])
