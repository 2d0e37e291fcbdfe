"""A dataset cut into shards, one folder for each rank.

`write` cuts, `shard` opens one, `layout` says what a shard holds and wants of others, `verify` checks a cut, `data`
is the dataset of which each rank has a shard, `collective_sampler` samples over all of them. The folders are a
contract, as those of `data` are. It stands on `budget` and below.
"""
