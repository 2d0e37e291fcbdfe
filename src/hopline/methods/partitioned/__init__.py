"""What Historical and FullBatch share: parts of a graph as batches, and sweeps over all of them.

`groups` says which parts meet in a batch, `batches` makes one with its halo, `sweep` computes exact rows and
gradients of all nodes part by part, `sweep_loss` its loss, `trimming` only what training nodes need, `memory_plan`
says what parts take. It stands on `inference` and below.
"""
