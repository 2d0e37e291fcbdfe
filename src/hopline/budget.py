"""A promise about memory: how much a run may take, and steps that keep to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hopline import ops, trace
from hopline.batch import Batch, Block, Rows
from hopline.meter import meter_of
from hopline.predict import Predictor, Sizes, costs_of
from hopline.spec import format_size, nearest, parse_size
from hopline.split import CutBy, SplitBy, check_split, cut_to_fit, split_to_fit
from hopline.validate import check_fields
from hopline.work import BatchUnit, Job, Unit

OverBudget = Literal["split", "resample", "cut", "refuse"]
Redraw = Callable[[Tensor, int], tuple[Block, ...]]
"""(seeds, key) -> blocks drawn for them: `NeighborSampler.sample`."""
MOST_REDRAWS = 10


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a run may take, and what becomes of a batch that would take more."""

    device: str | None = None
    """Where the model is: "8GiB"; on a CPU that is the host."""
    host: str | None = None
    """Host memory."""
    disk: str | None = None
    """Files that a run may write for itself."""
    over_budget: OverBudget = "split"
    """`split`: pieces with the same gradients; `resample`: drawn anew; `cut`: fewer edges; `refuse`: the run ends."""
    split_by: SplitBy = "balance"
    """Pieces of equal cost at once, or by METIS pieces that share few neighbours."""
    cut_by: CutBy = "random"
    """Edges that are left out: any, or by degree or PageRank those between hubs."""

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
            return given
        if isinstance(given, Mapping):
            for name in given:
                if name not in cls.__dataclass_fields__:
                    known = ", ".join(cls.__dataclass_fields__)
                    raise ValueError(
                        f"a budget has no {name!r}: give some of {known}.{nearest(name, known.split(', '))}"
                    )
            return cls(**given)  # type: ignore[arg-type]
        parse_size(given)
        return cls(device=str(given))

    def bytes_on(self, device: torch.device) -> int | None:
        """What a step and the model may take on a device; None where nothing was said."""
        given = [self.device] if device.type == "cuda" else [self.device, self.host]
        sizes = [parse_size(size) for size in given if size is not None]
        return min(sizes) if sizes else None


@dataclass
class Record:
    """What became of the batches of an epoch."""

    promised_bytes: float = 0.0
    """The largest promise made for a step that ran,"""
    peak_bytes: int = 0
    """and the most that one took."""
    before: list[float] = field(default_factory=list)
    """For each batch what it would have taken whole,"""
    after: list[int] = field(default_factory=list)
    """and what the largest of its pieces took."""
    over: int = 0
    """Pieces that took more than the limit."""
    split: int = 0
    pieces: int = 0
    resampled: int = 0
    cut: int = 0
    edges_cut: int = 0
    oom: int = 0
    """Times that memory ran out, and the batch went on in smaller pieces."""


