"""The batch of a full-batch step over shards: all nodes of a rank.

The block of each layer belongs to a `ShardConvs` runner. When the model calls a conv on it, the runner fetches rows
of other shards through a *transport*, and in backward sends their gradients back:

    one process     virtual shards of one graph, `LocalTransport`: no messages
    several ranks   a shard per rank, `P2PTransport`, or `HalfPrecisionTransport` with `compress`
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch, each_once
from hopline.core.examples import ExampleIndex, Examples
from hopline.core.row_handles import Rows
from hopline.data.dataset import Dataset
from hopline.distributed.all_to_all import Channel
from hopline.distributed.world import World
from hopline.methods.full_batch.compression import COMPRESSED, HalfPrecisionTransport
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.partitioned.partitioned_graph import partition_together
from hopline.nn.layered import Layered
from hopline.nn.row_wise import describe_module
from hopline.shards.convs.patch_message_passing import FetchMode
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.convs.trimming import trimmed_convs
from hopline.shards.data import ShardedData
from hopline.shards.layout import ShardLayout, shard_layouts, virtual_layout
from hopline.shards.transports import LocalTransport, P2PTransport, Transport
from hopline.tables import Table


def check_settings(method: FullBatch, data: Dataset, world: World) -> None:
    """Refuse settings that do not go with the graph or the ranks."""
    if world.size == 1 and method.num_shards > data.num_nodes:
        raise ValueError(
            f"num_shards={method.num_shards} is more than the {data.num_nodes} nodes: make it {data.num_nodes} or less"
        )
    if method.compress != "none" and world.size == 1:
        raise ValueError("compress= is about rows that travel between ranks: set devices=2 or more, or leave it out")


def check_model(method: FullBatch, model: Layered, data: Dataset, world: World) -> str | None:
    """Refuse a model whose gradients would not be exact.

    Returns a description of the first module that mixes rows in training, such as a batch norm. None: no module does.
    """
    edge = data.shard.edge if isinstance(data, ShardedData) else data.graph.edge
    model.check_blocks(data.num_features, edge)
    if world.size > 1:
        # Over ranks batch norms are fine: their statistics are summed over the ranks.
        mixing = model.mixing_in_training(data.num_features, edge, over_ranks=True)
        if mixing is not None:
            raise ValueError(
                f"{describe_module(mixing)} mixes rows in training, and a rank has only its own: use BatchNorm or "
                "LayerNorm(..., mode='node'), or devices=1"
            )
    mixing = model.mixing_in_training(data.num_features, edge)
    if mixing is None:
        return None
    if method.trim:
        raise ValueError(
            f"{describe_module(mixing)} looks at all rows at once, as batch norms do, and trim=true leaves some out: "
            "set trim=false, or in place of a batch norm norm=layer"
        )
    return describe_module(mixing)


class _OwnShard(NamedTuple):
    """The nodes of one rank."""

    tables: dict[str, Table]
    """Features and other rows, of the own nodes (`ShardedData`) or of all nodes (any other dataset)."""
    transport: Transport
    ids: Tensor
    """[num_own] int64: global ids of the own nodes."""
    y: Tensor | None
    """[num_own, ...]: labels of the own nodes. None without labels."""


class ShardBatches:
    """Makes the batches of one rank: all its nodes, with the nodes of `examples` as seeds.

    Owns the transport between shards, and the channel between ranks if there are several. The constructor is
    collective: all ranks call it.
    """

    def __init__(
        self,
        data: Dataset,
        examples: Examples,
        method: FullBatch,
        mode: FetchMode,
        num_layers: int,
        *,
        seed: int,
        device: torch.device,
        world: World,
    ) -> None:
        self.data = data
        self.method = method
        self.seed = seed
        self.device = device
        self.world = world
        self.channel: Channel | None = None
        if world.size > 1:
            self.channel = Channel(world)

        shard = self._open_shard()
        self.tables = shard.tables
        self.transport = shard.transport
        self.y = shard.y
        # Rows of the own nodes in `tables`: a shard's tables hold only these, a dataset's hold all nodes.
        self.rows = torch.arange(shard.ids.numel()) if isinstance(data, ShardedData) else shard.ids

        index = ExampleIndex(examples, data.num_nodes)
        self.examples = examples
        self.found = index.find(shard.ids)
        """This rank's examples."""
        self.seeds = shard.ids[self.found.seed_idx]
        self.total = len(examples)  # of all ranks

        whole = ShardConvs.of(self.transport.layout, self.transport, mode=mode)
        if method.trim:
            trimmed = trimmed_convs(whole, index.is_seed[shard.ids], num_layers, device, mode=mode)
            self.blocks = tuple(convs.block() for convs in trimmed)
        else:
            self.blocks = (whole.to(device).block(),) * num_layers

    def _open_shard(self) -> _OwnShard:
        """This rank's shard: one that was opened before, or the rank's part of a partition that is made now."""
        data = self.data
        world = self.world
        if isinstance(data, ShardedData):
            layout = data.shard.layout
            return _OwnShard(dict(data.shard.tables), self._make_transport(layout), layout.own_ids, data.shard.y)

        num_shards = world.size if world.size > 1 else self.method.num_shards
        partition = partition_together(data, num_shards, self.method.partition, seed=self.seed, world=world)
        if world.size == 1:
            layout = virtual_layout(data.graph, partition)
        else:
            layout = shard_layouts(data.graph, partition)[world.rank]
        transport = self._make_transport(layout)
        y = None if data.y is None else ops.gather_rows(data.y, layout.own_ids.to(data.y.device))
        return _OwnShard(dict(data.tables), transport, layout.own_ids, y)

    def _make_transport(self, layout: ShardLayout) -> Transport:
        """The transport between virtual shards, or between ranks as `compress` asks for it."""
        if self.world.size == 1:
            return LocalTransport(layout)
        kinds = COMPRESSED[self.method.compress]
        if kinds:
            return HalfPrecisionTransport(layout, self.world, kinds)
        return P2PTransport(layout, world=self.world)

    @property
    def seed_labels(self) -> Tensor | None:
        """[n, ...]: labels of this rank's examples, on their own device."""
        if self.examples.y is not None:
            return self.examples.labels(None, self.found.numbers)
        return None if self.y is None else self.y[self.found.output_idx.to(self.y.device)]

    def batch(self, key: int | None) -> Batch:
        """The batch of all own nodes, on the device. key: that of the step's random draws."""
        device = self.device
        # Layers that share a block also share its copy.
        blocks = each_once(self.blocks, lambda block: replace(block, key=key))

        def rows_of(table: Table) -> Rows | Tensor:
            if device.type == "cpu":
                return Rows(table, self.rows)
            can_device_read = table.tiers(device) is not None
            return Rows(table, self.rows.to(device)) if can_device_read else table.read(self.rows).to(device)

        tables = {name: rows_of(table) for name, table in self.tables.items()}
        y = self.seed_labels
        return Batch(
            seeds=self.seeds.to(device),
            blocks=blocks,
            x=tables.pop("x", None),
            y=None if y is None else y.to(device),
            tables=tables,
            key=key,
            total_seeds=self.total,
            output_idx=self.found.output_idx.to(device),
        )
