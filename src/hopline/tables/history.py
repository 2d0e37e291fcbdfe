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

from hopline import ops
from hopline.device.row_mover import PulledRows, RowMover
from hopline.tables.allocators import Allocator
from hopline.tables.layers import At, LayerTables
from hopline.tables.memory import TensorTable
from hopline.util import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "model": None}
"""Element types of stored rows by the value of `storage=`; None is that of the rows."""
AGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the bins of the staleness histogram, in steps; older rows and those never written have bins too."""


class RowReader(ABC):
    """Where rows of all nodes, or of some, are read by their places."""

    step: int
    """The steps that were committed so far."""

    @abstractmethod
    def rows(self, l: int, positions: Tensor) -> Tensor:
        """The rows at some places of layer `l`, as they are stored."""

    @abstractmethod
    def stamps(self, positions: Tensor) -> Tensor:
        """The step whose commit wrote these rows; -1 if none did."""

    def ages(self, positions: Tensor) -> Tensor:
        """How many steps ago these rows were written; -1 if never."""
        stamps = self.stamps(positions)
        return torch.where(stamps < 0, -1, self.step - stamps)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        """The rows at some places of layer `l`, where `like` is and in its precision."""
        return self.rows(l, positions).to(like.device, like.dtype)

    def read_subset(self, l: int, positions: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        """The rows at `positions[idx]`, of places that a batch reads; idx is on the host."""
        return self.read(l, positions[idx], like)


def report_ages(ages: Tensor) -> None:
    """Count how many steps ago rows that are about to be read were written."""
    known = ages[ages >= 0]
    trace.count("history.rows", ages.numel())
    trace.count("history.never_written", ages.numel() - known.numel())
    trace.count("history.age_sum", float(known.sum()))
    counts = torch.bincount(torch.bucketize(known, torch.tensor(AGES)), minlength=len(AGES) + 1)
    for name, count in zip([*(f"to_{high}" for high in AGES), "older"], counts.tolist(), strict=True):
        trace.count(f"history.age.{name}", count)


class Histories(LayerTables, RowReader):
    """Embeddings of earlier steps: a table per layer, and the step that wrote each row.

    Args:
        num_rows: Of every table.
        allocator: Where tables lie; host memory by default.
        name: Of the tables, for those that are files.
        dtype: Of the stored rows, by default that of the first rows that are written.
        mover: Brings rows to a GPU and back; it belongs to the work. None where tables and model are on a CPU.
    """

    def __init__(
        self,
        num_rows: int,
        allocator: Allocator | None = None,
        *,
        name: str = "h",
        dtype: torch.dtype | None = None,
        mover: RowMover | None = None,
    ) -> None:
        super().__init__(num_rows, allocator, name=name, dtype=dtype)
        self.mover = mover
        self.written = torch.full((num_rows,), -1, dtype=torch.int64)  # the step of each row's last commit
        self.step = 0

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowReader:
        return self

    def prefetch(self, layers: Sequence[int], positions: Tensor) -> RowReader:
        """Where a batch reads the rows at some places, as they are now. They may be on their way from now on."""
        if self.mover is None or not positions.numel():
            return self
        tables = {l: self.tables[l] for l in layers if l in self.tables}
        pulled = self.mover.pull(tables, positions)
        # A batch reads at the same places after every layer: they are copied to the device once.
        as_positions = self.mover.to_device(positions) if len(pulled) < len(tables) else positions
        return PrefetchedRows(self, positions, as_positions, pulled)

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> TensorTable | None:
        """None where a mover writes the tables: their rows may still be on their way."""
        return super().in_place(l, device, dtype) if self.mover is None else None

    def rows(self, l: int, positions: Tensor) -> Tensor:
        return super().rows(l, positions) if self.mover is None else self.mover.read(self.tables[l], positions)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        self.table(l, like)
        return super().read(l, positions, like)

    def stamps(self, positions: Tensor) -> Tensor:
        return self.written[positions]

    def now(self) -> Any:
        """This moment of the computation, for `write`; None where computation is done when it returns."""
        return None if self.mover is None else self.mover.now()

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        if self.mover is None:
            super().write(l, at, rows)
        else:
            self.mover.push(self.table(l, rows), at, rows, computed)

    def stamp(self, row_ranges: Sequence[slice], step: int) -> None:
        """These rows are as of a step."""
        for slab in row_ranges:
            self.written[slab] = step

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.written.nbytes

    def state_dict(self) -> dict[str, Any]:
        if self.mover is not None:
            self.mover.flush()
        tables = {str(l): table.to("cpu", copy=True) for l, table in self.tables.items()}
        return {"tables": tables, "written": self.written.clone(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.mover is not None:
            self.mover.flush()
        self.tables = {}
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            self.table(int(l), rows).copy_(rows)
        self.written, self.step = state["written"].clone(), state["step"]


class PrefetchedRows(RowReader):
    """Rows of one batch that are on their way, or that its device reads when they are needed."""

    def __init__(
        self, histories: Histories, positions: Tensor, as_positions: Tensor, pulled: dict[int, PulledRows]
    ) -> None:
        self.histories = histories
        self.positions = positions
        """[n] int64 on the host."""
        self.positions = as_positions
        """[n] int64: the same, on the device if tables are on it."""
        self.pulled = pulled
        """By layer. Rows of tables on the device are not among them."""
        self.step = histories.step
        self._stamps = histories.stamps(positions).clone()

    def stamps(self, positions: Tensor) -> Tensor:
        return self._stamps if positions is self.positions else self.histories.stamps(positions)

    def rows(self, l: int, positions: Tensor) -> Tensor:
        if positions is not self.positions:
            return self.histories.rows(l, positions)
        return self.pulled[l].wait() if l in self.pulled else self.histories.rows(l, self.positions)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        if l not in self.pulled:
            self.histories.table(l, like)
        return super().read(l, positions, like)

    def read_subset(self, l: int, positions: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        if positions is not self.positions or l not in self.pulled:
            return super().read_subset(l, positions, idx, like)
        rows = self.pulled[l].wait()
        return ops.gather_rows(rows, idx.to(rows.device)).to(like.device, like.dtype)
