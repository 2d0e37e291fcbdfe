"""`CollectiveLoader`: batches of neighbour sampling on a graph in shards, which all ranks prepare together.

    sample (one thread per rank)                                                   move (thread)
    seeds -> all-to-all: sampled edges, once per layer -> all-to-all: rows    ->   to the GPU, if needed

A node's in-edges and rows are on the shard that owns it. So every rank asks the others for them, in
collective calls that all ranks make in the same order. That is why a rank has one thread, and why all ranks
must take equally many batches. Nodes are numbered by *position*: shard after shard, so that a position
tells the owner.
"""

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
from hopline.core.examples import Examples
from hopline.core.sampler import NodeIds, as_node_ids
from hopline.core.seed_order import SeedOrder, share_of
from hopline.data.fingerprint import ids_fact
from hopline.distributed.agreement import Fact, check_same
from hopline.distributed.all_to_all import Channel
from hopline.distributed.world import World
from hopline.pipeline.stages import Pipeline, Stage
from hopline.pipeline.transfer import Mover
from hopline.shards.collective_sampler import CollectiveSampler, fetch_dense
from hopline.shards.shard import Shard
from hopline.tables import Table
from hopline.units.rank_facts import settings_facts
from hopline.util import trace
from hopline.util.config import to_dict

if TYPE_CHECKING:
    from hopline.methods.sampled.settings import Sampled


LOOK_AHEAD = 2
"""Batches prepared before they are needed, if the setting is "auto"."""


@dataclass(frozen=True)
class _Request:
    """One step: the input of the pipeline."""

    numbers: Tensor
    """[n] int64: this rank's examples."""
    total: int
    """The number of examples of all ranks."""
    key: int
    """Key of the step's random draws."""
    draw_key: int
    """Key by which neighbours are drawn."""


