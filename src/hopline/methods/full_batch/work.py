"""The work of `FullBatch`: one exact step per epoch over all nodes, in one of two ways.

    SweepWork     one process. Computes a layer part by part (here a part is a shard), and keeps the rows between
                  layers in tables. Memory: one part and its halo. Modules that need all rows at once, such as
                  batch norms, do not work.
    ShardedWork   one process or several ranks. Computes a layer at all own nodes at once; convs fetch rows of other
                  shards. Backward is ordinary autograd.

`aggregation="auto"` is a sweep where a sweep can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hopline import ops
from hopline.budget.plan import Plan
from hopline.contract import Guard, Job, Unit, Work
from hopline.core.batch import Batch
from hopline.device.snapshots import preserve_rng
from hopline.methods.full_batch.batches import ShardBatches, check_model, check_settings
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.partitioned.partitioned_graph import PartitionedGraph, PartsSpec
from hopline.methods.partitioned.sweep import Sweep
from hopline.methods.partitioned.trimming import TrimmedSweep
from hopline.nn.layered import Layered
from hopline.nn.whole_module import Whole, why_whole
from hopline.shards.convs.batch_norm import norms_over_ranks
from hopline.shards.convs.patch_message_passing import FetchMode
from hopline.shards.data import ShardedData
from hopline.units.batch_unit import autocast
from hopline.units.loss_at_outputs import batch_of_seeds, loss_at_outputs
from hopline.units.measured_unit import MeasuredUnit
from hopline.util import trace
from hopline.util.config import plural


def bind(method: FullBatch, job: Job) -> Work:
    """The work of a job, by the aggregation that the settings or the job ask for."""
    model = job.model
    if isinstance(model, Whole):
        raise ValueError(
            f"{type(model.module).__name__} is not made of layers, of which each goes over all shards"
            f"{why_whole(model)}: use hl.nn.GNN, or a PyG model such as GCN"
        )
    check_settings(method, job.data, job.world)
    aggregation, reason = choose_aggregation(method, job, model)
    if method.aggregation == "auto":
        num_shards = job.world.size if job.world.size > 1 else method.num_shards
        job.say(f"full batch by aggregation={aggregation} ({reason}), {num_shards} {plural(num_shards, 'shard')}")
    if aggregation == "sweep":
        return SweepWork(job, model, method)
    return ShardedWork(job, model, method, mode=aggregation)


def choose_aggregation(
    method: FullBatch, job: Job, model: Layered
) -> tuple[Literal["sweep", "sequential", "stored", "one_shot"], str]:
    """(the aggregation of a job, why). "auto" is replaced by one that works."""
    mixing = check_model(method, model, job.data, job.world)
    has_ranks = job.world.size > 1 or isinstance(job.data, ShardedData)
    if method.aggregation == "auto":
        if has_ranks:
            return "sequential", "several ranks"
        if mixing is not None:
            return "sequential", f"{mixing} needs all rows at once"
        return "sweep", "one process"
    if method.aggregation == "sweep" and has_ranks:
        raise ValueError("aggregation=sweep is for one process: set aggregation=sequential, or devices=1")
    if method.aggregation == "sweep" and mixing is not None:
        raise ValueError(
            f"{mixing} looks at all rows at once, as batch norms do, and a sweep has some of them at a time: set "
            "aggregation=sequential, or in place of a batch norm norm=layer"
        )
    return method.aggregation, "as set"


class SweepWork(Work):
    """Full batch by sweeps over the parts, forward and then backward, in the memory of one part and its halo.

    After the forward sweep the tables hold every layer's rows, from which the backward sweep computes each layer
    again.
    """

    def __init__(
        self, job: Job, model: Layered, method: FullBatch, guard: Guard | None = None, plan: Plan | None = None
    ) -> None:
        spec = PartsSpec(
            num_parts=method.num_shards if plan is None or plan.partition is None else plan.partition.num_parts,
            partition=method.partition,
            tables=method.tables,
            folder=method.folder,
            caches_blocks=plan is None,
        )
        self.job = job
        self.method = method
        self.partitioned = PartitionedGraph(job, model, spec, None if plan is None else plan.partition)
        self.sweep = TrimmedSweep(self.partitioned) if method.trim else Sweep(self.partitioned)
        self.guard = guard
        self.step_bytes = 0.0 if plan is None else plan.step_bytes
        """The predicted peak of a step, by the plan."""
        if plan is not None:  # the plan counts these apart from the steps
            self.partitioned.allocate_tables()
            _ = self.partitioned.swept_positions, self.partitioned.partition.position

    def guarded(self, guard: Guard, plan: Plan) -> SweepWork:
        """The work over the plan's parts, which are small enough. Its steps are measured, and not split further."""
        return SweepWork(self.job, self.partitioned.model, self.method, guard, plan)

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if not done:  # an epoch has one unit, step 0. done: a resumed run has trained it
            unit = SweepUnit(self.job, self.sweep, ops.derive_key(self.job.seed, epoch, 0))
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)


