"""The nouns of sampling: graph, batch, rows, seeds, sampler, partition.

Read `graph`, then `batch` (`Part`, `Block`, `Batch`) and `row_handles` (rows that are read where they are used).
`sizes` counts the nodes and edges of a batch, `seed_order` is the order of an epoch's seeds, `sampler` draws
neighbours, `tree_layout` is the layout with a slot for every draw, `neighborhood` takes all edges within some hops,
`partition` divides a graph. Fields of `Block` and `Batch` are what users' training steps and convs see: they are
kept. It stands on `device`, `ops` and `util`.
"""
