"""CUDA streams by thread, purpose and priority, and the lock for CUDA-graph capture.

Streams are made once per thread and reused, because every new stream costs memory twice. CUDA's libraries keep a
workspace for each stream that had a matrix product. Torch's allocator reuses freed memory only on the stream that it
was allocated on.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

capture_lock = threading.RLock()
"""The lock of the process for capturing CUDA graphs. This module owns it.

A capture fails if another thread synchronises with the device meanwhile. Asynchronous evaluation does, so it takes
this lock too. They seldom wait for each other: most captures are in the first steps, before any evaluation.
"""

HIGH_PRIORITY = -1
"""The stream priority of training, whose kernels must not wait for evaluation. The default, 0, is the lowest."""


_own = threading.local()
"""The streams of each thread, by purpose, device index and priority. This module owns them; they live as long as the
thread."""


def stream_for(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """This thread's stream for a purpose; the same stream at every call, also in later runs of the process.

    The module docstring says what a new stream would cost.
    """
    streams: dict[tuple[str, int, int], torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    # By index, so that "cuda" and "cuda:0" give one stream if GPU 0 is the current one.
    key = (purpose, torch.cuda.current_device() if device.index is None else device.index, priority)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)
    return streams[key]


def capture_stream(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """This thread's stream for capturing graphs of a purpose, with the priority of the current stream.

    The kernels of a graph keep the priority of the stream that captured them. Graphs of one purpose must not run at
    the same time: their matrix products share the workspace of this stream.
    """
    return stream_for(f"record {purpose}", device, torch.cuda.current_stream(device).priority)


@contextmanager
def high_priority_stream(device: torch.device) -> Iterator[None]:
    """A context in which this thread's kernels go before those of streams with the default priority.

    The two `wait_stream` calls keep the order: kernels within run after those launched before the context, and before
    those launched after it.
    """
    outer = torch.cuda.current_stream(device)
    stream = stream_for("train", device, HIGH_PRIORITY)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
