"""Work done ahead of training: plain functions in threads, bounded and in order.

`stages` is the pipeline, `transfer` brings batches to a GPU by pinned buffers and a stream of its own, `tuning`
changes the number of threads between epochs. No result depends on any of it. It stands on `distributed` and below.
"""
