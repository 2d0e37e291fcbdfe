"""Histories: hidden rows of all nodes as earlier steps wrote them, and how old they are.

A table holds one layer's rows in the order of a partition, so that a part's rows are one slab. Training writes tables
by `commit` alone. A table that nobody has written yet reads as zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hopline.tables.allocators import Allocator
from hopline.tables.layers import LayerTables
from hopline.util import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "model": None}
"""Element types of stored rows by the value of `storage=`; None is that of the rows."""
AGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the bins of the staleness histogram, in steps; older rows and those never written have bins too."""


class Reader(ABC):
    """Where rows of all nodes, or of some, are read by their places."""

    step: int
    """The steps that were committed so far."""

    @abstractmethod
    def rows(self, l: int, places: Tensor) -> Tensor:
        """The rows at some places of layer `l`, as they are stored."""

    @abstractmethod
    def stamps(self, places: Tensor) -> Tensor:
        """The step whose commit wrote these rows; -1 if none did."""

    def ages(self, places: Tensor) -> Tensor:
        """How many steps ago these rows were written; -1 if never."""
        stamps = self.stamps(places)
        return torch.where(stamps < 0, -1, self.step - stamps)

    def read(self, l: int, places: Tensor, like: Tensor) -> Tensor:
        """The rows at some places of layer `l`, where `like` is and in its precision."""
        return self.rows(l, places).to(like.device, like.dtype)

    def read_some(self, l: int, places: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        """The rows at `places[idx]`, of places that a batch reads; idx is on the host."""
        return self.read(l, places[idx], like)


def report_ages(ages: Tensor) -> None:
    """Count how many steps ago rows that are about to be read were written."""
    known = ages[ages >= 0]
    trace.count("history.rows", ages.numel())
    trace.count("history.never_written", ages.numel() - known.numel())
    trace.count("history.age_sum", float(known.sum()))
    counts = torch.bincount(torch.bucketize(known, torch.tensor(AGES)), minlength=len(AGES) + 1)
    for name, count in zip([*(f"to_{high}" for high in AGES), "older"], counts.tolist(), strict=True):
        trace.count(f"history.age.{name}", count)


class Histories(LayerTables, Reader):
    """Embeddings of earlier steps: a table per layer, and the step that wrote each row."""

    def __init__(
        self, num_rows: int, allocator: Allocator | None = None, *, name: str = "h", dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_rows, allocator, name=name, dtype=dtype)
        self.written = torch.full((num_rows,), -1, dtype=torch.int64)  # the step of each row's last commit
        self.step = 0

    def begin_reading(self, layers: Sequence[int], places: Tensor | None) -> Reader:
        return self

    def ahead(self, layers: Sequence[int], places: Tensor) -> Reader:
        """Where a batch will read these rows, which may be on their way from now on: they are those of now."""
        return self

    def read(self, l: int, places: Tensor, like: Tensor) -> Tensor:
        self.table(l, like)
        return super().read(l, places, like)

    def stamps(self, places: Tensor) -> Tensor:
        return self.written[places]

    def mark(self) -> Any:
        """This moment of the computation, for `write`; None where computation is done when it returns."""
        return None

    def stamp(self, slabs: Sequence[slice], step: int) -> None:
        """These rows are as of a step."""
        for slab in slabs:
            self.written[slab] = step

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.written.nbytes

    def state_dict(self) -> dict[str, Any]:
        tables = {str(l): table.to("cpu", copy=True) for l, table in self.tables.items()}
        return {"tables": tables, "written": self.written.clone(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tables = {}
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            self.table(int(l), rows).copy_(rows)
        self.written, self.step = state["written"].clone(), state["step"]
