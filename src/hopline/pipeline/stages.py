"""Work prepared ahead of its use: plain functions run in threads, bounded, in request order."""

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
from typing import Any

import torch

from hopline import ops
from hopline.util import trace
from hopline.util.errors import StageError
from hopline.util.host import queued_s


@dataclass(frozen=True)
class Stage:
    """A named step of the preparation: its span in the trace, and the name in an error."""

    name: str
    run: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a run of a pipeline was. The wait for the first result, which nothing can shorten, is left out."""

    workers: int
    look_ahead: int
    num_results: int
    wall_s: float
    """From the first result to the end."""
    waited_s: float
    """How long of that the caller waited."""
    stages: dict[str, float]
    """Seconds that the threads spent in each stage, without those in which they were ready and had no core."""


NICER = 10
"""How much lower the priority of a preparing thread is: it runs when training leaves a core idle or waits for it."""


class StageValueError(StageError, ValueError):
    """The same where the user can mend it."""


class StageMemoryError(StageError, torch.OutOfMemoryError):
    """The same where memory ran out."""


class Pipeline:
    """Requests in, results out, in the same order.

    One thread takes one request through all stages, so threads share nothing. At most `look_ahead` results exist
    before they are asked for: a slow consumer makes the threads wait. `workers=0` runs everything in the caller.
    in_step: stages wait for those of other ranks, so one thread takes the requests in order, and what was begun before
    the iterator is closed is brought to its end: with equal numbers of results taken, that is the same on all ranks.
    all_cores: a thread's kernels run on all of them, where the caller leaves them idle; else in the thread alone.
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
        self.in_step, self.all_cores = in_step, all_cores
        self.workers = min(1, workers) if in_step else workers
        self.look_ahead = max(1, look_ahead)
        self.load: Load | None = None
        """Of the last run that came to its end, if threads worked on it."""

    def run(self, requests: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield each request's result. Closing the iterator stops the threads and drops what they prepared."""
        if self.workers == 0:
            for request in requests:
                yield self._through_stages(request, [])
            return
        source = iter(requests)
        pool = ops.start_threads(
            self.workers, "hopline-pipeline", partial(_begin, torch.get_num_threads() if self.all_cores else 1)
        )
        pending: deque[Future[Any]] = deque()
        waited, spent = list[float](), list[tuple[str, float]]()

        def fill() -> None:
            while len(pending) < self.look_ahead and (request := next(source, _END)) is not _END:
                pending.append(pool.submit(self._through_stages, request, spent))

        cancel = not self.in_step
        try:
            fill()
            began_s = time.perf_counter()
            while pending:
                asked_s = time.perf_counter()
                with trace.span("wait"):
                    result = pending.popleft().result()
                waited.append(time.perf_counter() - asked_s)
                fill()
                yield result
            if waited:
                wall_s, (first_s, *rest_s) = time.perf_counter() - began_s, waited
                stages = {stage.name: sum(s for name, s in spent if name == stage.name) for stage in self.stages}
                self.load = Load(
                    workers=self.workers,
                    look_ahead=self.look_ahead,
                    num_results=len(waited),
                    wall_s=wall_s - first_s,
                    waited_s=sum(rest_s),
                    stages=stages,
                )
        except Exception:
            cancel = True
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=cancel)

    def _through_stages(self, value: Any, spent: list[tuple[str, float]]) -> Any:
        for stage in self.stages:
            began_s = _alone_s()
            try:
                with trace.span(stage.name):
                    value = stage.run(value)
            except Exception as error:
                kinds = {ValueError: StageValueError, torch.OutOfMemoryError: StageMemoryError}
                kind = next((kind for cause, kind in kinds.items() if isinstance(error, cause)), StageError)
                raise kind(f"stage {stage.name!r} failed: {error}") from error
            spent.append((stage.name, max(0.0, _alone_s() - began_s)))
        return value


def _alone_s() -> float:
    """A clock that stands still while this thread is ready to run and has no core."""
    return time.perf_counter() - queued_s()


def _begin(threads: int) -> None:
    """What every preparing thread does first: it gives way to training where cores are few, and mostly works alone."""
    if threads == 1:
        ops.serial_here()
    else:
        torch.get_num_threads()  # the first call in a thread sets its number, so it must not come after
        torch.set_num_threads(threads)  # of this thread only
    give_way()


def give_way() -> None:
    """This thread runs when training leaves a core idle, or waits for it."""
    if sys.platform.startswith("linux"):  # elsewhere priorities belong to whole processes
        with contextlib.suppress(OSError):
            nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


_END = object()
