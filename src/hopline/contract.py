"""What a method and the trainer say to each other: a job, the units of work it is done in, and its memory.

`Method.bind(job)` gives `Work`, which yields a `Unit` per step. Under a `Budget`, `Method.plan(outline, budget)` says
before anything runs what lies where and what a step may take.
"""

from __future__ import annotations

import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from hopline.data.placement_settings import Placement
from hopline.util.config import RemovedSetting, check_fields, format_size, nearest, parse_size, settings

if TYPE_CHECKING:  # settings of methods derive from `Method`, and reading settings needs no torch
    import torch
    from torch import Tensor, nn

    from hopline.core.batch import Batch, Block
    from hopline.core.sizes import Sizes
    from hopline.data.dataset import Dataset
    from hopline.device.meter import Meter
    from hopline.distributed.world import World
    from hopline.nn.gnn import GNN
    from hopline.nn.whole_module import Whole

TrainStep: TypeAlias = "Callable[[nn.Module, Batch], Tensor]"
"""(model, batch) -> mean loss over the batch's seeds, as a scalar to differentiate."""
KeepRows: TypeAlias = "Callable[[int, Tensor, Tensor], None]"
"""(layer, node ids, their rows after that layer) -> None: called with each part of the nodes once."""


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def _alone() -> World:
    from hopline.distributed.world import World

    return World.alone()


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What a method needs to know about the run it works for. The Trainer makes it; `Method` has an example."""

    data: Dataset
    model: GNN | Whole
    """The model as the library runs it, called with a batch; shares its parameters with the user's."""
    module: nn.Module
    """The user's own model, as it was given."""
    train_ids: Tensor
    """[n] int64: nodes to train on."""
    train_step: TrainStep
    usual_loss: bool = False
    """Whether `train_step` is the usual loss of the task: a mean over the seeds, which may be computed in parts."""
    seed: int = 0
    device: torch.device = field(default_factory=_cpu)
    bf16: bool = False
    """Whether forward runs under bfloat16 autocast."""
    world: World = field(default_factory=_alone)
    """The processes that train together."""
    say: Callable[[str], None] = print
    """Where a line for the person watching goes."""


class Unit(ABC):
    """A piece of work that ends in gradients: a batch, a sweep over parts, a captured graph.

    `Method` has an example.
    """

    size: int
    """How many training examples it covers, on this rank."""

    @property
    def total_size(self) -> float | None:
        """How many the units of all ranks in this place cover together; None: the Trainer sums their sizes.

        A method that knows it saves an exchange a step, and then gives every rank the same number of units.
        """
        return None

    @abstractmethod
    def forward_backward(self, total: float) -> Tensor:
        """Add this unit's share of the gradient of the mean loss over `total` examples; return its summed loss.

        total: examples of the whole step, over all its units and all ranks. Gradients are summed over the ranks, or
        combined as `Trainer(gradients=)` says.
        """

    def commit(self) -> None:  # noqa: B027 - most units have nothing to write
        """Called after the optimizer step: the one place where a unit may write state."""


@dataclass(frozen=True, kw_only=True)
class WorkDescription:
    """How a work prepares its units, for the report and its advice. The defaults are those of a work without threads.

    Example:
        >>> hl.extend.WorkDescription(workers=4, look_ahead=8, is_sampled=True).max_workers
        0
    """

    workers: int = 0
    """Threads that prepare batches; 0 where the thread that trains does."""
    look_ahead: int = 1
    """Batches that may be prepared ahead."""
    max_workers: int = 0
    """How many threads there can be at most; 0 where a user cannot change their number."""
    on_gpu: bool = False
    """Whether a GPU prepares the batches itself."""
    is_sampled: bool = False
    """Whether batches are samples, which smaller fan-outs make smaller."""
    refreshes: bool = False
    """Whether stored embeddings are computed exactly in every epoch."""
    prepare_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the threads' own work in the last epoch, by stage."""


