"""A plan: what a run will take, where it lies, and how much of it a budget leaves for a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hopline.budget.predictor import Predictor, costs_of
from hopline.budget.settings import Budget
from hopline.contract import Job, Method
from hopline.core.row_handles import Rows
from hopline.data.dataset import Dataset
from hopline.data.placement_settings import Placement
from hopline.device.meter import free_bytes, library_bytes
from hopline.device.out_of_memory import free_memory
from hopline.nn.gnn import GNN, out_width
from hopline.nn.whole_module import Whole
from hopline.tables import TieredTable
from hopline.util.config import format_size, parse_size

Place = Literal["device", "host", "disk"]
BESIDE = 0.25
"""The part of what is left for steps that evaluation beside them gets."""
PLACES: tuple[Place, ...] = ("device", "host", "disk")
STATES = {"adam": 2, "adamw": 2, "sgd": 0}
"""Tensors as large as a weight that an optimizer remembers of it."""


@dataclass(frozen=True)
class Item:
    """Something that a run keeps."""

    name: str
    place: Place
    num_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """All that is known of a run before it begins."""

    job: Job
    """With the data where it is before a GPU is given some of it."""
    optimizer: str = "adam"
    placement: Placement = field(default_factory=Placement)
    beside: bool = False
    """Whether evaluation beside training takes memory where steps are computed."""
    predictors: dict[int, Predictor] = field(default_factory=dict)
    """By number of blocks, what is known of the model's steps."""

    def predictor(self, num_blocks: int) -> Predictor:
        """The bound by widths, or more where steps were measured."""
        if num_blocks not in self.predictors:
            x = self.data.tables.get("x")
            shape = None if x is None else Rows(x, torch.empty(0, dtype=torch.int64))
            self.predictors[num_blocks] = Predictor(costs_of(self.model, shape, num_blocks))
        return self.predictors[num_blocks]

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
    def home(self) -> Place:
        """Where the model and its steps are; a CPU is the host."""
        return "host" if self.device.type == "cpu" else "device"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def kept(self) -> list[Item]:
        """Weights, and what the optimizer remembers of them; their gradients belong to a step."""
        weights = [p for p in self.model.parameters() if not isinstance(p, nn.UninitializedParameter)]
        total = sum(p.numel() * p.element_size() for p in weights)
        items = [Item("weights", self.home, total), Item("optimizer", self.home, STATES[self.optimizer] * total)]
        if self.device.type == "cuda":
            # Beside evaluation, training has a stream of its own too, next to the one that was there.
            streams = 3 if self.beside else 1
            items.append(Item("workspace of CUDA's libraries", "device", streams * library_bytes(self.device)))
            items.append(Item("what the process had there before", "device", self._there_before))
        return items

    @cached_property
    def _there_before(self) -> int:
        """Bytes of a GPU that this process took for something else than the run, such as a run before it."""
        tables = self.data.tables.values()
        if self.data.graph.indptr.is_cuda or any(isinstance(table, TieredTable) for table in tables):
            return 0  # the data is there already, and counted with the run
        free_memory(self.device)
        own = [*self.job.module.parameters(), *self.job.module.buffers()]
        run = library_bytes(self.device) + sum(t.nbytes for t in own if not is_lazy(t) and t.is_cuda)
        return max(0, torch.cuda.memory_allocated(self.device) - run)

    def hidden_bytes(self) -> int:
        """Hidden rows before and after a layer, of all nodes; none where the model is not made of layers."""
        if not isinstance(self.model, GNN):
            return 0
        widest = max(map(out_width, self.model.convs), default=0)
        tables = 2 + 2 * self.model.encodes + 2 * self.model.num_layers * self.model.keeps_jk
        return tables * widest * self.data.num_nodes * self.dtype.itemsize

    def data_on_host(self) -> list[Item]:
        """Graph, rows and labels in memory; what is mapped from files is not in it."""
        if self.data.folder is not None:
            return []
        data = self.data
        rest = data.num_bytes - data.graph.num_bytes - sum(table.num_bytes for table in data.tables.values())
        tables = [Item(_title(name), "host", table.num_bytes) for name, table in data.tables.items()]
        return [Item("graph", "host", data.graph.num_bytes), *tables, Item("labels and splits", "host", rest)]


def _title(table: str) -> str:
    return "features" if table == "x" else f"table {table}"


