"""Histories that several ranks share: each host holds the rows of its own ranks' parts.

Positions follow the order of the partition, and each rank owns a run of parts. The runs of a host's ranks
follow each other, so a host holds one range of positions:

    positions   0 ......................... num_nodes
    ranks       | rank 0 | rank 1 | rank 2 | rank 3 |
    memory      |     host 0      |     host 1      |    one table per layer and host, mapped by its ranks

Rows of the own host are read from that memory. Rows of other hosts are fetched from the ranks that own
them, by all-to-all calls. All ranks must make these calls in the same order.
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

    assignment: the parts that each rank owns.
    ptr: [num_parts + 1] int64: the position at which each part begins.
    """

    def __init__(self, world: World, assignment: PartAssignment, ptr: Tensor) -> None:
        self.world = world
        self.assignment = assignment
        self.spans = [range(int(ptr[parts.start]), int(ptr[parts.stop])) for parts in assignment.parts]
        """The positions that each rank owns, by rank."""
        host_parts = assignment.parts_of_host(assignment.hosts[assignment.rank])
        self.host = range(int(ptr[host_parts.start]), int(ptr[host_parts.stop]))
        """The positions of the rows that this host holds."""
        self.order = sorted(range(world.size), key=lambda rank: self.spans[rank].start)

    @property
    def own(self) -> range:
        return self.spans[self.assignment.rank]

    def runs(self, positions: Tensor) -> list[slice]:
        """The slice of `positions` that each rank owns, by rank. positions: [n] int64, ascending."""
        stops = torch.tensor([self.spans[rank].stop for rank in self.order])
        ends = torch.searchsorted(positions, stops).tolist()
        run_of_rank: dict[int, slice] = {}
        start = 0
        for rank, end in zip(self.order, ends, strict=True):
            run_of_rank[rank] = slice(start, end)
            start = end
        return [run_of_rank[rank] for rank in range(self.world.size)]

    def collect(self, positions: Tensor, rows: Tensor) -> Tensor:
        """The sums of all ranks' rows, by position, at the positions that this rank owns. Collective.

        positions: [n] int64, ascending, each once.
        rows: [n, ...]: what this rank adds at each of them.
        """
        runs = self.runs(positions)
        received_positions = self.world.all_to_all([positions[run] for run in runs])
        received_rows = self.world.all_to_all([rows[run] for run in runs])
        total = rows.new_zeros(len(self.own), *rows.shape[1:])
        for rank_positions, rank_rows in zip(received_positions, received_rows, strict=True):
            total.index_add_(0, rank_positions - self.own.start, rank_rows)
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

    All ranks must make them together. The first use of a layer creates its table, and is collective too. No
    row is locked: the barriers of `complete`, and of a historical batch's commit, separate writing from
    reading.
    """

    def __init__(
        self, owners: Owners, *, name: str = "h", dtype: torch.dtype | None = None, folder: Path | None = None
    ) -> None:
        world = owners.world
        allocator = (
            SharedMemory(world) if folder is None else SharedFiles(folder, world, owners.assignment.several_hosts)
        )
        super().__init__(len(owners.host), allocator, name=name, dtype=dtype)
        self.owners = owners
        self.world = world
        self.written = shared_zeros((self.num_rows,), torch.int64, self.world)
        self._run_on_one_rank(lambda: self.written.fill_(-1))

    def _run_on_one_rank(self, write: Callable[[], object]) -> None:
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
        assert not isinstance(at, Tensor), "ranks write row ranges"
        super().write(l, self._to_host_ranges(at), rows)

    def stamp(self, row_ranges: Sequence[slice], step: int) -> None:
        super().stamp(self._to_host_ranges(row_ranges), step)

    def _to_host_ranges(self, row_ranges: Sequence[slice]) -> list[slice]:
        first = self.owners.host.start
        return [slice(row_range.start - first, row_range.stop - first) for row_range in row_ranges]

    def begin_reading(self, layers: Sequence[int], positions: Tensor | None) -> RowReader:
        """A reader of the rows at `positions`: the tables on a single host, else a snapshot. Collective."""
        if not self.owners.assignment.several_hosts:
            return self
        assert positions is not None, "ranks ask for the rows that they read"
        runs = self.owners.runs(positions)
        hosts = self.owners.assignment.hosts
        own_host = hosts[self.world.rank]
        remote_ranks = [rank for rank, host in enumerate(hosts) if host != own_host]
        host_range = self.owners.host
        is_on_host = (positions >= host_range.start) & (positions < host_range.stop)
        host_idx = is_on_host.nonzero().view(-1)
        requests = [positions[run] if rank in remote_ranks else positions[:0] for rank, run in enumerate(runs)]
        requested = self.world.all_to_all(requests)

        # Every rank has learnt which of its rows the others read. Each table then takes one all-to-all of
        # rows.
        def pull(table: Tensor) -> Tensor:
            answers = [ops.gather_rows(table, asked - host_range.start) for asked in requested]
            received = self.world.all_to_all(answers)
            rows = table.new_empty(positions.numel(), *table.shape[1:])
            rows[host_idx] = ops.gather_rows(table, positions[host_idx] - host_range.start)
            for rank in remote_ranks:
                rows[runs[rank]] = received[rank]
            return rows

        return Snapshot(
            positions=positions,
            tables={l: pull(self.tables[l]) for l in layers},
            written=pull(self.written),
            step=self.step,
        )

    def state_dict(self) -> dict[str, Any]:
        """The rows of all hosts in rank 0, for a checkpoint. Empty tensors in the other ranks. Collective."""
        tables = {str(l): self._gather(table) for l, table in self.tables.items()}
        return {"tables": tables, "written": self._gather(self.written), "step": self.step}

    def _gather(self, table: Tensor) -> Tensor:
        """The rows of all ranks in the order of positions, in rank 0; no rows in the others. Collective."""
        own = self.owners.own
        host_start = self.owners.host.start
        rows = table[own.start - host_start : own.stop - host_start]
        received = self.world.all_to_all([rows if rank == 0 else rows[:0] for rank in range(self.world.size)])
        return torch.cat([received[rank] for rank in self.owners.order])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of a checkpoint. Collective: every rank is given the rows of all hosts."""
        host = slice(self.owners.host.start, self.owners.host.stop)
        for l, rows in state["tables"].items():
            self.dtype = self.dtype or rows.dtype
            table = self.table(int(l), rows)
            self._run_on_one_rank(lambda table=table, rows=rows: table.copy_(rows[host]))
        self._run_on_one_rank(lambda: self.written.copy_(state["written"][host]))
        self.step = state["step"]


