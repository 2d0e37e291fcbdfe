"""`Sampled`, the settings of neighbour sampling, and `Auto`, which stands for the fastest method.

Settings are plain data. Torch is imported only where a method is bound to a job, so that help and errors
about settings come at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from hopline.budget.plan import Budget, Outline, Plan
from hopline.contract import Job, Method, Work
from hopline.util.config import check_fanouts, check_fields, check_law, settings

if TYPE_CHECKING:  # what is bound to a job needs torch; the settings do not
    import torch
    from torch import Tensor, nn

    from hopline.core.sampler import NodeIds
    from hopline.data.dataset import Dataset
    from hopline.data.placement_settings import Placement
    from hopline.distributed.world import World
    from hopline.methods.sampled.collective_loader import CollectiveLoader
    from hopline.methods.sampled.loader import Loader
    from hopline.shards.data import ShardedData
    from hopline.shards.shard import Shard

FIRST_FANOUTS = (15, 10, 5)
"""Default fan-outs, the seeds' layer first. Layers further out have the last one."""


def usual_fanouts(num_layers: int) -> tuple[int, ...]:
    """The default fan-outs, 15, 10, 5, 5, ...

    They fall with the distance from the seeds, because hops multiply.
    """
    return (FIRST_FANOUTS + FIRST_FANOUTS[-1:] * num_layers)[:num_layers]


