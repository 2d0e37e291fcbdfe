"""The seeds of a loader of parts or shards, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline.core.sampler import check_ids
from hopline.data.dataset import Dataset


def find_seeds(data: Dataset, ids: Tensor | str) -> Tensor:
    """[n] int64: the seeds that a loader was asked for. ids: the name of a split, or node ids.

    Raises:
        ValueError: There is no such split, there are no seeds, or one comes twice.
    """
    if isinstance(ids, str):
        if ids not in data.splits:
            raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(data.splits)}")
        seeds = data.splits[ids]
    else:
        seeds = torch.as_tensor(ids)
        check_ids(seeds, data.num_nodes)
    if seeds.numel() == 0:
        raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
    if seeds.unique().numel() < seeds.numel():
        raise ValueError("the seeds must be distinct: pass each node id once, for example ids.unique()")
    return seeds.long()
