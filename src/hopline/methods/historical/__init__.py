"""Historical embeddings: batches of parts, with neighbours' rows from earlier steps.

Read `settings`, `work` (an epoch, and when tables are written) and `step` (one batch) first. Then:

    groups          draws the parts of each batch
    batches         makes a batch
    halo            reads historical embeddings of the batch's neighbours, between layers
    micro_batches   splits a batch to keep to a budget
    compensation    adds gradients from outside the batch
    staleness       measures how far embeddings drift while they wait in the tables
    edge_dropout    drops edges
    own_forward     modules of the user's own that call `push_and_pull`
    memory_plan     bounds the memory of tables and steps, for a budget
    loader          batches for a loop of the user's own

A unit, the step of one batch, writes its rows in `commit` only, after the optimizer's step. The base is
`hopline.methods.partitioned`: the partition, and the tables.
"""
