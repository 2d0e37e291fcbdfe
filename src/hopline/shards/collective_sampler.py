"""Neighbour sampling on a graph in shards: every rank asks the owners for edges and rows, all at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph, PartialGraph
from hopline.core.sampler import hop_keys
from hopline.distributed.all_to_all import Channel, RowRequest
from hopline.nn.gcn_norm import weights_of
from hopline.ops.cpu.sampling import sample_children
from hopline.shards.shard import Shard, check_fits, node_ranges
from hopline.tables import SparseTable, Table
from hopline.util.config import check_fanouts

CHUNK = 1 << 22
"""Edges whose weights are summed at a time."""


class _Hop(NamedTuple):
    """The edges of one layer, as they come back."""

    num_dst: int
    fanout: int
    part: Part


class _SampledEdges(NamedTuple):
    indptr: Tensor
    sources: Tensor
    edge_ids: Tensor | None
    edge: dict[str, Tensor]


class CollectiveSampler:
    """Seeds to blocks, as `NeighborSampler`, where each rank has one shard of the graph.

    Every rank must call `sample` as often as the others, with seeds of its own or none. A node's sample depends on
    (key, pair of layers, node) alone and is drawn by its owner, so it is the one that a single process with the whole
    graph draws.

    Args:
        shard: This rank's.
        channel: Between the ranks. Nothing else may use it meanwhile.
        fanouts: In-edges drawn per node and layer, the seeds' own first; -1 takes all.
        replace: Draw neighbours with replacement.
        edge_ids: Whether parts have `edge_ids`.
        one_list: A node has one neighbour list in all layers, for models that run on the union of the blocks.

    Raises:
        ValueError: A fan-out is not allowed, or shards and ranks do not fit together.

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
    ) -> None:
        check_fanouts(fanouts, replace)
        check_fits(shard, channel)
        self.shard = shard
        self.channel = channel
        self.fanouts = tuple(fanouts)
        self.replace = replace
        self.edge_ids = edge_ids
        self.one_list = one_list
        self._id_map = ops.new_id_map(shard.num_nodes, torch.device("cpu"))

        own_part = shard.layout.parts[0]
        num_loops = ops.self_loops(own_part.indptr, own_part.src_idx).numel()
        self.has_loops = bool(channel.max(torch.tensor([num_loops])) > 0)
        needs_weights = self.has_loops or "weight" in shard.edge
        self.weights = weights_of_shard(shard) if needs_weights else None
        """[num_own, 3] what `PartialGraph.weights` says of the own nodes, where it must say something."""

    def sample(self, seeds: Tensor, key: int) -> tuple[tuple[Block, ...], RowRequest, RowRequest]:
        """(blocks, questions for rows of the first one's sources and of the seeds). seeds: places, each once."""
        ptr = self.shard.ptr
        id_map = self._id_map
        hops: list[_Hop] = []
        try:
            id_map.add(seeds)
            if id_map.size != seeds.numel():
                raise ValueError("the seeds of a batch must be distinct: pass each node id once")
            positions = seeds
            seed_request = RowRequest(self.channel, ptr, seeds)
            request = seed_request
            keys = hop_keys(key, len(self.fanouts), self.one_list)
            for fanout, hop_key in zip(self.fanouts, keys, strict=True):
                sampled = self._request_edges(request, fanout, int(hop_key))
                part = Part(sampled.indptr, id_map.add(sampled.sources), sampled.edge, sampled.edge_ids)
                hops.append(_Hop(positions.numel(), fanout, part))
                positions = id_map.ids()
                request = RowRequest(self.channel, ptr, positions)
        finally:
            id_map.clear()

        ids, graph = self._request_degrees(request)
        num_sources = [*(hop.num_dst for hop in hops[1:]), ids.numel()]
        blocks = []
        for hop, num_src in zip(hops, num_sources, strict=True):
            takes_all = hop.fanout < 0
            blocks.append(Block(ids[:num_src], hop.num_dst, (hop.part,), graph, key, in_graph_order=takes_all))
        return tuple(reversed(blocks)), request, seed_request

    def _request_edges(self, request: RowRequest, fanout: int, key: int) -> _SampledEdges:
        """(indptr, [places of the sources, edge ids, rows of each edge array]) of the in-edges of some nodes."""
        shard = self.shard
        rows = request.rows
        if fanout < 0:
            starts, edges = ops.row_positions(shard.indptr, rows)
            counts = starts.diff()
            numbers = ops.gather_rows(shard.at, edges).long()
        else:
            nodes = ops.gather_rows(shard.nodes, rows)
            children = sample_children(shard.indptr, shard.at, rows, nodes, fanout, key, self.replace)
            counts = children.counts.long()
            is_drawn = torch.arange(fanout) < counts[:, None]
            numbers = children.ids[is_drawn].long()

        answers = [shard.sources(numbers)]
        if self.edge_ids:
            answers.append(ops.gather_rows(shard.edge_ids, numbers))
        answers += [ops.gather_rows(array, numbers) for array in shard.edge.values()]
        indptr, received = request.reply_lists(counts, answers)

        sources, *edge_arrays = received
        edge_ids = edge_arrays.pop(0) if self.edge_ids else None
        return _SampledEdges(indptr, sources, edge_ids, dict(zip(shard.edge, edge_arrays, strict=True)))

    def _request_degrees(self, request: RowRequest) -> tuple[Tensor, PartialGraph]:
        """The ids of some nodes, and what is known of them."""
        shard = self.shard
        rows = request.rows
        columns = [ops.gather_rows(array, rows) for array in (shard.nodes, shard.layout.degrees)]
        ids, degrees = request.reply(torch.stack(columns, 1)).t().contiguous()
        weights = None if self.weights is None else request.reply(ops.gather_rows(self.weights, rows))
        return ids, PartialGraph.of(shard.edge, ids, degrees, self.has_loops, weights)


