"""Tables of rows for several ranks: one memory per host, and each host has the rows of its ranks' parts.

Rows of other hosts are asked of the rank that keeps them, by exchanges in which all ranks take part in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.distributed.shared_memory import shared_zeros
from hopline.distributed.world import World
from hopline.tables.allocators import SharedFiles, SharedMemory
from hopline.tables.history import Histories, RowReader
from hopline.tables.layers import At


class Owners:
    """Which rank keeps the row at a place."""

    def __init__(self, world: World, shares: PartAssignment, ptr: Tensor) -> None:
        self.world, self.shares = world, shares
        self.spans = [range(int(ptr[parts.start]), int(ptr[parts.stop])) for parts in shares.parts]
        """By rank, the places of its rows."""
        host = shares.parts_of_host(shares.hosts[shares.rank])
        self.host = range(int(ptr[host.start]), int(ptr[host.stop]))
        """Places of the rows that this host has."""
        self.order = sorted(range(world.size), key=lambda rank: self.spans[rank].start)
        """The ranks as their rows follow each other."""

    @property
    def own(self) -> range:
        """Places of the rows that this rank keeps."""
        return self.spans[self.shares.rank]

    def runs(self, positions: Tensor) -> list[slice]:
        """By rank, where among ascending places those are that it keeps."""
        ends = torch.searchsorted(positions, torch.tensor([self.spans[rank].stop for rank in self.order])).tolist()
        found = {rank: slice(*ends) for rank, *ends in zip(self.order, [0, *ends[:-1]], ends, strict=True)}
        return [found[rank] for rank in range(self.world.size)]

    def collect(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Sums of all ranks' rows, at the places that this one keeps. positions: ascending, each once."""
        runs = self.runs(positions)
        theirs = self.world.all_to_all([positions[run] for run in runs])
        total = rows.new_zeros(len(self.own), *rows.shape[1:])
        for at, what in zip(theirs, self.world.all_to_all([rows[run] for run in runs]), strict=True):
            total.index_add_(0, at - self.own.start, what)
        return total


@dataclass(frozen=True, eq=False)
class Snapshot(RowReader):
    """Some rows as they were."""

    positions: Tensor
    """Ascending."""
    tables: Mapping[int, Tensor]
    written: Tensor
    step: int

    def rows(self, l: int, positions: Tensor) -> Tensor:
        return ops.gather_rows(self.tables[l], torch.searchsorted(self.positions, positions))

    def stamps(self, positions: Tensor) -> Tensor:
        return self.written[torch.searchsorted(self.positions, positions)]


class SharedHistories(Histories):
    """Tables that all ranks of a host write and read; every rank must make them, and ask for a new table, together."""

    def __init__(
        self, owners: Owners, *, name: str = "h", dtype: torch.dtype | None = None, folder: Path | None = None
    ) -> None:
        world = owners.world
        allocator = SharedMemory(world) if folder is None else SharedFiles(folder, world, owners.shares.several_hosts)
        super().__init__(len(owners.host), allocator, name=name, dtype=dtype)
        self.owners, self.world = owners, world
        self.written = shared_zeros((self.num_rows,), torch.int64, self.world)
        self._by_one(lambda: self.written.fill_(-1))

    def _by_one(self, write: Callable[[], object]) -> None:
        """What one rank of a host does for all of them."""
        if self.world.local_rank == 0:
            write()
        self.world.barrier()

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> None:
        """Not allowed: the positions are those of all hosts, and a table has the rows of one."""

    def complete(self, l: int) -> None:
        self.world.barrier()  # the next layer reads what others wrote

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """Of this host."""
        return super().rows(l, positions - self.owners.host.start)

    def stamps(self, positions: Tensor) -> Tensor:
        return super().stamps(positions - self.owners.host.start)

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        assert not isinstance(at, Tensor), "ranks write whole slabs"
        super().write(l, self._here(at), rows)

    def stamp(self, row_ranges: Sequence[slice], step: int) -> None:
        super().stamp(self._here(row_ranges), step)

    def _here(self, row_ranges: Sequence[slice]) -> list[slice]:
        first = self.owners.host.start
        return [slice(slab.start - first, slab.stop - first) for slab in row_ranges]

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowReader:
        if not self.owners.shares.several_hosts:
            return self
        assert positions is not None, "ranks ask for the rows that they read"
        runs, hosts, host = self.owners.runs(positions), self.owners.shares.hosts, self.owners.host
        far = [rank for rank, other in enumerate(hosts) if other != hosts[self.world.rank]]
        here = ((positions >= host.start) & (positions < host.stop)).nonzero().view(-1)
        asked = self.world.all_to_all(
            [positions[run] if rank in far else positions[:0] for rank, run in enumerate(runs)]
        )

        def pull(table: Tensor) -> Tensor:
            got = self.world.all_to_all([ops.gather_rows(table, ids - host.start) for ids in asked])
            rows = table.new_empty(positions.numel(), *table.shape[1:])
            rows[here] = ops.gather_rows(table, positions[here] - host.start)
            for rank in far:
                rows[runs[rank]] = got[rank]
            return rows

        return Snapshot(positions, {l: pull(self.tables[l]) for l in layers}, pull(self.written), self.step)

    def state_dict(self) -> dict[str, Any]:
        """All rows, in the first rank; the others have none to give."""
        tables = {str(l): self._gather(table) for l, table in self.tables.items()}
        return {"tables": tables, "written": self._gather(self.written), "step": self.step}

    def _gather(self, table: Tensor) -> Tensor:
        own, start = self.owners.own, self.owners.host.start
        rows = table[own.start - start : own.stop - start]
        got = self.world.all_to_all([rows if rank == 0 else rows[:0] for rank in range(self.world.size)])
        return torch.cat([got[rank] for rank in self.owners.order])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        host = slice(self.owners.host.start, self.owners.host.stop)
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            table = self.table(int(l), rows)
            self._by_one(lambda table=table, rows=rows: table.copy_(rows[host]))
        self._by_one(lambda: self.written.copy_(state["written"][host]))
        self.step = state["step"]


@dataclass(frozen=True)
class PartAssignment:
    """Parts divided over ranks: each keeps a run of them, and the ranks of a host keep theirs in one memory."""

    rank: int
    hosts: tuple[int, ...]
    """By rank, its host, counted from 0."""
    parts: tuple[range, ...]
    """By rank, the parts whose rows it keeps; those of a host's ranks follow each other."""

    @classmethod
    def of(cls, world: World, num_parts: int) -> PartAssignment:
        """Every rank must call this."""
        if num_parts < world.size:
            raise ValueError(f"num_parts={num_parts} is less than the {world.size} ranks: make it larger")
        nodes = world.sum([world.node * (rank == world.rank) for rank in range(world.size)])
        known = sorted(set(nodes))
        order = sorted(range(world.size), key=lambda rank: nodes[rank])
        ends = [num_parts * i // world.size for i in range(world.size + 1)]
        parts = [range(ends[i], ends[i + 1]) for i in map(order.index, range(world.size))]
        return cls(world.rank, tuple(known.index(node) for node in nodes), tuple(parts))

    @property
    def several_hosts(self) -> bool:
        return max(self.hosts) > 0

    def parts_of_host(self, host: int) -> range:
        mine = [parts for parts, other in zip(self.parts, self.hosts, strict=True) if other == host]
        return range(min(parts.start for parts in mine), max(parts.stop for parts in mine))
