"""Full batch over shards for a loop of the user's own: one batch per epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hopline import ops
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset
from hopline.distributed.world import World
from hopline.methods.full_batch.batches import ShardBatches, check_model, check_settings
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.partitioned.seeds import find_seeds
from hopline.nn.layered import Layered
from hopline.nn.whole_module import as_batch_model, is_layered, refuse_batches, unwrap
from hopline.shards.convs.patch_message_passing import FetchMode
from hopline.shards.data import ShardedData
from hopline.shards.shard import Shard
from hopline.units.rank_facts import check_loader_ranks


class FullBatchLoader:
    """One batch per epoch: all nodes of this rank with all their in-edges. Each iteration is the next epoch.

    Usually made by `hl.FullBatch(...).loader(data, model=model)`. The blocks of a batch run convs over shards: rows
    of other shards are fetched while a conv runs. With `aggregation="sequential"` they come one shard at a time, and
    again in backward.

    The seeds of a batch are those of `ids` that are this rank's own nodes, and `batch.total_seeds` counts the seeds
    of all ranks. Divide a summed loss by it, and sum the gradients over the ranks. Every rank makes a loader and
    takes as many batches as the others. It calls the model and backward on each of them, even if it has no seeds.

    Args:
        method: The settings: aggregation, partition and `trim`.
        data: The whole dataset on every rank, or this rank's shard.
        ids: The nodes whose outputs are wanted, as node ids or as the name of a split, the same on every rank.
        model: A `GNN` or a PyG model.
        num_layers: The number of blocks of a batch, in place of `model`.
        seed: Seed of the partition and, together with the epoch, of every random draw.
        device: The device of the batches.
        world: The ranks. Default: this process alone.

    Raises:
        ValueError: `aggregation` is "sweep", a setting does not go with the graph, the model or the ranks, or ranks
            differ in what they were given.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)])
        >>> loader = hl.FullBatch(num_shards=2, partition="range").loader(data, model=model)
        >>> for batch in loader:
        ...     torch.nn.functional.cross_entropy(model(batch), batch.labels).backward()
        >>> len(loader), batch.seeds.tolist(), len(batch.blocks)
        (1, [0, 1, 2], 2)
    """

    def __init__(
        self,
        method: FullBatch,
        data: Dataset | Shard,
        ids: NodeIds | str = "train",
        *,
        model: nn.Module | None = None,
        num_layers: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> None:
        if isinstance(data, Shard):
            data = ShardedData(data, world)
        seeds = find_seeds(data, ids)
        check_loader_ranks(world, method, data, ids, seed=seed, model=model, num_layers=num_layers)
        world = World.alone(device) if world is None else world
        if (model is None) == (num_layers is None):
            raise ValueError(
                "give model= that is made of layers (hl.nn.GNN, or a PyG model such as GCN), or num_layers= of a "
                "module of your own, which runs its convs by hl.nn.convolve(conv, h, block)"
            )
        if model is not None:
            num_layers = _check_layers(method, model, data, world)
        assert num_layers is not None
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, not {num_layers}")
        if method.aggregation == "sweep":
            raise ValueError(
                "aggregation=sweep computes forward and backward by itself, part by part: train by hl.Trainer, or set "
                "aggregation=sequential for a loop of your own"
            )
        mode: FetchMode = "sequential" if method.aggregation == "auto" else method.aggregation
        method = method.for_graph(data.num_nodes)
        check_settings(method, data, world)
        self.seed = seed
        self.world = world
        self._batches = ShardBatches(
            data=data,
            examples=Examples(seeds),
            method=method,
            mode=mode,
            num_layers=num_layers,
            seed=seed,
            device=torch.device(device),
            world=world,
        )
        self._next_epoch = 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._next_epoch
        self._next_epoch += 1
        return self.epoch(epoch)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        yield self._batches.batch(ops.derive_key(self.seed, epoch, 0))  # an epoch has one step, 0
        # The user's loop asks for the next batch, so its step on this one is over.
        self._batches.transport.end_step()


def _check_layers(method: FullBatch, model: nn.Module, data: Dataset, world: World) -> int:
    """The number of layers of a model, whose gradients are exact over shards. Raises a ValueError if they are not."""
    inner = unwrap(model)
    if not is_layered(inner):
        raise ValueError(
            f"{type(inner).__name__} is not made of layers, of which each goes over all shards: give num_layers= in "
            "place of model=, and run its convs by hl.nn.convolve(conv, h, block)"
        )
    refuse_batches(inner)  # a PyG model that is called with a batch will raise an error with advice
    batch_model = as_batch_model(inner)
    assert isinstance(batch_model, Layered)
    check_model(method, batch_model, data, world)
    return batch_model.num_layers
