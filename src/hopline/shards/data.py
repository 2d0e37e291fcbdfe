"""`ShardedData`: a dataset that the Trainer sees as a whole, while every rank has one shard of it.

`DatasetInShards` is what it has in common with `AllShards`, of which one process has all shards.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.distributed.agreement import Fact
from hopline.distributed.all_to_all import Channel, rank_and_size
from hopline.distributed.world import World
from hopline.shards.shard import Shard, check_fits, open_shard
from hopline.tables import Table
from hopline.tasks.settings import LabelFacts


class DatasetInShards(Dataset):
    """A dataset whose edges, features and labels are in shards. Its sizes and the ids of its splits are here.

    Code that asks for the whole graph or for all features gets a ValueError.

    shard: any of the shards, for what all of them know.
    """

    _advice: str
    """What to do where the whole graph is needed: the end of an error message."""

    def __init__(self, shard: Shard) -> None:
        self.name = shard.name
        self.task = shard.task
        self.num_classes = shard.num_classes
        self.tables = {}
        self.y = None
        self.alternatives = ()  # published splits to choose from: `open_shard` has chosen one
        self.meta = shard.meta
        self.cut = shard.cut
        """A hash of the dataset and its partition."""
        self._num_nodes = shard.num_nodes
        self._num_edges = shard.num_edges
        self._edge_arrays = shard.edge

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        """Refused: no rank has the whole graph."""
        raise ValueError(f"dataset {self.name!r} is in shards, {self._advice}")

    @property
    def x(self) -> Table:
        """Refused: features are in the shards."""
        raise self._refusal()

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @property
    def edge_arrays(self) -> Mapping[str, Tensor]:
        return self._edge_arrays

    @property
    def is_symmetric(self) -> bool | None:
        return True if self.meta.get("symmetric") is True else None

    def contents(self) -> dict[str, str]:
        """The hash that all shards of one cut share. It stands for the arrays of the whole dataset."""
        return {"cut": self.cut}

    def with_fields(self, **fields: Any) -> Self:
        """A copy with other labels, another task, other classes or another `meta`."""
        if "tables" in fields or "graph" in fields:
            raise self._refusal()
        copied = copy.copy(self)
        copied.y = fields.get("y", self.y)
        copied.task = fields.get("task", self.task)
        copied.num_classes = fields.get("num_classes", self.num_classes)
        copied.meta = fields.get("meta", self.meta)
        return copied

    def _refusal(self) -> ValueError:
        """The error for features or edges that would have to be changed, and are in the files of shards."""
        return ValueError(
            f"the features or edges of {self.name!r} must be changed for this run, and it is in shards: give data= the "
            "dataset that was partitioned"
        )


class ShardedData(DatasetInShards):
    """A dataset in shards. This rank has one of them: `shard`.

    All ranks know the sizes of the dataset and the ids of its splits. Edges, tables and labels of this
    rank's nodes are in `shard`. Here `tables` is empty and `y` is None.

    The constructor is collective, since the ranks compare their shards and gather the splits. All ranks
    call it together, usually by `hl.shards.open`, which is `open_sharded` of this module.

    Args:
        shard: This rank's.
        world: The ranks. Default: the processes of torch.distributed, or this process alone.

    Raises:
        ValueError: Shards and ranks do not fit together, or the shards are of different datasets
            or partitions.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), splits={"train": [3, 1]})
        >>> hl.shards.cut(data, "shards", 1, how="range")
        >>> data = hl.shards.ShardedData(hl.shards.open_shard("shards", rank=0))
        >>> data.num_nodes, data.splits["train"].tolist()
        (4, [1, 3])
    """

    _advice = (
        "of which this rank has one, and this method or model needs the whole graph: train by method=sampled or "
        "method=full_batch with layers whose widths are known, or open the dataset that was partitioned"
    )

    def __init__(self, shard: Shard, world: World | None = None) -> None:
        super().__init__(shard)
        self.shard = shard
        self.channel = Channel(world)
        check_fits(shard, self.channel)
        # `Channel.all_gather` gathers the ids of all ranks, shard after shard. A `Dataset` has its split ids sorted.
        self.splits = {name: self.channel.all_gather(ids).sort().values for name, ids in shard.splits.items()}
        self.folder = shard.folder

    def label_facts(self, ids: Tensor) -> LabelFacts:
        """What a task is told about the labels of these nodes. Collective if the task adds numbers over the ranks."""
        shard = self.shard
        own_ids = ids[torch.isin(ids, shard.nodes)]
        y = None if shard.y is None else shard.y[shard.rows_of(own_ids)]
        return LabelFacts(kind=self.task, num_classes=self.num_classes, train=y, total=self._sum_over_ranks)

    def _sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of numbers that each has of its own nodes. Collective."""
        world = self.channel.world
        if world is None:
            return numbers
        summed = world.sum(numbers.reshape(-1).tolist())
        return torch.tensor(summed, dtype=numbers.dtype).reshape(numbers.shape)

    def _no_labels_error(self) -> ValueError:
        """The error of `Dataset.labels` and `Dataset.train_ids`: each rank has the labels of its own nodes."""
        return ValueError(
            f"dataset {self.name!r} is in shards, of which this rank has one: its labels are data.shard.labels, and a "
            "split is drawn before the dataset is cut, by `hopline convert DATASET FOLDER split=0.6,0.2,0.2`"
        )

    @property
    def num_features(self) -> int:
        """Width of the table "x"; 0 without one."""
        return self.shard.num_features

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes

    def map_features(self, function: Callable[[Table], Table]) -> ShardedData:
        copied = copy.copy(self)
        tables = self.shard.tables
        copied.shard = replace(self.shard, tables={**tables, "x": function(tables["x"])})
        return copied

    def facts(self) -> dict[str, Fact]:
        """The hash that all shards of one cut share. It stands for the arrays of the whole dataset."""
        return {"the cut of the dataset": Fact("", checksum=self.cut)}

    def __repr__(self) -> str:
        return f"ShardedData({self.shard!r})"


def open_sharded(folder: str | os.PathLike[str], world: World | None = None, *, split: int = 0) -> ShardedData:
    """Open this rank's shard for a Trainer. Collective: every rank must call it.

    Args:
        folder: Made by `hopline partition`, with as many shards as there are ranks.
        world: As `hopline.distributed.launch` hands it out. Default: the processes of torch.distributed, or
            this one alone.
        split: Which published split is the current one, for datasets that have several.

    Raises:
        ValueError: There is no shard for this rank, or shards and ranks do not fit together.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> hl.shards.cut(data, "shards", 1, how="range")
        >>> hl.shards.open("shards").num_features
        2
    """
    rank, _ = rank_and_size(world)
    return ShardedData(open_shard(folder, rank, split=split), world)
