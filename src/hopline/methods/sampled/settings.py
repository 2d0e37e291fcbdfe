"""`Sampled`, the settings of neighbour sampling, and `Auto`: plain data, so that reading them needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from hopline.contract import Budget, Job, Method, Outline, Plan, Work
from hopline.util.config import check_fanouts, check_fields, settings

if TYPE_CHECKING:  # what is bound to a job needs torch; the settings do not
    import torch
    from torch import Tensor, nn

    from hopline.data.dataset import Dataset
    from hopline.data.placement_settings import Placement
    from hopline.distributed.world import World
    from hopline.methods.sampled.collective_loader import CollectiveLoader
    from hopline.methods.sampled.loader import Loader
    from hopline.shards.data import ShardedData
    from hopline.shards.shard import Shard

FIRST_FANOUTS = (15, 10, 5)
"""Of the layers nearest to the seeds; those further out take as many as the last of these."""


def usual_fanouts(num_layers: int) -> tuple[int, ...]:
    """15, 10, 5, 5, ...: fewer the further a layer is from the seeds, since hops multiply."""
    return (FIRST_FANOUTS + FIRST_FANOUTS[-1:] * num_layers)[:num_layers]


@settings
class Sampled(Method):
    """Neighbour sampling: each batch is some seeds and a sample of the edges that lead to them.

    Raises:
        ValueError: A field has a value that is not allowed. From the Trainer: there is not one fan-out per layer.

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
    """In-edges sampled per node, one number per layer, the seeds' own first; -1 takes all. `auto`: 15, 10, 5, 5, ...
    for as many layers as the model has."""
    batch_size: int = 1024
    """Seeds per batch and rank."""
    replace: bool = False
    """Draw neighbours with replacement."""
    layout: Literal["auto", "block", "tree"] = "auto"
    """`block`: every node once; `tree`: a slot for every draw, shapes never change; `auto`: tree if a GPU reads all."""
    shuffle: bool = True
    """Visit the seeds in a new order each epoch."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is not full."""
    scale_sums: bool = False
    """Scale sums over sampled edges by degree / sampled, to the expectation of the full sum; GCNConv always does."""
    workers: int | Literal["auto"] = "auto"
    """Threads that prepare batches; 0 prepares them in the training thread."""
    look_ahead: int | Literal["auto"] = "auto"
    """Batches prepared before they are needed."""

    def __post_init__(self) -> None:
        fanouts: Any = self.fanouts
        if isinstance(fanouts, list):  # as PyG's loaders take them
            object.__setattr__(self, "fanouts", tuple(fanouts))
        if fanouts != "auto":
            check_fanouts(fanouts, self.replace)
        check_fields(self)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        for name, minimum in (("workers", 0), ("look_ahead", 1)):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < minimum):
                raise ValueError(f"{name} must be 'auto' or a number from {minimum}, not {value!r}")

    @property
    def fanout_per_layer(self) -> tuple[int, ...]:
        """`fanouts` as numbers; refused where there is no model yet that "auto" could follow."""
        if isinstance(self.fanouts, str):
            raise ValueError(
                "fanouts='auto' follows the model's depth, and there is no model here: give model=, or one number per "
                "layer, such as fanouts=(15, 10, 5)"
            )
        return self.fanouts

    def for_model(self, model: nn.Module) -> Sampled:
        """The same settings, with fan-outs for each of the model's layers."""
        if self.fanouts != "auto":
            return self
        from hopline.nn.whole_module import depth_of

        return replace(self, fanouts=usual_fanouts(depth_of(model)))

    def place(self, data: Dataset, requested: Placement, device: torch.device) -> Dataset:
        """Rows that are read most often, at these fan-outs, are the first to be cached on a GPU."""
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
        ids: Tensor | str = ...,
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
        ids: Tensor | str = ...,
        *,
        seed: int = ...,
        device: torch.device | str = ...,
        model: nn.Module | None = ...,
        world: World | None = ...,
    ) -> Loader: ...

    def loader(
        self,
        data: Dataset | Shard,
        ids: Tensor | str = "train",
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        model: nn.Module | None = None,
        world: World | None = None,
    ) -> Loader | CollectiveLoader:
        """The batches alone, for a loop of your own: `for batch in Sampled(...).loader(data): ...`.

        With `model`, rows that its first layer reads itself are left to it; without, `batch.x` is a tensor.
        data: a dataset, or a rank's shard of one, where all ranks take their batches together (see `CollectiveLoader`).
        world: the ranks that share the seeds of each step, as in a `Trainer` (docs/own_loop.md); of a shard, whose
        ranks are known, it names the rank that stopped if one does.
        """
        from hopline.methods.sampled.work import make_loader

        return make_loader(self, data, ids, seed=seed, device=device, model=model, world=world)


@settings
class Auto(Method):
    """The method whose steps are the fastest of those that fit: found by `choose`, as `hopline train` does."""

    def bind(self, job: Job) -> Work:
        raise ValueError(
            "method=auto is found before a run: give the Trainer what `hopline.run.compare_methods.choose` returns"
        )
