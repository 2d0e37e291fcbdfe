"""Neighbour sampling on a graph in shards: ranks ask the owners of nodes for in-edges, by all-to-all.

All ranks sample a batch at the same time, hop by hop. One hop on rank p:

    rank p                                              rank q, owner of some nodes (p itself too)
    nodes of the frontier, by owner   -- all-to-all ->  draw up to `fanout` in-edges of each node
    new nodes: the next frontier      <- all-to-all --  sources, edge arrays, edge ids, counts per node

After the last hop one more request goes to the owners of all nodes that were reached. They answer with ids
and degrees, and later, by `fetch`, with rows of tables.

Nodes are addressed by *position* (`Shard`), from which the owner follows. A node's draws depend on the key
of the hop and the node id alone, not on who asks. So the batch is the one that a single process with the
whole graph draws. An edge's *number* is its index in the edge arrays of its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph, PartialGraph
from hopline.core.laws import LaborLaw, Law, UniformLaw, WeightedLaw, are_weights, weights_of_draws, wrong_weights
from hopline.core.sampler import HopKey, hop_keys
from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.nn.gcn_norm import weights_of
from hopline.shards.shard import Shard, check_fits, node_ranges
from hopline.tables import SparseTable, Table
from hopline.util.config import check_fanouts, check_law

CHUNK = 1 << 22
"""Edges whose weights are summed at a time, to limit the memory of temporary arrays."""


class _Hop(NamedTuple):
    """One hop of a batch."""

    num_dst: int
    """Number of destinations: the nodes that were reached before this hop."""
    fanout: int
    """The most in-edges that were drawn per node; -1: all."""
    part: Part
    """The edges. Sources are local ids."""


class _SampledEdges(NamedTuple):
    """In-edges of some nodes, as their owners sent them."""

    indptr: Tensor
    """[num_nodes + 1] int64."""
    sources: Tensor
    """[num_edges] int64: positions."""
    edge_ids: Tensor | None
    """[num_edges] int64: positions in the dataset's edge arrays; None if they are not asked for."""
    edge: dict[str, Tensor]
    """[num_edges, ...] each, by name: rows of the edge arrays."""


