"""The work of `FullBatch`: by parts in one process, or by shards, one or more ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import Guard, Job, Plan, Unit, Work
from hopline.core.batch import Batch
from hopline.methods.full_batch.batches import Mode, ShardBatches, check_model, check_settings
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.partitioned.sweep import backward_sweep, forward_sweep
from hopline.methods.partitioned.trimming import NeededRows
from hopline.methods.partitioned.work import PartsSpec, PartsWork
from hopline.nn.gnn import GNN
from hopline.nn.whole_module import Whole
from hopline.shards.convs.norm import norms_over_ranks
from hopline.shards.data import ShardedData
from hopline.units.batch_unit import autocast
from hopline.units.loss_at_outputs import batch_of_seeds, loss_at_outputs
from hopline.units.measured_unit import MeasuredUnit
from hopline.util import trace


def bind(method: FullBatch, job: Job) -> Work:
    """The work of a job, by the aggregation that suits it; refuses what cannot be exact."""
    model = job.model
    if isinstance(model, Whole):
        raise ValueError(
            f"{type(model.module).__name__} is not made of layers, of which each goes over all shards: use "
            "hl.nn.GNN, or a PyG model such as GCN"
        )
    check_settings(method, job.data, job.world)
    mixing = check_model(method, model, job.data, job.world)
    chosen = _choose_aggregation(method, job, mixing)
    if chosen == "sweep":
        return SweepWork(job, model, method)
    return ShardedWork(job, model, method, chosen)


def _choose_aggregation(
    method: FullBatch, job: Job, mixing: str | None
) -> Literal["sweep", "sequential", "stored", "one_shot"]:
    """The aggregation, "auto" replaced and said."""
    several = job.world.size > 1 or isinstance(job.data, ShardedData)
    if method.aggregation == "auto":
        reasons = {"several ranks": several, f"{mixing} needs all rows at once": mixing is not None}
        reason = next((text for text, holds in reasons.items() if holds), "one process")
        chosen = "sweep" if reason == "one process" else "sequential"
        job.say(f"full batch by aggregation={chosen} ({reason}), {_num_shards(method, job)} shards")
        return chosen
    if method.aggregation == "sweep" and several:
        raise ValueError("aggregation=sweep is for one process: set aggregation=sequential, or devices=1")
    if method.aggregation == "sweep" and mixing is not None:
        raise ValueError(
            f"{mixing} looks at all rows at once, as batch norms do, and a sweep has some of them at a time: set "
            "aggregation=sequential, or norm=layer"
        )
    return method.aggregation


def _num_shards(method: FullBatch, job: Job) -> int:
    return job.world.size if job.world.size > 1 else method.num_shards


class SweepWork(Work):
    """Layer by layer over the parts, forward and then back, in the memory of a part and its neighbours.

    After the forward pass the tables hold every layer's rows, so that going back can compute each layer again.
    """

    def __init__(self, job: Job, model: GNN, method: FullBatch) -> None:
        spec = PartsSpec(
            num_parts=method.num_shards, partition=method.partition, tables=method.tables, folder=method.folder
        )
        self.job, self.work = job, PartsWork(job, model, spec)
        self.needed = NeededRows(self.work) if method.trim else None
        self.guard: Guard | None = None
        self.step_bytes = 0.0  # what a plan promised of a step

    def guarded(self, guard: Guard, plan: Plan) -> SweepWork:
        """This work, whose step is measured; the plan has chosen as many shards as it takes to fit."""
        self.guard, self.step_bytes = guard, plan.step_bytes
        return self

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if not done:
            unit = SweepUnit(self.job, self.work, ops.derive_key(self.job.seed, epoch, 0), self.needed)
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)


@dataclass(eq=False)
class SweepUnit(Unit):
    """One step: a sweep over all parts, there and back."""

    job: Job
    work: PartsWork
    key: int
    needed: NeededRows | None = None
    """What the training nodes need, where the sweep is trimmed to it."""

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.job.train_ids.numel()

    @property
    def total_size(self) -> int:
        return self.size  # a sweep is for one process

    def forward_backward(self, total: float) -> Tensor:
        needed, layers = self.needed, self.work.model.num_layers
        trace.count("sweep.rows", self.job.data.num_nodes * layers if needed is None else needed.num_rows)
        trace.count("sweep.edges", self.job.data.num_edges * layers if needed is None else needed.num_edges)
        with autocast(self.job), trace.span("forward", self.job.device):
            forward_sweep(self.work, self.key) if needed is None else needed.forward(self.key)
        with autocast(self.job), trace.span("backward", self.job.device):
            if needed is not None:
                return needed.backward(self.key, 1 / total)
            return backward_sweep(self.work, self.key, 1 / total, keep=False)


class ShardedWork(Work):
    """All own rows of a layer at once; those of other shards come one shard at a time, or all together."""

    def __init__(self, job: Job, model: GNN, method: FullBatch, mode: Mode) -> None:
        self.job = job
        layers = [type(conv).__name__ for conv in model.convs]
        self.batches = ShardBatches(
            job.data, job.train_ids, method, mode, model.num_layers,
            seed=job.seed, device=job.device, world=job.world, common=[layers, job.bf16],
        )  # fmt: skip
        self.agreed = False
        self.guard: Guard | None = None
        self.step_bytes = 0.0  # what a plan promised of a step

    def guarded(self, guard: Guard, plan: Plan) -> ShardedWork:
        """This work, whose step is measured; the plan has chosen as many shards as it takes to fit."""
        self.guard, self.step_bytes = guard, plan.step_bytes
        return self

    def agree(self) -> None:
        """Ranks must have the same model, and begin with the first one's weights."""
        model = self.job.module
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert self.batches.channel is not None
        self.batches.channel.check_same(repr([(n, tuple(t.shape), t.dtype) for n, t in tensors]).encode(), "the model")
        self.job.world.broadcast_tensors(t.data for _, t in tensors)

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if self.batches.channel is not None and not self.agreed:
            self.agree()
            self.agreed = True
        if not done:
            unit = ShardedUnit(self, ops.derive_key(self.job.seed, epoch, 0))
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)


