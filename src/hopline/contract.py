"""The contract between a training method and the trainer: jobs, units of work, and memory.

    Method (settings)  --bind(job)-->  Work  --units(epoch)-->  Unit, Unit, ...

    for each step, the trainer:   unit.forward_backward(total)     one or more units
                                  optimizer.step()
                                  unit.commit()                    the one place where a unit writes state

A `Budget` adds two calls. Before the run, `Method.plan(outline, budget)` returns a `Plan`: the place of all
data, and the bytes that a step may take. During the run, `Work.guarded(guard, plan)` keeps the steps within
these bytes.

Settings of methods derive from `Method`, and settings can be read without torch. So torch is imported only
where it is used.
"""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from hopline.data.placement_settings import Placement

if TYPE_CHECKING:  # settings of methods derive from `Method`, and reading settings needs no torch
    import torch
    from torch import Tensor, nn

    from hopline.budget.plan import Budget, Outline, Plan
    from hopline.core.batch import Batch, Block
    from hopline.core.batch_sizes import Sizes
    from hopline.core.examples import Examples
    from hopline.core.graph import Graph
    from hopline.data.dataset import Dataset
    from hopline.device.meter import Meter
    from hopline.distributed.world import World
    from hopline.nn.layered import Layered
    from hopline.nn.whole_module import Whole
    from hopline.tasks.task import Task

KeepRows: TypeAlias = "Callable[[int, Tensor, Tensor], None]"
"""(layer, node ids, their rows after that layer) -> None. Called once per layer and chunk of nodes."""


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def _alone() -> World:
    from hopline.distributed.world import World

    return World.alone()


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """All that a method needs to know about a run. The Trainer makes it. `Method` has an example."""

    data: Dataset
    model: Layered | Whole
    """The model as the library runs it, called with a batch. It shares its parameters with `module`."""
    module: nn.Module
    """The user's model, as it was given to the Trainer."""
    examples: Examples
    """The terms of the loss: nodes with labels, a node perhaps several times."""
    task: Task
    """What is learnt: it computes the loss of a batch."""
    seed: int = 0
    """Seed of all random draws."""
    device: torch.device = field(default_factory=_cpu)
    bf16: bool = False
    """Whether forward runs under bfloat16 autocast."""
    world: World = field(default_factory=_alone)
    """The processes that train together."""
    say: Callable[[str], None] = print
    """Prints a line for the person who watches the run."""

    @property
    def train_ids(self) -> Tensor:
        """[n] int64: the nodes to train on, those of the examples, each once."""
        return self.examples.seeds

    @property
    def weight_of_all(self) -> float:
        """What all examples count in a mean over them. Their labels must be on this rank."""
        weight = self.task.weight(self.examples.labels(self.data.y))
        return len(self.examples) if weight is None else weight

    def weight_of(self, batch: Batch) -> float:
        """What a batch counts in a mean over batches: its examples, or the sum of their weights."""
        weight = self.task.weight(batch.y)
        return batch.num_examples if weight is None else weight


class Unit(ABC):
    """Work that ends in gradients: a batch, the whole graph part by part, a captured CUDA graph.

    The trainer calls `forward_backward`, then the optimizer, then `commit`. `Method` has an example.
    """

    size: int
    """The number of training examples that the unit covers, on this rank."""

    @property
    def weight(self) -> float:
        """What the unit counts in the mean loss of a step: its examples, or the sum of their weights."""
        return self.size

    @property
    def total_size(self) -> float | None:
        """The number of examples in this unit and in the other ranks' units of the same step, together.

        None: the Trainer sums the sizes over the ranks. A unit that returns a number saves this collective
        call in every step. Then every rank must have the same number of units.
        """
        return None

    @abstractmethod
    def forward_backward(self, total: float) -> Tensor:
        """Add this unit's share of the gradient of the mean loss over `total` examples.

        Returns the loss summed over the unit's examples. total: the examples of the whole step, over all
        its units and all ranks, or the sum of their weights. The Trainer then sums the gradients over the
        ranks, or combines them as `Trainer(gradients=)` says.
        """

    def commit(self) -> None:  # noqa: B027 - most units have nothing to write
        """Write state. Called after the optimizer's step: the one place where a unit may do so."""


