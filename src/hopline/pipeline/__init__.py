"""The pipeline: plain functions prepare batches in a bounded number of threads, before training needs them.

`stages` runs the functions in threads and delivers their results in order. `transfer` brings batches to a
GPU, through pinned buffers and on a stream of its own. No result depends on the threads. The folder
imports from `distributed` and the packages below it.
"""
