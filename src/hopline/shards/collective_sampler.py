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
    indptr: Tensor
    src_idx: Tensor
    rest: list[Tensor]
    """Edge ids where they were asked for, then the rows of each edge array."""


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
        self.shard, self.channel, self.fanouts = shard, channel, tuple(fanouts)
        self.replace, self.edge_ids, self.one_list = replace, edge_ids, one_list
        self._id_map = ops.new_id_map(shard.num_nodes, torch.device("cpu"))
        own = shard.layout.parts[0]
        loops = ops.self_loops(own.indptr, own.src_idx).numel()
        self.has_loops = bool(channel.max(torch.tensor([loops])) > 0)
        self.weights = weights_of_shard(shard) if self.has_loops or "weight" in shard.edge else None
        """[num_own, 3] what `PartialGraph.weights` says of the own nodes, where it must say something."""

    def sample(self, seeds: Tensor, key: int) -> tuple[tuple[Block, ...], RowRequest, RowRequest]:
        """(blocks, questions for rows of the first one's sources and of the seeds). seeds: places, each once."""
        id_map, hops = self._id_map, list[_Hop]()
        try:
            id_map.add(seeds)
            if id_map.size != seeds.numel():
                raise ValueError("the seeds of a batch must be distinct: pass each node id once")
            positions, of_seeds = seeds, RowRequest(self.channel, self.shard.ptr, seeds)
            request = of_seeds
            for fanout, drawn_by in zip(self.fanouts, hop_keys(key, len(self.fanouts), self.one_list), strict=True):
                indptr, (sources, *rest) = self._ask(request, fanout, int(drawn_by))
                hops.append(_Hop(positions.numel(), fanout, indptr, id_map.add(sources), rest))
                positions = id_map.ids()
                request = RowRequest(self.channel, self.shard.ptr, positions)
        finally:
            id_map.clear()
        ids, graph = self._graph(request)
        sizes = [*(hop.num_dst for hop in hops[1:]), ids.numel()]
        blocks = [self._block(hop, ids[:size], graph, key) for hop, size in zip(hops, sizes, strict=True)]
        return tuple(reversed(blocks)), request, of_seeds

    def _ask(self, request: RowRequest, fanout: int, key: int) -> tuple[Tensor, list[Tensor]]:
        """(indptr, [places of the sources, edge ids, rows of each edge array]) of the in-edges of some nodes."""
        shard, rows = self.shard, request.rows
        if fanout < 0:
            starts, taken = ops.row_positions(shard.indptr, rows)
            counts, at = starts.diff(), ops.gather_rows(shard.at, taken).long()
        else:
            nodes = ops.gather_rows(shard.nodes, rows)
            drawn = sample_children(shard.indptr, shard.at, rows, nodes, fanout, key, self.replace)
            counts = drawn.counts.long()
            at = drawn.ids[torch.arange(fanout) < counts[:, None]].long()
        answers = [shard.sources(at)] + ([ops.gather_rows(shard.edge_ids, at)] if self.edge_ids else [])
        return request.reply_lists(counts, answers + [ops.gather_rows(a, at) for a in shard.edge.values()])

    def _block(self, hop: _Hop, src_ids: Tensor, graph: Graph, key: int) -> Block:
        edge_ids = hop.rest[0] if self.edge_ids else None
        edge = dict(zip(self.shard.edge, hop.rest[1:] if self.edge_ids else hop.rest, strict=True))
        part = Part(hop.indptr, hop.src_idx, edge, edge_ids)
        return Block(src_ids, hop.num_dst, (part,), graph, key, in_graph_order=hop.fanout < 0)

    def _graph(self, request: RowRequest) -> tuple[Tensor, PartialGraph]:
        """The ids of some nodes, and what is known of them."""
        shard, rows = self.shard, request.rows
        known = torch.stack([ops.gather_rows(a, rows) for a in (shard.nodes, shard.layout.degrees)], 1)
        ids, degrees = request.reply(known).t().contiguous()
        weights = None if self.weights is None else request.reply(ops.gather_rows(self.weights, rows))
        return ids, PartialGraph.of(shard.edge, ids, degrees, self.has_loops, weights)


def weights_of_shard(shard: Shard) -> Tensor:
    """[num_own, 3] what `PartialGraph.weights` says of the own nodes."""
    found = torch.empty(shard.num_own, 3, dtype=torch.float64)
    for first, last in node_ranges(shard.indptr, CHUNK):
        low, high = int(shard.indptr[first]), int(shard.indptr[last])
        at = shard.at[low:high].long()
        sources = shard.sources(at) - shard.ptr[shard.rank] - first
        inside = (sources >= 0) & (sources < last - first)
        edge = {"weight": shard.edge["weight"][at]} if "weight" in shard.edge else {}
        piece = Graph(shard.indptr[first : last + 1] - low, torch.where(inside, sources, last - first), edge)
        without = weights_of(piece, True, float("nan"))
        found[first:last] = torch.stack([weights_of(piece, False, 0.0).total, *without], 1)
    return found


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