@dataclass(frozen=True, kw_only=True)
class WorkDescription:
    """Describes how a work prepares its units, for the report and its advice. By default no threads prepare them.

    Example:
        >>> hl.extend.WorkDescription(workers=4, look_ahead=8, is_sampled=True).max_workers
        0
    """

    workers: int = 0
    """The number of threads that prepare batches. 0: the thread that trains does."""
    look_ahead: int = 1
    """Most batches that are prepared ahead."""
    max_workers: int = 0
    """Most threads that a user can ask for. 0: their number cannot be changed."""
    on_gpu: bool = False
    """Whether a GPU prepares the batches itself."""
    is_sampled: bool = False
    """Whether batches are sampled, so that smaller fan-outs make them smaller."""
    refreshes: bool = False
    """Whether historical embeddings are computed exactly in every epoch."""
    prepare_s: Mapping[str, float] = field(default_factory=dict)
    """By stage: seconds that the threads worked in the last epoch."""


class Work(ABC):
    """A method bound to a job. `Method` has an example.

    A subclass must define `units`. All else has defaults.

    Raises:
        TypeError: A subclass defines `units` with other arguments.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        parameters = list(inspect.signature(cls.units).parameters)
        if parameters[1:] != ["epoch", "done", "examples"]:
            raise TypeError(
                f"{cls.__name__}.units takes ({', '.join(parameters)}): write units(self, epoch, done=0, examples=0), "
                "and leave out the first `done` units of the epoch"
            )

    @abstractmethod
    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch (counted from 1), in order. The same epoch gives the same units again.

        Each rank yields its own units. The gradient is that of the mean over the examples of all ranks.

        done: the number of units to leave out at the beginning: an interrupted run has trained them.
        examples: the number of examples that these units had, over all ranks.
        """

    def describe(self) -> WorkDescription:
        """Describes how units are prepared, with the figures of the last epoch."""
        return WorkDescription()

    @property
    def keep_rows(self) -> KeepRows | None:
        """A callback for the embeddings that exact evaluation computes. None: the method needs none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state that the work keeps from step to step, for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most works remember nothing
        """Resume from what `state_dict` returned."""

    def check_exact(self) -> None:  # noqa: B027 - most methods train the model as it is on the whole graph
        """Raise ValueError if the model on the whole graph is another function than the one that is trained."""

    def guarded(self, guard: Guard, plan: Plan) -> Work:
        """The work whose steps keep to a plan: this object or another. Called once, before any unit."""
        raise ValueError(
            f"{type(self).__name__} has no guarded(guard, plan), so it cannot keep to a budget: leave out budget=, or "
            "define it"
        )


def in_groups(units: Iterator[Unit], size: int) -> Generator[list[Unit], None, None]:
    """Units in lists of `size`. Closing it closes `units`, so that no thread prepares more of them."""
    try:
        while group := list(itertools.islice(units, size)):
            yield group
    finally:
        if isinstance(units, Generator):  # a user's work may yield from a list
            units.close()


class Method(ABC):
    """A training method. Subclasses hold settings. `bind` returns the work that yields units in each epoch.

    For every step the Trainer calls `Unit.forward_backward` of one or more units, then the optimizer, then
    `Unit.commit`.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class OneByOne(hl.extend.Method):  # a step per training node, over all edges that lead to it
        ...     def bind(self, job):
        ...         return OneByOneWork(job)
        >>> class OneByOneWork(hl.extend.Work):
        ...     def __init__(self, job):
        ...         self.job = job
        ...         self.sampler = hl.extend.NeighborSampler(job.data.graph, [-1] * job.model.num_layers)
        ...
        ...     def units(self, epoch, done=0, examples=0):
        ...         for step, seeds in enumerate(self.job.train_ids.split(1)[done:], start=done):
        ...             key = hl.extend.derive_key(self.job.seed, epoch, step)  # of dropout
        ...             blocks = self.sampler.sample(seeds, key)
        ...             x = hl.extend.Rows(self.job.data.x, blocks[0].src_ids)
        ...             batch = hl.Batch(seeds, blocks, x, self.job.data.labels[seeds], key=key)
        ...             yield hl.extend.BatchUnit(self.job, batch)
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> trainer = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, OneByOne(), epochs=1, show=False)
        >>> trainer.fit().finished, trainer.num_steps
        (True, 3)
    """

    OWN: ClassVar[str] = "hl.extend.Method"
    """The public name of this class, for messages: `method=package.module:Class` may name a subclass."""
    shares_steps: ClassVar[bool] = False
    """Whether all ranks compute each step together, so that they must have the same weights."""
    grows_with_graph: ClassVar[bool] = True
    """Whether a step, or what comes before the first, takes longer on a larger graph. Then an estimate of an epoch
    times steps on a part of a large graph."""

    @abstractmethod
    def bind(self, job: Job) -> Work:
        """The work of this method for one job."""
        ...

    def for_model(self, model: nn.Module) -> Method:
        """A copy of this method in which settings that depend on the model's depth are filled in."""
        return self

    def for_graph(self, num_nodes: int) -> Method:
        """A copy of this method whose defaults are small enough for a graph of `num_nodes` nodes."""
        return self

    def placement(self, requested: Placement) -> Placement:
        """The placement of data that suits this method on a GPU. requested: what the user asked for."""
        return requested

    def place(self, data: Dataset, requested: Placement, device: torch.device) -> Dataset:
        """The dataset, placed where a GPU reads it fastest. requested: what the user asked for."""
        from hopline.data.placement import place

        return place(data, self.placement(requested), device)

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        """The memory that the method takes, with settings that keep to a budget if there are any.

        `Plan.fits` says whether it does. A plan may choose the look-ahead or the number of shards, which
        change memory and time. It changes nothing of what is learnt.
        """
        raise ValueError(
            f"{type(self).__name__} has no plan, so it cannot keep to a budget: leave out budget=, or define "
            f"{type(self).__name__}.plan(outline, budget)"
        )

    def inference_batches(self, job: Job, ids: Tensor | str, on_host: bool = False) -> Iterable[Batch] | None:
        """Batches for approximate inference at `ids`, in their order. None: only exact inference.

        ids: of a graph in shards also the name of a split. on_host: whether batches wait on the host, so that a GPU
        holds one of them at most.
        """
        return None

    def num_hops(self, model: nn.Module) -> int | None:
        """The number of hops around its seeds that a batch has. None: not a fixed number."""
        return None

    def for_timing(self, folder: Path) -> Method:
        """A copy that trains as this one, for the time of a few steps.

        It leaves out what a run does once. Files that it keeps are in `folder`.
        """
        return self

    @classmethod
    def forms(cls, model: Layered | Whole, folder: Path) -> Sequence[Method]:
        """The forms in which this method is suggested for a model, with default settings. None for other models.

        Those in memory come first, then those whose tables are files in `folder`.
        """
        return (cls(),)


