"""`TieredTable`: copies of the hot rows on the device, all rows in a slower table below.

Sampling reads some rows far more often than others. Copies of these hot rows on the device save traffic
from the host. They cost device memory for `num_hot` rows, plus an int32 slot per row of the table. A read
looks every id up in `hot_slot`:

    ids --> hot_slot[id] --+-- slot >= 0 --> hot[slot], on the device
                           +-- slot < -1 --> hot[-2 - slot], a staged row (see below)
                           +-- slot = -1 --> cold[id]: zero-copy read of pinned host memory by a GPU's kernel,
                                             or `below.read` by the host: for ids on a CPU, or for rows that
                                             the kernel cannot read

A *staged* row is a cold row that was brought to the device for the next steps only. Staged rows stand
behind the hot ones in the same tensor. `methods/sampled/prefetch_rows.py` brings them and takes them away;
this file allocates their slots (`TieredTable.reserve`) and counts their reads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import prod
from typing import TypedDict

import torch
from torch import Tensor

from hopline.device import pinned
from hopline.device.meter import free_bytes, with_index
from hopline.distributed.shared_memory import SharedArray
from hopline.ops.gather_tiers import count_ids, gather_tiers, new_counts, slot_of
from hopline.tables.base import Table, Tiers, WrappedTable
from hopline.tables.hot_rows import hottest
from hopline.tables.shareable import Shareable
from hopline.util import trace

BYTES_AT_ONCE = 1 << 26
"""Bytes of rows that are read from below at once while the hot rows are filled."""
SORTED_FROM = 1 << 14
"""Least number of ids for which a read is sorted by id. Fewer ids are not worth the sort."""


class Counts(TypedDict):
    """Reads of a table by one process since the table was made."""

    hits: int
    """Reads of hot rows."""
    misses: int
    """Reads of all other rows. The read of a staged row is a miss."""
    hit_bytes: int
    """Bytes that were read from the hot rows."""
    miss_bytes: int
    """Bytes that came from below. A staged row counts once, however often it was read."""


@dataclass
class _DeviceTiers:
    """The tiers and counters of one device.

    Once a CUDA graph is captured, no tensor here may be replaced, because the graph holds their addresses.
    `reserve`, which replaces `tiers`, comes before the capture.
    """

    tiers: Tiers
    """Hot and cold rows, as kernels on this device read them."""
    counts: Tensor
    """[n, 3] int64 on the device. Its sum over axis 0: reads of hot, cold and staged rows.

    Programs of a kernel add to different rows, so that they do not wait for each other.
    """
    seen: Tensor | None
    """[num_rows] int32 on the device: how often each row was read. None if the table does not observe reads."""
    fetched: Tensor
    """[1] int64 on the device: number of rows that were fetched from below to be staged.

    The kernel that stages adds to it (`ops.gpu.tiers.stage`).
    """
    reported: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int64))
    """The result of `count_reads` at the last report."""

    def count_reads(self) -> Tensor:
        """[3] int64 on the host: hits, misses, and rows that came from below so far. Synchronises with a GPU.

        A staged row came from below once, however often it was read.
        """
        hits, direct, staged = self.counts.sum(0).tolist()
        return torch.tensor([hits, direct + staged, direct + int(self.fetched)])


class TieredTable(Shareable, WrappedTable):
    """Copies of the rows `hot_ids` of `below` on a device. Other rows are read from `below`.

    `hl.table` makes one.

    Each device of each process gets its own copies, at its first read. On CUDA the rows below are pinned
    where they lie, and the kernel reads them by zero-copy. Rows that cannot be pinned, such as those behind
    a RAM cache of a file, are read by the host. If the ids are on another kind of device than the table's,
    all rows come from `below` and nothing is counted.

    `read` may be called by several threads. `rebalance` and `reserve` may not run while any thread reads.

    Args:
        below: The table that has all rows.
        hot_ids: [n] int64 rows to copy; None copies all.
        device: Where the copies are.
        observe: Count how often each row is read in the first epoch, and then keep the rows that were read
            most.

    Raises:
        ValueError: `read` is given ids that are not 1-D int32 or int64.

    Example:
        >>> below = hl.extend.TensorTable(torch.eye(4))
        >>> table = hl.extend.TieredTable(below, torch.tensor([2, 3]), "cpu")
        >>> table.num_hot, table[torch.tensor([0, 3])].argmax(1).tolist()
        (2, [0, 3])
    """

    def __init__(
        self, below: Table, hot_ids: Tensor | None, device: torch.device | str, *, observe: bool = False
    ) -> None:
        self.below = below
        self.hot_ids = hot_ids
        self.device = torch.device(device)
        self.observing = observe and hot_ids is not None
        self._device_tiers: dict[torch.device, _DeviceTiers] = {}
        self._lock = threading.Lock()

    @property
    def num_hot(self) -> int:
        return len(self) if self.hot_ids is None else self.hot_ids.numel()

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        slot_bytes = 0 if self.hot_ids is None else len(self) * torch.int32.itemsize
        return self.num_hot * self.row_bytes + slot_bytes

    def read(self, ids: Tensor, *, staged: bool = True) -> Tensor:
        """The rows of `ids` [n], on the device of the ids.

        staged: whether staged rows may be read from their slots. Only the training loop may: it alone knows
            when staging replaces them.
        """
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"row ids must be a 1-D int32 or int64 tensor, not {list(ids.shape)} {ids.dtype}")
        if ids.device.type != self.device.type:
            return self.below.read(ids)
        # On a GPU a check would synchronise, and an id of -1 reads as zeros. On a CPU it is refused.
        if ids.device.type == "cpu" and ids.numel():
            lowest = int(ids.min())
            if lowest < 0:
                raise IndexError(f"row id {lowest} is outside 0 .. {len(self) - 1}")
        device_tiers = self._on(ids.device)
        tiers = device_tiers.tiers
        if device_tiers.seen is not None and self.observing:
            with self._lock:  # several threads may add to the same counters
                count_ids(device_tiers.seen, ids)
        # The kernel is for GPUs alone.
        if ids.device.type != "cpu" and _has_all_rows(tiers):
            # Host memory answers ascending ids faster (docs/measurements/gpu.md: 48 instead of 28 GB/s).
            # With half of the rows hot, hardly any read goes to the host, and the sort is not worth its
            # time.
            reads_host = tiers.cold is not None and 2 * self.num_hot < len(self)
            in_order = reads_host and ids.numel() >= SORTED_FROM
            return gather_tiers(
                tiers.hot,
                tiers.cold,
                tiers.hot_slot,
                ids,
                counts=device_tiers.counts,
                in_order=in_order,
                staged=staged,
            )
        return self._read_by_host(device_tiers, ids)

    def _read_by_host(self, device_tiers: _DeviceTiers, ids: Tensor) -> Tensor:
        """The rows of `ids`, where the host reads the misses from `below`. Synchronises with a GPU."""
        hot, _cold, hot_slot = device_tiers.tiers
        rows = gather_tiers(hot, cold=None, hot_slot=hot_slot, ids=ids)  # right at hot rows; misses follow
        is_row = ids >= 0
        num_rows = int(is_row.sum())
        num_misses = 0
        if hot_slot is not None:
            is_cold_or_staged = hot_slot[ids.long().clamp(min=0)] < 0
            misses = (is_row & is_cold_or_staged).nonzero().view(-1)
            num_misses = misses.numel()
            if num_misses:
                rows[misses] = self.below.read(ids[misses].cpu()).to(ids.device)
        with self._lock:  # several threads may add to the same counter
            device_tiers.counts[0] += torch.tensor([num_rows - num_misses, num_misses, 0], device=ids.device)
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self.below.write(ids.cpu(), rows.cpu())
        for device, device_tiers in self._device_tiers.items():
            # The copies must change with `below`, the staged ones included: `slot_of` finds both kinds.
            hot, _, hot_slot = device_tiers.tiers
            device_rows = rows.to(device, self.dtype)
            slots = ids.to(device).long()  # if all rows are hot, the slot of a row is its id
            if hot_slot is not None:
                slots = slot_of(hot_slot[slots].long())
            is_copied = slots >= 0
            hot[slots[is_copied]] = device_rows[is_copied]

    def storage(self) -> Tensor | None:
        if self.hot_ids is None:
            return self._on(self.device).tiers.hot
        if self.num_hot:
            return None  # rows are in two tensors
        # No row is hot: all rows are in one tensor, which is pinned for a GPU.
        return self._on(self.device).tiers.cold if self.device.type == "cuda" else self.below.storage()

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        target = self.device if device is None else torch.device(device)
        if target.type != self.device.type:
            return self.below.tiers(target)
        tiers = self._on(target).tiers
        return tiers if _has_all_rows(tiers) else None

    def concurrent_view(self) -> Table:
        """A view that never reads staged rows, for a thread that reads while others train."""
        return _ConcurrentView(self)

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """[n, 3] int64: the counts of one device, for kernels that read the tiers themselves and add to them.

        Their sum over axis 0: reads of hot, cold and staged rows. `counters` adds up those of all devices.
        """
        return self._on(self.device if device is None else torch.device(device)).counts

    def observe(self, ids: Tensor) -> None:
        """Count the reads of `ids` by a kernel that did not call `read`, for `rebalance`."""
        device_tiers = self._on(ids.device)
        if device_tiers.seen is not None and self.observing:
            count_ids(device_tiers.seen, ids)

    def counters(self) -> Counts:
        """Hits and misses of this process so far, over all its devices. Synchronises with a GPU."""
        reads = [device_tiers.count_reads() for device_tiers in self._device_tiers.values()]
        hits, misses, from_below = torch.stack([torch.zeros(3, dtype=torch.int64), *reads]).sum(0).tolist()
        return Counts(
            hits=hits,
            misses=misses,
            hit_bytes=hits * self.row_bytes,
            miss_bytes=from_below * self.row_bytes,
        )

    def report(self) -> None:
        """Add the reads since the last report to the counters of `trace`. Synchronises with a GPU."""
        for device_tiers in self._device_tiers.values():
            reads = device_tiers.count_reads()
            hits, misses, from_below = (reads - device_tiers.reported).tolist()
            device_tiers.reported = reads
            if hits or misses:
                trace.count("rows.cache_hit", hits)
                trace.count("rows.cache_miss", misses)
                trace.count("bytes.from_cache", hits * self.row_bytes)
                trace.count("bytes.from_host", from_below * self.row_bytes)

    def end_epoch(self) -> None:
        self.report()
        if self.observing:
            self.rebalance()

    def rebalance(self) -> None:
        """Make the rows hot that were read most since the table was made, and stop observing.

        Each device keeps the rows that it read most itself. Call it between epochs: nothing may read the
        table meanwhile, because the hot rows are overwritten in place. Afterwards `hot_ids` has the rows of
        the last device. A device that reads for the first time later copies these.
        """
        for device_tiers in self._device_tiers.values():
            hot, _, hot_slot = device_tiers.tiers
            if device_tiers.seen is None or hot_slot is None:
                continue
            # Rows that are hot already win ties: the factor of two leaves the last bit to break them.
            is_hot = hot_slot >= 0
            score = 2 * device_tiers.seen.long() + is_hot.long()
            hot_ids = hottest(score, self.num_hot).cpu()
            self._fill(hot, hot_slot, hot_ids)
            device_tiers.seen.zero_()
            self.hot_ids = hot_ids
        self.observing = False

    def _on(self, device: torch.device) -> _DeviceTiers:
        """The tiers of a device, filled at the first call."""
        device = with_index(device)
        device_tiers = self._device_tiers.get(device)
        if device_tiers is None:
            # Looked up again under the lock: another thread may have filled them meanwhile, and a second
            # copy of the hot rows would take the memory twice.
            with self._lock:
                device_tiers = self._device_tiers.get(device) or self._make_tiers(device)
                self._device_tiers[device] = device_tiers
        return device_tiers

    def _make_tiers(self, device: torch.device) -> _DeviceTiers:
        hot = torch.empty((self.num_hot, *self.shape[1:]), dtype=self.dtype, device=device)
        cold: Tensor | None = None
        hot_slot: Tensor | None = None
        seen: Tensor | None = None
        if self.hot_ids is None:
            self._fill(hot, None, torch.arange(len(self)))
        else:
            hot_slot = torch.full((len(self),), -1, dtype=torch.int32, device=device)
            self._fill(hot, hot_slot, self.hot_ids.cpu())
            if self.observing:
                seen = torch.zeros(len(self), dtype=torch.int32, device=device)
            cold = self._readable(device)
        return _DeviceTiers(
            tiers=Tiers(hot, cold, hot_slot),
            counts=new_counts(device),
            seen=seen,
            fetched=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def reserve(self, device: torch.device, num_rows: int) -> _DeviceTiers:
        """Allocate slots for `num_rows` staged rows behind the hot ones, and return the device's tiers.

        The hot rows get a new address, so call it before a CUDA graph that reads them is captured.
        """
        device_tiers = self._on(device)
        hot, cold, hot_slot = device_tiers.tiers
        shape = (self.num_hot + num_rows, *self.shape[1:])
        needed_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        if device.type != "cuda" or needed_bytes <= free_bytes(device):
            grown = hot.new_empty(shape)
            grown[: self.num_hot] = hot[: self.num_hot]
        else:
            # Old and new tensor do not fit together. The old one is dropped first, and the hot rows are
            # read from below once more.
            device_tiers.tiers = Tiers(hot[:0].clone(), cold, hot_slot)
            hot = None
            grown = torch.empty(shape, dtype=self.dtype, device=device)
            assert self.hot_ids is not None
            self._fill(grown, hot_slot, self.hot_ids.cpu())
        device_tiers.tiers = Tiers(grown, cold, hot_slot)
        return device_tiers

    def _fill(self, hot: Tensor, hot_slot: Tensor | None, hot_ids: Tensor) -> None:
        """Copy the rows `hot_ids` from below into `hot`, in their order, and enter their slots."""
        rows_at_once = max(1, BYTES_AT_ONCE // max(1, self.row_bytes))
        for start in range(0, hot_ids.numel(), rows_at_once):
            ids = hot_ids[start : start + rows_at_once]
            hot[start : start + ids.numel()] = self.below.read(ids).to(hot.device)
        if hot_slot is not None:
            hot_slot.fill_(-1)
            slots = torch.arange(hot_ids.numel(), dtype=torch.int32, device=hot_slot.device)
            hot_slot[hot_ids.to(hot_slot.device)] = slots

    def _readable(self, device: torch.device) -> Tensor | None:
        """[num_rows, ...]: the rows below, pinned if a GPU will read them. None if `below` has no dense tensor."""
        rows = self.below.storage()
        if rows is None or device.type == "cpu" or rows.device.type != "cpu":
            return rows
        return pinned.pin(rows)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a handle: another process reads the same rows below, and fills hot rows of its own."""
        hot_ids = None if self.hot_ids is None else self.share_arrays("hot_ids")["hot_ids"]
        # "cuda" without an index: the other process reads on a GPU of its own.
        kind = self.device.type if self.device.type == "cuda" else str(self.device)
        return _open, (self.below, hot_ids, kind, self.observing)


def _has_all_rows(tiers: Tiers) -> bool:
    """Whether a kernel can read all rows: all are hot, or cold ones are in memory that it can read."""
    return tiers.hot_slot is None or tiers.cold is not None


class _ConcurrentView(WrappedTable):
    """A tiered table without its staged rows, which training replaces while another thread reads."""

    def __init__(self, tiered: TieredTable) -> None:
        self.below = self.tiered = tiered

    def read(self, ids: Tensor) -> Tensor:
        return self.tiered.read(ids, staged=False)

    def storage(self) -> Tensor | None:
        return self.tiered.storage()

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        # Kernels that are given `hot_slot` would follow it to staged rows. Without it they read all rows from
        # `hot`. So `cold`, which has all rows, takes its place.
        tiers = self.tiered.tiers(device)
        return tiers if tiers is None or tiers.cold is None else Tiers(hot=tiers.cold, cold=None, hot_slot=None)


def _open(below: Table, hot_ids: SharedArray | None, device: str, observe: bool) -> TieredTable:
    return TieredTable(below, None if hot_ids is None else hot_ids.tensor, device, observe=observe)
