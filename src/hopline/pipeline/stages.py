"""`Pipeline`: threads prepare batches, or other results, before they are needed, and deliver them in order.

    requests --> thread 1: stage a, stage b, ... --+
             --> thread 2: stage a, stage b, ... --+--> up to `look_ahead` results --> the caller, in order
             --> ...                             --+

One thread takes one request through all stages, so that threads share nothing.

Threads compete with training for cores. So they run at a lower priority (`give_way`), and their kernels run
in the thread alone unless the caller leaves the cores idle.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from hopline import ops
from hopline.util import trace
from hopline.util.errors import StageError
from hopline.util.host import queued_s, refuse_after_fork

MAX_WORKERS = 8
"""Most threads of `workers="auto"`."""


def resolve_threads(
    workers: int | Literal["auto"], look_ahead: int | Literal["auto"], num_cores: int
) -> tuple[int, int]:
    """(threads that prepare batches, batches that they may be ahead), with "auto" replaced.

    One thread per core: they may take all cores, because they give way to training. Two batches per thread:
    one is prepared while another waits to be taken.
    """
    num_workers = min(MAX_WORKERS, num_cores) if workers == "auto" else workers
    return num_workers, 2 * max(1, num_workers) if look_ahead == "auto" else look_ahead


@dataclass(frozen=True)
class Stage:
    """One step of the preparation."""

    name: str
    """Name of the stage's span in the trace, and in error messages."""
    run: Callable[[Any], Any]
    """(result of the stage before, or the request) -> result. Runs in several threads at once."""


EXTRA_NICENESS = 10
"""Niceness of a preparing thread beyond that of the process, so that training gets a core first."""
MAX_NICENESS = 19
"""The lowest priority that Linux has."""
_END = object()
"""Says that no request is left. Any other value, None included, may be a request."""


class StageValueError(StageError, ValueError):
    """A `ValueError` inside a stage: the user can mend it."""


class StageMemoryError(StageError, torch.OutOfMemoryError):
    """An out-of-memory error inside a stage."""


class Pipeline:
    """Takes requests through stages in threads, and yields the results in the order of the requests.

    The threads belong to one call of `run`, and end with it. The requests are iterated in the caller's
    thread.

    Args:
        stages: Functions that each request goes through, one after the other.
        workers: Number of threads. 0: everything runs in the caller's thread.
        look_ahead: Most results that exist, or are being made, before they are asked for. With a slow
            caller the threads wait.
        in_step: Whether stages wait for those of other ranks. Then one thread takes the requests in order.
            Requests that were begun before the iterator is closed are finished. Ranks that took equally
            many results have begun equally many requests, so no rank waits for one that stopped.
        all_cores: Whether a thread's kernels may run on all cores, because the caller leaves them idle.
            Else they run in the thread alone.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        workers: int = 1,
        look_ahead: int = 2,
        in_step: bool = False,
        all_cores: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.in_step = in_step
        self.all_cores = all_cores
        self.workers = min(1, workers) if in_step else workers
        self.look_ahead = max(1, look_ahead)
        self.stage_s: dict[str, float] = {}
        """Seconds of all threads in each stage, by name, in the last run that came to its end. Empty if there was none,
        or if it had no threads. Time in which a thread was ready but had no core is left out."""

    def run(self, requests: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield each request's result, in order. Closing the iterator ends the threads and drops their results."""
        refuse_after_fork(torch.get_num_threads())
        if self.workers == 0:
            # Without threads the stages' times are dropped.
            for request in requests:
                yield self._run_stages(request, [])
            return

        source = iter(requests)
        num_kernel_threads = torch.get_num_threads() if self.all_cores else 1
        pool = ops.start_threads(self.workers, "hopline-pipeline", partial(_set_up_thread, num_kernel_threads))
        pending: deque[Future[Any]] = deque()
        stage_times: list[tuple[str, float]] = []  # (stage, seconds), of all threads

        # Requests are submitted by the caller's thread alone, so `pending` needs no lock.
        def fill() -> None:
            while len(pending) < self.look_ahead:
                request = next(source, _END)
                if request is _END:
                    return
                pending.append(pool.submit(self._run_stages, request, stage_times))

        # If the iterator is closed early, pending requests are dropped. With `in_step` they are finished,
        # because stages of other ranks wait for theirs.
        cancel = not self.in_step
        try:
            fill()
            while pending:
                with trace.span("wait"):
                    result = pending.popleft().result()
                fill()  # before the yield, so that threads work while the caller uses the result
                yield result
            if stage_times:
                stage_s = {stage.name: 0.0 for stage in self.stages}
                for name, seconds in stage_times:
                    stage_s[name] += seconds
                self.stage_s = stage_s
        except Exception:  # a stage or the requests failed: what is still pending is of no use
            cancel = True
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=cancel)

    def _run_stages(self, value: Any, stage_times: list[tuple[str, float]]) -> Any:
        """The result of a request. Adds (stage, seconds) to `stage_times`, to which several threads may append."""
        for stage in self.stages:
            began_s = _alone_s()
            try:
                with trace.span(stage.name):
                    value = stage.run(value)
            except Exception as error:
                # The kind is kept, so that `except ValueError` and `except torch.OutOfMemoryError` still
                # catch it.
                kind = StageError
                if isinstance(error, ValueError):
                    kind = StageValueError
                elif isinstance(error, torch.OutOfMemoryError):
                    kind = StageMemoryError
                raise kind(f"stage {stage.name!r} failed: {error}") from error
            stage_times.append((stage.name, max(0.0, _alone_s() - began_s)))
        return value


def _alone_s() -> float:
    """Seconds of a clock that stands still while this thread is ready to run but has no core."""
    return time.perf_counter() - queued_s()


def _set_up_thread(num_kernel_threads: int) -> None:
    """Set up a preparing thread: the number of threads of its kernels, and its priority."""
    if num_kernel_threads == 1:
        ops.serial_here()
    else:
        # The first call in a thread sets its number to the default, so it must come before ours.
        torch.get_num_threads()
        torch.set_num_threads(num_kernel_threads)  # of this thread only
    give_way()


def give_way() -> None:
    """Lower the priority of this thread, so that it runs when training leaves a core idle or waits for it.

    Only on Linux: elsewhere a priority belongs to a whole process. If the system refuses, the priority
    stays.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            niceness = min(MAX_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + EXTRA_NICENESS)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