@settings
class Sampled(Method):
    """Neighbour sampling: each batch is some seeds, and a sample of the edges that lead to them.

    Raises:
        ValueError: A field has a value that is not allowed. From the Trainer: there is not one fan-out per
            layer.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> model = hl.nn.GNN([SAGEConv(4, 8), SAGEConv(8, 2)])
        >>> trainer = hl.Trainer(model, data, hl.Sampled(fanouts=(10, 5), batch_size=2), epochs=1, show=False)
        >>> trainer.fit().finished, trainer.num_steps
        (True, 2)
    """

    fanouts: tuple[int, ...] | Literal["auto"] = "auto"
    """In-edges sampled per node, one number per layer, that of the seeds first. -1 takes all. Default: 15,
    10, 5, 5, ..., one for each layer of the model."""
    batch_size: int = 1024
    """Seeds per batch and rank."""
    replace: bool = False
    """Draws of neighbours: with replacement (true), or without (false)."""
    law: Literal["uniform", "labor"] = "uniform"
    """Draws of neighbours: each on its own (`uniform`), or so that nodes draw the same ones where they can (`labor`),
    which makes batches smaller. `labor` takes layout `block`."""
    law_every: int = 1
    """Steps in which law `labor` keeps its choices. More steps read more rows again, from caches."""
    weight: str | None = None
    """Name of the edge array by which neighbours are drawn: the chance of an edge is like its weight. It takes layout
    `block`. Default: all in-edges of a node have the same chance."""
    layout: Literal["auto", "block", "tree"] = "auto"
    """Layout of a batch. `block` has every node once, `tree` a slot for every draw, so that shapes never
    change. Default: tree if a GPU reads graph and features itself, else block."""
    shuffle: bool = True
    """Order of the seeds: a new one in each epoch (true), or always the given one (false)."""
    drop_last: bool = False
    """Last batch of an epoch if it is not full: left out (true), or trained (false)."""
    scale_sums: bool = False
    """Scaling of sums over sampled edges by degree / sampled, or with `weight` by 1 / probability, so that they
    estimate the full sum. GCNConv always scales."""
    workers: int | Literal["auto"] = "auto"
    """Threads that prepare batches. 0: the training thread does. Default: one per core, up to 8."""
    look_ahead: int | Literal["auto"] = "auto"
    """Batches prepared before they are needed. Default: two per thread."""

    def __post_init__(self) -> None:
        fanouts: Any = self.fanouts
        if isinstance(fanouts, list):  # as PyG's loaders take them
            object.__setattr__(self, "fanouts", tuple(fanouts))
        if fanouts != "auto":
            check_fanouts(fanouts, self.replace)
        check_fields(self)
        check_law(self.law, self.weight, self.replace, self.law_every)
        if self.law != "uniform" or self.weight is not None:
            if self.layout == "tree":
                raise ValueError("layout=tree draws each slot on its own, and uniformly: set layout=block")
            object.__setattr__(self, "layout", "block")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        for name, minimum in (("workers", 0), ("look_ahead", 1)):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < minimum):
                raise ValueError(f"{name} must be 'auto' or a number from {minimum}, not {value!r}")

    @property
    def fanout_per_layer(self) -> tuple[int, ...]:
        """`fanouts` as numbers.

        Raises:
            ValueError: They are "auto", and `for_model` has not replaced that yet.
        """
        if isinstance(self.fanouts, str):
            raise ValueError(
                "fanouts='auto' follows the model's depth, and there is no model here: give model=, or one number per "
                "layer, such as fanouts=(15, 10, 5)"
            )
        return self.fanouts

    def for_model(self, model: nn.Module) -> Sampled:
        """A copy of these settings in which "auto" is replaced by a fan-out for each layer of the model."""
        if self.fanouts != "auto":
            return self
        from hopline.nn.whole_module import depth_of

        return replace(self, fanouts=usual_fanouts(depth_of(model)))

    def place(self, data: Dataset, requested: Placement, device: torch.device) -> Dataset:
        """The dataset, placed for a GPU.

        If rows are cached there, they are those that these fan-outs read most often in uniform draws.
        """
        from hopline.data.placement import place

        return place(
            data,
            self.placement(requested),
            device,
            fanouts=self.fanout_per_layer,
            batch_size=self.batch_size,
        )

    def inference_batches(self, job: Job, ids: Tensor) -> Loader | CollectiveLoader:
        from hopline.methods.sampled.work import inference_batches

        return inference_batches(self, job, ids)

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        from hopline.methods.sampled.memory_plan import plan

        return plan(self, outline, budget)

    def bind(self, job: Job) -> Work:
        from hopline.methods.sampled.work import bind

        return bind(self, job)

    @overload
    def loader(
        self,
        data: Shard | ShardedData,
        ids: NodeIds | str = ...,
        *,
        seed: int = ...,
        device: torch.device | str = ...,
        model: nn.Module | None = ...,
        world: World | None = ...,
    ) -> CollectiveLoader: ...
    @overload
    def loader(
        self,
        data: Dataset,
        ids: NodeIds | str = ...,
        *,
        seed: int = ...,
        device: torch.device | str = ...,
        model: nn.Module | None = ...,
        world: World | None = ...,
        sampler: Iterable[int] | None = ...,
    ) -> Loader: ...

    def loader(
        self,
        data: Dataset | Shard,
        ids: NodeIds | str = "train",
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        model: nn.Module | None = None,
        world: World | None = None,
        sampler: Iterable[int] | None = None,
    ) -> Loader | CollectiveLoader:
        """The batches alone, for a loop of your own: `for batch in Sampled(...).loader(data): ...`.

        data: a dataset, or one rank's shard of it. With shards, all ranks take their batches together (see
        `CollectiveLoader`). ids: the seeds, as node ids or as the name of a split. model: a model whose
        first layer may read rows of features itself. If it does, `batch.x` is a handle: the table with row
        ids. Default: a tensor. world: the ranks that share the seeds of each step, as in a `Trainer`
        (docs/own_loop.md). With a shard, all ranks share them anyway, and `world` only lets errors name the
        rank that stopped. sampler: positions in `ids`, in place of `shuffle` and `world`, such as a
        `DistributedSampler`. Lightning, Fabric and Accelerate set one (docs/engines.md).
        """
        from hopline.methods.sampled.work import make_loader

        return make_loader(self, data, ids, seed=seed, device=device, model=model, world=world, sampler=sampler)
