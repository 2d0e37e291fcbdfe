"""Staging: cold rows of the next steps are copied from host memory to the GPU while earlier steps train.

Steps are taken in *windows* of some steps each. While the steps of window w train, the rows of window w + 1
are copied on a stream of their own. A table has two regions for staged rows, which take turns:

    host memory                           device memory, one tensor
    all rows  --fill: window w + 1-->     hot rows | region of even windows | region of odd windows
                                          steps of window w read one region; `switch` exchanges the two

Host memory answers ascending ids faster than scattered ones (see `ops/gpu/tiers.py`). So the rows of a
whole window are read at once, sorted by id, and each of them once. The price is device memory for two
windows.

A kernel finds a staged row as it finds a hot one, by `hot_slot`, the table's slot per row in device memory.
A row that did not fit is read from the host by the step itself. So no result depends on staging.

Steps of a window *claim* the cold rows that they will read: they append the ids to a list, each id once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hopline import ops
from hopline.device.meter import free_bytes
from hopline.device.streams import stream_for
from hopline.tables.base import Table
from hopline.tables.gpu_cache import TieredTable

STEPS = 16
"""Steps of a window, if `look_ahead` is "auto".

Enough that pages of host memory are read whole, in a table as large as papers100M's.
"""
MAX_STAGED_BYTES = 5 << 29
"""Most bytes of one region: 2.5 GiB. A table has two regions."""


class Staging:
    """The two regions of staged rows of one table on one GPU. One is read while the other is filled.

    Allocating the regions gives the hot rows a new address. So a `Staging` must exist before a CUDA graph
    that reads the table is captured.

    capacity: rows of one region. id_dtype: dtype of the node ids in `fill`.
    """

    def __init__(self, table: TieredTable, device: torch.device, capacity: int, id_dtype: torch.dtype) -> None:
        device_tiers = table.reserve(device, 2 * capacity)
        # Hot and staged rows in device memory, all rows in host memory, and the slot of each row in `hot`.
        self.hot, self.cold, self.hot_slot = device_tiers.tiers
        # [1] int64: the table's counter of staged rows.
        self.fetched = device_tiers.fetched
        # By region: its first row in `hot`.
        self.first_slots = (table.num_hot, table.num_hot + capacity)
        # [num_rows]: the last window that claimed each row, so that a window claims a row once.
        self.stamp = torch.zeros(len(table), dtype=torch.int32, device=device)
        # By region: ids of the rows that its window has claimed, ascending.
        self.staged_ids = torch.zeros(2, capacity, dtype=id_dtype, device=device)
        # By region: the number of rows that its window has claimed, which may exceed the capacity.
        self.count = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.window = 0  # the window whose steps run now; its region is window % 2

    def fill(self, trees: Sequence[Tensor]) -> None:
        """Copy the cold rows of the next window into its region, which no step reads yet.

        trees: by step of the window, [num_slots] node ids, -1 at empty slots.
        """
        kernels = ops.gpu_kernels("tiers")
        window = self.window + 1
        region = window % 2
        staged_ids = self.staged_ids[region]
        count = self.count[region]

        staged_ids.fill_(kernels.unclaimed(staged_ids.dtype))
        count.zero_()
        for nodes in trees:
            kernels.claim(nodes, self.hot_slot, self.stamp, window, staged_ids, count)
        staged_ids.copy_(staged_ids.sort().values)  # unclaimed entries come last
        first_slot = self.first_slots[region]
        kernels.stage(self.hot, self.cold, self.hot_slot, staged_ids, count, first_slot, self.fetched)

    def switch(self) -> None:
        """Begin the next window: from now on, kernels find the rows that the last `fill` has copied."""
        self.clear()
        self.window += 1
        region = self.window % 2
        ops.gpu_kernels("tiers").point(
            self.hot_slot, self.staged_ids[region], self.count[region], self.first_slots[region]
        )

    def clear(self) -> None:
        """Withdraw the staged rows of the current window: kernels read them from the host again."""
        region = self.window % 2
        ops.gpu_kernels("tiers").point(self.hot_slot, self.staged_ids[region], self.count[region], None)
        self.count[region].zero_()


class RowPrefetcher:
    """Stages the rows of an epoch, one window ahead of the steps. It belongs to the thread that trains."""

    def __init__(self, stagings: Sequence[Staging], device: torch.device, steps: int, draw: Callable[[], Tensor]):
        """steps: steps of a window. draw: the nodes of the next step, [num_slots], -1 at empty slots.

        Every call of `draw` advances a counter of its own, which is ahead of training.
        """
        self.stagings = stagings
        self.device = device
        self.steps = steps
        self.draw = draw
        self.stream = stream_for("staging", device) if device.type == "cuda" else None
        self.num_remaining = 0  # steps of the epoch that are not staged yet

    def start(self, num_steps: int) -> None:
        """Begin an epoch of `num_steps` steps, and start to stage its first window."""
        self.num_remaining = num_steps
        self._fill()

    def before_step(self, step: int) -> None:
        """Call it before each step, counted from 0.

        It does something at the first step of a window only.
        """
        if step % self.steps:
            return
        self._wait_for_rows()
        for staging in self.stagings:
            staging.switch()
        self._fill()

    def end(self) -> None:
        """End an epoch: withdraw all staged rows, because the table may choose other hot rows now."""
        self._wait_for_rows()
        for staging in self.stagings:
            staging.clear()

    def _fill(self) -> None:
        """Start to stage the next window, on the staging stream. The host does not wait."""
        num_steps = min(self.steps, self.num_remaining)
        self.num_remaining -= num_steps
        # Steps launched before may still read the region that is filled now.
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            trees = [self.draw() for _ in range(num_steps)]
            if trees:
                for staging in self.stagings:
                    staging.fill(trees)

    def _wait_for_rows(self) -> None:
        """Let the training stream wait until all rows are staged. The host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def stage_tables(
    tables: Iterable[Table], device: torch.device, slots: int, steps: int, id_dtype: torch.dtype
) -> list[Staging]:
    """The staging of each table that has rows in host memory, if the GPU has memory for it.

    slots: most nodes that a step reads. steps: steps of a window. id_dtype: dtype of the node ids.
    """
    stagings = []
    for table in tables:
        if not isinstance(table, TieredTable):
            continue
        tiers = table.tiers(device)
        if tiers is None or tiers.cold is None:
            continue
        # At most an eighth of the free memory for each of the two regions. A rule of thumb.
        max_rows = min(MAX_STAGED_BYTES, free_bytes(device) // 8) // max(1, table.row_bytes)
        capacity = min(steps * slots, max_rows, len(table) - table.num_hot)
        if capacity > 0:
            stagings.append(Staging(table, device, capacity, id_dtype))
    return stagings