@dataclass(eq=False)
class Guard:
    """Keeps the steps of one job within bytes: asks before each one, measures it, and learns.

    The first batches go by the bound, which is far above what they take, so they come in more pieces than later ones.
    """

    job: Job
    budget: Budget
    limit_bytes: int
    """What a step may take beyond all else that the run keeps: weights, optimizer, data, batches prepared ahead."""
    redraw: Redraw | None = None
    """How other edges are drawn for the same seeds, for over_budget=resample."""
    predictor: Predictor | None = field(default=None, init=False)
    promised_bytes: float = field(default=0.0, init=False)
    """The largest promise made for a step that ran,"""
    peak_bytes: int = field(default=0, init=False)
    """and the most that one took."""

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(
                f"the budget leaves {format_size(max(0, self.limit_bytes))} for a step: give more, or make the model "
                "smaller"
            )
        self._record = Record()

    def take_record(self) -> dict[str, Any]:
        """What happened since the last call."""
        record, self._record = self._record, Record()
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def unit(self, batch: Batch) -> Unit:
        return GuardedUnit(self.job, batch, self)

    def pieces(self, batch: Batch) -> Iterable[Batch]:
        """The batch as it may run: whole, in pieces, drawn anew or with fewer edges; what was done is counted.

        The rows of a piece are copied when it is asked for.
        """
        predictor, needed = self._predictor(Sizes.of(batch)), self.promise(batch)
        if needed <= self.limit_bytes:
            return [batch]
        match self.budget.over_budget:
            case "refuse":
                raise ValueError(
                    f"a batch may take {format_size(needed)}, and {format_size(self.limit_bytes)} are left for a step: "
                    f"give the budget {format_size(needed - self.limit_bytes)} more, make batch_size smaller, or set "
                    "over_budget=split"
                )
            case "cut":
                return [self._cut(batch, predictor)]
            case "resample":
                batch = self._resampled(batch)
        if self.promise(batch) <= self.limit_bytes:
            return [batch]
        check_split(self.job.model)
        found = split_to_fit(batch, predictor.promise, self.limit_bytes, predictor.costs, self.budget.split_by)
        self.note_split(len(found))
        return (piece.batch() for piece in found)

    def promise(self, batch: Batch) -> float:
        """Bytes that a step of this batch will not exceed."""
        return self.promise_sizes(Sizes.of(batch))

    def promise_sizes(self, sizes: Sizes) -> float:
        """Bytes that a step of so many nodes and edges will not exceed."""
        return self._predictor(sizes).promise(sizes)

    def observe(self, piece: Batch, promised_bytes: float, peak_bytes: int) -> None:
        """Learn from a piece that ran."""
        self.observe_sizes(Sizes.of(piece), promised_bytes, peak_bytes)

    def observe_sizes(self, sizes: Sizes, promised_bytes: float, peak_bytes: int) -> None:
        """Learn from a step of so many nodes and edges."""
        self.learn(sizes, peak_bytes)
        self.note_peak(promised_bytes, peak_bytes)

    def learn(self, sizes: Sizes, peak_bytes: int) -> None:
        """What so many nodes and edges took, of a step or of a stretch of one."""
        self._predictor(sizes).observe(sizes, peak_bytes)

    def note_peak(self, promised_bytes: float, peak_bytes: int) -> None:
        """A step ran: what was promised, and what it took."""
        for record in (self, self._record):
            record.promised_bytes = max(record.promised_bytes, promised_bytes)
            record.peak_bytes = max(record.peak_bytes, peak_bytes)
        if peak_bytes > self.limit_bytes:
            self._count("over", "budget.steps_over")

    def note_split(self, num_pieces: int) -> None:
        """A batch goes in pieces."""
        self._count("split", "budget.batches_split")
        self._count("pieces", "budget.pieces", num_pieces)

    def note_step(self, before_bytes: float, after_bytes: int) -> None:
        """A batch ran: what it would have taken whole, and what the largest of its pieces took."""
        self._record.before.append(before_bytes)
        self._record.after.append(after_bytes)

    def _count(self, name: str, counter: str, number: int = 1) -> None:
        setattr(self._record, name, getattr(self._record, name) + number)
        trace.count(counter, number)

    def _predictor(self, sizes: Sizes) -> Predictor:
        if self.predictor is None:
            self.predictor = Predictor(costs_of(self.job.model, self.job.data.tables.get("x"), len(sizes.edges)))
        return self.predictor

    def _cut(self, batch: Batch, predictor: Predictor) -> Batch:
        key = ops.derive_key(_key_of(batch), MOST_REDRAWS + 1)
        found = cut_to_fit(batch, predictor.promise, self.limit_bytes, self.budget.cut_by, key)
        self._count("cut", "budget.batches_cut")
        self._count("edges_cut", "budget.edges_cut", sum(Sizes.of(batch).edges) - sum(Sizes.of(found).edges))
        return found

    def _resampled(self, batch: Batch) -> Batch:
        """The first of some other samples that fits, or the smallest of all, which is then split."""
        if self.redraw is None:
            raise ValueError("over_budget=resample is for sampled batches: set over_budget=split")
        found = [batch]
        for attempt in range(MOST_REDRAWS):
            key = ops.derive_key(_key_of(batch), attempt)
            blocks = tuple(b.scaling_sums(batch.blocks[0].scale_sums) for b in self.redraw(batch.seeds, key))
            found.append(replace(batch, blocks=blocks, key=key))
            self._count("resampled", "budget.resampled")
            if self.promise(found[-1]) <= self.limit_bytes:
                break
        best = min(found, key=self.promise)
        return batch if best is batch else self._with_rows(best)

    def _with_rows(self, batch: Batch) -> Batch:
        """A batch whose edges are new, with the rows that they need: read if they were read before."""
        tables, ids = self.job.data.tables, batch.input_ids

        def rows(name: str, before: Rows | Tensor) -> Rows | Tensor:
            if isinstance(before, Rows):
                return Rows(before.table, ids)
            return tables[name].read(ids.cpu()).to(before.device)

        others = {name: rows(name, before) for name, before in batch.tables.items()}
        return replace(batch, x=None if batch.x is None else rows("x", batch.x), tables=others)


def _key_of(batch: Batch) -> int:
    return 0 if batch.key is None else int(batch.key)


@dataclass
class GuardedUnit(Unit):
    """One batch through the job's training step, in as many pieces as the budget asks for."""

    job: Job
    batch: Batch
    guard: Guard

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.batch.num_seeds

    @property
    def total_size(self) -> int:
        return BatchUnit(self.job, self.batch).total_size

    def forward_backward(self, total: int) -> Tensor:
        if not self.size:
            return BatchUnit(self.job, self.batch).forward_backward(total)
        losses, before, largest = [], self.guard.promise(self.batch), 0
        for piece in self.guard.pieces(self.batch):
            promised = self.guard.promise(piece)
            with meter_of(self.job.device) as meter:
                losses.append(BatchUnit(self.job, piece).forward_backward(total))
            self.guard.observe(piece, promised, meter.peak_bytes)
            largest = max(largest, meter.peak_bytes)
        self.guard.note_step(before, largest)
        return torch.stack(losses).sum()
