"""The number of threads that prepare batches, and of batches that they prepare ahead, chosen from epoch to epoch.

After each epoch the `Load` of the pipeline says how long training waited for batches, and how busy the threads were:

    training waited much, threads were busy   --> twice the threads, as long as batches come faster for it
    training hardly waited, threads were idle --> fewer threads and fewer prefetched batches

A change is judged after the next epoch. One that does not pay is undone, and then the numbers stay. Only speed and
memory depend on them: every batch is the same with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hopline.pipeline.stages import Load

MAX_FIRST_WORKERS = 8
"""Most threads that a loader starts with, if `workers` is "auto". Tuning may add more. A rule of thumb."""
NEVER, OFTEN = 0.01, 0.1
"""Shares of an epoch that training waits for batches. Rules of thumb.

Below NEVER there are threads to spare, above OFTEN there are too few.
"""
WORTH = 0.03
"""Share of the time per batch that more threads must save, and that fewer threads may cost. Less is noise.

A rule of thumb.
"""
TELLING = 4
"""Least number of batches of an epoch that is judged, as a multiple of `look_ahead`. A rule of thumb.

A shorter epoch is mostly filling and emptying of the pipeline, and tells nothing.
"""


@dataclass
class Tuning:
    """The numbers for the next epoch, and what earlier epochs have shown.

    If training waits, the threads are doubled, as long as that makes batches faster. If it hardly waits, the threads
    are reduced to twice the number that the work keeps busy. A change that does not pay is undone, and ends the
    tuning.
    """

    workers: int
    """Threads that prepare batches."""
    look_ahead: int
    """Batches that the threads may be ahead of training."""
    max_workers: int
    """Most threads: the cores of this process, since more could not run at once."""
    max_look_ahead: int
    """Most batches that may be prefetched."""
    settled: bool = False
    """Whether the tuning has ended."""
    _epochs: int = field(default=0, init=False)
    """Number of epochs seen, those that were not judged included."""
    _before: tuple[int, int, float] | None = field(default=None, init=False)
    """(workers, look_ahead) before the last change, and the most seconds per batch with which the change stays.

    None if there is no change to judge.
    """

    @property
    def threads(self) -> tuple[int, int]:
        """(workers, look_ahead) for the next epoch."""
        return self.workers, self.look_ahead

    def learn(self, load: Load) -> None:
        """Choose the numbers for the next epoch by the load of the last. The first epoch, a warm-up, is ignored."""
        self._epochs += 1
        if self.settled or self._epochs == 1 or load.num_results < TELLING * self.look_ahead or load.wall_s <= 0:
            return
        batch_s = load.wall_s / load.num_results
        if self._before is not None:
            workers, look_ahead, allowed_s = self._before
            self._before = None
            if batch_s > allowed_s:  # the change does not pay: undo it, and change nothing again
                self.workers, self.look_ahead, self.settled = workers, look_ahead, True
                return
        # busy: threads at work, on average. Twice as many, rounded up, are taken to be enough: a rule of thumb.
        busy, waited = sum(load.stages.values()) / load.wall_s, load.waited_s / load.wall_s
        enough = max(1, -int(-2 * busy // 1))
        if waited < NEVER and enough < self.workers:
            self._set(enough, batch_s * (1 + WORTH))
        elif waited > OFTEN and 2 * busy > self.workers and self._most() > self.workers:
            self._set(min(self._most(), 2 * self.workers), batch_s * (1 - WORTH))

    def _most(self) -> int:
        """Most threads: with fewer prefetched batches than threads, some threads would have nothing to do."""
        return min(self.max_workers, self.max_look_ahead)

    def _set(self, workers: int, allowed_s: float) -> None:
        self._before = (*self.threads, allowed_s)
        self.workers, self.look_ahead = workers, min(2 * workers, self.max_look_ahead)


class Threads:
    """The number of threads of one loader, and of batches that they prepare ahead.

    If both are "auto", a `Tuning` changes them between epochs. Only the thread that takes the batches may call it.

    Args:
        workers: Number of threads. "auto": at first one per core, up to `MAX_FIRST_WORKERS`. They may take all cores,
            because they give way to training.
        look_ahead: Number of batches that they may be ahead. "auto": two per thread.
        num_cores: Cores of this process.
        by_gpu: Whether a GPU prepares the batches. It works in order, and threads would only take turns; so there are
            none.
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
        """(workers, look_ahead) for the next epoch."""
        return self._fixed if self._tuning is None else self._tuning.threads

    def learn(self, load: Load | None) -> None:
        """Tune the numbers after an epoch that ran to its end. load: None if no thread prepared its batches."""
        if self._tuning is not None and load is not None:
            self._tuning.learn(load)
