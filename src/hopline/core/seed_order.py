"""The steps of an epoch: the seeds of each, the key of its random draws, and each rank's share.

All are functions of their arguments alone. So every rank can compute the batches without communication, and a
run that resumes in the middle of an epoch gets the remaining ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hopline import ops


def share_of(seeds: Tensor, rank: int, size: int) -> Tensor:
    """One rank's share of the seeds of a step. The shares are contiguous, and their sizes differ by at most one.

    size: the number of ranks.
    """
    return seeds[seeds.numel() * rank // size : seeds.numel() * (rank + 1) // size]


def seed_batches(
    ids: Tensor, batch_size: int, key: int, *, shuffle: bool = True, drop_last: bool = False, done: int = 0
) -> Iterator[Tensor]:
    """The batches of an epoch: `ids` in an order that the key decides, every id once.

    drop_last: whether to leave out the last batch if it is smaller than `batch_size`.
    done: the number of ids at the front of that order to skip, because the epoch has trained on them already.
    """
    order = ids[ops.permutation(key, ids.numel())] if shuffle else ids
    stop = ids.numel()
    if drop_last:
        stop -= (stop - done) % batch_size
    for start in range(done, stop, batch_size):
        yield order[start : min(start + batch_size, stop)]


class StepSeeds(NamedTuple):
    """The seeds and the key of one step."""

    seeds: Tensor
    """[n] int64: the seeds of all ranks."""
    key: int
    """Key of the step's random draws."""


@dataclass(frozen=True, eq=False)
class SeedOrder:
    """The steps of every epoch of a loader. Its length is the number of steps of an epoch."""

    ids: Tensor
    """[n] int64: the seeds, each once."""
    per_step: int
    """Seeds of a step, over all ranks."""
    shuffle: bool
    drop_last: bool
    """Whether to leave out the last step of an epoch if it has fewer seeds."""

    def __len__(self) -> int:
        num_full, num_remaining = divmod(self.ids.numel(), self.per_step)
        has_smaller_step = num_remaining > 0 and not self.drop_last
        return num_full + 1 if has_smaller_step else num_full

    def steps(self, epoch_key: int, done: int = 0, seeds_done: int = 0) -> Iterator[StepSeeds]:
        """The steps of one epoch, whose key decides the order and the keys of the steps.

        done: the number of steps to leave out at the beginning. seeds_done: the number of their seeds. Both are
        needed, because these steps may have had another size.
        """
        batches = seed_batches(
            self.ids, self.per_step, epoch_key, shuffle=self.shuffle, drop_last=self.drop_last, done=seeds_done
        )
        for step, seeds in enumerate(batches, start=done):
            yield StepSeeds(seeds, ops.derive_key(epoch_key, step))
