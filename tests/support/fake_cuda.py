"""Stands in for streams and CUDA graphs of torch.cuda on a machine without a GPU: it logs what they are asked for.

While a call is captured its body runs once. A replay runs nothing, so tested calls log that they ran, and compute
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hopline.device import streams


class Stream:
    """A stream that logs its waits."""

    def __init__(self, log: list[str], name: str, priority: int = 0) -> None:
        self.log = log
        self.name = name
        self.priority = priority
        self.device = torch.device("cpu")
        self.device_index = 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """The log of all requests in order, and the CUDA graphs that were made."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: list[Stream] = [Stream(self.log, "main")]
        self.graphs: list[Any] = []
        self.num_streams = 0
        self.random_state = torch.zeros(1)
        self.sync_debug_mode: int | str = 0
        self.reserved_bytes = self.bytes_per_graph = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of torch.cuda for one test."""
        fake = self

        class Graph:
            def __init__(self) -> None:
                self.number = len(fake.graphs)
                self.memory = None
                fake.graphs.append(self)

            def pool(self) -> Any:
                return self.memory

            def replay(self) -> None:
                fake.log.append(f"replay of {self.number} on {fake.current[-1].name}")

        def fail_to_end(*_: object) -> None:
            raise RuntimeError("the capture came to its end")

        monkeypatch.setattr(streams, "_own", threading.local())  # streams that are kept for the next use
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.enter_stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool of {len(self.graphs) - 1}")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current[-1])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.random_state.clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.random_state.copy_(state))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.sync_debug_mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_sync_debug_mode)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved_bytes)
        properties = SimpleNamespace(total_memory=1 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fail_to_end, raising=False)

    def new_stream(self, device: object, priority: int = 0) -> Stream:
        self.num_streams += 1
        return Stream(self.log, f"side {self.num_streams}", priority)

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = mode

    @contextmanager
    def enter_stream(self, stream: Stream) -> Iterator[None]:
        """Stands in for `torch.cuda.stream`."""
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    @contextmanager
    def capture(self, graph: Any, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """Stands in for `torch.cuda.graph`."""
        assert capture_error_mode == "thread_local"
        assert self.current[-1] is stream, "torch leaves it only where the capture ends well"
        graph.memory = pool
        self.reserved_bytes += self.bytes_per_graph
        self.log.append(f"capture {graph.number} on {stream.name} in {pool}")
        try:
            yield
        finally:
            self.log.append(f"end of capture {graph.number}")


@contextmanager
def capture_lock_elsewhere() -> Iterator[threading.Event]:
    """A context in which another thread holds the capture lock, as an evaluation does, until the event is set."""
    begun = threading.Event()
    ended = threading.Event()

    def evaluate() -> None:
        with streams.capture_lock:
            begun.set()
            ended.wait()

    thread = threading.Thread(target=evaluate)
    thread.start()
    begun.wait()
    try:
        yield ended
    finally:
        ended.set()
        thread.join()
