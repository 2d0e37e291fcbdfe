"""The steps of an epoch: the examples of each, the key of its random draws, and each rank's share.

All are functions of their arguments alone. So every rank can compute the batches without communication, and a
run that resumes in the middle of an epoch gets the remaining ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hopline import ops


def share_of(examples: Tensor, rank: int, size: int) -> Tensor:
    """One rank's share of the examples of a step. The shares are contiguous, and their sizes differ by at most one.

    size: the number of ranks.
    """
    return examples[examples.numel() * rank // size : examples.numel() * (rank + 1) // size]


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


class StepExamples(NamedTuple):
    """The examples and the key of one step."""

    numbers: Tensor
    """[n] int64: which examples, those of all ranks."""
    key: int
    """Key of the step's random draws."""
    draw_key: int
    """Key by which neighbours are drawn. Several steps may have the same."""


def draw_key_of(epoch_key: int, step: int, every: int) -> int:
    """The key by which a step draws neighbours: that of the first of each `every` steps."""
    return ops.derive_key(epoch_key, step - step % every)


@dataclass(frozen=True, eq=False)
class SeedOrder:
    """The steps of every epoch of a loader. Its length is the number of steps of an epoch."""

    num_examples: int
    per_step: int
    """Examples of a step, over all ranks."""
    shuffle: bool
    drop_last: bool
    """Whether to leave out the last step of an epoch if it has fewer examples."""
    law_every: int = 1
    """Steps that draw neighbours by one key."""

    def __len__(self) -> int:
        num_full, num_remaining = divmod(self.num_examples, self.per_step)
        has_smaller_step = num_remaining > 0 and not self.drop_last
        return num_full + 1 if has_smaller_step else num_full

    def steps(self, epoch_key: int, done: int = 0, examples_done: int = 0) -> Iterator[StepExamples]:
        """The steps of one epoch, whose key decides the order and the keys of the steps.

        done: the number of steps to leave out at the beginning. examples_done: the number of their examples. Both are
        needed, because these steps may have had another size.
        """
        numbers = torch.arange(self.num_examples)
        batches = seed_batches(
            numbers, self.per_step, epoch_key, shuffle=self.shuffle, drop_last=self.drop_last, done=examples_done
        )
        for step, batch in enumerate(batches, start=done):
            yield StepExamples(batch, ops.derive_key(epoch_key, step), draw_key_of(epoch_key, step, self.law_every))
