"""Full batch over shards: one step over all nodes, by a sweep or shard by shard.

Read `settings` and `work`. `transports` moves rows between shards, within a process or between ranks, `compression`
makes messages smaller, `convs/` runs PyG's convs over shards.
"""
