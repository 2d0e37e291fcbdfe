"""Hot rows on the device, the rest in memory that its kernels read in place, or below that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypedDict

import torch
from torch import Tensor

from hopline.device import pinned
from hopline.device.meter import free_bytes, with_index
from hopline.distributed.shared_memory import SharedArray
from hopline.ops.gather_tiers import count_ids, gather_tiers, new_counts, slot_of
from hopline.tables.base import Table, Tiers
from hopline.tables.hot_rows import hottest
from hopline.tables.shareable import Shareable
from hopline.util import trace

BYTES_AT_ONCE = 1 << 26
"""Rows are brought to the device that many bytes at a time."""
SORTED_FROM = 1 << 14
"""So many ids are read from the host in ascending order; fewer are not worth a sort."""


class Counts(TypedDict):
    """How reads went since a table was made. A row that was staged for the next steps is a miss, read from there."""

    hits: int
    misses: int
    hit_bytes: int
    miss_bytes: int
    """That came from below: a staged row came once, however often it was read."""


@dataclass
class _DeviceTiers:
    """The tiers as one device has them. Their tensors are never replaced: a captured graph knows their addresses."""

    tiers: Tiers
    counts: Tensor
    seen: Tensor | None
    """[num_rows] int32: how often each row was read, where that is observed."""
    fetched: Tensor
    """[1] int64: rows that were brought from below ahead of their step."""
    reported: tuple[int, int, int] = (0, 0, 0)
    """Hits, misses and rows from below that were reported already."""

    def now(self) -> tuple[int, int, int]:
        """(hits, misses, rows from below) so far; on a GPU this waits for the device."""
        hits, direct, staged = self.counts.sum(0).tolist()
        return hits, direct + staged, direct + int(self.fetched)


class TieredTable(Shareable, Table):
    """Copies of the rows `hot_ids` of `below` on the device that asks; the rest are read below. `hl.table` makes one.

    Each device of each process gets its copies at its first read. On CUDA the rows below are pinned where they lie and
    the kernel reads them itself; rows that cannot be, such as those behind a RAM cache of a file, are read by the host.
    With ids on another kind of device than the table's, rows come from below and nothing is counted.

    Args:
        below: The table that has all rows.
        hot_ids: [n] int64 rows to copy; None copies all.
        device: Where the copies are.
        observe: Count how often each row is read in the first epoch, and then keep those read most.

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
        self._placed: dict[torch.device, _DeviceTiers] = {}
        self._lock = threading.Lock()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.below.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.below.dtype

    @property
    def num_hot(self) -> int:
        return len(self) if self.hot_ids is None else self.hot_ids.numel()

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        hot_slots = 0 if self.hot_ids is None else 4 * len(self)
        return self.num_hot * self.row_bytes + hot_slots

    def read(self, ids: Tensor, *, staged: bool = True) -> Tensor:
        """staged: whether rows may be read where they stand for a step (`staging`), which training alone can do."""
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"row ids must be a 1-D int64 tensor, not {list(ids.shape)} {ids.dtype}")
        if ids.device.type != self.device.type:
            return self.below.read(ids)
        # On a GPU -1 is an empty slot of a tree; on the CPU, where there is none, it is a mistake.
        if ids.device.type == "cpu" and ids.numel() and int(ids.min()) < 0:
            raise IndexError(f"a row id is outside 0 .. {len(self) - 1}")
        device_tiers = self._on(ids.device)
        tiers = device_tiers.tiers
        if device_tiers.seen is not None and self.observing:
            with self._lock:
                count_ids(device_tiers.seen, ids)
        if ids.device.type != "cpu" and (tiers.hot_slot is None or tiers.cold is not None):
            # With half of the rows here, hardly any read goes to the host.
            in_order = tiers.cold is not None and 2 * self.num_hot < len(self) and ids.numel() >= SORTED_FROM
            return gather_tiers(tiers.hot, tiers.cold, tiers.hot_slot, ids, device_tiers.counts, in_order, staged)
        return self._read_by_host(device_tiers, ids)

    def _read_by_host(self, device_tiers: _DeviceTiers, ids: Tensor) -> Tensor:
        """Misses are read below, by the host. On a GPU this waits for the device."""
        hot, _, hot_slot = device_tiers.tiers
        rows, present = gather_tiers(hot, None, hot_slot, ids), ids >= 0
        num_present, num_missed = int(present.sum()), 0
        if hot_slot is not None:
            missed = (present & (hot_slot[ids.long().clamp(min=0)] < 0)).nonzero().view(-1)
            num_missed = missed.numel()
            if num_missed:
                rows[missed] = self.below.read(ids[missed].cpu()).to(ids.device)
        with self._lock:  # on the CPU several threads would add to the same counter
            device_tiers.counts[0] += torch.tensor([num_present - num_missed, num_missed, 0], device=ids.device)
        return rows

    @property
    def version(self) -> int | None:
        return self.below.version

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self.below.write(ids.cpu(), rows.cpu())
        for device, device_tiers in self._placed.items():
            hot, _, hot_slot = device_tiers.tiers
            new, slots = rows.to(device, self.dtype), ids.to(device).long()
            if hot_slot is not None:
                slots = slot_of(hot_slot[slots].long())
            hot[slots[slots >= 0]] = new[slots >= 0]

    def storage(self) -> Tensor | None:
        if self.hot_ids is None or (self.device.type == "cuda" and not self.num_hot):
            hot, cold, _ = self._on(self.device).tiers
            return hot if self.hot_ids is None else cold
        return self.below.storage() if not self.num_hot else None

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        target = self.device if device is None else torch.device(device)
        if target.type != self.device.type:
            return self.below.tiers(target)
        tiers = self._on(target).tiers
        return tiers if tiers.hot_slot is None or tiers.cold is not None else None

    def concurrent_view(self) -> Table:
        return _ConcurrentView(self)

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """The counter of a device, for kernels that read the tiers themselves: see `ops.tiers.gather_tiers`."""
        return self._on(self.device if device is None else torch.device(device)).counts

    def observe(self, ids: Tensor) -> None:
        """Count reads that a kernel did by itself, for `rebalance`."""
        device_tiers = self._on(ids.device)
        if device_tiers.seen is not None and self.observing:
            count_ids(device_tiers.seen, ids)

    def counters(self) -> Counts:
        """Hits and misses so far, in this process. On a GPU this waits for the device."""
        found = [device_tiers.now() for device_tiers in self._placed.values()]
        hits, misses, below = (sum(three[i] for three in found) for i in range(3))
        return Counts(hits=hits, misses=misses, hit_bytes=hits * self.row_bytes, miss_bytes=below * self.row_bytes)

    def report(self) -> None:
        """Tell who listens (`trace`) of the reads since the last report."""
        for device_tiers in self._placed.values():
            now = device_tiers.now()
            hits, misses, below = (new - old for new, old in zip(now, device_tiers.reported, strict=True))
            device_tiers.reported = now
            if hits or misses:
                trace.count("rows.cache_hit", hits)
                trace.count("rows.cache_miss", misses)
                trace.count("bytes.from_cache", hits * self.row_bytes)
                trace.count("bytes.from_host", below * self.row_bytes)

    def end_epoch(self) -> None:
        self.report()
        if self.observing:
            self.rebalance()

    def rebalance(self) -> None:
        """Keep the rows that were read most since the table was made, and observe no more.

        Nothing may be reading meanwhile: call it between epochs. Each device keeps what it read most itself.
        """
        for device_tiers in self._placed.values():
            hot, _, hot_slot = device_tiers.tiers
            if device_tiers.seen is None or hot_slot is None:
                continue
            # Of rows that were read equally often those that are here already stay.
            chosen = hottest(2 * device_tiers.seen.long() + (hot_slot >= 0).long(), self.num_hot)
            self._fill(hot, hot_slot, chosen.cpu())
            device_tiers.seen.zero_()
            self.hot_ids = chosen.cpu()
        self.observing = False

    def _on(self, device: torch.device) -> _DeviceTiers:
        device = with_index(device)
        found = self._placed.get(device)
        if found is None:
            with self._lock:
                found = self._placed.get(device) or self._place(device)
                self._placed[device] = found
        return found

    def _place(self, device: torch.device) -> _DeviceTiers:
        hot = torch.empty((self.num_hot, *self.shape[1:]), dtype=self.dtype, device=device)
        if self.hot_ids is None:
            self._fill(hot, None, torch.arange(len(self)))
            return _DeviceTiers(Tiers(hot, None, None), new_counts(device), None, _zero(device))
        hot_slot = torch.full((len(self),), -1, dtype=torch.int32, device=device)
        self._fill(hot, hot_slot, self.hot_ids.cpu())
        seen = torch.zeros(len(self), dtype=torch.int32, device=device) if self.observing else None
        return _DeviceTiers(Tiers(hot, self._readable(device), hot_slot), new_counts(device), seen, _zero(device))

    def reserve(self, device: torch.device, num_rows: int) -> _DeviceTiers:
        """Room for so many rows behind the hot ones, for `staging`: call it before a graph knows where they are."""
        device_tiers = self._on(device)
        hot, cold, hot_slot = device_tiers.tiers
        shape = (self.num_hot + num_rows, *self.shape[1:])
        if device.type != "cuda" or torch.Size(shape).numel() * self.dtype.itemsize <= free_bytes(device):
            grown = hot.new_empty(shape)
            grown[: self.num_hot] = hot[: self.num_hot]
        else:  # there is no room for both: they come from below once more
            device_tiers.tiers, hot = Tiers(hot[:0].clone(), cold, hot_slot), None
            grown = torch.empty(shape, dtype=self.dtype, device=device)
            assert self.hot_ids is not None
            self._fill(grown, hot_slot, self.hot_ids.cpu())
        device_tiers.tiers = Tiers(grown, cold, hot_slot)
        return device_tiers

    def _fill(self, hot: Tensor, hot_slot: Tensor | None, hot_ids: Tensor) -> None:
        for start, ids in _pieces(hot_ids, self.row_bytes):
            hot[start : start + ids.numel()] = self.below.read(ids).to(hot.device)
        if hot_slot is not None:
            hot_slot.fill_(-1)
            slots = torch.arange(hot_ids.numel(), dtype=torch.int32, device=hot_slot.device)
            hot_slot[hot_ids.to(hot_slot.device)] = slots

    def _readable(self, device: torch.device) -> Tensor | None:
        """The rows below as a kernel on the device reads them."""
        rows = self.below.storage()
        if rows is None or device.type == "cpu" or rows.device.type != "cpu":
            return rows
        return pinned.pin(rows)

    def __reduce__(self) -> tuple[object, ...]:
        """To other processes goes a handle: the rows below are the same memory, and each fills a cache of its own."""
        hot_ids = None if self.hot_ids is None else self.share_arrays("hot_ids")["hot_ids"]
        kind = self.device.type if self.device.type == "cuda" else str(self.device)
        return _open, (self.below, hot_ids, kind, self.observing)


class _ConcurrentView(Table):
    """A tiered table whose rows are read where they always are: those that are staged come and go meanwhile."""

    def __init__(self, tiered: TieredTable) -> None:
        self.tiered = tiered

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tiered.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tiered.dtype

    @property
    def version(self) -> int | None:
        return self.tiered.version

    def read(self, ids: Tensor) -> Tensor:
        return self.tiered.read(ids, staged=False)

    def storage(self) -> Tensor | None:
        return self.tiered.storage()

    def tiers(self, device: torch.device | str | None = None) -> Tiers | None:
        tiers = self.tiered.tiers(device)
        return tiers if tiers is None or tiers.cold is None else Tiers(tiers.cold, None, None)


def _open(below: Table, hot_ids: SharedArray | None, device: str, observe: bool) -> TieredTable:
    return TieredTable(below, None if hot_ids is None else hot_ids.tensor, device, observe=observe)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _pieces(ids: Tensor, row_bytes: int) -> Iterator[tuple[int, Tensor]]:
    step = max(1, BYTES_AT_ONCE // max(1, row_bytes))
    for start in range(0, ids.numel(), step):
        yield start, ids[start : start + step]
