"""Numba kernels for the CPU: each releases Python's lock (the GIL) and is cached on disk.

Read `runtime` first: it has the threads, ranges and keyed draws that all kernels share. `kernel_cache`
keeps compiled kernels in files with checksums, until their source changes. `sampling` samples blocks and
trees, `reduce` aggregates over edges and applies dropout. `linear` divides torch's matrix products over
hopline's threads. `page_cache` reads rows that are still on disk, `partition` divides graphs into parts,
`cut_batches` makes batches smaller, and `synthetic` makes graphs. Results never depend on the number of
threads.

State of the process: `runtime` owns the pool of threads.
"""
