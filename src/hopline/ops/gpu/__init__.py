"""Triton kernels, the twins of `ops/cpu`: imported when the first tensor on a GPU asks for one.

Read `runtime` first: keys in device memory, launch shapes, and the flags by which kernels report an id out of range.
`sampling` and `tree` draw, `reduce` and `dense` compute layers, `attention` is GAT, `tiers` reads cold and hot rows,
`loss_and_adam` ends a step. Nothing here waits for the device unless its docstring says so, so that steps can be
captured as CUDA graphs. Without a GPU, TRITON_INTERPRET=1 runs them on CPU tensors.

State of the process: `runtime` owns one error flag per device.
"""
