"""The seeds of a loader of parts or shards, checked."""

from __future__ import annotations

from torch import Tensor

from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.nodes import select_nodes


def find_seeds(data: Dataset, ids: NodeIds | str) -> Tensor:
    """[n] int64: the seeds of a loader; one may come several times. ids: the name of a split, or node ids."""
    expect_dataset(data, "a loader")
    seeds = select_nodes(data, ids)
    if seeds.numel() == 0:
        raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
    return seeds