# ---- samplers of the user


@runtime_checkable
class BlockSampler(Protocol):
    """Samples the blocks of a batch: an object with this method is a sampler, as `hl.Sampled(sampler=...)` takes it.

    Several threads call it at once, unless it has an attribute `thread_safe = False`.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4))
        >>> class AllInEdges:
        ...     def sample(self, seeds, key):
        ...         graph = data.graph
        ...         num_edges = graph.in_degrees(seeds)
        ...         dst_idx = torch.arange(len(seeds)).repeat_interleave(num_edges)
        ...         src = torch.cat([graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in seeds])
        ...         return [hl.extend.block_of_edges(seeds, src, dst_idx)]
        >>> (batch,) = hl.Sampled(sampler=AllInEdges(), shuffle=False).loader(data, torch.tensor([1, 3]))
        >>> batch.input_ids.tolist()
        [1, 3, 0, 2]
    """

    def sample(self, seeds: Tensor, key: int) -> Sequence[Block]:
        """One block per layer, in the order of computation. The destinations of the last one are the seeds.

        The result must be a function of the arguments. seeds: [n] int64, each node once. key: decides random draws.
        """
        ...


class SamplerSettings(ABC):
    """Settings of a sampler, which `bind` makes for a graph.

    A dataclass that derives from it can be named in a command: type `method.sampler=package.module:Class` or
    `method.sampler=file.py:Class`, and its fields as `method.sampler.FIELD=VALUE`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Uniform(hl.extend.SamplerSettings):
        ...     fanouts: tuple[int, ...] = (2, 2)
        ...     def bind(self, graph):
        ...         return hl.extend.NeighborSampler(graph, self.fanouts)
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4))
        >>> (batch,) = hl.Sampled(sampler=Uniform(), shuffle=False).loader(data, torch.tensor([1]))
        >>> [block.num_edges for block in batch.blocks]
        [2, 1]
    """

    OWN: ClassVar[str] = "hl.extend.SamplerSettings"
    """The public name of this class, for messages: `method.sampler=package.module:Class` names a subclass."""

    @abstractmethod
    def bind(self, graph: Graph) -> BlockSampler:
        """The sampler for one graph. Called once per graph, before any thread samples."""
        ...