@dataclass(eq=False)
class ShardedUnit(Unit):
    """One step over all shards."""

    work: ShardedWork
    key: int

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.work.batches.seeds.numel()

    @property
    def total_size(self) -> int:
        return self.work.batches.total

    def forward_backward(self, total: float) -> Tensor:
        job, batch = self.work.job, self.work.batches.batch(self.key)
        if job.world.size > 1 and not job.usual_loss:
            return self._by_all_ranks(batch, total)
        with autocast(job), norms_over_ranks(job.world):
            with trace.span("forward", job.device):
                # A rank without seeds takes part: others wait for its rows and its gradients.
                loss = job.train_step(job.model, batch) if self.size else job.model(batch).sum() * 0
            with trace.span("backward", job.device):
                (loss * (max(1, self.size) / total)).backward()
        self.work.batches.transport.end_step()
        return loss.detach() * self.size

    def _by_all_ranks(self, batch: Batch, total: float) -> Tensor:
        """The same, for a loss of the user's own: every rank computes it over the training nodes of all ranks."""
        work, job = self.work, self.work.job
        assert work.batches.channel is not None
        with autocast(job), norms_over_ranks(job.world):
            with trace.span("forward", job.device):
                outputs = job.model(batch)
            # Random numbers of the loss are the same on all ranks, and those of the model go on as they would.
            with torch.random.fork_rng([job.device] if job.device.type == "cuda" else []):
                torch.manual_seed(self.key)
                found = loss_at_outputs(job, self._of_all_ranks(batch), self._gather(outputs.detach()), 1 / total)
            first = int(work.batches.channel.all(torch.tensor([self.size]))[: job.world.rank].sum())
            with trace.span("backward", job.device):
                (outputs * found.output_gradients[first : first + self.size]).sum().backward()
        found.add_to_parameters(1 / job.world.size)  # gradients are summed over the ranks, and all have these
        work.batches.transport.end_step()
        return found.loss_sum * (self.size / work.batches.total)

    def _of_all_ranks(self, batch: Batch) -> Batch:
        y = None if batch.y is None else self._gather(batch.y)
        return batch_of_seeds(self.work.job, self._gather(batch.seeds), y, self.key)

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        assert self.work.batches.channel is not None
        return self.work.batches.channel.all(rows.cpu()).to(rows.device)
