"""`MeasuredUnit`: measures the step of a unit that cannot be split into micro-batches.

The guard, which keeps steps within a budget, runs the step and records its measured peak next to the planned
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hopline.contract import Guard, Unit


@dataclass(eq=False)
class MeasuredUnit(Unit):
    """A unit that a guard measures. It passes everything else on to the unit inside."""

    unit: Unit
    guard: Guard
    predicted_bytes: float
    """The bytes that the plan has for a step: `Plan.step_bytes`."""

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.unit.size

    @property
    def weight(self) -> float:
        return self.unit.weight

    @property
    def total_size(self) -> float | None:
        return self.unit.total_size

    def forward_backward(self, total: float) -> Tensor:
        return self.guard.measure(partial(self.unit.forward_backward, total), self.predicted_bytes)

    def commit(self) -> None:
        self.unit.commit()
