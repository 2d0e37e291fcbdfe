"""The layer-wise engine: a model computed one layer at a time over all pieces of a graph, and back.

`engine` has the loop, `Layers`, and its two partners: a `LayerPlan` says which nodes each layer is computed at and in
which pieces, `Boundaries` from which table a layer reads and into which it writes. Exact inference, refreshes of
histories, full-batch sweeps and the micro-batches of a historical batch differ in these two alone. Nobody
subclasses `Layers`. The plans stand with those who use them. `hl.extend` offers all of it to authors: change its
signatures with care. It stands on `nn` and below.
"""
