"""Inference: exact, over all edges and layer by layer; or sampled, as an estimate over drawn edges.

Exact inference computes all nodes, or only those that the requested nodes depend on. A module that is not
made of layers runs on the hops around the nodes (`hops=`), or on the whole graph at once.

    exact_inference    `exact` and `exact_rows`, which are public
    sampled_inference  `sampled`, which is public
    layerwise_chunks   layer by layer, over chunks of nodes
    without_layers     a module without layers, on the whole graph or on parts of it
    neighborhoods      a module without layers, on the hops around some nodes
    distributed        layer by layer, with a shard per rank
    over_shards        layer by layer, over shards in one process
    resumable          stores the tables of layers in files, from which a killed inference resumes
    cache              stores blocks and sums that the next inference at the same nodes needs again
    captured_forward   replays inference at the same nodes as a CUDA graph

The package imports from `shards` and the packages below it.

A graph owns the cache of the last inference on it (`Graph.get_cached`). The object that evaluates
repeatedly owns the captured inferences (`CapturedInferences`); in a run that is the Trainer.
"""

from hopline.inference.exact_inference import exact, exact_rows
from hopline.inference.sampled_inference import sampled

__all__ = ["exact", "exact_rows", "sampled"]
