"""Questions to the owners of rows, and their answers, by all-to-all."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hopline import ops
from hopline.distributed.world import GroupHandle, World
from hopline.util import trace


def rank_and_size(world: World | None = None) -> tuple[int, int]:
    """Which process this is, of how many: of a world, or of torch.distributed."""
    if world is not None:
        return world.rank, world.size
    grouped = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)


class Channel:
    """All-to-all between the ranks, apart from all else that they say to each other.

    It has a process group of its own (gloo, on the host), so that a thread can prepare batches while the main thread
    sums gradients. Every rank makes its channels, and uses each of them, in the same order.

    world: names the rank that stopped where an exchange fails; without it, the processes of torch.distributed.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.rank, self.size = rank_and_size(world)
        self._handle: GroupHandle | None = None
        if self.size > 1:
            with self._guarded():
                self._handle = GroupHandle(dist.new_group(backend="gloo")) if world is None else world.new_group()

    def counts(self, giving: Tensor) -> Tensor:
        """[size] how many rows come from each rank, where giving[r] go to rank r."""
        return self.send(giving[:, None], [1] * self.size, [1] * self.size).view(-1)

    def send(self, rows: Tensor, giving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """What the ranks have for this one, rank after rank: giving[r] of the rows go to rank r."""
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        got = rows.new_empty((sum(coming), *rows.shape[1:]))
        received, given = (t[:, None].flatten(1).view(torch.uint8) for t in (got, rows))
        with self._guarded():
            dist.all_to_all_single(received, given, list(coming), list(giving), group=self._group)
        trace.count("bytes.exchanged", (rows.size(0) - giving[self.rank]) * given.size(1))
        return got

    def all(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one behind the other."""
        coming = self.counts(torch.full((self.size,), rows.size(0)))
        return self.send(torch.cat([rows] * self.size), [rows.size(0)] * self.size, coming.tolist())

    def max(self, values: Tensor) -> Tensor:
        """The largest over the ranks, one by one."""
        values = values.clone()
        if self.size > 1:
            with self._guarded():
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def check_same(self, value: bytes, what: str) -> None:
        """Refuse to go on where the ranks differ in something they must have in common."""
        digest = hashlib.blake2b(value, digest_size=8).digest()
        found = self.all(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        differing = (found != found[0]).nonzero().view(-1).tolist()
        if differing:
            raise ValueError(f"rank {differing[0]} and rank 0 differ in {what}: give all ranks the same")

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._handle is not None  # there are other ranks
        return self._handle.group

    @contextmanager
    def _guarded(self) -> Generator[None]:
        if self.world is None:
            yield
        else:
            with self.world.exchange():
                yield


class RowRequest:
    """Rows asked of their owners: every rank asks at once, some perhaps for none.

    positions: [n] int64, rank r owning ptr[r] .. ptr[r + 1] - 1. Answers come back in the order of `positions`.
    """

    def __init__(self, channel: Channel, ptr: Tensor, positions: Tensor) -> None:
        owners = torch.bucketize(positions, ptr[1:-1], right=True)
        ends, order = ops.group_edges(owners, channel.size)
        self.channel = channel
        self._asked = ends.diff().tolist()
        self._heard = channel.counts(ends.diff()).tolist()
        self._back = torch.empty_like(order)
        self._back[order] = torch.arange(order.numel())
        self.rows = channel.send(positions[order], self._asked, self._heard) - ptr[channel.rank]
        """[m] int64: the own rows that the ranks ask this one for."""

    def reply(self, rows: Tensor) -> Tensor:
        """Give one row for each of `rows`; returns those that were asked for."""
        return ops.gather_rows(self.channel.send(rows, self._heard, self._asked), self._back)

    def reply_lists(self, counts: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Give counts[i] entries of every array for row i; returns (indptr, entries) of those that were asked for."""
        got = self.channel.send(counts, self._heard, self._asked)
        giving, coming = _totals(counts, self._heard), _totals(got, self._asked)
        starts = torch.cat([got.new_zeros(1), got.cumsum(0)])
        indptr, positions = ops.row_positions(starts, self._back)
        return indptr, [ops.gather_rows(self.channel.send(v, giving, coming), positions) for v in values]


def _totals(counts: Tensor, sizes: Sequence[int]) -> list[int]:
    return [int(piece.sum()) for piece in counts.split(list(sizes))]
