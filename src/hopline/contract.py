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
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from hopline.data.placement_settings import Placement
from hopline.util.config import check_fields, format_size, nearest, parse_size, settings

if TYPE_CHECKING:  # settings of methods derive from `Method`, and reading settings needs no torch
    import torch
    from torch import Tensor, nn

    from hopline.core.batch import Batch, Block
    from hopline.core.batch_sizes import Sizes
    from hopline.core.partition import Partition
    from hopline.data.dataset import Dataset
    from hopline.device.meter import Meter
    from hopline.distributed.world import World
    from hopline.nn.gnn import GNN
    from hopline.nn.whole_module import Whole

TrainStep: TypeAlias = "Callable[[nn.Module, Batch], Tensor]"
"""(model, batch) -> mean loss over the batch's seeds, as a scalar to differentiate."""
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
    model: GNN | Whole
    """The model as the library runs it, called with a batch. It shares its parameters with `module`."""
    module: nn.Module
    """The user's model, as it was given to the Trainer."""
    train_ids: Tensor
    """[n] int64: nodes to train on."""
    train_step: TrainStep
    """Computes the loss of a batch."""
    usual_loss: bool = False
    """Whether `train_step` is the usual loss of the task, a mean over the seeds. Only then can the loss of a
    batch be computed in micro-batches."""
    seed: int = 0
    """Seed of all random draws."""
    device: torch.device = field(default_factory=_cpu)
    bf16: bool = False
    """Whether forward runs under bfloat16 autocast."""
    world: World = field(default_factory=_alone)
    """The processes that train together."""
    say: Callable[[str], None] = print
    """Prints a line for the person who watches the run."""


class Unit(ABC):
    """Work that ends in gradients: a batch, the whole graph part by part, a captured CUDA graph.

    The trainer calls `forward_backward`, then the optimizer, then `commit`. `Method` has an example.
    """

    size: int
    """The number of training examples that the unit covers, on this rank."""

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
        its units and all ranks. The Trainer then sums the gradients over the ranks, or combines them as
        `Trainer(gradients=)` says.
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

    def inference_batches(self, job: Job, ids: Tensor) -> Iterable[Batch] | None:
        """Batches for approximate inference at `ids`, in their order. None: only exact inference."""
        return None


# ---- memory before a run: the budget, the outline of what is known, and the plan of a method

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
"""All kinds of memory, fastest first."""
ASYNC_EVALUATION_SHARE = 0.25
"""Share of the bytes left for steps that asynchronous evaluation gets. A rule of thumb."""
MAX_SLOWDOWN = 10
"""Time within a budget, as a multiple of the time without, from which on the plan warns. A rule of thumb."""
OverBudget = Literal["split", "resample", "cut", "cut_by_degree", "cut_by_pagerank", "refuse"]
CutBy = Literal["random", "degree", "pagerank"]
CUTS: Mapping[str, CutBy] = {"cut": "random", "cut_by_degree": "degree", "cut_by_pagerank": "pagerank"}
"""Values of `Budget.over_budget` that cut edges, and the order in which each leaves them out."""


