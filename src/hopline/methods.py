"""Ways to train. A method is a small frozen spec; bound to a job it yields units of work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from hopline import ops, trace
from hopline.batch import Batch, Rows
from hopline.cores import num_cores
from hopline.data.dataset import Dataset
from hopline.memory import reuse_freed_memory
from hopline.nn.gnn import GNN
from hopline.nn.whole import Whole, as_walkable
from hopline.pipeline import Pipeline, Stage
from hopline.sampling import NeighborSampler, check_fanouts, seed_batches, share_of
from hopline.validate import check_fields
from hopline.world import World

TrainStep = Callable[[nn.Module, Batch], Tensor]
"""(model, batch) -> mean loss over the batch's seeds, as a scalar to differentiate."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What a method needs to know about the run it works for."""

    data: Dataset
    model: GNN | Whole
    """The model as the library runs it, called with a batch; shares its parameters with the user's."""
    module: nn.Module
    """The user's own model, as it was given."""
    train_ids: Tensor
    """[n] int64: nodes to train on."""
    train_step: TrainStep
    seed: int = 0
    device: torch.device = torch.device("cpu")
    bf16: bool = False
    """Whether forward runs under bfloat16 autocast."""
    world: World = field(default_factory=World.alone)
    """The processes that train together."""


def supervised(task: str, num_classes: int) -> TrainStep:
    """The usual loss of a task: cross entropy, or binary cross entropy for several labels or a single score."""

    def train_step(model: nn.Module, batch: Batch) -> Tensor:
        scores, y = model(batch), batch.labels
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if task == "multi" or scores.size(-1) == 1:
            return nn.functional.binary_cross_entropy_with_logits(scores.view(y.shape), y.to(scores.dtype))
        if scores.size(-1) < num_classes:
            raise ValueError(
                f"the model puts out {scores.size(-1)} columns for {num_classes} classes: widen its last layer"
            )
        return nn.functional.cross_entropy(scores, y)

    return train_step


class Unit(ABC):
    """A piece of work that ends in gradients: a batch, a sweep over parts, a captured graph."""

    size: int
    """How many training examples it covers."""

    @property
    def total_size(self) -> int:
        """How many the units of all ranks in this place cover together."""
        return self.size

    @abstractmethod
    def forward_backward(self, total: int) -> Tensor:
        """Add this unit's share of the gradient of the mean loss over `total` examples; return its summed loss."""

    def commit(self) -> None:  # noqa: B027 - most units have nothing to write
        """Called after the optimizer step: the one place where a unit may write state."""


class Work(Protocol):
    """A method bound to a job."""

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch (counted from 1), in order; the same epoch gives the same units again.

        done, examples: how many units, which trained how many examples over all ranks, had their turn already.
        """
        ...


class Method(ABC):
    """A way to train. Subclasses are frozen settings; `bind` gives what yields the units."""

    @abstractmethod
    def bind(self, job: Job) -> Work: ...

    def inference_batches(self, job: Job, ids: Tensor) -> Iterable[Batch] | None:
        """Batches for approximate inference at `ids`, in their order; None where only exact inference exists."""
        return None


@dataclass
class BatchUnit(Unit):
    """One batch through the job's training step."""

    job: Job
    batch: Batch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_seeds

    @property
    def total_size(self) -> int:
        return self.batch.num_seeds if self.batch.total_seeds is None else self.batch.total_seeds

    def forward_backward(self, total: int) -> Tensor:
        job = self.job
        if not self.size:  # fewer seeds were left than there are ranks
            return torch.zeros((), device=job.device)
        with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.bf16), trace.span("forward"):
            loss = job.train_step(job.model, self.batch)
        with trace.span("backward"):
            (loss * (self.size / total)).backward()
        return loss.detach() * self.size


@dataclass(frozen=True, kw_only=True)
class Sampled(Method):
    """Neighbour sampling: each batch is some seeds and a sample of the edges that lead to them."""

    fanouts: tuple[int, ...] = (15, 10, 5)
    """In-edges taken per node and layer, the seeds' own first; -1 takes all."""
    batch_size: int = 1024
    """Seeds per batch and rank."""
    replace: bool = False
    """Draw neighbours with replacement."""
    layout: Literal["block"] = "block"
    """How a batch is laid out: `block` has every node once."""
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

    def inference_batches(self, job: Job, ids: Tensor) -> Loader:
        in_order = replace(self, shuffle=False, drop_last=False)
        return in_order.loader(job.data, ids, seed=job.seed, device=job.device, model=job.model)

    def bind(self, job: Job) -> SampledWork:
        num_layers = getattr(job.model, "num_layers", len(self.fanouts))
        if num_layers != len(self.fanouts):
            raise ValueError(
                f"the model has {num_layers} layers and fanouts={self.fanouts} names {len(self.fanouts)}: "
                f"give one fan-out per layer, for example fanouts={','.join(['10'] * num_layers)}"
            )
        if self.scale_sums and isinstance(job.model, Whole):
            raise ValueError("scale_sums=true needs a model made of layers: use hl.nn.GNN, or set scale_sums=false")
        job.model.check_blocks()
        loader = self.loader(job.data, job.train_ids, seed=job.seed, device=job.device, model=job.model)
        loader.rank, loader.size, loader.num_cores = job.world.rank, job.world.size, job.world.num_cores
        return SampledWork(job, loader)

    def loader(
        self,
        data: Dataset,
        ids: Tensor | str = "train",
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        model: nn.Module | None = None,
    ) -> Loader:
        """The batches alone, for a loop of your own: `for batch in Sampled(...).loader(data): ...`.

        With `model`, rows that its first layer reads itself are left to it; without, `batch.x` is a tensor.
        """
        if isinstance(ids, str) and ids not in data.splits:
            raise ValueError(f"there is no split {ids!r}: choose one of {', '.join(data.splits)}")
        chosen = data.splits[ids] if isinstance(ids, str) else torch.as_tensor(ids)
        return Loader(data, chosen, self, seed, torch.device(device), as_walkable(model) if model else None)


