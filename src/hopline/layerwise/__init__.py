"""The layer-wise engine: a model computed one layer at a time over all pieces of a graph, forward and backward.

`engine` has the loop, `Layers`, and its two partners. A `LayerPlan` decides at which nodes each layer is
computed, and in which pieces. `Boundaries` decide from which table a layer reads, and into which it
writes. Exact inference, refreshes of histories, full-batch sweeps and the micro-batches of a historical
batch differ in these two alone: nobody subclasses `Layers`. Each plan is in the folder of the code that
uses it. `hl.extend` offers all of it to authors, so change signatures with care. The package imports from
`nn` and the packages below it.
"""
