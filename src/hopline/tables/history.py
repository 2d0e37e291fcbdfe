"""Histories: embeddings of all nodes as earlier steps wrote them, and the step that wrote each.

There is a table per layer. Its rows are in the order of a partition, so that the rows of a part are one row
range. A batch pulls the rows of its halo, and after its step pushes the rows of its own nodes:

    before the step    tables --`prefetch` (pull)--> PrefetchedRows --`read`, layer by layer--> the model
    after the step     the model's rows of own nodes --`write` (push)--> tables; `stamp` notes the step

With a GPU, a `RowMover` pulls and pushes on a stream of its own, while the GPU computes. Without one, rows
are read and written directly. In a training step, the commit of the batch writes and stamps
(`HistoricalWork.commit`). A table that nobody has written yet reads as zeros.

The cost is one row per node and layer in the memory that the allocator chooses, and 8 bytes per node for
the steps.
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
"""Element type of stored rows by the value of the setting `storage`. None: the type of the rows that are written."""
AGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the bins of the staleness histogram, in steps. Older rows have one more bin.

Rows that were never written are counted apart.
"""


class RowReader(ABC):
    """Reads historical embeddings by position: from the tables, or from rows prefetched for a batch."""

    step: int
    """Number of committed steps, from which ages are counted.

    Prefetched rows and snapshots keep the number that it was when they were made.
    """

    @abstractmethod
    def rows(self, l: int, positions: Tensor) -> Tensor:
        """The rows at `positions` [n] after layer `l`, in the place and dtype in which they are stored."""

    @abstractmethod
    def stamps(self, positions: Tensor) -> Tensor:
        """[n] int64: the step whose commit wrote each of these rows; -1 if none did."""

    def ages(self, positions: Tensor) -> Tensor:
        """[n] int64: the staleness of each of these rows, in steps; -1 if it was never written."""
        stamps = self.stamps(positions)
        return torch.where(stamps < 0, -1, self.step - stamps)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        """The rows at `positions` [n] after layer `l`, on the device and in the dtype of `like`."""
        return self.rows(l, positions).to(like.device, like.dtype)

    def read_subset(self, l: int, positions: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        """The rows at positions[idx], idx [k] int64 on the host. Prefetched rows are found by `positions` itself."""
        return self.read(l, positions[idx], like)


def report_ages(ages: Tensor) -> None:
    """Add the staleness of rows that are about to be read to the counters of `trace`.

    ages: [n] int64 on the host, in steps; -1 for a row that was never written.
    """
    written_ages = ages[ages >= 0]
    trace.count("history.rows", ages.numel())
    trace.count("history.never_written", ages.numel() - written_ages.numel())
    trace.count("history.age_sum", float(written_ages.sum()))
    bins = torch.bucketize(written_ages, torch.tensor(AGES))
    counts = torch.bincount(bins, minlength=len(AGES) + 1)
    bin_names = [*(f"to_{age}" for age in AGES), "older"]
    for name, count in zip(bin_names, counts.tolist(), strict=True):
        trace.count(f"history.age.{name}", count)


class Histories(LayerTables, RowReader):
    """Embeddings of earlier steps: a table per layer, and the step that wrote each row.

    Histories own their tables, but not the mover. Only the thread that trains may call the mover. So with
    one, only that thread may read and write.

    Args:
        num_rows: Rows of every table.
        allocator: Decides where tables lie. Default: host memory.
        name: Name of the tables, for those that are files.
        dtype: Element type of the stored rows. Default: that of the first rows that are written.
        mover: Moves rows to a GPU and back. None if tables and model are on a CPU.
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
        """A reader of the rows at `positions`. The pull of rows in host memory starts now.

        positions: [n] int64 on the host. The reader knows prefetched rows by this tensor itself, not by its
            values.
        """
        if self.mover is None or not positions.numel():
            return self
        tables = {l: self.tables[l] for l in layers if l in self.tables}
        pulled = self.mover.pull(tables, positions)
        # Tables on the device are not pulled: the batch reads them itself, at the same positions after
        # every layer. So the positions are copied to the device once.
        has_device_tables = len(pulled) < len(tables)
        device_positions = self.mover.to_device(positions) if has_device_tables else positions
        return PrefetchedRows(self, positions, device_positions, pulled)

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> TensorTable | None:
        """The table of layer `l` if a conv may read it directly. None with a mover: pushes may be on their way."""
        return super().in_place(l, device, dtype) if self.mover is None else None

    def rows(self, l: int, positions: Tensor) -> Tensor:
        return super().rows(l, positions) if self.mover is None else self.mover.read(self.tables[l], positions)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        self.table(l, like)  # creates it if nothing was written yet: it reads as zeros
        return super().read(l, positions, like)

    def stamps(self, positions: Tensor) -> Tensor:
        return self.written[positions]

    def now(self) -> Any:
        """A CUDA event of this moment of the computation, for `write`. None on a CPU, which computes at once."""
        return None if self.mover is None else self.mover.now()

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        if self.mover is None:
            super().write(l, at, rows)
        else:
            self.mover.push(self.table(l, rows), at, rows, computed)

    def stamp(self, row_ranges: Sequence[slice], step: int) -> None:
        """Note that a step wrote these row ranges."""
        for row_range in row_ranges:
            self.written[row_range] = step

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.written.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Copies of all rows and steps on the host, for a checkpoint. Synchronises with a GPU."""
        if self.mover is not None:  # pushes must be in the tables before they are copied
            self.mover.flush()
        tables = {str(l): table.to("cpu", copy=True) for l, table in self.tables.items()}
        return {"tables": tables, "written": self.written.clone(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows and steps by those of a checkpoint."""
        if self.mover is not None:  # a push that is still on its way must not overwrite the loaded rows
            self.mover.flush()
        self.tables = {}
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            self.table(int(l), rows).copy_(rows)
        self.written = state["written"].clone()
        self.step = state["step"]


class PrefetchedRows(RowReader):
    """The rows that one batch reads. Those of tables in host memory are on their way to the device.

    Rows of tables on the device are read when they are needed. So are rows at other positions than those of
    the batch.
    """

    def __init__(
        self, histories: Histories, positions: Tensor, device_positions: Tensor, pulled: dict[int, PulledRows]
    ) -> None:
        self.histories = histories
        self.positions = positions
        """[n] int64 on the host: the positions of the rows. Prefetched rows are found by this tensor itself."""
        self.device_positions = device_positions
        """[n] int64: a copy of `positions` on the device if tables are on it, else the same tensor."""
        self.pulled = pulled
        """Rows on their way to the device, by layer. Layers whose tables are on the device are left out."""
        self.step = histories.step
        # A copy, taken when the rows are: later commits stamp rows that this batch does not see.
        self._stamps = histories.stamps(positions).clone()

    def stamps(self, positions: Tensor) -> Tensor:
        return self._stamps if positions is self.positions else self.histories.stamps(positions)

    def rows(self, l: int, positions: Tensor) -> Tensor:
        if positions is not self.positions:
            return self.histories.rows(l, positions)
        return self.pulled[l].wait() if l in self.pulled else self.histories.rows(l, self.device_positions)

    def read(self, l: int, positions: Tensor, like: Tensor) -> Tensor:
        if l not in self.pulled:
            self.histories.table(l, like)  # creates it if nothing was written yet: it reads as zeros
        return super().read(l, positions, like)

    def read_subset(self, l: int, positions: Tensor, idx: Tensor, like: Tensor) -> Tensor:
        if positions is not self.positions or l not in self.pulled:
            return super().read_subset(l, positions, idx, like)
        rows = self.pulled[l].wait()
        return ops.gather_rows(rows, idx.to(rows.device)).to(like.device, like.dtype)