class CollectiveSampler:
    """Samples blocks around seeds, like `NeighborSampler`, on a graph in shards, one per rank.

    Collective: every rank makes one, and calls `sample` as often as the others, with seeds of its own or
    none. The sample is the one that a single process with the whole graph draws. One thread at a time may
    call it.

    Args:
        shard: This rank's.
        channel: Between the ranks. Nothing else may use it while `sample` runs.
        fanouts: In-edges drawn per node and layer, that of the seeds first; -1 takes all.
        replace: Whether to draw neighbours with replacement.
        edge_ids: Whether parts have `edge_ids`.
        one_list: Whether a node has the same neighbours in all layers, for models that run on the union of
            the blocks.
        law: "uniform" or "labor", as in `hl.Sampled`.
        weight: Name of the edge array by which neighbours are drawn, as in `hl.Sampled`.

    Raises:
        ValueError: A fan-out or a law is not allowed, or shards and ranks do not fit together.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> hl.shards.cut(data, "shards", 1, how="range")
        >>> data = hl.shards.open("shards")
        >>> sampler = hl.shards.CollectiveSampler(data.shard, data.channel, [2, 2])
        >>> blocks, _, _ = sampler.sample(torch.tensor([1]), key=0)
        >>> blocks
        (Block(3 -> 2 nodes, 2 edges), Block(2 -> 1 nodes, 1 edges))
    """

    def __init__(
        self,
        shard: Shard,
        channel: Channel,
        fanouts: Sequence[int],
        *,
        replace: bool = False,
        edge_ids: bool = False,
        one_list: bool = False,
        law: str = "uniform",
        weight: str | None = None,
    ) -> None:
        check_fanouts(fanouts, replace)
        check_law(law, weight, replace)
        check_fits(shard, channel)
        self.shard = shard
        self.channel = channel
        self.fanouts = tuple(fanouts)
        self.replace = replace
        self.edge_ids = edge_ids
        self.one_list = one_list
        self._id_map = ops.new_id_map(shard.num_nodes, torch.device("cpu"))

        own_part = shard.layout.parts[0]  # the edges among own nodes, so it has all self-loops
        loops = ops.self_loops(own_part.indptr, own_part.src_idx)
        has_wrong_weights = weight is not None and not are_weights(weights_of_draws(shard.edge, weight))
        most_loops, is_wrong = channel.max(torch.tensor([loops.numel(), int(has_wrong_weights)])).tolist()
        if weight is not None and is_wrong:
            raise wrong_weights(weight)
        self.law = _law_of(shard, law, weight, replace)
        self.has_loops = most_loops > 0
        """Whether some node of the whole graph has an edge to itself."""
        self.has_loop = torch.zeros(shard.num_own, dtype=torch.bool)
        """[num_own] bool: whether each own node has an edge to itself."""
        self.has_loop[own_part.src_idx[loops].long()] = True
        needs_weights = self.has_loops or "weight" in shard.edge
        self.weights = weights_of_shard(shard) if needs_weights else None
        """[num_own, 3] float64: `PartialGraph.weights` of the own nodes; None if degrees say the same."""

    def sample(
        self, seeds: Tensor, key: int, draw_key: int | None = None
    ) -> tuple[tuple[Block, ...], RowRequest, RowRequest]:
        """Sample the blocks of a batch. Collective.

        seeds: [n] int64, distinct positions. key, draw_key: as in `NeighborSampler.sample`.

        Returns (blocks in the order of computation, a request for rows of the first block's sources, one
        for rows of the seeds). `fetch` turns a request into rows.
        """
        ptr = self.shard.ptr
        id_map = self._id_map
        hops: list[_Hop] = []
        try:
            id_map.add(seeds)
            # A repeated seed gets the local id that it has already, so the map stays smaller.
            if id_map.size != seeds.numel():
                raise ValueError("the seeds of a batch must be distinct: pass each node id once")
            positions = seeds
            seed_request = RowRequest(self.channel, ptr, seeds)
            request = seed_request
            draws = key if draw_key is None else draw_key
            keys = hop_keys(draws, len(self.fanouts), self.one_list, self.law.key_per_layer)
            for fanout, hop_key in zip(self.fanouts, keys, strict=True):
                sampled = self._request_edges(request, fanout, hop_key)
                part = Part(sampled.indptr, id_map.add(sampled.sources), sampled.edge, sampled.edge_ids)
                hops.append(_Hop(positions.numel(), fanout, part))
                positions = id_map.ids()
                request = RowRequest(self.channel, ptr, positions)
        finally:
            id_map.clear()

        ids, graph = self._request_degrees(request)
        # Local ids are in the order in which nodes were reached, so the sources of each block are the first
        # ones: as many as the destinations of the next hop, and in the last hop all.
        num_sources = [*(hop.num_dst for hop in hops[1:]), ids.numel()]
        blocks = []
        for hop, num_src in zip(hops, num_sources, strict=True):
            takes_all = hop.fanout < 0
            blocks.append(Block(ids[:num_src], hop.num_dst, (hop.part,), graph, key, in_graph_order=takes_all))
        return tuple(reversed(blocks)), request, seed_request

    def _request_edges(self, request: RowRequest, fanout: int, hop_key: HopKey) -> _SampledEdges:
        """Get in-edges of a request's nodes from their owners. Draws the edges that ranks ask of this one.

        `request.rows` are the own nodes that ranks, this one included, have asked for, as local rows.
        """
        shard = self.shard
        rows = request.rows
        # Draws are keyed by the node's id, which does not depend on the partition.
        nodes = ops.gather_rows(shard.nodes, rows)
        if hop_key.loops_apart:
            nodes = ops.draw_ids(nodes, ops.gather_rows(self.has_loop, rows))
        # Edge numbers stand where a graph has the sources of its edges, so the "neighbours" are edge numbers.
        drawn, of_law = self.law.draw(rows, fanout, hop_key.key, nodes)
        edge_numbers = drawn.ids.long()

        answers = [shard.sources(edge_numbers)]
        if self.edge_ids:
            answers.append(ops.gather_rows(shard.edge_ids, edge_numbers))
        answers += [ops.gather_rows(array, edge_numbers) for array in shard.edge.values()]
        answers += of_law.values()
        indptr, received = request.reply_lists(drawn.indptr.diff(), answers)

        sources, *edge_arrays = received
        edge_ids = edge_arrays.pop(0) if self.edge_ids else None
        return _SampledEdges(indptr, sources, edge_ids, dict(zip([*shard.edge, *of_law], edge_arrays, strict=True)))

    def _request_degrees(self, request: RowRequest) -> tuple[Tensor, PartialGraph]:
        """(global ids, degrees and sums of weights in the whole graph) of the nodes of a request."""
        shard = self.shard
        rows = request.rows
        columns = [ops.gather_rows(array, rows) for array in (shard.nodes, shard.layout.degrees)]
        ids, degrees = request.reply(torch.stack(columns, 1)).t().contiguous()
        weights = None if self.weights is None else request.reply(ops.gather_rows(self.weights, rows))
        return ids, PartialGraph.of(shard.edge, ids, degrees, self.has_loops, weights)


