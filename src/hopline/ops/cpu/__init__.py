"""Numba kernels: each releases Python's lock and is cached on disk.

Read `runtime` first: threads, ranges and keyed draws that all kernels share. After editing it, `make clean`: Numba
does not notice that kernels which use it are out of date. `sampling` draws blocks and trees, `reduce` aggregates and
drops out, `linear` spreads torch's products over our threads, `page_cache` reads rows that are still on disk,
`partition` divides graphs, `cut_batches` makes batches smaller, `synthetic` makes graphs. Results never depend on the
number of threads.

State of the process: `runtime` owns the pool of threads.
"""