class Work(ABC):
    """A method bound to a job. Only `units` must be written; the rest has defaults. `Method` has an example.

    Raises:
        TypeError: A subclass has a `units` with other arguments.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        given = list(inspect.signature(cls.units).parameters)
        if given[1:] != ["epoch", "done", "examples"]:
            raise TypeError(
                f"{cls.__name__}.units takes ({', '.join(given)}): write units(self, epoch, done=0, examples=0), and "
                "leave out the first `done` units of the epoch"
            )

    @abstractmethod
    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        """The units of an epoch (counted from 1), in order; the same epoch gives the same units again.

        Over several ranks each yields its own; the gradient is that of the mean over the examples of all of them.
        done, examples: units at the beginning of the epoch that are left out, since a run that was interrupted has
        trained them, and how many examples these had over all ranks.
        """

    def describe(self) -> WorkDescription:
        """How units are prepared, as it is after the last epoch."""
        return WorkDescription()

    @property
    def keep_rows(self) -> KeepRows | None:
        """Where exact evaluation leaves the hidden rows that it computes; None where they are of no use."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the work remembers from step to step. It is in the checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most works remember nothing
        """Go on from what `state_dict` returned."""

    def guarded(self, guard: Guard, plan: Plan) -> Work:
        """The work whose steps keep to a plan: this one or another. Called once, before the first unit."""
        raise ValueError(
            f"{type(self).__name__} has no guarded(guard, plan), so it cannot keep to a budget: leave out budget=, or "
            "define it"
        )


def units_from(work: Work, epoch: int, done: int = 0, examples: int = 0) -> Generator[Unit, None, None]:
    """The units of an epoch that are not done yet; closing it closes the work's own iterator."""
    units = work.units(epoch, done, examples)
    try:
        yield from units
    finally:
        if isinstance(units, Generator):
            units.close()


def in_groups(units: Generator[Unit, None, None], size: int) -> Generator[list[Unit], None, None]:
    """Units in lists of `size`; closing it closes the units, so that no thread goes on preparing them."""
    with closing(units):
        while group := list(itertools.islice(units, size)):
            yield group


class Method(ABC):
    """A way to train. Subclasses are settings; `bind` gives the work that yields the units of each epoch.

    For every step the Trainer calls `Unit.forward_backward` of some units, then the optimizer, then `Unit.commit`.

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
        ...             key = 1000 * epoch + step  # of dropout
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
    """Settings may name a subclass of the user's own, `method=package.module:Class`; this is what it derives from."""

    @abstractmethod
    def bind(self, job: Job) -> Work: ...

    def for_model(self, model: nn.Module) -> Method:
        """The same method, with settings that depend on the model's depth filled in."""
        return self

    def for_graph(self, num_nodes: int) -> Method:
        """The same method, with defaults that a graph of so few nodes cannot follow made smaller."""
        return self

    def placement(self, requested: Placement) -> Placement:
        """Where a GPU should find the data, given what was asked for."""
        return requested

    def place(self, data: Dataset, requested: Placement, device: torch.device) -> Dataset:
        """The dataset where a GPU finds it fastest, given what was asked for."""
        from hopline.data.placement import place

        return place(data, self.placement(requested), device)

    def plan(self, outline: Outline, budget: Budget) -> Plan:
        """What the method takes, and the form of it that keeps to a budget, by what is known of its steps.

        `Plan.fits` says whether it does. Forms may differ in memory and time, not in what is learnt.
        """
        raise ValueError(
            f"{type(self).__name__} has no plan, so it cannot keep to a budget: leave out budget=, or define "
            f"{type(self).__name__}.plan(outline, budget)"
        )

    def inference_batches(self, job: Job, ids: Tensor) -> Iterable[Batch] | None:
        """Batches for approximate inference at `ids`, in their order; None where only exact inference exists."""
        return None


# ---- memory: a budget, what is known before a run, and the plan by which a method keeps to the budget

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
ASYNC_EVALUATION_SHARE = 0.25
"""The part of what is left for steps that evaluation beside them gets."""
OverBudget = Literal["split", "resample", "cut", "cut_by_degree", "cut_by_pagerank", "refuse"]
CutBy = Literal["random", "degree", "pagerank"]
CUTS: Mapping[str, CutBy] = {"cut": "random", "cut_by_degree": "degree", "cut_by_pagerank": "pagerank"}
"""Values of `Budget.over_budget` that leave out edges, and the order in which edges go."""


