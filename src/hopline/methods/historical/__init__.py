"""Historical embeddings: batches of parts, with neighbours' rows from earlier steps.

Read `settings`, `work` (refresh, order of commits) and `step` (one batch). `groups` says which parts meet in a batch,
`batches` makes one, `halo` reads the rows of its neighbours. `micro_batches` runs a batch in pieces within a budget,
`compensation` adds gradients from outside, `staleness` measures how far stored rows move, `regularise` drops edges.
State is written in `commit` only, after the optimizer's step. It stands on `partitioned`.
"""
