"""Capture and replay: a call is recorded once as a CUDA graph, and launched as a whole afterwards.

Launching a graph costs the host a few microseconds, however many kernels it has. Three callers use it: a training step
from the seeds to the gradients, the optimizer's step, and an evaluation. This module has what they share: when to
capture a call, on which stream and under which lock, and what to do if that fails. Each caller prepares its own
capture and its own replays.

    owner runs the call, `warm_up` times   ->   capture   ->   replay, replay, ...
              ^                                                       |
              +-------------------------- reset ----------------------+   a tensor that the graph reads has moved

A graph knows addresses only. So its owner must hold every tensor that the graph reads for as long as the graph lives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch

from hopline.device import streams

R = TypeVar("R")


class CaptureDeclined(Exception):
    """Raised while a capture is prepared, if a graph is not worth making. It ends the capture without a message.

    The call is not captured later either.
    """


class CapturedCall(Generic[R]):
    """The CUDA graph of a call without arguments, with the result of the call and a count of its runs.

    It owns the graph and the result. The owner runs the call itself while there is no graph, and adds to `runs`. One
    thread at a time may use it.

    The call is an argument of `capture` and is not stored. It is usually a bound method of the owner, and the
    reference cycle would keep the graph's memory until Python's garbage collector runs.

    Args:
        device: The GPU.
        purpose: Names the stream to capture on. Graphs of one purpose must not run at the same time.
        subject: Subject and verb of the message on failure, such as "steps are".
        say: Called with that message.
        warm_up: Runs of the call before it is captured. They compile kernels and initialise libraries.
        max_captures: The most captures. A call whose tensors keep moving is not worth another graph.
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
        """Runs of the call without a graph, since the start or the last `reset`. The owner counts them."""
        self.captures = 0
        """Captures so far. A failed or declined one sets it to `max_captures`, as the next one would end likewise."""
        self.graph: torch.cuda.CUDAGraph | None = None
        """The captured graph; None before the capture and after `reset`."""
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
        """The return value of the captured call. Its tensors are in the graph's memory: replays overwrite them."""
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
        """Capture a call. Its kernels are recorded and do not run. Returns whether there is a graph now.

        Args:
            prepared: A context that gives the call. It is entered and left on the capturing stream: it may warm the
                call up before, and must restore afterwards what that has changed. It may raise `CaptureDeclined` on
                entry and on exit.
            stream: The stream to capture on. The graph's kernels keep its priority. Default: this thread's stream for
                the purpose, with the priority of the current stream.
            pool_of: A call captured earlier, whose memory this graph shares. The two must never run at the same time.
                The earlier result is alive during this capture, so replays of this graph leave it intact. Replays of
                the earlier graph overwrite the result of this one.
            wait: Whether to wait if another thread has the capture lock. Otherwise it returns False at once, and the
                owner may try again later.
        """
        # One capture at a time in the process, and none while asynchronous evaluation synchronises (`streams`).
        if not streams.capture_lock.acquire(blocking=wait):
            return False
        try:
            self.captures += 1
            self._capture(prepared, stream, pool_of)
        finally:
            streams.capture_lock.release()
        return self.graph is not None

    def replay(self) -> R:
        """Launch the graph on the current stream. Returns `result`, which is complete when that stream gets there."""
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def reset(self) -> None:
        """Drop the graph, because a tensor that it reads has moved. The call warms up again before it is captured."""
        self.graph = self._result = None
        self.runs = 0

    def _capture(
        self,
        prepared: AbstractContextManager[Callable[[], R]],
        stream: torch.cuda.Stream | None,
        pool_of: CapturedCall[Any] | None,
    ) -> None:
        """Capture a call, under the capture lock. A failure is told by `say` and is no error."""
        outer = torch.cuda.current_stream(self.device)
        if stream is None:
            stream = streams.capture_stream(self.purpose, self.device)
        graph = torch.cuda.CUDAGraph()
        pool_graph = None if pool_of is None else pool_of.graph
        # The streams wait for each other, before and after. The warm-up reads what the current stream has still to
        # write. Afterwards the current stream reads what the warm-up has written.
        stream.wait_stream(outer)
        try:
            with (
                torch.cuda.device(self.device),
                # torch.cuda.graph enters the stream too, but does not leave it after a failed capture.
                torch.cuda.stream(stream),
                prepared as run,
                _recording(graph, stream, pool_graph),
            ):
                result = run()
            self.graph = graph
            self._result = result
        except CaptureDeclined:
            self.captures = self.max_captures
        except Exception as error:
            self.captures = self.max_captures
            reason = " ".join(str(error).split())[:200]
            self.say(f"{self.subject} not captured in a CUDA graph, so kernels are launched one by one: {reason}")
        finally:
            outer.wait_stream(stream)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A context in which Python collects no reference cycles, in any thread.

    A cycle may hold an older CUDA graph, that of a Trainer that is gone for example. CUDA does not allow a graph to be
    destroyed while another one is captured: the process would crash.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool_graph: torch.cuda.CUDAGraph | None
) -> Iterator[None]:
    """A context in which kernels that this thread launches on the stream are recorded into the graph.

    pool_graph: a graph that never runs at the same time, whose memory the new one shares. None: new memory.
    """
    pool = torch.cuda.graph_pool_handle() if pool_graph is None else pool_graph.pool()
    try:
        # "thread_local": in torch's default mode a capture fails if any thread waits for a copy, as prefetching
        # threads do.
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    except BaseException:
        _end_recording(pool, stream)
        raise


def _end_recording(pool: Any, stream: torch.cuda.Stream) -> None:
    """Clean up after a capture that the device has ended by an error, which torch leaves half open.

    Otherwise torch would never again reuse memory that a second stream has read, nor draw random numbers on the GPU.
    """
    try:
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    except RuntimeError:  # the capture came to its end, so nothing is left open
        return
    torch._C._cuda_releasePool(stream.device_index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        # The end of any capture also ends that of the random generator, which the failed one has left open.
        torch.zeros(1, device=stream.device)
