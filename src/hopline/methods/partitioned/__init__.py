"""What Historical and FullBatch share: a graph in parts, tables of the rows between layers, and sweeps over all parts.

`work` has the parts and the tables, `parts` the nodes and edges of each part, `batches` moves them to the model's
device. `sweep` computes exact rows and gradients of all nodes by the layer-wise engine, `sweep_loss` is its loss,
`trimming` computes only what training nodes need. `memory_plan` says what parts take. It stands on `inference` and
below, and knows no method.
"""
