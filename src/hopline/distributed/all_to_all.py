"""Questions to the owners of rows, and their answers, by all-to-all."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hopline import ops
from hopline.distributed.world import GroupHandle, World, bytes_of_rows
from hopline.util import trace


def rank_and_size(world: World | None = None) -> tuple[int, int]:
    """Which process this is, of how many: of a world, or of torch.distributed."""
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


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
            with self._name_lost_rank():
                self._handle = GroupHandle(dist.new_group(backend="gloo")) if world is None else world.new_group()

    def counts(self, send_counts: Tensor) -> Tensor:
        """[size] how many rows come from each rank, where send_counts[r] go to rank r."""
        return self.send(send_counts[:, None], [1] * self.size, [1] * self.size).view(-1)

    def send(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """What the ranks have for this one, rank after rank: send_counts[r] of the rows go to rank r."""
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        received_bytes = bytes_of_rows(received)
        sent_bytes = bytes_of_rows(rows)
        with self._name_lost_rank():
            dist.all_to_all_single(
                received_bytes, sent_bytes, list(receive_counts), list(send_counts), group=self._group
            )
        num_rows_to_others = rows.size(0) - send_counts[self.rank]
        trace.count("bytes.exchanged", num_rows_to_others * sent_bytes.size(1))
        return received

    def all(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one behind the other."""
        receive_counts = self.counts(torch.full((self.size,), rows.size(0)))
        return self.send(torch.cat([rows] * self.size), [rows.size(0)] * self.size, receive_counts.tolist())

    def max(self, values: Tensor) -> Tensor:
        """The largest over the ranks, one by one."""
        values = values.clone()
        if self.size > 1:
            with self._name_lost_rank():
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def check_same(self, value: bytes, what: str) -> None:
        """Refuse to go on where the ranks differ in something they must have in common."""
        digest = hashlib.blake2b(value, digest_size=8).digest()
        digests = self.all(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        differing = (digests != digests[0]).nonzero().view(-1).tolist()
        if differing:
            raise ValueError(f"rank {differing[0]} and rank 0 differ in {what}: give all ranks the same")

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._handle is not None  # there are other ranks
        return self._handle.group

    @contextmanager
    def _name_lost_rank(self) -> Generator[None]:
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
        num_asked = ends.diff()
        self.channel = channel
        self._num_asked = num_asked.tolist()
        self._num_to_answer = channel.counts(num_asked).tolist()
        self._inverse = torch.empty_like(order)
        self._inverse[order] = torch.arange(order.numel())
        self.rows = channel.send(positions[order], self._num_asked, self._num_to_answer) - ptr[channel.rank]
        """[m] int64: the own rows that the ranks ask this one for."""

    def reply(self, rows: Tensor) -> Tensor:
        """Give one row for each of `rows`; returns those that were asked for."""
        answers = self.channel.send(rows, self._num_to_answer, self._num_asked)
        return ops.gather_rows(answers, self._inverse)

    def reply_lists(self, counts: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Give counts[i] entries of every array for row i; returns (indptr, entries) of those that were asked for."""
        answer_counts = self.channel.send(counts, self._num_to_answer, self._num_asked)
        send_counts = [int(of_rank.sum()) for of_rank in counts.split(self._num_to_answer)]
        receive_counts = [int(of_rank.sum()) for of_rank in answer_counts.split(self._num_asked)]

        starts = torch.cat([answer_counts.new_zeros(1), answer_counts.cumsum(0)])
        indptr, entry_positions = ops.row_positions(starts, self._inverse)
        entries: list[Tensor] = []
        for array in values:
            answers = self.channel.send(array, send_counts, receive_counts)
            entries.append(ops.gather_rows(answers, entry_positions))
        return indptr, entries