@settings
class Budget:
    """Memory that a run may take, and what becomes of a batch that would take more.

    `Trainer(budget="8GiB")` is short for `hl.Budget(device="8GiB")`.

    Raises:
        ValueError: A field has a value that is not allowed. From the Trainer: no size is given, or the run cannot fit.

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
    REMOVED: ClassVar = {
        "split_by": RemovedSetting("balance", "pieces of a batch always have equal cost, so leave it out"),
        "cut_by": RemovedSetting(
            "random", "set budget.over_budget=cut_by_degree or budget.over_budget=cut_by_pagerank"
        ),
    }
    device: str | None = None
    """Where the model is: "8GiB"; on a CPU that is the host."""
    host: str | None = None
    """Host memory."""
    disk: str | None = None
    """Files that a run may write for itself."""
    over_budget: OverBudget = "split"
    """`split`: pieces with the same gradients; `resample`: drawn anew; `cut`: fewer edges, left out at random,
    `cut_by_degree` and `cut_by_pagerank`: those between hubs first; `refuse`: the run ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("device", "host", "disk"):
            value = getattr(self, name)
            if value is not None and parse_size(value) <= 0:
                raise ValueError(f"budget.{name} must be more than nothing: write it as budget.{name}=8GiB")

    @classmethod
    def of(cls, given: Budget | str | int | Mapping[str, str]) -> Budget:
        """A budget from "8GiB", which is the device's, or from its fields."""
        if isinstance(given, Budget):
            if given.device is given.host is given.disk is None:
                raise ValueError("a budget needs a size: write budget=8GiB, budget.host=32GiB or budget.disk=100GiB")
            return given
        if isinstance(given, Mapping):
            for name in given:
                if name in cls.REMOVED:
                    raise ValueError(cls.REMOVED[name].refusal(f"budget.{name}"))
                if name not in (known := [one.name for one in fields(cls)]):
                    raise ValueError(
                        f"a budget has no {name!r}: give some of {', '.join(known)}.{nearest(name, known)}"
                    )
            return cls.of(cls(**given))  # type: ignore[arg-type]
        parse_size(given)
        return cls(device=str(given))

    def bytes_on(self, device: torch.device) -> int | None:
        """What a step and the model may take on a device; None where nothing was said."""
        given = [self.device] if device.type == "cuda" else [self.device, self.host]
        sizes = [parse_size(size) for size in given if size is not None]
        return min(sizes) if sizes else None


