"""Work that keeps to a plan: steps that can be cut are guarded, all others measured beside what was promised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hopline.budget.guard import Guard, Record
from hopline.budget.memory_plan import Plan
from hopline.budget.settings import Budget
from hopline.contract import Job, Unit, Work, units_from
from hopline.core.sampler import NeighborSampler
from hopline.device.meter import meter_of, numbered
from hopline.methods.sampled.loader import Loader
from hopline.methods.sampled.work import SampledWork
from hopline.util.config import parse_size


def keep_to(plan: Plan, budget: Budget, work: Work, job: Job) -> Work:
    """The same work, within what the plan leaves for a step."""
    if plan.limit_bytes == math.inf:
        return work
    limit = int(plan.limit_bytes)
    if not hasattr(work, "guard"):
        return WatchedWork(work, Watch(job.device, limit, plan.step_bytes))
    sampler = getattr(work.loader, "sampler", None) if isinstance(work, SampledWork) else None
    guard = Guard(job, budget, limit, sampler.sample if isinstance(sampler, NeighborSampler) else None)
    guard.predictor = plan.predictor
    work.guard = guard  # type: ignore[attr-defined]
    if isinstance(work, SampledWork) and isinstance(work.loader, Loader):
        work.loader.waits_on_host = guard.waits_on_host = plan.waits_on_host
    return work


@contextmanager
def capped(budget: Budget | None, device: torch.device) -> Iterator[None]:
    """Within, CUDA gives this process no more than a budget has for the device."""
    if budget is None or budget.device is None or device.type != "cuda":
        yield
        return
    device = numbered(device)
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, parse_size(budget.device) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@dataclass(eq=False)
class Watch:
    """Measures steps that cannot be cut; what it finds is handed out as a guard does."""

    device: torch.device
    limit_bytes: int
    promised_bytes: float
    """What every step was planned to take at most."""

    def __post_init__(self) -> None:
        self._record = Record()

    def take_record(self) -> dict[str, Any]:
        """What happened since the last call."""
        record, self._record = self._record, Record()
        return {"limit_bytes": self.limit_bytes, **asdict(record)}

    def observe(self, peak_bytes: int) -> None:
        record = self._record
        record.promised_bytes = self.promised_bytes
        record.peak_bytes = max(record.peak_bytes, peak_bytes)
        record.before.append(self.promised_bytes)
        record.after.append(peak_bytes)
        record.over += peak_bytes > self.limit_bytes


class WatchedWork:
    """Work whose steps are measured; in all else it is the work itself."""

    def __init__(self, work: Work, watch: Watch) -> None:
        self.work, self.guard = work, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[Unit]:
        with closing(units_from(self.work, epoch, done, examples)) as units:
            for unit in units:
                yield WatchedUnit(unit, self.guard)


@dataclass(eq=False)
class WatchedUnit(Unit):
    """A unit whose bytes are measured."""

    unit: Unit
    watch: Watch

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.unit.size

    @property
    def total_size(self) -> float | None:
        return self.unit.total_size

    def forward_backward(self, total: float) -> Tensor:
        with meter_of(self.watch.device) as meter:
            loss = self.unit.forward_backward(total)
        self.watch.observe(meter.peak_bytes)
        return loss

    def commit(self) -> None:
        self.unit.commit()
