"""`Budget`, `Outline` and `Plan`: how much memory a run may take, what a method may ask before it runs, and the answer.

`Method.plan(outline, budget)` makes a `Plan`, which prints itself (`Plan.lines`). The records belong to the
contract of methods: `contract` names them, and they name its `Job`. Settings hold budgets, so the module
imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hopline.data.placement_settings import Placement
from hopline.util.config import (
    check_fields,
    format_size,
    nearest,
    parse_size,
    settings,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hopline.contract import Job, Method
    from hopline.core.partition import Partition
    from hopline.data.dataset import Dataset
    from hopline.nn.layered import Layered
    from hopline.nn.whole_module import Whole

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
"""All kinds of memory, fastest first."""
ASYNC_EVALUATION_SHARE = 0.25
"""Share of the bytes left for steps that asynchronous evaluation gets."""
MAX_SLOWDOWN = 10
"""Time within a budget, as a multiple of the time without, from which on the plan warns."""
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
        """The bytes that a step and the model may take on a device: the smaller limit on a CPU. None: no limit."""
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
    num_bytes: int


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
    def model(self) -> Layered | Whole:
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

    def make_plan(self, method: Method, budget: Budget, items: Iterable[Item] = (), **fields: Any) -> Plan:
        """A plan with everything that all methods have in common: resident items, data on the host, and limits.

        items: what the method keeps in memory besides. fields: the other fields of `Plan`.
        """
        return Plan(
            method=method,
            items=(*self.resident_items(), *self.data_on_host(), *items),
            limits=self.limits(budget),
            compute_place=self.compute_place,
            async_evaluation=self.async_evaluation,
            hidden_bytes=self.hidden_bytes(),
            **fields,
        )


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
        ...         return outline.make_plan(
        ...             self, budget, step_bytes=4 * features, min_step_bytes=4 * features, steps=1,
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
        """This plan. Raises DoesNotFit if it does not keep to its limits."""
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
