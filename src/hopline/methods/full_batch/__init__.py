"""Full batch over shards: one exact step per epoch over all nodes.

Read `settings` and `work`. `batches` makes the batch of a rank, `compression` makes messages between ranks
smaller. `shards/transports` moves rows between shards, and `shards/convs/` runs PyG's convs over shards,
for inference too.
"""
