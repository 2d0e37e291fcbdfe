"""Full batch over shards: one step over all nodes, by a sweep or shard by shard.

Read `settings` and `work`. `compression` makes messages between ranks smaller. Rows move between shards by
`shards/transports`, and PyG's convs run over shards by `shards/convs/`, which inference uses too.
"""
