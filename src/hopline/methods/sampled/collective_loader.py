"""Batches of neighbour sampling on shards: a loader that all ranks step through together."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import WorkDescription
from hopline.core.batch import Batch
from hopline.core.sampler import check_ids
from hopline.core.seed_order import seed_batches, share_of
from hopline.distributed.all_to_all import Channel
from hopline.distributed.world import World
from hopline.pipeline.stages import Pipeline, Stage
from hopline.pipeline.transfer import Mover
from hopline.shards.collective_sampler import CollectiveSampler, fetch_dense
from hopline.shards.shard import Shard
from hopline.tables import Table
from hopline.util import trace
from hopline.util.config import to_dict

if TYPE_CHECKING:
    from hopline.methods.sampled.settings import Sampled


LOOK_AHEAD = 2
"""Batches prepared before they are needed."""


@dataclass(frozen=True)
class _Request:
    seeds: Tensor
    """This rank's seeds, by their places."""
    total: int
    """Seeds of all ranks."""
    key: int


class CollectiveLoader:
    """Batches of a graph in shards, prepared ahead. Iterating gives epoch after epoch, equally long on every rank.

    Usually made by `hl.Sampled(...).loader(shard, ids)`. Every rank must make one, and take as many batches as the
    others. A step has the seeds that a single process would have for a batch of `batch_size` times the number of ranks,
    in an order drawn from (seed, epoch). Each rank gets an equal share, of nodes that it owns as far as that goes.

    Args:
        shard: This rank's.
        ids: A split, or [n] int64 ids that are the same on every rank.
        method: Fan-outs and batch size; `fanouts` as numbers.
        seed: Of every random draw, together with the epoch.
        device: Where batches come.
        world: Names the rank that stopped if one does.
        tables: Which to fetch. Default: all.
        channel: One that nothing else uses while batches are taken. Default: one of its own.
        one_list: As in `hl.extend.NeighborSampler`.

    Raises:
        ValueError: There are no seeds, a split or a table does not exist, the method's layout is "tree", or shards and
            ranks do not fit together.

    Example:
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2), splits={"train": torch.arange(4)}
        ... )
        >>> hl.shards.cut(data, "shards", 1, how="range")  # as `hopline partition data shards shards=1`
        >>> loader = hl.Sampled(fanouts=(2, 2), batch_size=2).loader(hl.shards.open_shard("shards", rank=0))
        >>> [batch.num_seeds for batch in loader]
        [2, 2]
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
        self.shard = shard
        self.method = method
        self.seed = seed
        self.device = torch.device(device)
        self.channel = Channel(world) if channel is None else channel
        self.sampler = CollectiveSampler(
            shard, self.channel, method.fanout_per_layer, replace=method.replace, one_list=one_list
        )
        self.tables = _choose_tables(shard.tables, tables)
        self.positions = self._find_positions(ids if isinstance(ids, str) else torch.as_tensor(ids))
        settings = f"{to_dict(method)} {seed} {list(self.tables)}".encode()
        self.channel.check_same(settings + self.positions.numpy().tobytes(), "the seeds, the method or the tables")
        if self.positions.numel() == 0:
            raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
        self._next_epoch = 1

    def _find_positions(self, ids: Tensor | str) -> Tensor:
        """[n] int64: the places of the seeds, in the order of their ids or as they are given."""
        shard = self.shard
        if isinstance(ids, str):
            if ids not in shard.splits:
                raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(shard.splits)}")
            own_ids = shard.splits[ids]
            own_positions = shard.rows_of(own_ids) + shard.ptr[shard.rank]
            ids_and_positions = self.channel.all(torch.stack([own_ids, own_positions], 1))
            order = ids_and_positions[:, 0].argsort()
            return ids_and_positions[order, 1].contiguous()

        check_ids(ids, shard.num_nodes)
        rows = torch.searchsorted(shard.nodes, ids).clamp(max=shard.num_own - 1)
        is_own = shard.nodes[rows] == ids
        return self.channel.max(torch.where(is_own, rows + shard.ptr[shard.rank], -1))

    def __len__(self) -> int:
        num_full, num_remaining = divmod(self.positions.numel(), self.method.batch_size * self.channel.size)
        has_smaller_batch = num_remaining > 0 and not self.method.drop_last
        return num_full + 1 if has_smaller_batch else num_full

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._next_epoch
        self._next_epoch += 1
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

    def describe(self) -> WorkDescription:
        """How batches are prepared: ranks prepare them together, by one thread each."""
        return WorkDescription(workers=int(self.method.workers != 0), is_sampled=True)

    def _requests(self, epoch: int, done: int, seeds_done: int) -> Iterator[_Request]:
        epoch_key = ops.derive_key(self.seed, epoch)
        steps = seed_batches(
            self.positions,
            self.method.batch_size * self.channel.size,
            epoch_key,
            shuffle=self.method.shuffle,
            drop_last=self.method.drop_last,
            done=seeds_done,
        )
        for step, positions in enumerate(steps, start=done):
            # In the order of their places the shares are of own nodes where the shards have equally many seeds.
            in_order = positions.sort().values if self.method.shuffle else positions
            share = share_of(in_order, self.channel.rank, self.channel.size)
            yield _Request(share, positions.numel(), ops.derive_key(epoch_key, step))

    def _prepare(self, request: _Request) -> Batch:
        blocks, input_request, seed_request = self.sampler.sample(request.seeds, request.key)
        if self.method.scale_sums:
            blocks = tuple(block.scaling_sums(True) for block in blocks)
        trace.count("edges.sampled", sum(block.num_edges for block in blocks))
        rows = {name: fetch_dense(input_request, table) for name, table in self.tables.items()}
        labels = None if self.shard.y is None else fetch_dense(seed_request, self.shard.y)
        return Batch(
            seeds=blocks[-1].dst_ids,
            blocks=blocks,
            x=rows.pop("x", None),
            y=labels,
            tables=rows,
            key=request.key,
            total_seeds=request.total,
        )


def _choose_tables(tables: Mapping[str, Table], names: Sequence[str] | None) -> dict[str, Table]:
    for name in names or ():
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: choose from {', '.join(tables) or 'none'}")
    return {name: table for name, table in tables.items() if names is None or name in names}
