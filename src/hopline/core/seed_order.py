"""The order of an epoch's seeds, and each rank's share of a batch.

Both are functions of their arguments alone. So every rank can compute the batches without communication, and a
run that resumes in the middle of an epoch gets the remaining ones.
"""

from __future__ import annotations

from collections.abc import Iterator

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
