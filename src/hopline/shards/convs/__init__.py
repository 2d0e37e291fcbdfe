"""PyG's convs over shards: PyG is patched here, and only here.

A conv of a shard's layer needs source rows that other shards have, and its edges come in one part per
shard. From the outside in:

    runner                   `ShardConvs`: runs a conv on a shard; a probe finds how it treats its edges
    patch_message_passing    another `propagate` on the conv, while the conv runs
    sequential_aggregation   messages part by part, and again in backward (SAR), with the mathematics of it
    messages                 the conv's own `message` and aggregation on a chunk of edges
    accumulate               sums, maxima and softmax over chunks
    edges                    parts, chunks, self-loops and the norm of GCN
    batch_norm               batch norms over the rows of all ranks
    trimming                 layers with only the edges and rows that the outputs need

Before a conv runs, it is compared with plain PyG on a tiny graph. One that differs is refused. `FullBatch`
trains with these convs. Exact inference uses them for convs that look further than a node's in-edges.
"""
