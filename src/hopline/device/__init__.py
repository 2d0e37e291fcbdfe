"""A device's memory and streams: pinned host memory, CUDA graphs and priorities, the memory meter, steps undone.

`meter` measures what a step takes at most, `out_of_memory` undoes and retries a step, `pinned` registers host memory
that a GPU reads in place, `cuda_graph` captures a call and replays it, `streams` says who may use a GPU meanwhile,
`snapshots` keeps weights, modes and random states for whoever changes them for a while, `row_mover` moves rows between
tables in host memory and a GPU while that computes. It stands on `ops` and `util`.

State of the process: `pinned` owns the registered memory, `streams` the lock for CUDA-graph capture.
"""
