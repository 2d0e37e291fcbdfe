"""PyG's convs over shards: we patch PyG here, and only here.

Read `runner` (a conv on a shard), then `sequential_aggregation` (messages part by part, made again in backward),
`patch_message_passing` (another `propagate` while a conv runs), `messages`, `accumulate`, `edges`, `norm` and
`trimming`. Every conv is compared with plain PyG on a tiny graph before it runs, or refused. `FullBatch` trains by it,
and exact inference runs convs by it that look further than a node's in-edges.
"""