class CollectiveLoader:
    """Batches of a graph in shards, prefetched by a thread. Each iteration is the next epoch.

    Usually made by `hl.Sampled(...).loader(shard, ids)`. Every rank must make one, and take as many batches
    as the other ranks. An epoch has the same number of batches on all ranks.

    The seeds of a step are those of a single process with `batch_size` times the number of ranks, in an
    order drawn from (seed, epoch). Each rank gets an equal share of them, and as far as possible nodes that
    it owns.

    Args:
        shard: The shard of this rank.
        ids: The name of a split, [n] int64 node ids or `Examples`, the same on every rank. A node may come several
            times.
        method: The settings, with `fanouts` as numbers.
        seed: Seed of every random draw, together with the epoch.
        device: The device of the batches.
        world: The ranks. With it, an error names the rank that stopped.
        tables: Names of the tables whose rows are fetched. Default: all.
        channel: A channel between the ranks that nothing else uses meanwhile. Default: a new one.
        one_list: Whether a node draws the same neighbours in all layers, as in `hl.extend.NeighborSampler`.

    Raises:
        ValueError: There are no seeds, a split or a table does not exist, the method's layout is "tree",
            shards and ranks do not go together, or ranks were given different arguments.

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
        ids: NodeIds | Examples | str,
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
        self.neighbor_sampler = CollectiveSampler(
            shard,
            self.channel,
            method.fanout_per_layer,
            replace=method.replace,
            one_list=one_list,
            law=method.law,
            weight=method.weight,
        )
        self.tables = _choose_tables(shard.tables, tables)
        own_y = ids.y if isinstance(ids, Examples) else None
        if not isinstance(ids, str):
            ids = as_node_ids(ids.nodes if isinstance(ids, Examples) else ids, shard.num_nodes)
        # Ranks that differ would wait for messages that never come, so they compare what they were given. The
        # cut of the dataset was compared by the sampler.
        settings = {"method": to_dict(method), "seed": seed, "tables": list(self.tables)}
        seeds = Fact(f"the split {ids!r}") if isinstance(ids, str) else ids_fact(ids)
        check_same(self.channel, settings_facts(settings) | {"the seeds": seeds})
        # Nodes are known by their positions, over all shards.
        self.examples = Examples(self._find_positions(ids), own_y)
        if not len(self.examples):
            raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
        self._order = SeedOrder(
            num_examples=len(self.examples),
            per_step=method.batch_size * self.channel.size,
            shuffle=method.shuffle,
            drop_last=method.drop_last,
            law_every=method.law_every,
        )
        self._next_epoch = 1

    def _find_positions(self, ids: Tensor | str) -> Tensor:
        """[n] int64: positions of the seeds.

        A split is ordered by node id, ids stay as given. Collective.
        """
        shard = self.shard
        if isinstance(ids, str):
            if ids not in shard.splits:
                raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(shard.splits)}")
            own_ids = shard.splits[ids]
            own_positions = shard.rows_of(own_ids) + shard.ptr[shard.rank]
            ids_and_positions = self.channel.all_gather(torch.stack([own_ids, own_positions], 1))
            order = ids_and_positions[:, 0].argsort()
            return ids_and_positions[order, 1].contiguous()

        # Each rank knows the positions of its own nodes. The others contribute -1 to the maximum.
        rows = torch.searchsorted(shard.nodes, ids).clamp(max=shard.num_own - 1)
        is_own = shard.nodes[rows] == ids
        return self.channel.max(torch.where(is_own, rows + shard.ptr[shard.rank], -1))

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._next_epoch
        self._next_epoch += 1
        return self.epoch(epoch)

    def epoch(self, epoch: int, done: int = 0, examples_done: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, counted from 1. Every rank must take the same number of them.

        done: the number of batches to leave out at the beginning. examples_done: the number of their examples,
        over all ranks.
        """
        look_ahead = LOOK_AHEAD if self.method.look_ahead == "auto" else self.method.look_ahead
        workers = 1 if self.method.workers == "auto" else self.method.workers
        mover = Mover(self.device, look_ahead)
        stages = [Stage("sample", self._prepare), Stage("move", mover.move)]
        # in_step: one thread at most, whatever `workers` says, makes the collective calls in order. And
        # batches that were begun are finished, since other ranks wait for this one.
        pipeline = Pipeline(stages, workers=workers, look_ahead=look_ahead, in_step=True)
        with closing(pipeline.run(self._requests(epoch, done, examples_done))) as batches:
            for batch in batches:
                yield mover.ready(batch)

    def describe(self) -> WorkDescription:
        """Describes how batches are prepared: by one thread, or if `workers` is 0 by the training thread."""
        return WorkDescription(workers=int(self.method.workers != 0), is_sampled=True)

    def _requests(self, epoch: int, done: int, examples_done: int) -> Iterator[_Request]:
        """The steps of an epoch, as this rank samples them. The arguments are those of `epoch`."""
        for numbers, key, draw_key in self._order.steps(ops.derive_key(self.seed, epoch), done, examples_done):
            # Sorted by position, a rank's share is mostly its own nodes, if the shards have equally many
            # seeds.
            if self.method.shuffle:
                numbers = numbers[self.examples.nodes[numbers].argsort(stable=True)]
            share = share_of(numbers, self.channel.rank, self.channel.size)
            yield _Request(share, numbers.numel(), key, draw_key)

    def _prepare(self, request: _Request) -> Batch:
        """Sample the blocks of a step, and fetch the rows of their nodes. Collective."""
        examples = self.examples
        seeds, output_idx = examples.distinct(examples.nodes[request.numbers])
        blocks, input_request, seed_request = self.neighbor_sampler.sample(seeds, request.key, request.draw_key)
        if self.method.scale_sums:
            blocks = tuple(block.with_scale_sums(True) for block in blocks)
        trace.count("edges.sampled", sum(block.num_edges for block in blocks))
        rows = {name: fetch_dense(input_request, table) for name, table in self.tables.items()}
        labels = examples.labels(None, request.numbers)
        if labels is None and self.shard.y is not None:
            labels = fetch_dense(seed_request, self.shard.y)
            labels = labels if output_idx is None else labels[output_idx]
        return Batch(
            seeds=blocks[-1].dst_ids,
            blocks=blocks,
            x=rows.pop("x", None),
            y=labels,
            tables=rows,
            key=request.key,
            total_seeds=request.total,
            output_idx=output_idx,
        )


def _choose_tables(tables: Mapping[str, Table], names: Sequence[str] | None) -> dict[str, Table]:
    """The tables with these names, in the order of the shard. None: all."""
    for name in names or ():
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: choose from {', '.join(tables) or 'none'}")
    return {name: table for name, table in tables.items() if names is None or name in names}