@settings
class Budget:
    """Memory that a run may take, and what becomes of a batch that would take more.

    `Trainer(budget="8GiB")` is short for `hl.Budget(device="8GiB")`.

    Raises:
        ValueError: A field has a value that is not allowed. From the Trainer: no size is given, or the run
            cannot fit.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> budget = hl.Budget(device="2GiB", over_budget="refuse")
        >>> trainer = hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, budget=budget, epochs=1, show=False)
        >>> trainer.fit().finished
        True
    """

    SHORT: ClassVar[str] = "device"
    """The field that `budget=8GiB` sets."""
    device: str | None = None
    """Memory limit of the device that trains, such as 8GiB (on a CPU: host memory). Default: no limit."""
    host: str | None = None
    """Limit of host memory. Default: no limit."""
    disk: str | None = None
    """Limit of the files that a run writes for itself. Default: no limit."""
    over_budget: OverBudget = "split"
    """Treatment of a batch that is too large: `split` (micro-batches with the same gradients), `resample`
    (draw anew), `cut` (leave out edges at random), `cut_by_degree` and `cut_by_pagerank` (edges between
    hubs first), or `refuse` (end the run)."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("device", "host", "disk"):
            value = getattr(self, name)
            if value is not None and parse_size(value) <= 0:
                raise ValueError(f"budget.{name} must be above 0, not {value!r}: write it as budget.{name}=8GiB")

    @classmethod
    def of(cls, given: Budget | str | int | Mapping[str, str]) -> Budget:
        """A budget from a size such as "8GiB", for the device, or from a mapping of its fields."""
        if isinstance(given, Budget):
            if all(size is None for size in (given.device, given.host, given.disk)):
                raise ValueError("a budget needs a size: write budget=8GiB, budget.host=32GiB or budget.disk=100GiB")
            return given
        if isinstance(given, Mapping):
            names = [field.name for field in fields(cls)]
            for name in given:
                if name not in names:
                    raise ValueError(
                        f"a budget has no {name!r}: give some of {', '.join(names)}.{nearest(name, names)}"
                    )
            return cls.of(cls(**given))  # type: ignore[arg-type]
        parse_size(given)  # raises if it is no size
        return cls(device=str(given))

    def bytes_on(self, device: torch.device) -> int | None:
        """The bytes that the model and a step may take on a device. None: no limit.

        On a CPU the limits of the device and of the host both hold, so the smaller one counts.
        """
        limits = [self.device] if device.type == "cuda" else [self.device, self.host]
        sizes = [parse_size(limit) for limit in limits if limit is not None]
        return min(sizes) if sizes else None

    def key_on(self, device: torch.device) -> str:
        """The key that sets the limit where a device computes: "budget", or "budget.host" if that is the smaller."""
        is_limited_by_host = self.host is not None and parse_size(self.host) == self.bytes_on(device)
        return "budget.host" if device.type == "cpu" and is_limited_by_host else "budget"


@dataclass(frozen=True)
class Item:
    """Something that a run keeps in memory all the time, for a plan."""

    name: str
    """A name for the printed plan, such as "history"."""
    place: Place
    """The kind of memory that holds it."""
    num_bytes: int
    """Its size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline(ABC):
    """All that a method may ask about a run before it begins. `hopline.budget.memory_plan` implements it."""

    job: Job
    """The job. Its data has not been placed on a GPU yet."""
    optimizer: str = "adam"
    """The optimizer's name, which decides how much it remembers per weight. "own": one of the user."""
    placement: Placement = field(default_factory=Placement)
    """The placement of the data that the user asked for."""
    async_evaluation: bool = False
    """Whether asynchronous evaluation takes memory at the place where steps are computed."""
    learnt: dict[str, Any] = field(default_factory=dict)
    """What a method has learnt from measured steps, by a name of its own."""

    @property
    def data(self) -> Dataset:
        return self.job.data

    @property
    def model(self) -> GNN | Whole:
        return self.job.model

    @property
    def train_ids(self) -> Tensor:
        return self.job.train_ids

    @property
    def device(self) -> torch.device:
        return self.job.device

    @property
    def compute_place(self) -> Place:
        """The place of the model and its steps: the device, or the host if the device is a CPU."""
        return "host" if self.device.type == "cpu" else "device"

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""

    @abstractmethod
    def limits(self, budget: Budget) -> dict[Place, int | None]:
        """The bytes that a budget allows, by place. None for no limit.

        On a CPU, "host" has the smaller limit of device and host, and "device" has none.
        """

    @abstractmethod
    def resident_items(self) -> list[Item]:
        """Resident items of every method, such as weights and the optimizer's state. Gradients belong to a step."""

    @abstractmethod
    def data_on_host(self) -> list[Item]:
        """The graph, features and labels in host memory, without those that are memory-mapped files."""

    @abstractmethod
    def hidden_bytes(self) -> int:
        """An estimate of the bytes of embeddings that exact evaluation keeps. 0 for a model without layers."""

    @abstractmethod
    def predictor(self, num_blocks: int) -> Any:
        """The `hopline.budget.predictor.Predictor` of steps over `num_blocks` blocks.

        It gives a bound by the model's widths, and a closer prediction once steps were measured.
        """


@dataclass(frozen=True, kw_only=True)
class Price:
    """The time that a budget costs, from the steps that a plan has measured."""

    step_s: float
    """Expected seconds of an optimizer step within the budget."""
    free_step_s: float
    """Expected seconds of an optimizer step without a budget."""
    free_step_bytes: float
    """The predicted peak of a step that the budget neither splits nor divides."""


