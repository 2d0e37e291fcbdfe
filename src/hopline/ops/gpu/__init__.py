"""Triton kernels: the GPU counterparts of `ops/cpu`, imported by the first operation on a GPU.

Read `runtime` first: it has keys in device memory, launch shapes, and the flags by which kernels report an
id out of range. `sampling` draws neighbours for blocks, and `tree` draws them for the tree layout. `reduce`
aggregates over edges and applies dropout, `dense` computes hidden layers, and `attention` computes GAT.
`tiers` reads hot and cold rows. `loss_and_adam` has the loss and the optimizer's step.

A function in this folder synchronises with the device only if its docstring says so. That lets whole steps
be captured as CUDA graphs. Without a GPU, TRITON_INTERPRET=1 runs the kernels on CPU tensors.

State of the process: `runtime` owns one tensor of error flags per device.
"""
