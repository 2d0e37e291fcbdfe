"""The nouns of sampling: graph, batch, rows, seeds, sampler, partition.

Read `graph` first, then `batch` (`Part`, `Block`, `Batch`) and `row_handles` (rows that are read where
they are used). `batch_sizes` counts the nodes and edges of a batch. `seed_order` has the order of an epoch's
seeds. `schema` names node types and relations. `sampler` draws neighbours by one of the `laws`.
`tree_layout` is the layout with a slot for every possible draw. `neighborhood` takes all edges within some
hops. `partition` divides a graph into parts. Users' training steps and convs read the fields of `Block` and
`Batch`, so these fields must not change. The folder imports from `device`, `ops` and `util`.
"""