def weights_of_shard(shard: Shard) -> Tensor:
    """[num_own, 3] what `PartialGraph.weights` says of the own nodes."""
    weights = torch.empty(shard.num_own, 3, dtype=torch.float64)
    for first, last in node_ranges(shard.indptr, CHUNK):
        start = int(shard.indptr[first])
        stop = int(shard.indptr[last])
        numbers = shard.at[start:stop].long()

        num_nodes = last - first
        sources = shard.sources(numbers) - shard.ptr[shard.rank] - first
        is_inside = (sources >= 0) & (sources < num_nodes)
        edge = {"weight": shard.edge["weight"][numbers]} if "weight" in shard.edge else {}
        subgraph = Graph(shard.indptr[first : last + 1] - start, torch.where(is_inside, sources, num_nodes), edge)
        with_loops = weights_of(subgraph, False, 0.0)
        without_loops = weights_of(subgraph, True, float("nan"))
        weights[first:last] = torch.stack([with_loops.total, *without_loops], 1)
    return weights


def fetch(request: RowRequest, table: Table | Tensor) -> Table | Tensor:
    """Rows of what was asked for: dense, or as a table where they are stored sparse."""
    if isinstance(table, SparseTable):
        indptr, columns, values = table.read_csr(request.rows)
        starts, (columns, values) = request.reply_lists(indptr.diff(), [columns, values])
        return SparseTable(starts, columns, values, table.num_columns)
    rows = ops.gather_rows(table, request.rows) if isinstance(table, Tensor) else table.read(request.rows)
    return request.reply(rows)


def fetch_dense(request: RowRequest, table: Table | Tensor) -> Tensor:
    """Dense rows of what was asked for; sparse ones travel as they are stored."""
    rows = fetch(request, table)
    return rows if isinstance(rows, Tensor) else rows.read(torch.arange(len(rows)))
