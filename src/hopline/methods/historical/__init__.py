"""Historical embeddings: batches of parts, with neighbours' rows from earlier steps.

Read `settings`, `work` (refresh, order of commits) and `step` (one batch). `groups` draws the parts of each batch,
`batches` makes one, `halo` reads historical embeddings of its neighbours. `micro_batches` splits a batch to keep to a
budget. `compensation` adds gradients from outside the batch, `staleness` measures how far stored rows drift,
`regularise` drops edges. State is written in `commit` only, after the optimizer's step. It stands on `partitioned`.
"""
