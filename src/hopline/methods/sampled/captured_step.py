"""Sampled training on a GPU as one CUDA graph per step, from the seeds to the gradients.

Launching a graph costs the host a few microseconds, however many kernels the graph has. So the step is
captured once, and then replayed:

    on the device: order of the epoch, number of the step, keys
        |
        v   one graph
    next seeds -> sample -> gather -> forward -> loss -> backward -> gradients of the parameters
        |
        v
    optimizer's step, a graph of its own, because ranks sum gradients in between

A graph has no arguments. So the seeds of a step are found on the device, by a counter that every replay
advances (`DeviceBatches`). And a graph has fixed shapes. So the batch is in the tree layout, which has a
slot for every possible draw, empty or not.

There is one graph for full steps, and one for the smaller last step of an epoch. A step that cannot be
captured, such as one whose loss synchronises, runs eagerly on the same batches (`EagerUnit`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.plan import Plan
from hopline.contract import Guard, Job, Unit, Work, WorkDescription
from hopline.core.batch import Batch
from hopline.core.row_handles import Rows
from hopline.core.tree_layout import TreeSampler
from hopline.device.cuda_graph import CapturedCall
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.prefetch_rows import STEPS, RowPrefetcher, stage_tables
from hopline.ops.tree_slots import Slots
from hopline.units.batch_unit import BatchUnit, autocast
from hopline.units.measured_unit import MeasuredUnit
from hopline.util import trace

WARM_UP_STEPS = 3
"""Steps before the capture, which compile kernels and initialise libraries."""


class DeviceBatches:
    """Makes batches in the tree layout on the GPU, from a counter on the GPU.

    Two counters run through an epoch. Training advances `state`. Prefetching of rows advances
    `prefetch_state`, which is some steps further. Nothing here synchronises, but for a table that the GPU
    cannot read itself.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        assert isinstance(loader.neighbor_sampler, TreeSampler)
        self.sampler = loader.neighbor_sampler
        device = loader.device
        self.ids = loader.examples.nodes.to(device)
        self.order = torch.empty_like(self.ids)
        """[num_ids] int64: seeds in the order of the epoch. Changed in place only: graphs hold its address."""
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        """[3] int64: the epoch's key, the number of the next step, the position of its first seed in
        `order`."""
        self.prefetch_state = torch.zeros_like(self.state)
        """[3] int64: as `state`, for the next step whose rows are not prefetched yet."""

    def start(self, epoch: int, done: int, seeds_done: int) -> None:
        """Begin an epoch after its first `done` steps, which had `seeds_done` seeds over all ranks."""
        key = self.loader.epoch_key(epoch)
        draws = ops.gpu_kernels("tree").start_epoch(
            self.state, self.prefetch_state, self.ids.numel(), key, step=done, position=seeds_done
        )
        if self.loader.method.shuffle:
            # The same order as on the host, where `ops.permutation` sorts the same draws.
            torch.index_select(self.ids, 0, draws.argsort(stable=True), out=self.order)
        else:
            self.order.copy_(self.ids)

    def slot_tensors(self, num_seeds: int, first: int) -> list[Tensor]:
        """The cached tensors about the numbering of slots, which all batches of this size read.

        The arguments are those of `next`.
        """
        device = self.loader.device
        slots = Slots(num_seeds, self.sampler.fanouts, first)
        return [slots.ids(device), slots.parents(device), slots.first_children(device)]

    def prefetch_nodes(self, num_seeds: int, first: int, total: int) -> Tensor:
        """[num_slots]: the nodes of the next batch that is not prefetched yet, -1 at empty slots.

        The arguments are those of `next`.
        """
        seeds, keys = ops.gpu_kernels("tree").next_step(self.prefetch_state, self.order, num_seeds, first, total)
        return self.sampler.sample(seeds, keys, first)[0].tree.nodes

    def next(self, num_seeds: int, first: int, total: int) -> Batch:
        """The batch of the next step.

        num_seeds: this rank's seeds. first: the position of the first of them among the seeds of all ranks.
        total: the number of seeds of all ranks.
        """
        seeds, keys = ops.gpu_kernels("tree").next_step(self.state, self.order, num_seeds, first, total)
        blocks = self.sampler.sample(seeds, keys, first)
        if self.loader.method.scale_sums:
            blocks = tuple(block.with_scale_sums(True) for block in blocks)
        rows = {name: blocks[0].handle(table) for name, table in self.loader.data.tables.items()}
        x: Rows | Tensor | None = rows.pop("x", None)
        if x is not None and not self.loader.keeps_handle:
            # The GPU cannot read this table itself, so the host does. This synchronises.
            x = x.table.read(x.ids.cpu()).to(self.loader.device)
        return Batch(
            seeds=seeds,
            blocks=blocks,
            x=x,
            y=self.loader.labels(seeds),
            tables=rows,
            key=keys,
            total_seeds=total,
        )