@dataclass(frozen=True)
class PartAssignment:
    """The parts that each rank owns: a run of parts per rank. The runs of a host's ranks follow each other."""

    rank: int
    hosts: tuple[int, ...]
    """The host of each rank, by rank, counted from 0 without gaps."""
    parts: tuple[range, ...]

    @classmethod
    def of(cls, world: World, num_parts: int) -> PartAssignment:
        """Divide `num_parts` parts evenly over the ranks of `world`. Collective."""
        if num_parts < world.size:
            raise ValueError(f"num_parts={num_parts} is less than the {world.size} ranks: make it larger")
        # Every rank adds the number of its host at its own index: the sum has the numbers of all ranks.
        host_numbers = world.sum([world.node if rank == world.rank else 0 for rank in range(world.size)])
        distinct_hosts = sorted(set(host_numbers))
        hosts = tuple(distinct_hosts.index(number) for number in host_numbers)

        order = sorted(range(world.size), key=lambda rank: host_numbers[rank])
        bounds = [num_parts * i // world.size for i in range(world.size + 1)]
        parts = []
        for rank in range(world.size):
            i = order.index(rank)
            parts.append(range(bounds[i], bounds[i + 1]))
        return cls(world.rank, hosts, tuple(parts))

    @property
    def several_hosts(self) -> bool:
        return max(self.hosts) > 0

    def parts_of_host(self, host: int) -> range:
        """The parts of all ranks of a host: one range, because their runs follow each other."""
        runs = [parts for parts, other in zip(self.parts, self.hosts, strict=True) if other == host]
        return range(min(parts.start for parts in runs), max(parts.stop for parts in runs))