@dataclass
class SampledWork:
    """Sampled training of one job."""

    job: Job
    loader: Loader

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        with closing(self.loader.epoch(epoch, done, examples)) as batches:
            for batch in batches:
                yield BatchUnit(self.job, batch)


class Loader:
    """Batches of a dataset, prepared ahead: sample, gather, move. Iterating gives epoch after epoch."""

    def __init__(
        self,
        data: Dataset,
        ids: Tensor,
        method: Sampled,
        seed: int,
        device: torch.device,
        model: GNN | Whole | None,
    ) -> None:
        if ids.numel() == 0:
            raise ValueError("there are no seeds to make batches of: give a split or ids that are not empty")
        self.data, self.ids, self.method, self.seed, self.device = data, ids, method, seed, device
        self.sampler = NeighborSampler(data.graph, method.fanouts, replace=method.replace)
        here = device.type == "cpu"  # the kernels that read a table themselves are the CPU's
        self.keeps_handle = here and model is not None and "x" in data.tables and model.keeps_handle(data.tables["x"])
        self.model = model
        self.rank, self.size = 0, 1  # of the ranks that share each step's seeds
        self.num_cores = num_cores()
        self._next_epoch = 1
        reuse_freed_memory()

    def __len__(self) -> int:
        full, rest = divmod(self.ids.numel(), self.method.batch_size * self.size)
        return full + (rest > 0 and not self.method.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return self.epoch(epoch)

    def epoch(self, epoch: int, done: int = 0, seeds_done: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, counted from 1: the same for any number of workers.

        After `done` batches of `seeds_done` seeds it goes on, also where these were batches of another size.
        """
        stages = [Stage("sample", self._sample), Stage("gather", self._gather), Stage("move", self._move)]
        workers, look_ahead = resolve_workers(self.method, self.num_cores)
        pipeline = Pipeline(stages, workers=workers, look_ahead=look_ahead)
        epoch_key = ops.derive_key(self.seed, epoch)
        seeds = seed_batches(
            self.ids,
            self.method.batch_size * self.size,
            epoch_key,
            shuffle=self.method.shuffle,
            drop_last=self.method.drop_last,
            done=seeds_done,
        )
        return pipeline.run((s, ops.derive_key(epoch_key, step)) for step, s in enumerate(seeds, start=done))

    def _sample(self, request: tuple[Tensor, int]) -> Batch:
        all_seeds, key = request
        seeds = share_of(all_seeds, self.rank, self.size)
        blocks = self.sampler.sample(seeds, key)
        if self.method.scale_sums:
            blocks = tuple(replace(block, scale_sums=True) for block in blocks)
        trace.count("edges.sampled", sum(b.num_edges for b in blocks))
        return Batch(seeds, blocks, None, None, key=key, total_seeds=all_seeds.numel())

    def _gather(self, batch: Batch) -> Batch:
        handles = {name: Rows(table, batch.input_ids) for name, table in self.data.tables.items()}
        x: Rows | Tensor | None = handles.pop("x", None)
        if isinstance(x, Rows) and self.keeps_handle and isinstance(self.model, GNN):
            x = self.model.read_ahead(x, batch.blocks[0])
        elif isinstance(x, Rows):
            x = x.read()
            trace.count("bytes.gathered", x.numel() * x.element_size())
        y = None if self.data.y is None else ops.gather_rows(self.data.y, batch.seeds)
        return replace(batch, x=x, y=y, tables=handles)

    def _move(self, batch: Batch) -> Batch:
        return batch.to(self.device)


def resolve_workers(method: Sampled, num_cores: int) -> tuple[int, int]:
    """(workers, look_ahead) with "auto" replaced: preparing threads give way to training, so there is one per core."""
    workers = min(8, num_cores) if method.workers == "auto" else method.workers
    look_ahead = 2 * max(1, workers) if method.look_ahead == "auto" else method.look_ahead
    return workers, look_ahead