class CapturedWork(Work):
    """Sampled training of one job on one GPU, by captured steps.

    Owns the graphs, and the counters on the device. It belongs to the thread that trains.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        self.job = job
        self.loader = loader
        self.batches = DeviceBatches(loader)
        self.steps: dict[int, CapturedStep | None] = {}
        """By number of seeds over all ranks: the captured step. None if it could not be captured."""
        self.parameters = list(job.module.parameters())
        self.is_trained = self._find_trained()
        """[num_parameters] bool: which parameters had `requires_grad` when `steps` were captured."""
        self.prefetcher = self._make_prefetcher()
        self.guard: Guard | None = None
        self.step_bytes = 0.0  # the predicted peak of a step, by the plan

    def guarded(self, guard: Guard, plan: Plan) -> CapturedWork:
        """This work, whose steps are measured from now on.

        They are never split: their shapes never change.
        """
        self.guard = guard
        self.step_bytes = plan.step_bytes
        return self

    def describe(self) -> WorkDescription:
        return self.loader.describe()

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        for unit in self._units(epoch, done, examples):
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)

    def _units(self, epoch: int, done: int, examples: int) -> Iterator[Unit]:
        """The units of an epoch, not measured. The arguments are those of `units`."""
        loader = self.loader
        size = loader.method.batch_size
        per_step = size * loader.size  # seeds of all ranks
        num_full, num_remaining = divmod(len(loader.examples) - examples, per_step)
        self.batches.start(epoch, done, examples)

        # A graph computes gradients of the parameters that were trained when it was captured, and of no
        # others.
        is_trained = self._find_trained()
        if self.is_trained != is_trained:
            self.steps = {}
            self.is_trained = is_trained
        if num_full > 0 and per_step not in self.steps:
            self.steps[per_step] = capture(self.job, self.batches, size, loader.rank * size, per_step)

        yield from self._full_steps(num_full, size, per_step)
        if num_remaining and not loader.method.drop_last:
            yield self._last_step(num_remaining, epoch)

    def _last_step(self, per_step: int, epoch: int) -> Unit:
        """The last step of an epoch, which is smaller. It is captured from the second epoch on.

        The epoch alone decides whether to capture. If asynchronous evaluation holds the capture lock, the
        capture waits. So which steps are captured does not depend on timing, or on where a run was
        interrupted.

        per_step: the seeds of this step, over all ranks.
        """
        loader = self.loader
        # This rank's share of the seeds, as `share_of` has it on the host. It may be empty.
        first = per_step * loader.rank // loader.size
        stop = per_step * (loader.rank + 1) // loader.size
        size = stop - first

        # If the capture of another step has failed (None), this one would fail too.
        other_steps = list(self.steps.values())
        can_capture = None not in other_steps and self.is_trained == self._find_trained()
        if per_step not in self.steps and size > 0 and epoch > 1 and can_capture:
            shared_pool_step = other_steps[0] if other_steps else None
            self.steps[per_step] = capture(self.job, self.batches, size, first, per_step, shared_pool_step)

        step = self._captured_step(per_step)
        if step is not None:
            return CapturedUnit(step, size, per_step)
        return EagerUnit(job=self.job, batches=self.batches, size=size, first=first, total=per_step)

    def _captured_step(self, per_step: int) -> CapturedStep | None:
        """The captured step with `per_step` seeds over all ranks. None: the step must run eagerly.

        A callback may have frozen or unfrozen parameters since the capture. Then no captured step is right.
        """
        return self.steps.get(per_step) if self.is_trained == self._find_trained() else None

    def _find_trained(self) -> list[bool]:
        """[num_parameters]: whether each parameter has `requires_grad` now."""
        return [p.requires_grad for p in self.parameters]

    def _full_steps(self, num_steps: int, size: int, per_step: int) -> Iterator[Unit]:
        """The steps of an epoch that have `size` seeds on every rank, `per_step` in all."""
        prefetcher = self.prefetcher
        if prefetcher is not None:
            prefetcher.start(num_steps)
        for number in range(num_steps):
            step = self._captured_step(per_step)
            before = partial(prefetcher.before_step, number) if prefetcher is not None else None
            if step is not None:
                yield CapturedUnit(step=step, size=size, total=per_step, before=before)
            else:
                first = self.loader.rank * size
                yield EagerUnit(
                    job=self.job, batches=self.batches, size=size, first=first, total=per_step, before=before
                )
        if prefetcher is not None:
            prefetcher.end()

    def _make_prefetcher(self) -> RowPrefetcher | None:
        """A prefetcher for tables with rows in host memory.

        None if there are none, or no memory to prefetch into.
        """
        loader = self.loader
        method = loader.method
        size = method.batch_size
        num_steps = STEPS if method.look_ahead == "auto" else method.look_ahead
        num_slots = Slots(size, method.fanout_per_layer).offsets[-1]
        tables = loader.data.tables.values() if loader.keeps_handle else ()
        stagings = stage_tables(tables, loader.device, num_slots, num_steps, loader.data.graph.indices.dtype)
        if not stagings:
            return None
        draw = partial(self.batches.prefetch_nodes, size, loader.rank * size, size * loader.size)
        return RowPrefetcher(stagings, loader.device, num_steps, draw)


@dataclass
class CapturedUnit(Unit):
    """One replay of a captured step."""

    step: CapturedStep
    size: int
    total: int
    """Seeds of all ranks."""
    before: Callable[[], None] | None = None
    """Called before the replay, to switch to the rows that were prefetched for this step."""

    @property
    def total_size(self) -> int:
        return self.total

    def forward_backward(self, total: float) -> Tensor:
        if self.before is not None:
            self.before()
        with trace.span("step", self.step.job.device):
            return self.step.replay(total)


@dataclass
class EagerUnit(Unit):
    """A step that is not captured.

    Its batch is sampled when the step runs, because the device counts the steps.
    """

    job: Job
    batches: DeviceBatches
    size: int
    first: int
    """The position of this rank's first seed among the seeds of all ranks."""
    total: int
    """Seeds of all ranks."""
    before: Callable[[], None] | None = None
    """Called before the batch is sampled, to switch to the rows that were prefetched for this step."""

    @property
    def total_size(self) -> int:
        return self.total

    def forward_backward(self, total: float) -> Tensor:
        if self.before is not None:
            self.before()
        with trace.span("sample", self.job.device):
            batch = self.batches.next(self.size, self.first, self.total)
        return BatchUnit(self.job, batch).forward_backward(total)


