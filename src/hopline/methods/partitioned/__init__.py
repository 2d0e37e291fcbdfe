"""The common base of Historical and FullBatch: a graph in parts, tables of rows between layers, and sweeps.

`work` owns the partition and the tables, `parts` gives the nodes and edges of each part, `batches` moves them to the
model's device. `sweep` computes exact rows and gradients of all nodes by the layer-wise engine, `sweep_loss` is its
loss, `trimming` computes only the rows that training nodes need. `memory_plan` bounds the memory of parts. It stands
on `inference` and below, and knows no method.
"""
