"""Rows of other ranks, fetched by all-to-all.

Every row of a sharded array has one owner. A `RowRequest` fetches rows from their owners in two
all-to-alls:

    this rank                        every other rank
    positions  --- RowRequest --->   `rows`: its own rows that were asked for
    answers    <---- reply -------   one answer per asked row

All ranks take part in every call, also those that need no row. A `Channel` carries the messages. It has a
process group of its own, so that a prefetching thread can use it while the main thread sums gradients.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hopline import ops
from hopline.distributed.membership import GroupHandle
from hopline.distributed.world import World, bytes_of_rows
from hopline.util import trace


def rank_and_size(world: World | None = None) -> tuple[int, int]:
    """(rank, number of ranks) of this process, by a world or by torch.distributed. (0, 1) if it is alone."""
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Channel:
    """Collective calls over a process group of its own (gloo, tensors on the host).

    One thread at a time may use a channel. Another thread may use another channel or the world at the same
    time. Every rank makes its channels, and calls the methods of each, in the same order. With one rank
    every call returns the values that it is given.

    world: The ranks. If a call fails, the world names the rank that stopped. None: the processes of
        torch.distributed, and a failure is torch's own error.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.rank, self.size = rank_and_size(world)
        self._handle: GroupHandle | None = None
        if self.size > 1:
            with self._name_lost_rank():
                self._handle = GroupHandle(dist.new_group(backend="gloo")) if world is None else world.new_group()

    def exchange_counts(self, send_counts: Tensor) -> Tensor:
        """[size] int64: rows that each rank will send to this one, which will send `send_counts` to each."""
        one_per_rank = [1] * self.size
        return self.send(send_counts, one_per_rank, one_per_rank)

    def send(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send each rank its part of the rows, and return the rows from all ranks, by rank.

        rows: [n, ...] on the host: send_counts[0] rows for rank 0, then send_counts[1] for rank 1, ...
        receive_counts: rows that come from each rank, as `exchange_counts` returns them.
        """
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

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank. Ranks may have different numbers of rows."""
        receive_counts = self.exchange_counts(torch.full((self.size,), rows.size(0)))
        return self.send(torch.cat([rows] * self.size), [rows.size(0)] * self.size, receive_counts.tolist())

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks."""
        values = values.clone()
        if self.size > 1:
            with self._name_lost_rank():
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of every rank, by rank. Ranks may have different numbers of them."""
        counts = self.exchange_counts(torch.full((self.size,), len(content))).tolist()
        rows = torch.frombuffer(bytearray(content * self.size), dtype=torch.uint8)
        received = self.send(rows, [len(content)] * self.size, counts)
        return [piece.numpy().tobytes() for piece in received.split(counts)]

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._handle is not None  # None only if this rank is alone
        return self._handle.group

    @contextmanager
    def _name_lost_rank(self) -> Generator[None]:
        """A context in which a failed call raises a `PeerError` that names the lost rank, given a world."""
        if self.world is None:
            yield
        else:
            with self.world.collective_call():
                yield


class RowRequest:
    """Rows that this rank asks of their owners.

    Every rank makes its request in the same call, perhaps for no row.

    ptr: [size + 1] int64. Rank r owns positions ptr[r] .. ptr[r + 1] - 1.
    positions: [n] int64. Answers come back in this order.
    """

    def __init__(self, channel: Channel, ptr: Tensor, positions: Tensor) -> None:
        owners = torch.bucketize(positions, ptr[1:-1], right=True)
        owner_ptr, order = ops.group_by_key(owners, channel.size)
        num_asked = owner_ptr.diff()
        self.channel = channel
        self._num_asked = num_asked.tolist()
        """[size]: rows that this rank asks of each rank."""
        self._num_to_answer = channel.exchange_counts(num_asked).tolist()
        """[size]: rows that each rank asks of this one."""
        # Requests are sent sorted by owner, so answers arrive in that order too: answer i belongs to
        # positions[order[i]]. The inverse permutation brings them back into the order of `positions`.
        self._inverse = torch.empty_like(order)
        self._inverse[order] = torch.arange(order.numel())
        self.rows = channel.send(positions[order], self._num_asked, self._num_to_answer) - ptr[channel.rank]
        """[m] int64: rows that the ranks ask of this one, by rank. 0 is the first row that it owns."""

    def reply(self, rows: Tensor) -> Tensor:
        """[n, ...], in the order of `positions`: the rows that this rank asked for.

        rows: [m, ...] on the host: a row for each of `self.rows`.
        """
        answers = self.channel.send(rows, self._num_to_answer, self._num_asked)
        return ops.gather_rows(answers, self._inverse)

    def reply_lists(self, counts: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Send a list of entries for each of `self.rows`, and return the lists that this rank asked for.

        counts: [m] int64, entries of each row.
        values: Arrays [counts.sum(), ...] with the entries of all rows, one row after the other.
        Returns (indptr, entries): for position i, entries[k][indptr[i] : indptr[i + 1]] of each array k.
        """
        answer_counts = self.channel.send(counts, self._num_to_answer, self._num_asked)
        send_counts = [int(rank_counts.sum()) for rank_counts in counts.split(self._num_to_answer)]
        receive_counts = [int(rank_counts.sum()) for rank_counts in answer_counts.split(self._num_asked)]

        starts = torch.cat([answer_counts.new_zeros(1), answer_counts.cumsum(0)])
        indptr, entry_positions = ops.row_entries(starts, self._inverse)
        entries: list[Tensor] = []
        for array in values:
            answers = self.channel.send(array, send_counts, receive_counts)
            entries.append(ops.gather_rows(answers, entry_positions))
        return indptr, entries
