"""Neighbour sampling on a graph in shards: every rank asks the owners for edges and rows, all at the same time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, Block, Part
from hopline.core.graph import Graph, PartialGraph
from hopline.core.sampler import check_ids, hop_keys, seed_batches, share_of
from hopline.distributed.all_to_all import Channel, Question
from hopline.distributed.world import World
from hopline.methods.sampled.settings import check_fanouts
from hopline.nn.gcn_norm import weights_of
from hopline.ops.cpu.sampling import sample_children
from hopline.pipeline.stages import Pipeline, Stage
from hopline.pipeline.transfer import Mover
from hopline.shards.shard import Shard, check_fits, node_ranges
from hopline.tables import SparseTable, Table
from hopline.util import trace
from hopline.util.config import to_dict

if TYPE_CHECKING:
    from hopline.methods.sampled.settings import Sampled

CHUNK = 1 << 22
"""Edges whose weights are summed at a time."""
LOOK_AHEAD = 2
"""Batches prepared before they are needed."""


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
        """one_list: a node has one neighbour list in all layers, for models that run on the union of the blocks."""
        check_fanouts(fanouts, replace)
        check_fits(shard, channel)
        self.shard, self.channel, self.fanouts = shard, channel, tuple(fanouts)
        self.replace, self.edge_ids, self.one_list = replace, edge_ids, one_list
        self._id_map = ops.new_id_map(shard.num_nodes, torch.device("cpu"))
        own = shard.layout.parts[0]
        loops = ops.self_loops(own.indptr, own.src_idx).numel()
        self.has_loops = bool(channel.highest(torch.tensor([loops])) > 0)
        self.weights = weights_of_shard(shard) if self.has_loops or "weight" in shard.edge else None
        """[num_own, 3] what `PartialGraph.weights` says of the own nodes, where it must say something."""

    def sample(self, seeds: Tensor, key: int) -> tuple[tuple[Block, ...], Question, Question]:
        """(blocks, questions for rows of the first one's sources and of the seeds). seeds: places, each once."""
        id_map, hops = self._id_map, list[_Hop]()
        try:
            id_map.add(seeds)
            if id_map.size != seeds.numel():
                raise ValueError("the seeds of a batch must be distinct: pass each node id once")
            places, of_seeds = seeds, Question(self.channel, self.shard.ptr, seeds)
            question = of_seeds
            for fanout, drawn_by in zip(self.fanouts, hop_keys(key, len(self.fanouts), self.one_list), strict=True):
                indptr, (sources, *rest) = self._ask(question, fanout, int(drawn_by))
                hops.append(_Hop(places.numel(), fanout, indptr, id_map.add(sources), rest))
                places = id_map.ids()
                question = Question(self.channel, self.shard.ptr, places)
        finally:
            id_map.clear()
        ids, graph = self._graph(question)
        sizes = [*(hop.num_dst for hop in hops[1:]), ids.numel()]
        blocks = [self._block(hop, ids[:size], graph, key) for hop, size in zip(hops, sizes, strict=True)]
        return tuple(reversed(blocks)), question, of_seeds

    def _ask(self, question: Question, fanout: int, key: int) -> tuple[Tensor, list[Tensor]]:
        """(indptr, [places of the sources, edge ids, rows of each edge array]) of the in-edges of some nodes."""
        shard, rows = self.shard, question.rows
        if fanout < 0:
            starts, taken = ops.row_positions(shard.indptr, rows)
            counts, at = starts.diff(), ops.gather_rows(shard.at, taken).long()
        else:
            nodes = ops.gather_rows(shard.nodes, rows)
            drawn = sample_children(shard.indptr, shard.at, rows, nodes, fanout, key, self.replace)
            counts = drawn.counts.long()
            at = drawn.ids[torch.arange(fanout) < counts[:, None]].long()
        answers = [shard.sources(at)] + ([ops.gather_rows(shard.edge_ids, at)] if self.edge_ids else [])
        return question.answer_lists(counts, answers + [ops.gather_rows(a, at) for a in shard.edge.values()])

    def _block(self, hop: _Hop, src_ids: Tensor, graph: Graph, key: int) -> Block:
        edge_ids = hop.rest[0] if self.edge_ids else None
        edge = dict(zip(self.shard.edge, hop.rest[1:] if self.edge_ids else hop.rest, strict=True))
        part = Part(hop.indptr, hop.src_idx, edge, edge_ids)
        return Block(src_ids, hop.num_dst, (part,), graph, key, in_graph_order=hop.fanout < 0)

    def _graph(self, question: Question) -> tuple[Tensor, PartialGraph]:
        """The ids of some nodes, and what is known of them."""
        shard, rows = self.shard, question.rows
        known = torch.stack([ops.gather_rows(a, rows) for a in (shard.nodes, shard.layout.degrees)], 1)
        ids, degrees = question.answer(known).t().contiguous()
        weights = None if self.weights is None else question.answer(ops.gather_rows(self.weights, rows))
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


def fetch(question: Question, table: Table | Tensor) -> Table | Tensor:
    """Rows of what was asked for: dense, or as a table where they are stored sparse."""
    if isinstance(table, SparseTable):
        indptr, columns, values = table.read_csr(question.rows)
        starts, (columns, values) = question.answer_lists(indptr.diff(), [columns, values])
        return SparseTable(starts, columns, values, table.num_columns)
    rows = ops.gather_rows(table, question.rows) if isinstance(table, Tensor) else table.read(question.rows)
    return question.answer(rows)


def fetch_dense(question: Question, table: Table | Tensor) -> Tensor:
    """Dense rows of what was asked for; sparse ones travel as they are stored."""
    rows = fetch(question, table)
    return rows if isinstance(rows, Tensor) else rows.read(torch.arange(len(rows)))


@dataclass(frozen=True)
class _Request:
    seeds: Tensor
    """This rank's seeds, by their places."""
    total: int
    """Seeds of all ranks."""
    key: int


class CollectiveLoader:
    """Batches of a graph in shards, prepared ahead. Iterating gives epoch after epoch, equally long on every rank.

    A step has the seeds that a single process would have for a batch of `batch_size` times the number of ranks, in an
    order drawn from (seed, epoch). Each rank gets an equal share, of nodes that it owns as far as that goes.
    ids: a split, or the same ids on every rank. tables: which to fetch; all by default. channel: one that nothing else
    uses while batches are taken, instead of one of its own. one_list: as in `NeighborSampler`.
    """

    def __init__(
        self,
        shard: Shard,
        ids: Tensor | str,
        method: Sampled,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
        tables: Sequence[str] | None = None,
        channel: Channel | None = None,
        one_list: bool = False,
    ) -> None:
        if method.layout == "tree":
            raise ValueError("layout=tree draws every slot by itself, which shards cannot: set layout=block")
        self.shard, self.method, self.seed, self.device = shard, method, seed, torch.device(device)
        self.channel = Channel(world) if channel is None else channel
        self.sampler = CollectiveSampler(
            shard, self.channel, method.fanout_per_layer, replace=method.replace, one_list=one_list
        )
        self.tables = _chosen(shard.tables, tables)
        self.places = self._find(ids if isinstance(ids, str) else torch.as_tensor(ids))
        settings = f"{to_dict(method)} {seed} {list(self.tables)}".encode()
        self.channel.check_same(settings + self.places.numpy().tobytes(), "the seeds, the method or the tables")
        if self.places.numel() == 0:
            raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
        self._next_epoch = 1

    def _find(self, ids: Tensor | str) -> Tensor:
        """[n] int64: the places of the seeds, in the order of their ids or as they are given."""
        shard = self.shard
        if isinstance(ids, str):
            if ids not in shard.splits:
                raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(shard.splits)}")
            own = shard.splits[ids]
            both = self.channel.all(torch.stack([own, shard.rows_of(own) + shard.ptr[shard.rank]], 1))
            return both[both[:, 0].argsort(), 1].contiguous()
        check_ids(ids, shard.num_nodes)
        rows = torch.searchsorted(shard.nodes, ids).clamp(max=shard.num_own - 1)
        return self.channel.highest(torch.where(shard.nodes[rows] == ids, rows + shard.ptr[shard.rank], -1))

    def __len__(self) -> int:
        full, rest = divmod(self.places.numel(), self.method.batch_size * self.channel.size)
        return full + (rest > 0 and not self.method.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return self.epoch(epoch)

    def epoch(self, epoch: int, done: int = 0, seeds_done: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, counted from 1, after `done` batches of `seeds_done` seeds over all ranks.

        Every rank must take the same number of them.
        """
        look_ahead = LOOK_AHEAD if self.method.look_ahead == "auto" else self.method.look_ahead
        workers = 1 if self.method.workers == "auto" else self.method.workers
        mover = Mover(self.device, look_ahead)
        stages = [Stage("sample", self._prepare), Stage("move", mover.move)]
        pipeline = Pipeline(stages, workers=workers, look_ahead=look_ahead, in_step=True)
        with closing(pipeline.run(self._requests(epoch, done, seeds_done))) as batches:
            for batch in batches:
                yield mover.ready(batch)

    def _requests(self, epoch: int, done: int, seeds_done: int) -> Iterator[_Request]:
        epoch_key, rank, size = ops.derive_key(self.seed, epoch), self.channel.rank, self.channel.size
        steps = seed_batches(
            self.places,
            self.method.batch_size * size,
            epoch_key,
            shuffle=self.method.shuffle,
            drop_last=self.method.drop_last,
            done=seeds_done,
        )
        for step, places in enumerate(steps, start=done):
            # In the order of their places the shares are of own nodes where the shards have equally many seeds.
            share = share_of(places.sort().values if self.method.shuffle else places, rank, size)
            yield _Request(share, places.numel(), ops.derive_key(epoch_key, step))

    def _prepare(self, request: _Request) -> Batch:
        blocks, question, of_seeds = self.sampler.sample(request.seeds, request.key)
        if self.method.scale_sums:
            blocks = tuple(block.scaling_sums(True) for block in blocks)
        trace.count("edges.sampled", sum(block.num_edges for block in blocks))
        rows = {name: fetch_dense(question, table) for name, table in self.tables.items()}
        x = rows.pop("x", None)
        batch = Batch(blocks[-1].dst_ids, blocks, x, None, rows, key=request.key, total_seeds=request.total)
        return batch if self.shard.y is None else replace(batch, y=fetch_dense(of_seeds, self.shard.y))


def _chosen(tables: Mapping[str, Table], names: Sequence[str] | None) -> dict[str, Table]:
    for name in names or ():
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: choose from {', '.join(tables) or 'none'}")
    return {name: table for name, table in tables.items() if names is None or name in names}