def upgrade_budget(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored budget as this version has it: `over_budget` and `cut_by` were two settings, and are one."""
    kept = {key: value for key, value in stored.items() if key != "cut_by"}
    if stored.get("over_budget") == "cut" and stored.get("cut_by", "random") != "random":
        kept["over_budget"] = f"cut_by_{stored['cut_by']}"
    return kept


@dataclass(frozen=True)
class Item:
    """Something that a run keeps."""

    name: str
    place: Place
    num_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline(ABC):
    """All that a method may ask about a run before it begins; `hopline.budget.memory_plan` answers."""

    job: Job
    """With the data where it is before a GPU is given some of it."""
    optimizer: str = "adam"
    placement: Placement = field(default_factory=Placement)
    async_evaluation: bool = False
    """Whether evaluation beside training takes memory where steps are computed."""

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
        """Where the model and its steps are; a CPU is the host."""
        return "host" if self.device.type == "cpu" else "device"

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @abstractmethod
    def limits(self, budget: Budget) -> dict[Place, int | None]:
        """Bytes that a budget leaves at each place, None where nothing was said. On a CPU the device is the host."""

    @abstractmethod
    def resident_items(self) -> list[Item]:
        """Weights, and what the optimizer remembers of them; their gradients belong to a step."""

    @abstractmethod
    def data_on_host(self) -> list[Item]:
        """Graph, rows and labels in memory; what is mapped from files is not in it."""

    @abstractmethod
    def hidden_bytes(self) -> int:
        """Hidden rows before and after a layer, of all nodes; none where the model is not made of layers."""

    @abstractmethod
    def predictor(self, num_blocks: int) -> Any:
        """The `hopline.budget.predictor.Predictor` of steps over so many blocks: a bound, or more once some were
        measured."""


class DoesNotFit(ValueError):
    """No form of a method keeps to a budget; `smallest_bytes` would do, by place."""

    def __init__(self, sentence: str, smallest_bytes: Mapping[Place, int]) -> None:
        super().__init__(sentence)
        self.smallest_bytes = dict(smallest_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How a method keeps to a budget: what `Method.plan` returns.

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
    """With as much look-ahead, or as few shards, as fit; what is learnt does not depend on these."""
    items: tuple[Item, ...]
    """What is there all the time."""
    limits: Mapping[Place, int | None]
    """What may be taken, by place; None where nothing was said."""
    compute_place: Place
    """Where steps are computed."""
    step_bytes: float
    """What the largest step takes by prediction, were it not cut,"""
    min_step_bytes: float
    """and what it takes at least, cut as finely as it can be."""
    steps: int
    """Optimizer steps of an epoch."""
    count: int
    """How much of the graph a step covers, in"""
    covers: str
    """words with a place for that number."""
    hidden_bytes: int = 0
    """Hidden rows of all nodes between two layers, which exact evaluation keeps."""
    placement: Placement | None = None
    """Where a GPU finds the data."""
    batches_on_host: bool = False
    """Whether batches wait on the host, and go to the GPU, whole or in pieces, when their turn comes."""
    num_blocks: int | None = None
    """Blocks of a batch by whose steps the method was planned; None: no measured step would tell more."""
    async_evaluation: bool = False
    """Whether evaluation takes memory beside the steps."""

    def budget_bytes(self, place: Place) -> int | None:
        """What may be taken at a place; None where nothing was said."""
        return self.limits[place]

    def resident_bytes(self, place: Place) -> int:
        """What is there all the time."""
        return sum(item.num_bytes for item in self.items if item.place == place)

    @property
    def available_bytes(self) -> float:
        """What is left where steps are computed,"""
        return _available(self.limits[self.compute_place], self.resident_bytes(self.compute_place))

    @property
    def limit_bytes(self) -> float:
        """and for a step of it."""
        return (1 - ASYNC_EVALUATION_SHARE) * self.available_bytes if self.async_evaluation else self.available_bytes

    @property
    def evaluation_bytes(self) -> float:
        """What is left for evaluation: all, unless it goes on beside the steps."""
        return ASYNC_EVALUATION_SHARE * self.available_bytes if self.async_evaluation else self.available_bytes

    @property
    def num_micro_batches(self) -> int:
        """In how many pieces the largest step is likely to go."""
        return max(1, math.ceil(self.step_bytes / self.limit_bytes)) if self.limit_bytes > 0 else 1

    @property
    def whole(self) -> str:
        """The most that a step can cover uncut, in words."""
        if self.step_bytes <= self.limit_bytes:
            return f"{self.covers.format(self.count)}, uncut"
        most = max(0, int(self.count * self.limit_bytes / self.step_bytes))
        return f"{self.covers.format(self.count)}, in pieces; about {most} would fit in one piece"

    def peak_bytes(self, place: Place) -> int:
        """What will be taken at most."""
        step = min(self.step_bytes, self.limit_bytes) if place == self.compute_place else 0
        return self.resident_bytes(place) + math.ceil(with_evaluation(step, self.async_evaluation))

    def smallest_bytes(self, place: Place) -> int:
        """The smallest limit that would do."""
        step = with_evaluation(self.min_step_bytes, self.async_evaluation)
        besides = step if place == self.compute_place else self.hidden_bytes if place == self.hidden_place else 0
        return self.resident_bytes(place) + math.ceil(besides)

    @property
    def hidden_place(self) -> Place:
        """Where exact evaluation keeps hidden rows: in files where memory would have no room for them and a chunk."""
        room = (
            self.evaluation_bytes
            if self.compute_place == "host"
            else _available(self.limits["host"], self.resident_bytes("host"))
        )
        return "host" if 2 * self.hidden_bytes <= room else "disk"

    @property
    def chunk_bytes(self) -> int | None:
        """What a chunk of exact evaluation may take; None where there is no limit."""
        if self.limit_bytes == math.inf:
            return None
        hidden = self.hidden_bytes if self.hidden_place == self.compute_place else 0
        return max(1, int(self.evaluation_bytes - hidden))

    @property
    def fits(self) -> bool:
        """Whether it keeps to its limits, with steps cut as finely as they can be."""
        return all(map(self._fits, PLACES))

    def check(self) -> Plan:
        """This plan, if it keeps to its limits."""
        if self.fits:
            return self
        raise self.refusal(self.missing)

    @property
    def missing(self) -> dict[Place, int]:
        """Where it does not keep to its limits, and the smallest ones that would do."""
        return {place: self.smallest_bytes(place) for place in PLACES if not self._fits(place)}

    def refusal(self, smallest: Mapping[Place, int], budget_key: str = "budget") -> DoesNotFit:
        """An error with limits that would do. budget_key: how the one where steps are computed was given."""
        keys = {place: budget_key if place == self.compute_place else f"budget.{place}" for place in smallest}
        needs = ", ".join(f"{keys[place]}={_format_limit(size)}" for place, size in smallest.items())
        given = ", ".join(f"{format_size(self.limits[place] or 0)} on the {place}" for place in smallest)
        return DoesNotFit(
            f"{type(self.method).__name__} does not fit {given}: it needs at least {needs} ({self._largest(smallest)})",
            smallest,
        )

    def _fits(self, place: Place) -> bool:
        limit = self.limits[place]
        return limit is None or self.smallest_bytes(place) <= limit

    def _largest(self, places: Mapping[Place, int]) -> str:
        """What takes most where too little is left."""
        found = [(item.num_bytes, item.name) for item in self.items if item.place in places]
        if self.compute_place in places:
            found.append((math.ceil(self.min_step_bytes), "the smallest step"))
        size, name = max(found)
        return f"{name} alone {'take' if name.endswith('s') else 'takes'} {format_size(size)}"

    def lines(self) -> list[str]:
        """For people."""
        found = []
        for place in PLACES:
            items = [item for item in self.items if item.place == place and item.num_bytes]
            if not items and place != self.compute_place:
                continue
            parts = [f"{item.name} {format_size(item.num_bytes)}" for item in items]
            if place == self.compute_place:
                cut = f", in up to {self.num_micro_batches} pieces" if self.num_micro_batches > 1 else ""
                step = min(self.step_bytes, self.limit_bytes)
                parts.append(f"a step {format_size(step)}{cut}")
                if self.async_evaluation:
                    parts.append(f"evaluation beside it {format_size(with_evaluation(step, True) - step)}")
            limit = self.limits[place]
            of = "" if limit is None else f" of {format_size(limit)}"
            found.append(f"plan: {place} {format_size(self.peak_bytes(place))}{of}: {', '.join(parts)}")
        return [*found, f"plan: {self.whole}"]


def with_evaluation(step_bytes: float, async_evaluation: bool) -> float:
    """What must be there for a step, and for evaluation if that goes on beside it."""
    return step_bytes / (1 - ASYNC_EVALUATION_SHARE) if async_evaluation else step_bytes


def _available(limit: int | None, taken: int) -> float:
    return math.inf if limit is None else limit - taken


def _format_limit(num_bytes: int) -> str:
    """A size that `parse_size` reads as no less."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{math.ceil(100 * num_bytes / scale) / 100:g}{unit}"
    return str(num_bytes)


# ---- memory while it runs: what a work asks of the guard of its steps

Redraw: TypeAlias = "Callable[[Tensor, int], tuple[Block, ...]]"
"""(seeds, key) -> blocks drawn for them: `NeighborSampler.sample`."""


class SplittableStep(Protocol):
    """A step that runs at once, or in pieces that need each other's rows."""

    smaller_by: str
    """The setting that makes such steps smaller."""

    def sizes(self) -> Sizes:
        """Of the step at once."""
        ...

    def bound_bytes(self) -> float:
        """What it takes at once, by what pieces took."""
        ...

    def run_whole(self) -> Tensor: ...

    def run_in_micro_batches(self, meter: Meter, set_predicted_bytes: Callable[[float], None]) -> Tensor:
        """Cut it into pieces within `Guard.target_bytes`, call `set_predicted_bytes` with what they take at most, and
        run them."""
        ...

    def reset(self) -> None:
        """Drop what an attempt that ran out of memory has left."""
        ...


class Guard(Protocol):
    """Keeps steps within the bytes that a plan leaves for one; `hopline.budget.guard` has it.

    `split_ahead` may be called in any thread, all else in the one that trains.
    """

    target_bytes: float
    """What a step may take now: less for a while after memory ran out."""

    def overhead_bytes(self) -> int:
        """What is there beside a step: gradients of steps before it, and buffers."""
        ...

    def unit(self, batch: Batch, redraw: Redraw | None = None) -> Unit:
        """A batch whose seeds can be trained apart, as a unit that keeps to the room."""
        ...

    def split_ahead(self, batch: Batch) -> Batch:
        """The batch with its groups of seeds, if it will be split."""
        ...

    def step(self, step: SplittableStep) -> Tensor:
        """Run a step at once or in pieces, smaller ones after memory ran out."""
        ...

    def must_split(self, step: SplittableStep) -> bool:
        """Whether a step has to go in pieces; an error where it may not."""
        ...

    def note_split(self, num_micro_batches: int) -> None:
        """Note that a step goes in pieces."""
        ...

    def measure(self, run: Callable[[], Tensor], predicted_bytes: float) -> Tensor:
        """Run a step that cannot be cut, and note what it took of what was promised."""
        ...
