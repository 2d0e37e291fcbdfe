"""Exact inference with a shard per rank: each rank computes its own nodes layer by layer, and sends halo rows.

A rank numbers its own nodes 0 .. num_own - 1, and behind them the halo: nodes of other ranks that have an
edge into the shard, by owner. Before the first layer the ranks find out, from the output backwards, which
rows are needed:

    own nodes needed after layer l  ->  their sources in the halo: request them of the owners (all-to-all)
                                    ->  their own sources, and own nodes that other ranks request:
                                        own nodes needed after layer l - 1

Then each layer is computed over chunks of the own nodes. After it the ranks send the requested rows in one
all-to-all, into the halo's part of the table that the next layer reads. The features of the halo travel
once, before the first layer.

All calls here are collective: every rank must make them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.core.graph import PartialGraph
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.device.snapshots import evaluating
from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.inference.layerwise_chunks import CHUNK_EDGES, Chunks
from hopline.nn.layered import Layered
from hopline.nn.whole_module import as_batch_model
from hopline.shards.collective_sampler import CollectiveSampler, fetch
from hopline.shards.data import ShardedData
from hopline.shards.shard import Shard
from hopline.tables import Table, TensorTable
from hopline.tables.stacked import StackedTable
from hopline.tasks.task import Task
from hopline.util.config import parse_chunk_bytes

CHUNK = 1 << 22
"""Edges per pass over the edge list, which bounds temporary memory."""


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

    Collective: every rank must call it. Only rows that the outputs depend on are computed, by the ranks
    that own them, and only those travel. Memory holds the embeddings of the own nodes and of the halo, and
    chunks as in `hopline.inference.exact`.

    rows: [n] int64, local numbers of the own nodes to compute, may be empty. None: all own nodes.
    """
    max_bytes = parse_chunk_bytes(chunk_bytes)
    channel = Channel() if channel is None else channel
    batch_model = as_batch_model(model)
    if not isinstance(batch_model, Layered):
        raise ValueError(f"{type(model).__name__} has no layers to compute one by one: build it as hl.nn.GNN([...])")
    batch_model.check_blocks(shard.num_features, shard.edge)
    with evaluating(batch_model):
        work = RankChunks(batch_model, shard, channel, chunk_edges, torch.device(device), chunk_bytes=max_bytes)
        rows = torch.arange(shard.num_own) if rows is None else rows
        # A rank without rows computes one all the same, to learn the width of each layer's rows.
        computed_rows = rows if rows.numel() else torch.zeros(1, dtype=torch.int64)
        return work.run(computed_rows, show)[: rows.numel()]


class _RemoteRows(NamedTuple):
    """The halo rows that a layer reads, and the request by which they come."""

    numbers: Tensor
    """[n] int64, ascending: numbers of these rows in the halo, counted from 0."""
    request: RowRequest
    """The request to the owners of these rows. It also holds the own rows that other ranks ask for."""


class RankChunks(Chunks):
    """Exact inference of one rank. Own nodes are 0 .. num_own - 1, and behind them comes the halo, by owner.

    All ranks must run it at once, since `layer_nodes` and `on_layer_end` call an all-to-all.
    """

    depends_on_graph_alone = False  # other ranks' requests decide too which nodes a layer computes
    has_all_edges = False  # `data.graph` has the in-edges of own nodes only

    def __init__(
        self,
        model: Layered,
        shard: Shard,
        channel: Channel,
        chunk_edges: int,
        device: torch.device,
        chunk_bytes: int | None = None,
    ) -> None:
        self.shard = shard
        self.channel = channel
        self._halo_rows: list[_RemoteRows] = []
        """The halo rows that each layer reads, from the current layer on. `on_layer_end` removes the first."""
        data = Dataset(name=shard.name, graph=_local_graph(shard, channel))
        super().__init__(model, data, chunk_edges, device, chunk_bytes=chunk_bytes)

    def layer_nodes(self, ids: Tensor | None) -> list[Tensor]:
        """The own nodes whose rows this or another rank needs before each layer; last, the output nodes.

        Entry 0 also has the halo nodes that the first layer reads. Their features are fetched here.
        """
        assert ids is not None
        num_own = self.shard.num_own
        layer_nodes = [ids.unique()]
        for _ in range(self.model.num_layers):
            sources = self.with_sources(layer_nodes[0])
            halo_numbers = sources[sources >= num_own] - num_own
            # Collective. `request.rows` are the own rows that other ranks need before this layer.
            request = RowRequest(self.channel, self.shard.ptr, self.shard.halo_positions[halo_numbers])
            self._halo_rows.insert(0, _RemoteRows(halo_numbers, request))
            layer_nodes.insert(0, torch.cat([sources[sources < num_own], request.rows]).unique())

        halo_numbers, request = self._halo_rows[0]
        if "x" in self.shard.tables:
            own_x = self.shard.tables["x"]
            halo_x = fetch(request, own_x)
            self.data.tables["x"] = _join_tables(own_x, halo_x, halo_numbers, self.shard.halo_positions.numel())
        return [torch.cat([layer_nodes[0], halo_numbers + num_own]), *layer_nodes[1:]]

    def on_layer_end(self, l: int) -> None:
        """Fetch the halo rows that the next layer reads, by one all-to-all with the ranks that computed
        them."""
        if l == self.last:
            return
        del self._halo_rows[0]  # those that layer l has read
        halo_numbers, request = self._halo_rows[0]
        table = self.tables.of(l)
        device = table.rows.device
        halo_rows = request.reply(table.read(request.rows.to(device)).cpu())
        table.write((halo_numbers + self.shard.num_own).to(device), halo_rows.to(device))