def capture(
    job: Job, batches: DeviceBatches, size: int, first: int, per_step: int, shared_pool_step: CapturedStep | None = None
) -> CapturedStep | None:
    """Capture a step. If that fails, the user is told why, and the result is None.

    size, first, per_step: see `CapturedStep`. shared_pool_step: an older step in whose memory the new step
    computes too. A replay of the new step leaves the gradients of the older step intact. A replay of the
    older step overwrites the gradients of the new step.
    """
    step = CapturedStep(job=job, batches=batches, size=size, first=first, per_step=per_step)
    return step if step.capture(shared_pool_step) else None


class CapturedStep:
    """The CUDA graph of one step, from the seeds to the gradients.

    Owns the graph and, in the graph's memory, the gradients. `replay` is for the thread that trains.

    size: this rank's seeds. first: the position of the first of them among the seeds of all ranks.
    per_step: the number of seeds of all ranks.
    """

    def __init__(self, job: Job, batches: DeviceBatches, size: int, first: int, per_step: int) -> None:
        self.job = job
        self.batches = batches
        self.size = size
        self.first = first
        self.per_step = per_step
        self.parameters = [p for p in job.module.parameters() if p.requires_grad]
        # size / total, by which the graph scales the loss. A tensor, so that it can change between replays.
        # At least float32, since a half type would round it.
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self.share = torch.ones((), dtype=dtype, device=job.device)
        self.total = size  # the `total` that `share` holds
        self.captured: CapturedCall[Tensor] = CapturedCall(
            job.device, purpose="steps", subject="steps are", say=job.say
        )
        self.gradients: list[Tensor | None] = []
        """[num_parameters]: set by `capture`. The gradients that a replay writes, in the graph's memory."""
        self.slot_tensors: list[Tensor] = []
        """Set by `capture`. Held for the graph only, which knows their addresses."""

    def capture(self, shared_pool_step: CapturedStep | None) -> bool:
        """Warm the step up and capture it. Returns whether there is a graph now."""
        pool_of = None if shared_pool_step is None else shared_pool_step.captured
        return self.captured.capture(self._warm_up(), pool_of=pool_of)

    @contextmanager
    def _warm_up(self) -> Iterator[Callable[[], Tensor]]:
        """A context that warms the step up and gives it to be captured. On exit, it restores all that the
        runs have changed.

        Gradients are dropped on exit, also if the capture fails. Those that the captured call has made stay
        alive in `self.gradients`: the graph writes to them.
        """
        renew_accumulators(self.parameters)
        state = self.batches.state
        with _preserve_state(self.job.module, state, self.job.device):
            try:
                start = state.clone()
                self._run()  # compiles kernels, and may synchronise for values that are then cached
                with forbid_synchronising():
                    for _ in range(WARM_UP_STEPS - 1):
                        state.copy_(start)  # the same step again: the epoch may have no other
                        self._run()
                self._drop_gradients()
                yield self._run
                self.gradients = [p.grad for p in self.parameters]
                # The graph holds only the addresses of these tensors, and their cache may drop them.
                self.slot_tensors = self.batches.slot_tensors(self.size, self.first)
            finally:
                self._drop_gradients()

    def _run(self) -> Tensor:
        """The step itself. Returns the summed loss of its seeds, and leaves gradients at the parameters."""
        self._drop_gradients()
        batch = self.batches.next(self.size, self.first, self.per_step)
        with autocast(self.job):
            loss = self.job.task.loss(self.job.model, batch)
        (loss * self.share).backward()
        return loss.detach() * self.size

    def replay(self, total: float) -> Tensor:
        """Run the step, and add its share of the gradient of the mean loss over `total` examples.

        Returns the summed loss of its seeds.
        """
        if total != self.total:
            self.share.fill_(self.size / total)
            self.total = total
        earlier_gradients = []
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            earlier = parameter.grad
            # A replay for an earlier unit of the same optimizer step may have left its gradients in the graph's
            # memory. The next replay would overwrite them.
            if earlier is not None and earlier is buffer:
                earlier = earlier.clone()
            earlier_gradients.append(earlier)

        loss = self.captured.replay()
        for parameter, earlier, buffer in zip(self.parameters, earlier_gradients, self.gradients, strict=True):
            parameter.grad = buffer if earlier is None or buffer is None else earlier + buffer
        return loss.clone()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def renew_accumulators(parameters: Iterable[nn.Parameter]) -> None:
    """Make autograd use new nodes for accumulating the gradients of parameters.

    Such a node remembers the stream on which it was made. A capture on another stream would have to wait
    for that stream, and cannot. Old nodes may still exist: a node lives as long as any autograd graph that
    leads to it, and the traceback of a failed step may hold such a graph.
    """
    for parameter in parameters:
        values = parameter.data
        # A node belongs to one dtype. With another dtype in between, the next use makes a new node.
        other_dtype = torch.float32 if values.dtype != torch.float32 else torch.float64
        parameter.data = values.new_empty(0, dtype=other_dtype)
        parameter.data = values


@contextmanager
def forbid_synchronising() -> Iterator[None]:
    """A context in which operations that synchronise raise, since no such operation can be captured."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch warns that the mode misses some operations. The capture itself finds those.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _preserve_state(module: nn.Module, state: Tensor, device: torch.device) -> Iterator[None]:
    """A context that restores the module's buffers (running statistics), `state` and torch's generator.

    state: `DeviceBatches.state`.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    epoch_state = state.clone()
    random_state = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.set_rng_state(random_state, device)
        state.copy_(epoch_state)
        for buffer, before in buffers:
            buffer.data.copy_(before)
