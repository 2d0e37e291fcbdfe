"""How many threads prepare batches and how far ahead, from epoch to epoch; no batch depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hopline.pipeline.stages import Load

MAX_FIRST_WORKERS = 8
"""Threads that prepare batches, until epochs show that training waits for more."""
NEVER, OFTEN = 0.01, 0.1
"""Training that waits for batches less than this part of an epoch has threads to spare, more than that too few."""
WORTH = 0.03
"""What a change must gain, or may cost, in time; less is noise."""
TELLING = 4
"""An epoch of fewer batches than so many times those ahead is all beginning and end, and tells nothing."""


@dataclass
class Tuning:
    """What is set now, and what was learnt of it.

    Training that waits gets more threads, as long as epochs become shorter. Where it never waits, twice the threads
    that the work would fill are enough, and fewer batches are kept. A change that does not hold what it should is taken
    back, and then all stays as it is.
    """

    workers: int
    look_ahead: int
    max_workers: int
    """Threads that can run at once: cores,"""
    max_look_ahead: int
    """and batches that may be kept."""
    settled: bool = False
    """Whether nothing is changed any more."""
    _epochs: int = field(default=0, init=False)
    _before: tuple[int, int, float] | None = field(default=None, init=False)
    """The last change: what was set, and the seconds of a batch that the new setting has to keep to."""

    @property
    def threads(self) -> tuple[int, int]:
        return self.workers, self.look_ahead

    def learn(self, load: Load) -> None:
        """Set what the next epoch should have, after one like this; the first one warms up and is passed over."""
        self._epochs += 1
        if self.settled or self._epochs == 1 or load.num_results < TELLING * self.look_ahead or load.wall_s <= 0:
            return
        batch_s = load.wall_s / load.num_results
        if self._before is not None:
            workers, look_ahead, allowed_s = self._before
            self._before = None
            if batch_s > allowed_s:
                self.workers, self.look_ahead, self.settled = workers, look_ahead, True
                return
        busy, waited = sum(load.stages.values()) / load.wall_s, load.waited_s / load.wall_s
        enough = max(1, -int(-2 * busy // 1))
        if waited < NEVER and enough < self.workers:
            self._set(enough, batch_s * (1 + WORTH))
        elif waited > OFTEN and 2 * busy > self.workers and self._most() > self.workers:
            self._set(min(self._most(), 2 * self.workers), batch_s * (1 - WORTH))

    def _most(self) -> int:
        return min(self.max_workers, self.max_look_ahead)

    def _set(self, workers: int, allowed_s: float) -> None:
        self._before = (*self.threads, allowed_s)
        self.workers, self.look_ahead = workers, min(2 * workers, self.max_look_ahead)


class Threads:
    """The threads that prepare the batches of one loader. Numbers that are left open follow the epochs by a `Tuning`.

    It belongs to the thread that takes the batches.

    Args:
        workers: How many threads; "auto" is one per core, up to `MAX_FIRST_WORKERS`, since they give way to training.
        look_ahead: How many batches they may be ahead; "auto" is two per thread.
        num_cores: Cores of this process.
        by_gpu: Whether a GPU prepares batches, in its own order: threads would only take turns, so there are none.
    """

    def __init__(
        self,
        workers: int | Literal["auto"],
        look_ahead: int | Literal["auto"],
        num_cores: int,
        *,
        by_gpu: bool = False,
    ) -> None:
        num_workers = min(MAX_FIRST_WORKERS, num_cores) if workers == "auto" else workers
        ahead = 2 * max(1, num_workers) if look_ahead == "auto" else look_ahead
        self._fixed = (0, 1) if by_gpu else (num_workers, ahead)
        is_open = workers == look_ahead == "auto" and not by_gpu
        self._tuning = Tuning(num_workers, ahead, num_cores, 2 * MAX_FIRST_WORKERS) if is_open else None

    @property
    def now(self) -> tuple[int, int]:
        """(threads that prepare the next epoch, how many batches they may be ahead)."""
        return self._fixed if self._tuning is None else self._tuning.threads

    def learn(self, load: Load | None) -> None:
        """After an epoch that was taken to its end. load: None where no thread prepared it."""
        if self._tuning is not None and load is not None:
            self._tuning.learn(load)
