"""The order of an epoch's seeds, and each rank's share of a batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hopline import ops


def share_of(seeds: Tensor, rank: int, size: int) -> Tensor:
    """One rank's part of a step's seeds: all parts together are the seeds, and their sizes differ by at most one."""
    return seeds[seeds.numel() * rank // size : seeds.numel() * (rank + 1) // size]


def seed_batches(
    ids: Tensor, batch_size: int, key: int, *, shuffle: bool = True, drop_last: bool = False, done: int = 0
) -> Iterator[Tensor]:
    """`ids` in an order drawn from the key, cut into batches; every id once, the last batch may be smaller.

    done: ids at the front of that order that are left out, since they had their turn.
    """
    order = ids[ops.permutation(key, ids.numel())] if shuffle else ids
    stop = ids.numel() - (ids.numel() - done) % batch_size if drop_last else ids.numel()
    for start in range(done, stop, batch_size):
        yield order[start : min(start + batch_size, stop)]
