"""The common base of Historical and FullBatch: a graph in parts, tables of rows between layers, and sweeps.

    partitioned_graph   owns the partition and the tables
    parts               gives the nodes and edges of each part
    batches             moves them to the model's device
    rank_histories      which rank trains which part, and the tables that ranks share
    sweep               computes exact rows and gradients of all nodes, by the layer-wise engine
    sweep_loss          the loss of a sweep
    trimming            a sweep over only those rows that training nodes need
    seeds               checks the seeds that a loader is asked for
    layer_bytes         measures the bytes of a layer, and predicts them
    memory_plan         bounds the memory of parts

The folder uses `hopline.inference` and what that uses. It knows no method.
"""
