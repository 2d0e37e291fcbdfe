"""Who may use a GPU while a CUDA graph is recorded: nobody else in the process; and what goes first afterwards."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

turn = threading.RLock()
"""Held while a graph is recorded, which fails when another thread waits for the device, and during an evaluation beside
training, which does. A run records most graphs in its first steps, before there is anything to evaluate."""

FIRST = -1
"""The priority of what shall not wait for evaluation; streams have 0, the lowest, unless one asks."""


@contextmanager
def at_once() -> Iterator[bool]:
    """The turn, if nobody else has it: what can be recorded another time waits for nobody."""
    taken = turn.acquire(blocking=False)
    try:
        yield taken
    finally:
        if taken:
            turn.release()


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, beside: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Within, what this thread gives the stream becomes a graph; another, that moves batches, may wait for copies.

    beside: a graph that never runs at the same time, whose memory it may use.
    """
    pool = None if beside is None else beside.pool()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """To record on: with the current stream's priority, which the kernels of a graph keep."""
    return torch.cuda.Stream(device, priority=torch.cuda.current_stream(device).priority)


@contextmanager
def going_first(device: torch.device) -> Iterator[None]:
    """Within, what this thread gives a GPU goes before what others give it."""
    outer, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=FIRST)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
