"""Staging: cold rows of the next steps, brought from host memory to the GPU while earlier steps train.

The rows of many steps are read at once and in order, which is what host memory is fast at, and each of them once. A
kernel finds them as it finds hot rows; what was not staged it reads from the host itself, so nothing depends on it.
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
from hopline.tables.tiered import TieredTable

STEPS = 16
"""Steps whose rows are read at once: of a table of papers100M's size, enough that pages are read whole."""
MAX_STAGED_BYTES = 5 << 29
"""Of the rows of so many steps; there is room for twice that."""


class Staging:
    """For one table on one GPU: two regions behind its hot rows, of which one is read while the other is filled."""

    def __init__(self, table: TieredTable, device: torch.device, capacity: int, id_dtype: torch.dtype) -> None:
        device_tiers = table.reserve(device, 2 * capacity)
        self.hot, self.cold, self.hot_slot = device_tiers.tiers
        self.fetched = device_tiers.fetched
        self.first_slots = (table.num_hot, table.num_hot + capacity)
        self.stamp = torch.zeros(len(table), dtype=torch.int32, device=device)
        self.staged_ids = torch.zeros(2, capacity, dtype=id_dtype, device=device)
        self.count = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.window = 0

    def fill(self, trees: Sequence[Tensor]) -> None:
        """Read what the nodes of these trees need into the region that is not being read from."""
        kernels = ops.gpu_kernels("tiers")
        window = self.window + 1
        region = window % 2
        staged_ids = self.staged_ids[region]
        count = self.count[region]

        staged_ids.fill_(kernels.unclaimed(staged_ids.dtype))
        count.zero_()
        for nodes in trees:
            kernels.claim(nodes, self.hot_slot, self.stamp, window, staged_ids, count)
        staged_ids.copy_(staged_ids.sort().values)
        first_slot = self.first_slots[region]
        kernels.stage(self.hot, self.cold, self.hot_slot, staged_ids, count, first_slot, self.fetched)

    def switch(self) -> None:
        """From now on rows are read where the last `fill` put them."""
        self.clear()
        self.window += 1
        region = self.window % 2
        ops.gpu_kernels("tiers").point(
            self.hot_slot, self.staged_ids[region], self.count[region], self.first_slots[region]
        )

    def clear(self) -> None:
        """Forget what is staged."""
        region = self.window % 2
        ops.gpu_kernels("tiers").point(self.hot_slot, self.staged_ids[region], self.count[region], None)
        self.count[region].zero_()


class RowPrefetcher:
    """The staging of an epoch's steps, some of them at a time."""

    def __init__(self, stagings: Sequence[Staging], device: torch.device, steps: int, draw: Callable[[], Tensor]):
        """draw: the nodes of the next step's tree, -1 where there is none; its own counter goes on with each call."""
        self.stagings = stagings
        self.device = device
        self.steps = steps
        self.draw = draw
        self.stream = stream_for("staging", device) if device.type == "cuda" else None
        self.num_remaining = 0

    def start(self, num_steps: int) -> None:
        """An epoch of so many steps begins."""
        self.num_remaining = num_steps
        self._fill()

    def before_step(self, step: int) -> None:
        """Call it before each step, counted from 0."""
        if step % self.steps:
            return
        self._wait_for_rows()
        for staging in self.stagings:
            staging.switch()
        self._fill()

    def end(self) -> None:
        """Nothing is staged any more: the table may choose other hot rows."""
        self._wait_for_rows()
        for staging in self.stagings:
            staging.clear()

    def _fill(self) -> None:
        num_steps = min(self.steps, self.num_remaining)
        self.num_remaining -= num_steps
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            trees = [self.draw() for _ in range(num_steps)]
            if trees:
                for staging in self.stagings:
                    staging.fill(trees)

    def _wait_for_rows(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def stage_tables(
    tables: Iterable[Table], device: torch.device, slots: int, steps: int, id_dtype: torch.dtype
) -> list[Staging]:
    """Staging for those of the tables that have rows in host memory, where there is room.

    slots: nodes that a step looks at, at most.
    """
    stagings = []
    for table in tables:
        if not isinstance(table, TieredTable):
            continue
        tiers = table.tiers(device)
        if tiers is None or tiers.cold is None:
            continue
        max_rows = min(MAX_STAGED_BYTES, free_bytes(device) // 8) // max(1, table.row_bytes)
        capacity = min(steps * slots, max_rows, len(table) - table.num_hot)
        if capacity > 0:
            stagings.append(Staging(table, device, capacity, id_dtype))
    return stagings
