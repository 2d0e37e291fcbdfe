"""A dataset cut into shards, one folder for each rank.

`write` cuts, `shard` opens one, `all_shards` opens all of them as one dataset, `layout` says what a shard holds and
wants of others, `verify` checks a cut, `data` is the dataset of which each rank has a shard, `collective_sampler`
samples over all of them. `transports` moves rows between shards, within a process or between ranks, and `convs/` runs
PyG's convs over shards. The folders are a contract, as those of `data` are. It stands on `budget` and below.
"""

from typing import TYPE_CHECKING

from hopline.util.lazy import on_first_use

if TYPE_CHECKING:
    from hopline.shards.all_shards import join_shards as join
    from hopline.shards.collective_sampler import CollectiveSampler
    from hopline.shards.convs.norm import norms_over_ranks
    from hopline.shards.data import ShardedData
    from hopline.shards.data import open_sharded as open
    from hopline.shards.shard import Shard, open_shard
    from hopline.shards.write import cut_into as cut

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "hopline.shards.collective_sampler": ("CollectiveSampler",),
        "hopline.shards.convs.norm": ("norms_over_ranks",),
        "hopline.shards.data": ("ShardedData", "open=open_sharded"),
        "hopline.shards.all_shards": ("join=join_shards",),
        "hopline.shards.shard": ("Shard", "open_shard"),
        "hopline.shards.write": ("cut=cut_into",),
    },
)

__all__ = ["CollectiveSampler", "Shard", "ShardedData", "cut", "join", "norms_over_ranks", "open", "open_shard"]
