"""Ways to train. A method is a small frozen spec; bound to a job it yields units of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor, nn

from hopline.captured import CapturedWork
from hopline.collective import CollectiveLoader
from hopline.data.dataset import Dataset
from hopline.guard import Guard
from hopline.loader import Loader
from hopline.nn.whole import Whole, as_walkable
from hopline.sampling import check_fanouts
from hopline.shard_data import ShardedData
from hopline.shards import Shard
from hopline.validate import check_fields
from hopline.work import BatchUnit, Job, Method, Unit, Work
from hopline.world import World


@dataclass(frozen=True, kw_only=True)
class Sampled(Method):
    """Neighbour sampling: each batch is some seeds and a sample of the edges that lead to them."""

    fanouts: tuple[int, ...] = (15, 10, 5)
    """In-edges taken per node and layer, the seeds' own first; -1 takes all."""
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
        check_fanouts(self.fanouts, self.replace)
        check_fields(self)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        for name, least in (("workers", 0), ("look_ahead", 1)):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be 'auto' or a number from {least}, not {value!r}")

    def inference_batches(self, job: Job, ids: Tensor) -> Loader | CollectiveLoader:
        in_order = replace(self, shuffle=False, drop_last=False)
        options = {"seed": job.seed, "device": job.device}
        if isinstance(job.data, ShardedData):
            return CollectiveLoader(job.data.shard, ids, in_order, channel=job.data.channel, **options)
        return in_order.loader(job.data, ids, model=job.model, **options)

    def bind(self, job: Job) -> Work:
        num_layers = getattr(job.model, "num_layers", len(self.fanouts))
        if num_layers != len(self.fanouts):
            raise ValueError(
                f"the model has {num_layers} layers and fanouts={self.fanouts} names {len(self.fanouts)}: "
                f"give one fan-out per layer, for example fanouts={','.join(['10'] * num_layers)}"
            )
        if self.scale_sums and isinstance(job.model, Whole):
            raise ValueError("scale_sums=true needs a model made of layers: use hl.nn.GNN, or set scale_sums=false")
        job.model.check_blocks()
        if isinstance(job.data, ShardedData):
            shard, ids = job.data.shard, job.train_ids
            return SampledWork(job, self.loader(shard, ids, seed=job.seed, device=job.device, world=job.world))
        loader = self.loader(job.data, job.train_ids, seed=job.seed, device=job.device, model=job.model)
        loader.rank, loader.size, loader.num_cores = job.world.rank, job.world.size, job.world.num_cores
        if loader.layout == "tree" and loader.on_gpu:
            return CapturedWork(job, loader)
        return SampledWork(job, loader)

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
    @overload
    def loader(
        self,
        data: Shard,
        ids: Tensor | str = ...,
        *,
        seed: int = ...,
        device: torch.device | str = ...,
        model: nn.Module | None = ...,
        world: World | None = ...,
    ) -> CollectiveLoader: ...

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
        data: a dataset, or a rank's shard of one, where all ranks take their batches together (see `CollectiveLoader`)
        and `world` names the rank that stopped if one does.
        """
        if isinstance(data, Shard):
            return CollectiveLoader(data, ids, self, seed, device, world)
        if isinstance(ids, str) and ids not in data.splits:
            raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(data.splits)}")
        chosen = data.splits[ids] if isinstance(ids, str) else torch.as_tensor(ids)
        return Loader(data, chosen, self, seed, torch.device(device), as_walkable(model) if model else None)


@dataclass
class SampledWork:
    """Sampled training of one job."""

    job: Job
    loader: Loader | CollectiveLoader
    guard: Guard | None = None
    """Keeps the steps within a budget, where there is one."""

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if isinstance(self.loader, Loader):
            self.loader.divide = None if self.guard is None else self.guard.prepare
        with closing(self.loader.epoch(epoch, done, examples)) as batches:
            for batch in batches:
                yield BatchUnit(self.job, batch) if self.guard is None else self.guard.unit(batch)