def _local_graph(shard: Shard, channel: Channel) -> PartialGraph:
    """The graph of one rank: own nodes with all their in-edges, then the halo without edges.

    Degrees and weights of the halo are those in the whole graph. The owners send them.
    """
    request = RowRequest(channel, shard.ptr, shard.halo_positions)
    num_nodes = shard.num_own + shard.halo_positions.numel()

    # `src_idx` numbers the sources of each owner from 0. Local numbers add the number of the owner's first
    # node: own nodes begin at 0, and the halo nodes of each other owner somewhere behind them.
    first_of_owner = shard.num_own + shard.halo_ptr[:-1]
    first_of_owner[shard.rank] = 0
    indices = torch.empty(shard.edge_numbers.numel(), dtype=index_dtype(num_nodes))
    # Edges are numbered by the owner of their source, those of owner s from `part_ptr[s]` on. `edge_numbers` lists
    # these numbers by destination.
    for start in range(0, shard.edge_numbers.numel(), CHUNK):
        edges = shard.edge_numbers[start : start + CHUNK].long()
        owner = torch.bucketize(edges, shard.part_ptr[1:-1], right=True)
        indices[start : start + CHUNK] = (shard.src_idx[edges] + first_of_owner[owner]).to(indices.dtype)
    # The halo has no in-edges, so its offsets all are the end of the own nodes' edges.
    indptr = torch.full((num_nodes + 1,), int(shard.indptr[-1]))
    indptr[: shard.num_own + 1] = shard.indptr

    # The sampler draws nothing here: it finds out whether any rank has self-loops, and sums edge weights. The
    # order of the collective calls is the same on all ranks: the sampler's, degrees, weights.
    sampler = CollectiveSampler(shard, channel, (-1,))
    degrees = shard.layout.degrees
    degrees = torch.cat([degrees, request.reply(degrees[request.rows])])
    weights = sampler.weights
    if weights is not None:
        weights = torch.cat([weights, request.reply(weights[request.rows])])
    return PartialGraph(
        indptr,
        indices,
        {name: ops.gather_rows(array, shard.edge_numbers) for name, array in shard.edge.items()},
        ids=torch.arange(num_nodes),
        degrees=degrees,
        has_loops=sampler.has_loops,
        weights=weights,
    )


def _join_tables(own: Table, halo: Table | Tensor, halo_numbers: Tensor, num_halo: int) -> Table:
    """The own rows and the fetched halo rows as one table. Sparse rows stay sparse.

    halo_numbers: [len(halo)] int64, ascending: the halo numbers of the fetched rows.
    """
    halo_table = TensorTable(halo) if isinstance(halo, Tensor) else halo
    order = torch.full((len(own) + num_halo,), -1)
    order[: len(own)] = torch.arange(len(own))
    order[len(own) + halo_numbers] = len(own) + torch.arange(len(halo_table))
    return StackedTable([own, halo_table], order)


def sampled(model: nn.Module, channel: Channel, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids, outputs, labels) of the examples of this rank's batches, over sampled edges. labels: None without
    labels.

    Collective. A rank without seeds learns the width of the outputs from the others: its own output has no
    rows and no columns until then.
    """
    batch_model = as_batch_model(model)
    ids: list[Tensor] = []
    outputs: list[Tensor] = []
    labels: list[Tensor] = []
    with evaluating(batch_model):
        for batch in batches:
            ids.append(batch.example_ids.cpu())
            outputs.append(batch_model(batch).float().cpu() if batch.num_seeds else torch.empty(0, 0))
            if batch.y is not None:
                labels.append(batch.y.cpu())
    width = int(channel.max(torch.tensor([max(rows.size(1) for rows in outputs)])))
    scores = torch.cat([rows.view(-1, width) for rows in outputs])
    return torch.cat(ids), scores, torch.cat(labels) if labels else None


def evaluate(
    model: nn.Module,
    data: ShardedData,
    task: Task,
    examples: Examples,
    batches: Iterable[Batch] | None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """The metric of a task at some examples, equal on every rank.

    Collective. batches: sampled batches of the examples; None: exact.
    """
    shard = data.shard
    channel = data.channel
    if batches is None:
        ids = examples.nodes[torch.isin(examples.nodes, shard.nodes)]
        rows = shard.rows_of(ids)
        scores = exact(model, shard, channel, rows, device=device)
        labels = None if examples.y is not None else shard.labels[rows]
    else:
        ids, scores, labels = sampled(model, channel, batches)
    # By node id, as a single process has them: ties in a metric are then broken in the same way.
    order = channel.all_gather(ids).argsort(stable=True)
    if examples.y is not None:
        all_labels = examples.y[examples.nodes.argsort(stable=True)]
    else:
        assert labels is not None
        all_labels = channel.all_gather(labels)[order]
    return task.measure(channel.all_gather(scores.float())[order], all_labels)