# ---- memory during a run: the guard that keeps steps within the plan (`budget.plan`)

Redraw: TypeAlias = "Callable[[Tensor, int], tuple[Block, ...]]"
"""(seeds, key) -> blocks that are sampled for the seeds: `BlockSampler.sample` of the run's sampler."""


class SplittableStep(Protocol):
    """A step that runs whole, or in micro-batches that need each other's rows.

    Because they need each other's rows, one that runs out of memory makes the whole step start again.
    """

    smaller_by: str
    """The name of the setting that makes such steps smaller, for messages."""

    def sizes(self) -> Sizes:
        """The sizes of the whole step."""
        ...

    def bound_bytes(self) -> float:
        """The predicted peak of the whole step, by measurements of micro-batches."""
        ...

    def run_whole(self) -> Tensor:
        """Run the step without a split. Returns its summed loss."""
        ...

    def run_in_micro_batches(self, meter: Meter, set_predicted_bytes: Callable[[float], None]) -> Tensor:
        """Split the step into micro-batches within `Guard.target_bytes`, and run them.

        Returns the summed loss. meter: measures the step. set_predicted_bytes: must be called with the
        predicted peak before anything runs.
        """
        ...

    def reset(self) -> None:
        """Drop what an attempt that ran out of memory has left behind."""
        ...


class Guard(Protocol):
    """Keeps steps within the bytes that a plan leaves for one. `hopline.budget.guard` implements it.

    `split_ahead` may be called in any thread, everything else in the one that trains.
    """

    target_bytes: float
    """The bytes that a step may take now. Less for a while after an out-of-memory error."""

    def overhead_bytes(self) -> int:
        """The bytes that are taken besides a step: gradients of earlier units, and buffers."""
        ...

    def unit(self, batch: Batch, redraw: Redraw | None = None) -> Unit:
        """A unit that keeps to the limit, for a batch whose seeds can be trained separately."""
        ...

    def split_ahead(self, batch: Batch) -> Batch:
        """The batch, with the seeds of each micro-batch found already if it will be split."""
        ...

    def step(self, step: SplittableStep) -> Tensor:
        """Run a step whole or in micro-batches. Returns its summed loss.

        After an out-of-memory error the micro-batches get smaller.
        """
        ...

    def must_split(self, step: SplittableStep) -> bool:
        """Whether a step must be split. An error if it must and the budget does not allow it."""
        ...

    def note_split(self, num_micro_batches: int) -> None:
        """Record that a step is split."""
        ...

    def measure(self, run: Callable[[], Tensor], predicted_bytes: float) -> Tensor:
        """Run a step that cannot be split. Returns its summed loss.

        Records the measured peak next to the predicted one.
        """
        ...
