"""Sampled training on a GPU as one CUDA graph per step: sampling, gathering, forward, loss and backward.

The epoch's order, the step's number and its keys are on the device, so replaying the graph is all a step takes. What
cannot be captured runs as it is, on the same batches.
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
from hopline.contract import Guard, Job, Plan, Unit, Work, WorkDescription
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
"""Steps run before capture: kernels are compiled and libraries set up in them."""


class DeviceBatches:
    """Batches in the tree layout, made on the GPU from what is there."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        assert isinstance(loader.sampler, TreeSampler)
        self.sampler = loader.sampler
        device = loader.device
        self.ids = loader.ids.to(device)
        self.order = torch.empty_like(self.ids)
        self.state = torch.zeros(3, dtype=torch.int64, device=device)  # as the kernel `next_step` reads it
        self.prefetch_state = torch.zeros_like(self.state)  # the same, of batches that are looked at before their turn

    def start(self, epoch: int, done: int, seeds_done: int) -> None:
        """Stand at a place of an epoch."""
        key = ops.derive_key(self.loader.seed, epoch)
        draws = ops.gpu_kernels("tree").start_epoch(
            self.state, self.prefetch_state, self.ids.numel(), key, step=done, position=seeds_done
        )
        if self.loader.method.shuffle:
            torch.index_select(self.ids, 0, draws.argsort(stable=True), out=self.order)
        else:
            self.order.copy_(self.ids)

    def slot_tensors(self, num_seeds: int, first: int) -> list[Tensor]:
        """What every batch of that size reads beside its own tensors."""
        device = self.loader.device
        slots = Slots(num_seeds, self.sampler.fanouts, first)
        return [slots.ids(device), slots.parents(device), slots.first_children(device)]

    def prefetch_nodes(self, num_seeds: int, first: int, total: int) -> Tensor:
        """The nodes of the next batch that was not looked at yet."""
        seeds, keys = ops.gpu_kernels("tree").next_step(self.prefetch_state, self.order, num_seeds, first, total)
        return self.sampler.sample(seeds, keys, first)[0].tree.nodes

    def next(self, num_seeds: int, first: int, total: int) -> Batch:
        """The next step's batch: `num_seeds` of its `total` seeds, from the `first` on."""
        seeds, keys = ops.gpu_kernels("tree").next_step(self.state, self.order, num_seeds, first, total)
        blocks = self.sampler.sample(seeds, keys, first)
        if self.loader.method.scale_sums:
            blocks = tuple(block.scaling_sums(True) for block in blocks)
        rows = {name: blocks[0].handle(table) for name, table in self.loader.data.tables.items()}
        x: Rows | Tensor | None = rows.pop("x", None)
        if x is not None and not self.loader.keeps_handle:
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
    """Sampled training of one job on one GPU."""

    def __init__(self, job: Job, loader: Loader) -> None:
        self.job = job
        self.loader = loader
        self.batches = DeviceBatches(loader)
        self.steps: dict[int, CapturedStep | None] = {}
        """By their number of seeds; None where it cannot be captured."""
        self.parameters = list(job.module.parameters())
        self.is_trained = self._find_trained()
        """Which parameters have gradients in these steps."""
        self.prefetcher = self._make_prefetcher()
        self.guard: Guard | None = None
        self.step_bytes = 0.0  # what a plan promised of a step

    def guarded(self, guard: Guard, plan: Plan) -> CapturedWork:
        """This work, whose steps are measured: their shapes never change, so there is nothing to cut."""
        self.guard = guard
        self.step_bytes = plan.step_bytes
        return self

    def describe(self) -> WorkDescription:
        return self.loader.describe()

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        for unit in self._units(epoch, done, examples):
            yield unit if self.guard is None else MeasuredUnit(unit, self.guard, self.step_bytes)

    def _units(self, epoch: int, done: int, examples: int) -> Iterator[Unit]:
        loader = self.loader
        size = loader.method.batch_size
        per_step = size * loader.size
        num_full, num_remaining = divmod(loader.ids.numel() - examples, per_step)
        self.batches.start(epoch, done, examples)

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
        """The last step of an epoch, which is smaller: worth a graph from the second epoch on.

        The epoch alone decides: a capture waits for an evaluation beside training that has the turn, so that what is
        run does not depend on how long that takes, or on where a run was interrupted.
        """
        loader = self.loader
        first = per_step * loader.rank // loader.size
        stop = per_step * (loader.rank + 1) // loader.size
        size = stop - first

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
        """The captured step of that size, unless a callback has frozen parameters since, or trains more of them."""
        return self.steps.get(per_step) if self.is_trained == self._find_trained() else None

    def _find_trained(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def _full_steps(self, num_steps: int, size: int, per_step: int) -> Iterator[Unit]:
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
        """For tables with rows in host memory."""
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
    before: Callable[[], None] | None = None
    """What is to be done before it runs."""

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
    """A batch that is drawn when its turn comes, since the device counts the steps."""

    job: Job
    batches: DeviceBatches
    size: int
    first: int
    total: int
    before: Callable[[], None] | None = None

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
    """A captured step, or None and a line that says why there is none.

    shared_pool_step: another, in whose memory it may compute. It keeps what that leaves, while what it leaves is
    written over.
    """
    step = CapturedStep(job=job, batches=batches, size=size, first=first, per_step=per_step)
    return step if step.capture(shared_pool_step) else None


class CapturedStep:
    """Everything from the seeds to the gradients of a full batch, as a CUDA graph."""

    def __init__(self, job: Job, batches: DeviceBatches, size: int, first: int, per_step: int) -> None:
        self.job = job
        self.batches = batches
        self.size = size
        self.first = first
        self.per_step = per_step
        self.parameters = [p for p in job.module.parameters() if p.requires_grad]
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        # Of the step's seeds, by which its gradient is weighted.
        self.share = torch.ones((), dtype=dtype, device=job.device)
        self.total = size
        self.captured: CapturedCall[Tensor] = CapturedCall(
            job.device, purpose="steps", subject="steps are", say=job.say
        )

    def capture(self, shared_pool_step: CapturedStep | None) -> bool:
        """Whether it is captured now."""
        pool_of = None if shared_pool_step is None else shared_pool_step.captured
        return self.captured.capture(self._warm_up(), pool_of=pool_of)

    @contextmanager
    def _warm_up(self) -> Iterator[Callable[[], Tensor]]:
        """Gives the step after a few runs of it. What these change is put back, also where the capture fails."""
        renew_accumulators(self.parameters)
        state = self.batches.state
        with _preserve_state(self.job.module, state, self.job.device):
            try:
                start = state.clone()
                self._run()  # compiles, and asks the host whatever is asked only once
                with no_waiting():
                    for _ in range(WARM_UP_STEPS - 1):
                        state.copy_(start)  # the epoch may have no more steps than one
                        self._run()
                self._drop_gradients()
                yield self._run
                self.gradients = [p.grad for p in self.parameters]
                # The graph knows only where they are.
                self.keep_alive = self.batches.slot_tensors(self.size, self.first)
            finally:
                self._drop_gradients()

    def _run(self) -> Tensor:
        self._drop_gradients()
        batch = self.batches.next(self.size, self.first, self.per_step)
        with autocast(self.job):
            loss = self.job.train_step(self.job.model, batch)
        (loss * self.share).backward()
        return loss.detach() * self.size

    def replay(self, total: float) -> Tensor:
        """Add this step's share of the gradient; the summed loss of its seeds."""
        if total != self.total:
            self.share.fill_(self.size / total)
            self.total = total
        earlier_gradients = []
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            earlier = parameter.grad
            # What an earlier unit left in the graph's own memory would be written over.
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
    """Have autograd make new nodes where gradients arrive.

    A node goes by the stream that it was made in, which a capture cannot wait for. It lives as long as any graph that
    leads to it, and the traceback of a step that failed may hold one.
    """
    for parameter in parameters:
        values = parameter.data
        # A node is of one type of numbers: with another one in between, the next use makes a new node.
        other_dtype = torch.float32 if values.dtype != torch.float32 else torch.float64
        parameter.data = values.new_empty(0, dtype=other_dtype)
        parameter.data = values


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within, an operation that waits for the device raises: such a step cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not find everything; the capture does
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _preserve_state(module: nn.Module, state: Tensor, device: torch.device) -> Iterator[None]:
    """What warming up changes is put back: running statistics, the place in the epoch, torch's generator."""
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