@dataclass(eq=False)
class SweepUnit(Unit):
    """One step: a forward and a backward sweep over all parts."""

    job: Job
    sweep: Sweep
    key: int
    """Key of the random draws. Both passes use it, so that the backward one draws the same dropout."""

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.job.examples)

    @property
    def weight(self) -> float:
        return self.job.weight_of_all

    @property
    def total_size(self) -> int:
        return self.size  # a sweep runs in one process

    def forward_backward(self, total: float) -> Tensor:
        trace.count("sweep.rows", self.sweep.num_rows)
        trace.count("sweep.edges", self.sweep.num_edges)
        with autocast(self.job), trace.span("forward", self.job.device):
            self.sweep.forward(self.key)
        with autocast(self.job), trace.span("backward", self.job.device):
            return self.sweep.backward(self.key, 1 / total)


class ShardedWork(Work):
    """Full batch with all own rows of a layer at once. Rows of other shards come one shard at a time, or together.

    The constructor is collective: all ranks call it.
    """

    def __init__(self, job: Job, model: Layered, method: FullBatch, mode: FetchMode) -> None:
        self.job = job
        self.batches = ShardBatches(
            data=job.data,
            examples=job.examples,
            method=method,
            mode=mode,
            num_layers=model.num_layers,
            seed=job.seed,
            device=job.device,
            world=job.world,
        )
        self.has_agreed = False  # whether `agree` was called
        self.guard: Guard | None = None
        self.step_bytes = 0.0  # the predicted peak of a step, by the plan

    def guarded(self, guard: Guard, plan: Plan) -> ShardedWork:
        """This work. Its steps are measured from now on, but not split: the plan's number of shards makes them fit."""
        self.guard = guard
        self.step_bytes = plan.step_bytes
        return self

    def agree(self) -> None:
        """Give all ranks the first rank's weights and buffers. Collective."""
        model = self.job.module
        self.job.world.broadcast_tensors(tensor.data for tensor in [*model.parameters(), *model.buffers()])

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        if self.batches.channel is not None and not self.has_agreed:
            self.agree()
            self.has_agreed = True
        if not done:  # an epoch has one unit, step 0. done: a resumed run has trained it
            unit = ShardedUnit(self, ops.derive_key(self.job.seed, epoch, 0))
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)


@dataclass(eq=False)
class ShardedUnit(Unit):
    """One step over all shards: the part of it that this rank computes."""

    work: ShardedWork
    key: int

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.work.batches.found.output_idx.numel()

    @property
    def weight(self) -> float:
        weight = self.work.job.task.weight(self.work.batches.seed_labels)
        return self.size if weight is None else weight

    @property
    def total_size(self) -> int:
        return self.work.batches.total

    def forward_backward(self, total: float) -> Tensor:
        job = self.work.job
        batch = self.work.batches.batch(self.key)
        if job.world.size > 1 and not job.task.is_mean:
            return self._run_joint_loss(batch, total)

        weight = self.weight
        with autocast(job), norms_over_ranks(job.world):
            with trace.span("forward", job.device):
                if self.size:
                    loss = job.task.loss(job.model, batch)
                else:
                    # A rank without seeds runs the model too: other ranks wait for its rows and its gradients.
                    loss = job.model(batch).sum() * 0
            with trace.span("backward", job.device):
                # `loss` is a mean over this rank's examples.
                (loss * (weight / total)).backward()
        self.work.batches.transport.end_step()
        return loss.detach() * weight

    def _run_joint_loss(self, batch: Batch, total: float) -> Tensor:
        """A step with a loss of the user's own: every rank computes it over the training nodes of all ranks.

        Such a loss need not be a sum over ranks. So every rank gathers the outputs of all ranks, and computes the
        whole loss and its gradient at them. From its own rows of that gradient it runs backward through the model.

        Returns the loss, weighted by this rank's share of the examples.
        """
        work = self.work
        job = work.job
        assert work.batches.channel is not None
        with autocast(job), norms_over_ranks(job.world):
            with trace.span("forward", job.device):
                outputs = job.model(batch)
            # The loss must draw the same random numbers on all ranks, and leave the generator of the model as it was.
            with preserve_rng(job.device):
                torch.manual_seed(self.key)
                whole_batch = self._gather_seeds(batch)
                loss = loss_at_outputs(job, whole_batch, self._gather(outputs.detach()), 1 / total)
            # Outputs are gathered in the order of the ranks: this rank's come behind those of the ranks before it.
            sizes = work.batches.channel.all_gather(torch.tensor([self.size]))
            first = int(sizes[: job.world.rank].sum())
            with trace.span("backward", job.device):
                own_gradients = loss.output_gradients[first : first + self.size]
                (outputs * own_gradients).sum().backward()
        # Gradients that the loss itself has at parameters are equal on all ranks, and will be summed over them.
        loss.add_to_parameters(1 / job.world.size)
        work.batches.transport.end_step()
        return loss.loss_sum * (self.size / work.batches.total)

    def _gather_seeds(self, batch: Batch) -> Batch:
        """The batch for the loss: examples of all ranks, without edges."""
        y = None if batch.y is None else self._gather(batch.y)
        return batch_of_seeds(self.work.job, self._gather(batch.example_ids), y, self.key)

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other, on the device of `rows`. Collective."""
        assert self.work.batches.channel is not None
        return self.work.batches.channel.all_gather(rows.cpu()).to(rows.device)
