"""Neighbour sampling: batches of seeds with sampled neighbours.

Read `settings`, `loader` (batches prepared ahead), `work` (units of an epoch). `captured_step` runs a step as one
CUDA graph, `prefetch_rows` brings cold rows to the GPU ahead, `memory_plan` predicts, `on_shards` samples over
shards, `pyg_loader` gives PyG's own batches to scripts as they are. Draws are keyed by seed, epoch, step and node:
keep that.

State of the process: `pyg_loader` owns grouped edges that loaders of the same graph share.
"""
