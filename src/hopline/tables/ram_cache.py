"""`CachedTable`: copies of chosen rows in host memory, in front of a slower table such as a mapped file.

    ids --> slot[id] --+-- slot >= 0 --> hot[slot], in memory
                       +-- slot = -1 --> below.read(id)

The chosen rows do not change: nothing is evicted. The cost is a copy of these rows, and 4 bytes per row of
the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.tables.base import Table, WrappedTable
from hopline.tables.shareable import Shareable
from hopline.util import trace


class CachedTable(Shareable, WrappedTable):
    """Copies of chosen rows of `below`, from which these rows are read. All other rows come from `below`.

    Args:
        below: The table that has all rows.
        hot_ids: [n] int64: the rows to copy.
        counter: Name of the counters of `trace` for reads, to which "_hit" and "_miss" are added.

    Example:
        >>> table = hl.extend.CachedTable(hl.extend.TensorTable(torch.eye(4)), torch.tensor([2, 3]))
        >>> table.hot.shape, table[torch.tensor([0, 3])].argmax(1).tolist()
        (torch.Size([2, 4]), [0, 3])
    """

    def __init__(self, below: Table, hot_ids: Tensor, *, counter: str = "rows.cache") -> None:
        self.below = below
        self.counter = counter
        self.hot = below.read(hot_ids)
        """[n, *row_shape]: the copies, in the order of `hot_ids`."""
        self.slot = torch.full((len(below),), -1, dtype=torch.int32)
        """[num_rows] int32: the slot of each row in `hot`, -1 for a row that is not copied."""
        self.slot[hot_ids] = torch.arange(hot_ids.numel(), dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        return self.hot.numel() * self.hot.element_size() + self.slot.numel() * self.slot.element_size()

    def read(self, ids: Tensor) -> Tensor:
        slot = ops.gather_rows(self.slot, ids).long()  # raises on ids outside the table
        is_hit = slot >= 0
        rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
        rows[is_hit] = self.hot[slot[is_hit]]
        rows[~is_hit] = self.below.read(ids[~is_hit])
        num_hits = int(is_hit.sum())
        trace.count(f"{self.counter}_hit", num_hits)
        trace.count(f"{self.counter}_miss", ids.numel() - num_hits)
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self.below.write(ids, rows)
        slot = self.slot[ids].long()
        is_hit = slot >= 0
        self.hot[slot[is_hit]] = rows[is_hit].to(self.dtype)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a handle: another process reads the same copies and rows below, in shared memory."""
        attributes = {"below": self.below, "counter": self.counter}
        return CachedTable.from_shared, (self.share_arrays("hot", "slot"), attributes)
