"""Methods as a user may write them, trained by several ranks. None says its total over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.core.seed_order import share_of
from hopline.distributed.world import World
from tests.support.ranks import KillRank
from tests.support.runs import in_float64, small

STEPS = 6
SEEDS = 14


@dataclass(frozen=True)
class Own(hl.extend.Method):
    """A method whose ranks all have a step's seeds (`same`), or a share of them."""

    divide: str

    def bind(self, job: hl.extend.Job) -> OwnWork:
        return OwnWork(self.divide, job, hl.extend.NeighborSampler(job.data.graph, (3, 2)))


@dataclass
class OwnWork(hl.extend.Work):
    divide: str
    job: hl.extend.Job
    sampler: hl.extend.NeighborSampler

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        generator = torch.Generator().manual_seed(epoch)
        for step in range(STEPS):
            seed_idx = torch.randperm(self.job.train_ids.numel(), generator=generator)[:SEEDS]
            seeds = self._own(step, self.job.train_ids[seed_idx])
            if seeds is None:
                return
            if step < done:
                continue
            kind = PlainUnit if self.divide == "plain" else hl.extend.BatchUnit
            yield kind(self.job, self._batch(seeds, epoch * STEPS + step))

    def _own(self, step: int, seeds: Tensor) -> Tensor | None:
        """This rank's part of a step's seeds; None where its epoch has ended. One process has all parts."""
        world = self.job.world
        if self.divide == "same":
            return seeds
        if self.divide in ("share", "plain"):
            return share_of(seeds, world.rank, world.size)
        # Uneven: the first of two ranks has a quarter of the seeds, and no unit in the last three steps.
        quarter = seeds[: SEEDS // 4]
        rest = seeds[SEEDS // 4 :]
        has_ended = step >= STEPS - 3
        if world.size == 1:
            return rest if has_ended else seeds
        if world.rank == 0:
            return None if has_ended else quarter
        return rest

    def _batch(self, seeds: Tensor, key: int) -> hl.Batch:
        blocks = self.sampler.sample(seeds, key)
        data = self.job.data
        return hl.Batch(seeds, blocks, hl.extend.Rows(data.x, blocks[0].src_ids), data.labels[seeds], key=key)


@dataclass
class PlainUnit(hl.extend.Unit):
    """A unit with the required attributes only, and a loss of its own."""

    job: hl.extend.Job
    batch: hl.Batch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_seeds

    def forward_backward(self, total: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.job.model(self.batch), self.batch.labels, reduction="sum")
        (loss / total).backward()
        return loss.detach()


@dataclass(frozen=True)
class ByLoader(hl.extend.Method):
    """A method that only wraps the loader. Without world= every rank gets all seeds."""

    with_world: bool

    def bind(self, job: hl.extend.Job) -> LoaderWork:
        world = job.world if self.with_world else None
        size = 12 // job.world.size if self.with_world else 12
        method = hl.Sampled(fanouts=(3, 2), batch_size=size, workers=0)
        return LoaderWork(job, method.loader(job.data, job.train_ids, world=world))


@dataclass
class LoaderWork(hl.extend.Work):
    job: hl.extend.Job
    loader: hl.Loader

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        for batch in self.loader.epoch(epoch, done, examples):
            yield hl.extend.BatchUnit(self.job, batch)


class HalfKnown(Own):
    """A method whose units know their total on the first rank only."""

    def bind(self, job: hl.extend.Job) -> OwnWork:
        return (WorkWithTotals if job.world.rank == 0 else OwnWork)(**vars(super().bind(job)))


class WorkWithTotals(OwnWork):
    def _batch(self, seeds: Tensor, key: int) -> hl.Batch:
        return dataclasses.replace(super()._batch(seeds, key), total_seeds=SEEDS)


METHODS: dict[str, hl.extend.Method] = {
    **{divide: Own(divide) for divide in ("same", "share", "uneven", "plain")},
    "loader": ByLoader(with_world=False),
    "loader of ranks": ByLoader(with_world=True),
    "half known": HalfKnown("share"),
}


def train(world: World, name: str, out: str | None = None, **changes: Any) -> dict[str, Any]:
    """Losses by epoch, and the weights, of a few steps of SGD in float64."""
    data = in_float64(small())
    torch.manual_seed(3)
    model = hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 4)]).double()
    kill = changes.pop("kill", None)
    settings = {"epochs": 2, "show": False, "optimizer": "sgd", "lr": 0.1, "resume": out is not None} | changes
    callbacks = [] if kill is None else [KillRank(*kill)]
    trainer = hl.Trainer(model, data, METHODS[name], world=world, out=out, callbacks=callbacks, **settings)
    run = trainer.fit()
    return {
        "losses": [epoch.loss for epoch in run.history],
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
