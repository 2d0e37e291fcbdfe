"""Capture and replay: a call is recorded once as a CUDA graph, and launched as a whole afterwards.

Launching a graph costs the host a few microseconds, however many kernels it has. Three callers use it: a training step
from the seeds to the gradients, the optimizer's step, and an evaluation. They share what is here: when a call is due
for capture, on which stream and under which lock it is captured, and what follows when that fails. What happens around
a replay differs, and stays with them.

    owner runs the call, `warm_up` times   ->   capture   ->   replay, replay, ...
                                                   ^                  |
                                                   +---- forget ------+   what the graph reads has moved

A graph knows addresses only. So its owner holds every tensor that the graph reads for as long as the graph lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch

from hopline.device import streams

R = TypeVar("R")


class CaptureDeclined(Exception):
    """Raised by who prepares a capture and finds a graph not worth making: nothing is said, and nobody tries again."""


class CapturedCall(Generic[R]):
    """A call without arguments as a CUDA graph: when it is due for capture, the graph, and the result of the call.

    Its owner runs the call while there is no graph, and counts that in `runs`. One thread at a time may use it.

    The call is an argument of `capture` and is not held here. It is a bound method of the owner, usually, and a
    reference cycle would keep the graph's memory until Python's collector runs.

    Args:
        device: The GPU.
        purpose: Names the stream to capture on. Graphs of one purpose must not run at the same time.
        subject: Begins the sentence on failure, with its verb: "steps are".
        say: Where that sentence goes.
        warm_up: Runs of the call before it is due. They compile kernels and set libraries up.
        max_captures: Captures, at most: a call whose tensors keep moving is not worth another graph.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        purpose: str,
        subject: str,
        say: Callable[[str], None],
        warm_up: int = 0,
        max_captures: int = 1,
    ) -> None:
        self.device = device
        self.purpose = purpose
        self.subject = subject
        self.say = say
        self.warm_up = warm_up
        self.max_captures = max_captures
        self.runs = 0
        """Runs of the call since there was no graph."""
        self.captures = 0
        """Captures so far. After one that failed or was declined it is `max_captures`: the next one would be no
        other."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self._result: R | None = None

    @property
    def is_due(self) -> bool:
        """Whether to capture the call before it runs the next time."""
        return self.graph is None and self.runs >= self.warm_up and self.captures < self.max_captures

    @property
    def is_settled(self) -> bool:
        """Whether the call is captured, or never will be."""
        return self.graph is not None or self.captures >= self.max_captures

    @property
    def result(self) -> R:
        """What the call returned when it was captured. Its tensors are in the graph's memory: a replay writes them."""
        assert self.graph is not None
        return self._result  # type: ignore[return-value]

    def capture(
        self,
        prepared: AbstractContextManager[Callable[[], R]],
        *,
        stream: torch.cuda.Stream | None = None,
        pool_of: CapturedCall[Any] | None = None,
        wait: bool = True,
    ) -> bool:
        """Capture a call, whose kernels do not run by that. Returns whether there is a graph now.

        Args:
            prepared: Gives the call. It is entered on the stream that captures, to warm the call up, and left there
                after the capture, to put things back. `CaptureDeclined` ends the capture without a word, at either end.
            stream: Kernels of a graph keep its priority. Default: this thread's for the purpose, with the priority
                of the current stream.
            pool_of: Another call that never runs at the same time. This graph computes in that one's memory: it leaves
                that one's result alone, and a replay of that one writes over the result of this one.
            wait: Whether to wait for another thread that has the capture lock. Otherwise it is left for another time.
        """
        if not streams.capture_lock.acquire(blocking=wait):
            return False
        try:
            self.captures += 1
            self._capture(prepared, stream, pool_of)
        finally:
            streams.capture_lock.release()
        return self.graph is not None

    def replay(self) -> R:
        """Launch the graph on the current stream."""
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def reset(self) -> None:
        """Let the graph go, since what it reads has moved. The call warms up again before the next capture."""
        self.graph = self._result = None
        self.runs = 0

    def _capture(
        self,
        prepared: AbstractContextManager[Callable[[], R]],
        stream: torch.cuda.Stream | None,
        pool_of: CapturedCall[Any] | None,
    ) -> None:
        outer = torch.cuda.current_stream(self.device)
        if stream is None:
            stream = streams.capture_stream(self.purpose, self.device)
        graph = torch.cuda.CUDAGraph()
        pool_graph = None if pool_of is None else pool_of.graph
        # Both ways: the call reads what the current stream has still to write, and warm-up writes what that one reads.
        stream.wait_stream(outer)
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(stream),  # torch.cuda.graph enters it too, but stays in it after a failed capture
                prepared as run,
                _recording(graph, stream, pool_graph),
            ):
                result = run()
            self.graph, self._result = graph, result
        except CaptureDeclined:
            self.captures = self.max_captures
        except Exception as error:
            self.captures = self.max_captures
            reason = " ".join(str(error).split())[:200]
            self.say(f"{self.subject} not captured in a CUDA graph, so kernels are launched one by one: {reason}")
        finally:
            outer.wait_stream(stream)


@contextmanager
def _recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool_graph: torch.cuda.CUDAGraph | None
) -> Iterator[None]:
    """Within, what this thread gives the stream becomes a graph; another, that moves batches, may wait for copies.

    pool_graph: a graph that never runs at the same time, whose memory it may use.
    """
    pool = torch.cuda.graph_pool_handle() if pool_graph is None else pool_graph.pool()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        _end_recording(pool, stream)
        raise


def _end_recording(pool: Any, stream: torch.cuda.Stream) -> None:
    """After a failure: end what torch leaves open of a capture that the device has given up.

    Until then torch reuses no memory that a second stream has read, and draws no random number on the GPU.
    """
    try:
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    except RuntimeError:  # the capture came to its end
        return
    torch._C._cuda_releasePool(stream.device_index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)  # the end of any capture is that of the generator's
