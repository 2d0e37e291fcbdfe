"""Neighbour sampling: a batch is some seeds, and a sample of the edges that lead to them.

Read `settings`, `loader` (prefetched batches) and `work` (the units of an epoch) first. Then:

    own_sampler         a sampler of the user's, whose blocks are checked
    captured_step       a step on a GPU as one CUDA graph, from the seeds to the gradients
    prefetch_rows       copies cold rows of the next steps to the GPU
    collective_loader   batches of a graph in shards, which all ranks sample together
    memory_plan         the memory of a run, and the settings with which it keeps to a budget
    seed_loader         both loaders as a `DataLoader`, which Lightning and others divide among ranks
    pyg_loader          PyG's own batches, for a training script that uses PyG's `NeighborLoader`

All draws are functions of (seed, epoch, step, node). In the tree layout, which has a slot for every possible
draw, the slot takes the place of the node. So a batch does not depend on threads, ranks or where a run was
interrupted. Keep that.

Global state: `pyg_loader` caches the edges of a graph, grouped by destination. Loaders of the same graph
share them.
"""
