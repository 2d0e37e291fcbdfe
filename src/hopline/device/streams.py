"""The lock for CUDA-graph capture, and streams by thread, purpose and priority."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

capture_lock = threading.RLock()
"""The process's lock for capturing CUDA graphs, owned by this module. Capture fails if another thread synchronises with
the device, and async evaluation does, so both take this lock. A run captures most graphs in its first steps, before
there is anything to evaluate."""

HIGH_PRIORITY = -1
"""The priority of what shall not wait for evaluation; streams have 0, the lowest, unless one asks."""


_own = threading.local()
"""The streams of each thread, by purpose, device and priority; owned by this module, they go with their thread."""


def stream_for(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of this thread, the same one in every run: CUDA's libraries keep memory for each that had a product, and
    torch keeps what was freed on one for the next use on the same."""
    streams: dict[tuple[str, int, int], torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    key = (purpose, torch.cuda.current_device() if device.index is None else device.index, priority)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)
    return streams[key]


def capture_stream(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """With the current stream's priority, which the kernels of a graph keep.

    Graphs of one purpose must not run at the same time: their products share memory.
    """
    return stream_for(f"record {purpose}", device, torch.cuda.current_stream(device).priority)


@contextmanager
def high_priority_stream(device: torch.device) -> Iterator[None]:
    """Within, what this thread gives a GPU goes before what others give it."""
    outer, stream = torch.cuda.current_stream(device), stream_for("train", device, HIGH_PRIORITY)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
