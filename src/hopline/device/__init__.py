"""A device's memory and streams: pinned host memory, CUDA graphs, the memory meter, steps that are undone.

`meter` measures the peak memory of a step. `out_of_memory` undoes a step in which memory ran out. `pinned`
registers host memory for zero-copy reads. `cuda_graph` captures a call and replays it. `streams` has the
streams of each thread and the lock for captures. `snapshots` restores weights, modes and random states
after a temporary change. `row_mover` moves rows between tables in host memory and a GPU while the GPU
computes. The folder imports from `ops` and `util`.

State of the process: `pinned` owns the registered memory, `streams` the lock for CUDA-graph capture and
the streams.
"""