class DoesNotFit(ValueError):
    """Raised if a method cannot keep to a budget. `smallest_bytes`: by place, a limit that would do."""

    def __init__(self, sentence: str, smallest_bytes: Mapping[Place, int]) -> None:
        super().__init__(sentence)
        self.smallest_bytes = dict(smallest_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The memory of a run under a budget, known before it starts. `Method.plan` returns it.

    Example:
        >>> class Own(hl.extend.Method):
        ...     def bind(self, job):
        ...         return OwnWork(job)
        ...     def plan(self, outline, budget):
        ...         features = outline.data.x.num_bytes
        ...         return hl.extend.Plan(
        ...             method=self, limits=outline.limits(budget),
        ...             items=(*outline.resident_items(), *outline.data_on_host()),
        ...             compute_place=outline.compute_place, step_bytes=4 * features, min_step_bytes=4 * features,
        ...             steps=1,
        ...             count=outline.data.num_nodes, covers="steps of {} nodes",
        ...         )
        >>> class OwnWork(hl.extend.Work):
        ...     def __init__(self, job, watched=None):
        ...         self.job, self.watched = job, watched
        ...     def guarded(self, guard, plan):
        ...         return OwnWork(self.job, lambda unit: hl.extend.MeasuredUnit(unit, guard, plan.step_bytes))
        ...     def units(self, epoch, done=0, examples=0):
        ...         for batch in hl.Sampled(fanouts=(-1,)).loader(self.job.data):
        ...             yield self.watched(hl.extend.BatchUnit(self.job, batch))
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]),
        ...     splits={"train": [0, 1, 2]},
        ... )
        >>> hl.Trainer(hl.nn.GNN([SAGEConv(4, 2)]), data, Own(), budget="1MiB", epochs=1, show=False).fit().finished
        True
    """

    method: Method
    """The method, with as much look-ahead or as few shards as fit. They do not change what is learnt."""
    items: tuple[Item, ...]
    """Everything that is in memory all the time."""
    limits: Mapping[Place, int | None]
    """By place: the most bytes that may be taken. None for no limit."""
    compute_place: Place
    """The place where steps are computed."""
    step_bytes: float
    """The predicted peak of the largest step if it is not split."""
    min_step_bytes: float
    """The predicted peak of the largest step if it is split as finely as possible."""
    steps: int
    """The number of optimizer steps of an epoch."""
    count: int
    """The amount of the graph that a step covers, in the unit that `covers` names."""
    covers: str
    """A phrase for the printed plan, in which `{}` stands for `count`: "batches of {} of 40 parts"."""
    hidden_bytes: int = 0
    """The bytes of embeddings that exact evaluation keeps (`Outline.hidden_bytes`)."""
    placement: Placement | None = None
    """The placement of the data for a GPU. None: the one that was requested."""
    batches_on_host: bool = False
    """Whether batches wait on the host, and move to the GPU for their step, whole or in micro-batches."""
    num_blocks: int | None = None
    """The number of blocks of a step, for the predictor that learns from measured steps. None: measured
    steps do not improve the plan."""
    async_evaluation: bool = False
    """Whether asynchronous evaluation shares the memory with the steps."""
    partition: Partition | None = None
    """The parts that a sweep goes over one by one, for a method whose plan makes them small enough."""
    process_bytes: int = 0
    """Host memory that the process takes beside the run's tensors, measured before the plan: Python, torch and
    whatever else it has loaded. No limit of a budget covers it. 0: not measured."""
    price: Price | None = None
    """The time that the budget costs. None: the budget makes no step longer, or the time is not known."""
    budget_key: str = "budget"
    """The setting that limits the place of the steps."""

    def budget_bytes(self, place: Place) -> int | None:
        """The most bytes that may be taken at a place. None for no limit."""
        return self.limits[place]

    def resident_bytes(self, place: Place) -> int:
        """The bytes that are taken at a place all the time."""
        return sum(item.num_bytes for item in self.items if item.place == place)

    @property
    def available_bytes(self) -> float:
        """The bytes that resident items leave at the place of the steps. Infinite without a limit."""
        return _available(self.limits[self.compute_place], self.resident_bytes(self.compute_place))

    @property
    def limit_bytes(self) -> float:
        """The bytes that a step may take: all available ones, less the share of asynchronous evaluation."""
        if self.async_evaluation:
            return (1 - ASYNC_EVALUATION_SHARE) * self.available_bytes
        return self.available_bytes

    @property
    def evaluation_bytes(self) -> float:
        """The bytes that evaluation may take: all available ones, or a share if it runs asynchronously."""
        if self.async_evaluation:
            return ASYNC_EVALUATION_SHARE * self.available_bytes
        return self.available_bytes

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches that the largest step is likely to be split into."""
        if self.limit_bytes <= 0:
            return 1
        return max(1, math.ceil(self.step_bytes / self.limit_bytes))

    @property
    def step_summary(self) -> str:
        """A phrase for people: what a step covers, and how much of it would fit without a split."""
        step = self.covers.format(self.count)
        if self.step_bytes <= self.limit_bytes:
            return f"{step}, whole"
        max_count = max(0, int(self.count * self.limit_bytes / self.step_bytes))
        if max_count == 0:
            return f"{step}, in micro-batches"
        return f"{step}, in micro-batches (about {max_count} would fit at once)"

    def peak_bytes(self, place: Place) -> int:
        """The most bytes that will be taken at a place, with steps split to fit."""
        step_bytes = min(self.step_bytes, self.limit_bytes) if place == self.compute_place else 0
        return self.resident_bytes(place) + math.ceil(with_evaluation(step_bytes, self.async_evaluation))

    def smallest_bytes(self, place: Place) -> int:
        """The smallest limit at a place that would do, with steps split as finely as possible."""
        # The place of the steps must fit a step. Another place that keeps embeddings must fit these.
        if place == self.compute_place:
            temporary_bytes = with_evaluation(self.min_step_bytes, self.async_evaluation)
        elif place == self.hidden_place:
            temporary_bytes = self.hidden_bytes
        else:
            temporary_bytes = 0
        return self.resident_bytes(place) + math.ceil(temporary_bytes)

    @property
    def hidden_place(self) -> Place:
        """The place where exact evaluation keeps embeddings: the host, or files if the host is too small.

        The host must have twice their bytes, so that something is left for a chunk.
        """
        if self.compute_place == "host":
            available_bytes = self.evaluation_bytes
        else:
            available_bytes = _available(self.limits["host"], self.resident_bytes("host"))
        return "host" if 2 * self.hidden_bytes <= available_bytes else "disk"

    @property
    def chunk_bytes(self) -> int | None:
        """The bytes that a chunk of exact evaluation may take. None for no limit."""
        if self.limit_bytes == math.inf:
            return None
        hidden_bytes = self.hidden_bytes if self.hidden_place == self.compute_place else 0
        return max(1, int(self.evaluation_bytes - hidden_bytes))

    @property
    def fits(self) -> bool:
        """Whether the plan keeps to its limits, with steps split as finely as possible."""
        return all(map(self._fits, PLACES))

    def check(self) -> Plan:
        """This plan, if it keeps to its limits.

        Raises:
            DoesNotFit: It does not.
        """
        if self.fits:
            return self
        raise self.refusal(self.smallest_limits)

    @property
    def smallest_limits(self) -> dict[Place, int]:
        """By place, for those whose limit is too small: the smallest limit that would do."""
        return {place: self.smallest_bytes(place) for place in PLACES if not self._fits(place)}

    def refusal(self, smallest: Mapping[Place, int]) -> DoesNotFit:
        """An error that names limits that would do. smallest: by place, these limits."""
        keys = {place: f"budget.{place}" for place in smallest} | {self.compute_place: self.budget_key}
        needs = ", ".join(f"{keys[place]}={_format_limit(num_bytes)}" for place, num_bytes in smallest.items())
        limits = ", ".join(f"{format_size(self.limits[place] or 0)} on the {place}" for place in smallest)
        largest = self._describe_largest(smallest)
        return DoesNotFit(
            f"{type(self.method).__name__} does not fit {limits}: it needs at least {needs}{largest}", smallest
        )

    def _fits(self, place: Place) -> bool:
        limit = self.limits[place]
        return limit is None or self.smallest_bytes(place) <= limit

    def _describe_largest(self, places: Mapping[Place, int]) -> str:
        """A phrase in brackets that names the largest item at the places that are too small, or "".

        places: by place, a limit that would do. A step above this limit is not named: then the limit comes from
        measured steps, and `min_step_bytes` from the bound, which is far above them.
        """
        sizes = [(item.num_bytes, item.name) for item in self.items if item.place in places]
        if self.compute_place in places and self.min_step_bytes <= places[self.compute_place]:
            sizes.append((math.ceil(self.min_step_bytes), "the smallest step"))
        if not sizes:
            return ""
        num_bytes, name = max(sizes)
        verb = "take" if name.endswith("s") else "takes"
        return f" ({name} alone {verb} {format_size(num_bytes)})"

    def lines(self) -> list[str]:
        """The plan as lines to print: one per place in use, one about the steps, and what the budget costs."""
        lines = []
        for place in PLACES:
            items = [item for item in self.items if item.place == place and item.num_bytes]
            if not items and place != self.compute_place:
                continue
            parts = [f"{item.name} {format_size(item.num_bytes)}" for item in items]
            if place == self.compute_place:
                split = f", in up to {self.num_micro_batches:,} micro-batches" if self.num_micro_batches > 1 else ""
                step_bytes = min(self.step_bytes, self.limit_bytes)
                parts.append(f"a step {format_size(step_bytes)}{split}")
                if self.async_evaluation:
                    evaluation_bytes = with_evaluation(step_bytes, async_evaluation=True) - step_bytes
                    parts.append(f"asynchronous evaluation {format_size(evaluation_bytes)}")
            limit = self.limits[place]
            of_limit = "" if limit is None else f" of {format_size(limit)}"
            lines.append(f"plan: {place} {format_size(self.peak_bytes(place))}{of_limit}: {', '.join(parts)}")
        if self.process_bytes:
            lines.append(f"plan: the process takes {format_size(self.process_bytes)} beside these tensors")
        lines.append(f"plan: {self.step_summary}")
        if self.price is not None:
            epoch, free_epoch = (self.steps * step_s for step_s in (self.price.step_s, self.price.free_step_s))
            lines.append(f"plan: an epoch takes about {epoch:.2g} s, without a budget about {free_epoch:.2g} s")
        return [*lines, *([self.price_warning] if self.price_warning else [])]

    @property
    def price_warning(self) -> str:
        """The line of the plan about a budget that makes a run `MAX_SLOWDOWN` times as long or longer, else ""."""
        price = self.price
        if price is None or not price.step_s >= MAX_SLOWDOWN * price.free_step_s:
            return ""
        step_bytes = math.ceil(with_evaluation(price.free_step_bytes, self.async_evaluation))
        enough = _format_limit(self.resident_bytes(self.compute_place) + step_bytes)
        return (
            f"plan: the budget of {format_size(self.limits[self.compute_place] or 0)} makes the run about "
            f"{price.step_s / price.free_step_s:.0f} times as long as without, and changes nothing that is learnt: "
            f"{self.budget_key}={enough} would cost no time"
        )

    def excess_warning(self, host_bytes: int) -> str:
        """A sentence if the host's limit and the process together exceed the memory of the host, else "".

        host_bytes: the memory of the host or of its container.
        """
        tensor_bytes = self.limits["host"] or self.peak_bytes("host")
        left_bytes = host_bytes - self.process_bytes
        if not self.process_bytes or tensor_bytes <= left_bytes:
            return ""
        return (
            f"tensors may take {format_size(tensor_bytes)}, and the process takes {format_size(self.process_bytes)} "
            f"beside them, more than the {format_size(host_bytes)} of this host or container, which may kill the run: "
            f"set budget.host={_format_limit_down(max(0, left_bytes))} or less"
        )


def with_evaluation(step_bytes: float, async_evaluation: bool) -> float:
    """The bytes that must be available for a step, and for asynchronous evaluation if there is any."""
    return step_bytes / (1 - ASYNC_EVALUATION_SHARE) if async_evaluation else step_bytes


def _available(limit_bytes: int | None, resident_bytes: int) -> float:
    """The bytes that resident items leave of a limit. Infinite without a limit."""
    return math.inf if limit_bytes is None else limit_bytes - resident_bytes


def _format_limit(num_bytes: int) -> str:
    """A size in words, rounded up: `parse_size` reads it as no less than `num_bytes`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{math.ceil(100 * num_bytes / scale) / 100:g}{unit}"
    return str(num_bytes)


def _format_limit_down(num_bytes: int) -> str:
    """A size in words, rounded down: `parse_size` reads it as no more than `num_bytes`."""
    return f"{num_bytes >> 20}MiB"


# ---- memory during a run: the guard that keeps steps within the plan

Redraw: TypeAlias = "Callable[[Tensor, int], tuple[Block, ...]]"
"""(seeds, key) -> blocks that are sampled for the seeds. `NeighborSampler.sample` is one."""


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