class DoesNotFit(ValueError):
    """No form of a method keeps to a budget; `smallest_bytes` would do, by place."""

    def __init__(self, sentence: str, smallest_bytes: Mapping[Place, int]) -> None:
        super().__init__(sentence)
        self.smallest_bytes = dict(smallest_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How a method keeps to a budget."""

    method: Method
    """With as much look-ahead, or as few shards, as fit; what is learnt does not depend on these."""
    items: tuple[Item, ...]
    """What is there all the time."""
    limits: Mapping[Place, int | None]
    """What may be taken, by place; None where nothing was said."""
    home: Place
    """Where steps are computed."""
    step_bytes: float
    """What the largest step takes by prediction, were it not cut,"""
    least_bytes: float
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
    waits_on_host: bool = False
    """Whether batches wait on the host, and go to the GPU, whole or in pieces, when their turn comes."""
    predictor: Predictor | None = None
    """What was learnt of the method's steps while planning."""
    beside: bool = False
    """Whether evaluation takes memory beside the steps."""

    def budget_bytes(self, place: Place) -> int | None:
        """What may be taken at a place; None where nothing was said."""
        return self.limits[place]

    def kept_bytes(self, place: Place) -> int:
        """What is there all the time."""
        return sum(item.num_bytes for item in self.items if item.place == place)

    @property
    def left_bytes(self) -> float:
        """What is left where steps are computed,"""
        return _left(self.limits[self.home], self.kept_bytes(self.home))

    @property
    def limit_bytes(self) -> float:
        """and for a step of it."""
        return (1 - BESIDE) * self.left_bytes if self.beside else self.left_bytes

    @property
    def evaluation_bytes(self) -> float:
        """What is left for evaluation: all, unless it goes on beside the steps."""
        return BESIDE * self.left_bytes if self.beside else self.left_bytes

    @property
    def pieces(self) -> int:
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
        step = min(self.step_bytes, self.limit_bytes) if place == self.home else 0
        return self.kept_bytes(place) + math.ceil(with_evaluation(step, self.beside))

    def smallest_bytes(self, place: Place) -> int:
        """The smallest limit that would do."""
        step = with_evaluation(self.least_bytes, self.beside)
        besides = step if place == self.home else self.hidden_bytes if place == self.hidden_at else 0
        return self.kept_bytes(place) + math.ceil(besides)

    @property
    def hidden_at(self) -> Place:
        """Where exact evaluation keeps hidden rows: in files where memory would have no room for them and a chunk."""
        room = self.evaluation_bytes if self.home == "host" else _left(self.limits["host"], self.kept_bytes("host"))
        return "host" if 2 * self.hidden_bytes <= room else "disk"

    @property
    def chunk_bytes(self) -> int | None:
        """What a chunk of exact evaluation may take; None where there is no limit."""
        if self.limit_bytes == math.inf:
            return None
        hidden = self.hidden_bytes if self.hidden_at == self.home else 0
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

    def refusal(self, smallest: Mapping[Place, int], home_key: str = "budget") -> DoesNotFit:
        """An error with limits that would do. home_key: how the one where steps are computed was given."""
        keys = {place: home_key if place == self.home else f"budget.{place}" for place in smallest}
        needs = ", ".join(f"{keys[place]}={_written(size)}" for place, size in smallest.items())
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
        if self.home in places:
            found.append((math.ceil(self.least_bytes), "the smallest step"))
        size, name = max(found)
        return f"{name} alone {'take' if name.endswith('s') else 'takes'} {format_size(size)}"

    def lines(self) -> list[str]:
        """For people."""
        found = []
        for place in PLACES:
            items = [item for item in self.items if item.place == place and item.num_bytes]
            if not items and place != self.home:
                continue
            parts = [f"{item.name} {format_size(item.num_bytes)}" for item in items]
            if place == self.home:
                cut = f", in up to {self.pieces} pieces" if self.pieces > 1 else ""
                step = min(self.step_bytes, self.limit_bytes)
                parts.append(f"a step {format_size(step)}{cut}")
                if self.beside:
                    parts.append(f"evaluation beside it {format_size(with_evaluation(step, True) - step)}")
            limit = self.limits[place]
            of = "" if limit is None else f" of {format_size(limit)}"
            found.append(f"plan: {place} {format_size(self.peak_bytes(place))}{of}: {', '.join(parts)}")
        return [*found, f"plan: {self.whole}"]


def with_evaluation(step_bytes: float, beside: bool) -> float:
    """What must be there for a step, and for evaluation if that goes on beside it."""
    return step_bytes / (1 - BESIDE) if beside else step_bytes


def _left(limit: int | None, taken: int) -> float:
    return math.inf if limit is None else limit - taken


def _written(num_bytes: int) -> str:
    """A size that `parse_size` reads as no less."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{math.ceil(100 * num_bytes / scale) / 100:g}{unit}"
    return str(num_bytes)


def limits_of(budget: Budget, outline: Outline) -> dict[Place, int | None]:
    """What a budget leaves at each place. On a CPU the device is the host."""
    found: dict[Place, int | None] = {}
    for place in PLACES:
        size = getattr(budget, place)
        found[place] = None if size is None else parse_size(size)
    if outline.home == "host":
        return {**found, "device": None, "host": budget.bytes_on(outline.device)}
    if found["device"] is None:
        found["device"] = free_bytes(outline.device) + torch.cuda.memory_allocated(outline.device)
    return found
