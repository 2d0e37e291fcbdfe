"""The pipeline: batches prepared before training needs them, by plain functions in a bounded number of threads.

`stages` runs the functions in threads and delivers their results in order. `transfer` brings batches to a GPU,
through pinned buffers and on a stream of its own. `tuning` changes the number of threads between epochs. No result
depends on any of it. It stands on `distributed` and below.
"""