def _law_of(shard: Shard, law: str, weight: str | None, replace: bool) -> Law:
    """The law by which the edges of own nodes are drawn. What it draws are their numbers."""
    edge_numbers = shard.edge_numbers
    if weight is not None:
        return WeightedLaw(shard.indptr, edge_numbers, ops.gather_rows(shard.edge[weight], edge_numbers))
    if law == "labor":
        sources = shard.source_ids(edge_numbers.long())
        return LaborLaw(shard.indptr, edge_numbers, ops.edge_copies(shard.indptr, sources), sources)
    return UniformLaw(shard.indptr, edge_numbers, replace)


def weights_of_shard(shard: Shard) -> Tensor:
    """[num_own, 3] float64: `PartialGraph.weights` of the own nodes.

    Column 0: the sum of the weights of a node's in-edges. Column 1: that sum without its self-loop.
    Column 2: the weight of the self-loop, or NaN.
    """
    weights = torch.empty(shard.num_own, 3, dtype=torch.float64)
    for first, last in node_ranges(shard.indptr, CHUNK):
        start = int(shard.indptr[first])
        stop = int(shard.indptr[last])
        edge_numbers = shard.edge_numbers[start:stop].long()

        # A graph of these nodes alone. `weights_of` reads sources only to find self-loops, so one more node
        # may stand for all sources outside.
        num_nodes = last - first
        sources = shard.sources(edge_numbers) - shard.ptr[shard.rank] - first
        is_inside = (sources >= 0) & (sources < num_nodes)
        edge = {"weight": shard.edge["weight"][edge_numbers]} if "weight" in shard.edge else {}
        subgraph = Graph(shard.indptr[first : last + 1] - start, torch.where(is_inside, sources, num_nodes), edge)
        # With `add_loops`, `total` leaves the graph's own self-loops out, and `loop` has their weights.
        with_loops = weights_of(subgraph, add_loops=False, fill=0.0)
        without_loops = weights_of(subgraph, add_loops=True, fill=float("nan"))
        weights[first:last] = torch.stack([with_loops.total, without_loops.total, without_loops.loop], 1)
    return weights


def fetch(request: RowRequest, table: Table | Tensor) -> Table | Tensor:
    """The rows of a request's nodes: a tensor, or a `SparseTable` if the table is one. Collective.

    table: the rows of this rank's own nodes.
    """
    if isinstance(table, SparseTable):
        indptr, columns, values = table.read_csr(request.rows)
        starts, (columns, values) = request.reply_lists(indptr.diff(), [columns, values])
        return SparseTable(starts, columns, values, table.num_columns)
    rows = ops.gather_rows(table, request.rows) if isinstance(table, Tensor) else table.read(request.rows)
    return request.reply(rows)


def fetch_dense(request: RowRequest, table: Table | Tensor) -> Tensor:
    """The rows of a request's nodes as a dense tensor. Rows of a sparse table travel sparse. Collective."""
    rows = fetch(request, table)
    return rows if isinstance(rows, Tensor) else rows.read(torch.arange(len(rows)))
