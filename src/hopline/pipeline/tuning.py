"""Chooses from epoch to epoch how many threads prepare batches, and how many batches they prefetch.

After each epoch the `Load` of the pipeline says how long training waited for batches, and how busy the
threads were:

    training waited much, threads were busy   --> twice the threads, as long as batches come faster for it
    training hardly waited, threads were idle --> fewer threads and fewer prefetched batches

A change is judged after the next epoch. One that does not pay is undone, and then the numbers stay. Only
speed and memory depend on them: every batch is the same with any number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hopline.pipeline.stages import Load

MAX_FIRST_WORKERS = 8
"""Most threads that a loader starts with, if `workers` is "auto". Tuning may add more. A rule of thumb."""
RARE_WAIT = 0.01
"""If training waits for batches less than this share of an epoch, threads may be spared.

A rule of thumb.
"""
FREQUENT_WAIT = 0.1
"""If training waits for batches more than this share of an epoch, threads are too few. A rule of thumb."""
MIN_GAIN = 0.03
"""Share of the time per batch that more threads must save, and that fewer threads may cost. Less is noise.

A rule of thumb.
"""
MIN_LOOK_AHEADS = 4
"""Least number of batches of an epoch that is judged, as a multiple of `look_ahead`. A rule of thumb.

A shorter epoch is mostly filling and emptying of the pipeline, and tells nothing.
"""


class _Trial(NamedTuple):
    """A change of the numbers that the next epoch will judge."""

    workers_before: int
    """`Tuning.workers` before the change."""
    look_ahead_before: int
    """`Tuning.look_ahead` before the change."""
    max_batch_s: float
    """Most seconds per batch with which the change stays."""


@dataclass
class Tuning:
    """The numbers for the next epoch, and what earlier epochs have shown.

    If training waits, the threads are doubled, as long as that makes batches faster. If it hardly waits,
    the threads are reduced to twice the number that the work keeps busy. A change that does not pay is
    undone, and ends the tuning.
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
    _num_epochs: int = field(default=0, init=False)
    """Number of epochs seen, those that were not judged included."""
    _trial: _Trial | None = field(default=None, init=False)
    """The last change. None if there is no change to judge."""

    @property
    def threads(self) -> tuple[int, int]:
        """(workers, look_ahead) for the next epoch."""
        return self.workers, self.look_ahead

    def learn(self, load: Load) -> None:
        """Choose the numbers for the next epoch by the load of the last.

        The first epoch, a warm-up, is ignored.
        """
        self._num_epochs += 1
        is_too_short = load.num_results < MIN_LOOK_AHEADS * self.look_ahead or load.wall_s <= 0
        if self.settled or self._num_epochs == 1 or is_too_short:
            return

        batch_s = load.wall_s / load.num_results
        trial = self._trial
        self._trial = None
        if trial is not None and batch_s > trial.max_batch_s:
            # The change does not pay: undo it, and change nothing again.
            self.workers = trial.workers_before
            self.look_ahead = trial.look_ahead_before
            self.settled = True
            return

        num_busy = sum(load.stages.values()) / load.wall_s  # threads at work, on average
        wait = load.waited_s / load.wall_s
        # Twice the busy threads are taken to be enough: a rule of thumb.
        enough = max(1, math.ceil(2 * num_busy))
        # With fewer prefetched batches than threads, some threads would have nothing to do.
        max_workers = min(self.max_workers, self.max_look_ahead)
        are_busy = 2 * num_busy > self.workers  # more than half of the threads are at work
        if wait < RARE_WAIT and enough < self.workers:
            self._try_workers(enough, batch_s * (1 + MIN_GAIN))
        elif wait > FREQUENT_WAIT and are_busy and max_workers > self.workers:
            self._try_workers(min(max_workers, 2 * self.workers), batch_s * (1 - MIN_GAIN))

    def _try_workers(self, workers: int, max_batch_s: float) -> None:
        """Change the numbers for the next epoch.

        They stay if a batch then takes at most `max_batch_s` seconds.
        """
        self._trial = _Trial(self.workers, self.look_ahead, max_batch_s)
        self.workers = workers
        self.look_ahead = min(2 * workers, self.max_look_ahead)


class Threads:
    """The number of threads of one loader, and of batches that they prepare ahead.

    If both are "auto", a `Tuning` changes them between epochs. Only the thread that takes the batches may
    call it.

    Args:
        workers: Number of threads. "auto": at first one per core, up to `MAX_FIRST_WORKERS`. They may take
            all cores, because they give way to training.
        look_ahead: Number of batches that they may be ahead. "auto": two per thread.
        num_cores: Cores of this process.
        by_gpu: Whether a GPU prepares the batches. It works in order, and threads would only take turns; so
            there are none.
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
        num_ahead = 2 * max(1, num_workers) if look_ahead == "auto" else look_ahead
        self._fixed = (0, 1) if by_gpu else (num_workers, num_ahead)
        self._tuning: Tuning | None = None
        if workers == look_ahead == "auto" and not by_gpu:
            self._tuning = Tuning(
                workers=num_workers,
                look_ahead=num_ahead,
                max_workers=num_cores,
                max_look_ahead=2 * MAX_FIRST_WORKERS,  # as for the most threads that a loader starts with
            )

    @property
    def now(self) -> tuple[int, int]:
        """(workers, look_ahead) for the next epoch."""
        return self._fixed if self._tuning is None else self._tuning.threads

    def learn(self, load: Load | None) -> None:
        """Tune the numbers after an epoch that ran to its end.

        load: None if no thread prepared its batches.
        """
        if self._tuning is not None and load is not None:
            self._tuning.learn(load)
