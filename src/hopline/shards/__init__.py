"""Datasets in shards: one folder per shard, one shard per rank.

A shard holds some of the nodes, with all their in-edges. The sources of these edges that other shards own
are its *halo*. A rank opens its own shard and gets rows of the halo from the ranks that own them.

    on disk     write                partitions a dataset into shards
                shard                opens one shard
                all_shards           opens all shards as one dataset, in one process
                verify               checks a folder of shards
    training    data                 `ShardedData`: the dataset of which each rank has a shard
                collective_sampler   neighbour sampling over all shards
                layout               which rows travel between which shards, in which round
                transports           moves rows between shards, within a process or between ranks
                convs/               PyG's convs over shards, for full-batch training

Read `layout`, then `shard` and `write`; for full-batch training `transports` and `convs/`. The format of
the folders is a contract: a later version opens them, or refuses them by name. The package may import
`budget` and the folders below it.
"""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:
    from hopline.shards.all_shards import join_shards as join
    from hopline.shards.collective_sampler import CollectiveSampler
    from hopline.shards.convs.batch_norm import norms_over_ranks
    from hopline.shards.data import ShardedData
    from hopline.shards.data import open_sharded as open
    from hopline.shards.shard import Shard, open_shard
    from hopline.shards.write import cut_into as cut

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.shards.collective_sampler": ("CollectiveSampler",),
        "hopline.shards.convs.batch_norm": ("norms_over_ranks",),
        "hopline.shards.data": ("ShardedData", "open=open_sharded"),
        "hopline.shards.all_shards": ("join=join_shards",),
        "hopline.shards.shard": ("Shard", "open_shard"),
        "hopline.shards.write": ("cut=cut_into",),
    },
)

__all__ = ["CollectiveSampler", "Shard", "ShardedData", "cut", "join", "norms_over_ranks", "open", "open_shard"]
