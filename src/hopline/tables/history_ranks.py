"""Histories that several ranks share: each host holds the rows of its own ranks' parts.

Positions follow the order of the partition, and each rank owns a run of parts. The runs of a host's ranks follow each
other, so a host holds one range of positions:

    positions   0 ......................... num_nodes
    ranks       | rank 0 | rank 1 | rank 2 | rank 3 |
    memory      |     host 0      |     host 1      |    one table per layer and host, mapped by all ranks of the host

Rows of the own host are read from that memory. Rows of other hosts are fetched from the ranks that own them, by
all-to-all calls. All ranks must make these calls in the same order.
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
    """Which rank owns the row at a position, and which positions this host holds.

    ptr: [num_parts + 1] int64: the position at which each part begins.
    """

    def __init__(self, world: World, shares: PartAssignment, ptr: Tensor) -> None:
        self.world, self.shares = world, shares
        self.spans = [range(int(ptr[parts.start]), int(ptr[parts.stop])) for parts in shares.parts]
        """The positions that each rank owns, by rank."""
        host = shares.parts_of_host(shares.hosts[shares.rank])
        self.host = range(int(ptr[host.start]), int(ptr[host.stop]))
        """The positions of the rows that this host holds."""
        self.order = sorted(range(world.size), key=lambda rank: self.spans[rank].start)
        """The ranks in the order of their positions."""

    @property
    def own(self) -> range:
        """The positions that this rank owns."""
        return self.spans[self.shares.rank]

    def runs(self, positions: Tensor) -> list[slice]:
        """The slice of `positions` that each rank owns, by rank. positions: [n] int64, ascending."""
        ends = torch.searchsorted(positions, torch.tensor([self.spans[rank].stop for rank in self.order])).tolist()
        found = {rank: slice(*ends) for rank, *ends in zip(self.order, [0, *ends[:-1]], ends, strict=True)}
        return [found[rank] for rank in range(self.world.size)]

    def collect(self, positions: Tensor, rows: Tensor) -> Tensor:
        """The sums of all ranks' rows, by position, at the positions that this rank owns. Collective.

        positions: [n] int64, ascending, each once.
        rows: [n, ...]: what this rank adds at each of them.
        """
        runs = self.runs(positions)
        theirs = self.world.all_to_all([positions[run] for run in runs])
        total = rows.new_zeros(len(self.own), *rows.shape[1:])
        for at, what in zip(theirs, self.world.all_to_all([rows[run] for run in runs]), strict=True):
            total.index_add_(0, at - self.own.start, what)
        return total


@dataclass(frozen=True, eq=False)
class Snapshot(RowReader):
    """Copies of the rows at some positions, as they were when all ranks called `begin_reading`.

    Only positions that are in the snapshot may be read: it does not check them.
    """

    positions: Tensor
    """[n] int64, ascending, each once."""
    tables: Mapping[int, Tensor]
    """The rows at `positions` by layer, each [n, ...]."""
    written: Tensor
    """[n] int64: the step whose commit wrote each row; -1 if none did."""
    step: int
    """Number of steps that were committed at that time."""

    def rows(self, l: int, positions: Tensor) -> Tensor:
        return ops.gather_rows(self.tables[l], torch.searchsorted(self.positions, positions))

    def stamps(self, positions: Tensor) -> Tensor:
        return self.written[torch.searchsorted(self.positions, positions)]


class SharedHistories(Histories):
    """Histories in memory that all ranks of a host write and read.

    Making them is collective, and so is the first use of a layer, which creates its table: all ranks must do so
    together. Barriers separate writing from reading: that of `complete`, and those of the work when it commits. So no
    row is locked.
    """

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
        """Call `write` in one rank of each host, and let the others wait until it is done. Collective."""
        if self.world.local_rank == 0:
            write()
        self.world.barrier()

    def in_place(self, l: int, device: torch.device, dtype: torch.dtype) -> None:
        """None, always: positions count over all hosts, but a table holds the rows of one host."""

    def complete(self, l: int) -> None:
        self.world.barrier()  # the next layer reads rows that other ranks wrote

    def rows(self, l: int, positions: Tensor) -> Tensor:
        """The rows at `positions` after layer `l`. All positions must be on this host."""
        return super().rows(l, positions - self.owners.host.start)

    def stamps(self, positions: Tensor) -> Tensor:
        return super().stamps(positions - self.owners.host.start)

    def write(self, l: int, at: At, rows: Tensor, computed: Any = None) -> None:
        assert not isinstance(at, Tensor), "ranks write whole slabs"
        super().write(l, self._here(at), rows)

    def stamp(self, row_ranges: Sequence[slice], step: int) -> None:
        super().stamp(self._here(row_ranges), step)

    def _here(self, row_ranges: Sequence[slice]) -> list[slice]:
        """Row ranges of this host's tables, for row ranges of positions."""
        first = self.owners.host.start
        return [slice(slab.start - first, slab.stop - first) for slab in row_ranges]

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowReader:
        """A reader of the rows at `positions`: the tables on a single host, else a snapshot. Collective."""
        if not self.owners.shares.several_hosts:
            return self
        assert positions is not None, "ranks ask for the rows that they read"
        runs, hosts, host = self.owners.runs(positions), self.owners.shares.hosts, self.owners.host
        far = [rank for rank, other in enumerate(hosts) if other != hosts[self.world.rank]]
        here = ((positions >= host.start) & (positions < host.stop)).nonzero().view(-1)
        asked = self.world.all_to_all(
            [positions[run] if rank in far else positions[:0] for rank, run in enumerate(runs)]
        )

        # Every rank has learnt which of its rows the others read. Each table then takes one all-to-all of rows.
        def pull(table: Tensor) -> Tensor:
            got = self.world.all_to_all([ops.gather_rows(table, ids - host.start) for ids in asked])
            rows = table.new_empty(positions.numel(), *table.shape[1:])
            rows[here] = ops.gather_rows(table, positions[here] - host.start)
            for rank in far:
                rows[runs[rank]] = got[rank]
            return rows

        return Snapshot(positions, {l: pull(self.tables[l]) for l in layers}, pull(self.written), self.step)

    def state_dict(self) -> dict[str, Any]:
        """All rows of all hosts in rank 0, for a checkpoint, and empty tensors in the other ranks. Collective."""
        tables = {str(l): self._gather(table) for l, table in self.tables.items()}
        return {"tables": tables, "written": self._gather(self.written), "step": self.step}

    def _gather(self, table: Tensor) -> Tensor:
        """The rows of all ranks in the order of positions, in rank 0; no rows in the others. Collective."""
        own, start = self.owners.own, self.owners.host.start
        rows = table[own.start - start : own.stop - start]
        got = self.world.all_to_all([rows if rank == 0 else rows[:0] for rank in range(self.world.size)])
        return torch.cat([got[rank] for rank in self.owners.order])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of a checkpoint. Collective: every rank is given the rows of all hosts."""
        host = slice(self.owners.host.start, self.owners.host.stop)
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            table = self.table(int(l), rows)
            self._by_one(lambda table=table, rows=rows: table.copy_(rows[host]))
        self._by_one(lambda: self.written.copy_(state["written"][host]))
        self.step = state["step"]


@dataclass(frozen=True)
class PartAssignment:
    """The parts that each rank owns: a run of parts per rank. The runs of a host's ranks follow each other."""

    rank: int
    """This rank."""
    hosts: tuple[int, ...]
    """The host of each rank, by rank, counted from 0 without gaps."""
    parts: tuple[range, ...]
    """The parts that each rank owns, by rank."""

    @classmethod
    def of(cls, world: World, num_parts: int) -> PartAssignment:
        """Divide `num_parts` parts evenly over the ranks of `world`. Collective."""
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
        """The parts of all ranks of a host: one range, because their runs follow each other."""
        mine = [parts for parts, other in zip(self.parts, self.hosts, strict=True) if other == host]
        return range(min(parts.start for parts in mine), max(parts.stop for parts in mine))
