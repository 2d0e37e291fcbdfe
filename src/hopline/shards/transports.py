"""Transports: how source rows reach the shards that aggregate them, and how their gradients come back.

Rows travel in rounds (`ShardLayout`). In round k every shard sends rows to shard rank + k and receives from
shard rank - k, modulo the number of shards. With three shards:

              round 0     round 1              round 2
    shard 0   own rows    to 1, from 2         to 2, from 1
    shard 1   own rows    to 2, from 0         to 0, from 2
    shard 2   own rows    to 0, from 1         to 1, from 0

A shard's edges are divided into *parts* by the owner of their source: part k reads the rows of round k.
These rows can be dropped before those of round k + 1 arrive, so a shard need not hold the rows of all others
at once. Gradients of these rows go back in a round of the same number, from the receiver of the rows to
their sender.

    fetch, start_return         round by round, with some rounds in transfer while others are computed on
    fetch_all, return_all       all rounds in one all-to-all

There are no tags, no threads and no barriers: messages between two ranks match by their order alone. So all
ranks must call the methods of their transports in the same order, backward passes included.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hopline.util import trace

if TYPE_CHECKING:
    from hopline.distributed.world import World
    from hopline.shards.layout import ShardLayout

# ---- kinds of messages. Bytes are counted by kind, as `bytes.KIND` in a run's report.

FORWARD = "forward"
"""Source rows in forward."""
REFETCH = "refetch"
"""Source rows that backward fetches again."""
GRADIENT = "gradient"
"""Gradients of source rows, on their way back."""
DEGREES = "degrees"
"""Inverse square roots of degrees, for the norm of GCN."""
MASKS = "masks"
"""Masks of the rows that a trimmed layer still reads."""

DeferredCalls = list[Callable[[], None]]
"""Requests for rows that the caller of `fetch` sends off itself, when it has memory for the rows."""


class GradientReturn(Protocol):
    """Gradients of fetched rows on their way back to the rows' owners.

    For each part in turn the caller calls `buffers` and then `push`. One object serves one backward pass,
    in one thread.
    """

    def buffers(self, k: int) -> list[Tensor]:
        """By tensor: [halo size of part k, ...], to which the caller adds the gradients of part k.

        Buffers of another rank's rows begin as zeros. Buffers of own rows are the totals or slices of them,
        which may already hold gradients.
        """
        ...

    def push(self, k: int) -> None:
        """Send the buffers of part k. The caller must not change them any more."""
        ...

    def settle(self) -> None:
        """Wait for the oldest rounds until fewer than `depth` are in transfer, or none if `depth` is 0.

        `push` leaves up to `depth` rounds in transfer. Backward calls `settle` before it requests rows of later
        parts, so that gradients in transfer take less memory by then.
        """
        ...

    def finish(self) -> list[Tensor]:
        """By tensor: [num_own, ...], the gradients of the own rows. Waits for all rounds."""
        ...


class Transport(ABC):
    """Moves rows between one shard and the others. It belongs to one `ShardLayout`.

    Not thread-safe: one thread at a time calls it.
    """

    world: World | None = None
    """The ranks, one per shard. None for virtual shards in one process, and for a
    `P2PTransport` that was given no world."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.traffic: Counter[str] = Counter()
        """Bytes by kind of message.

        Between ranks: the bytes that this rank receives. Own rows do not travel and are not counted. Virtual
        shards count otherwise (`LocalTransport`)."""

    @abstractmethod
    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, deferred: DeferredCalls | None = None
    ) -> Iterator[list[Tensor]]:
        """Yield the source rows of each part in turn: by tensor, [halo size of part k, ...].

        rows: by tensor, [num_own, ...], the own rows.
        kind: label under which the bytes are counted.
        depth: rounds that are in transfer while the caller computes on the one that was yielded.
        deferred: if not None, requests for rounds ahead are appended to this list instead of being sent.
            The caller sends them off by calling them. A round that was not requested ahead is requested
            when its turn comes.
        """

    @abstractmethod
    def start_return(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        """Begin to collect the gradients of rows that were fetched.

        like: tensors in shape and dtype of the own rows; their values are not read.
        depth: rounds of gradients that may be in transfer at a time.
        """

    @abstractmethod
    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        """[sum of halo sizes, ...]: the source rows of all parts, part after part, by one all-to-all.

        rows: [num_own, ...].
        """

    @abstractmethod
    def return_all(self, gradient: Tensor) -> Tensor:
        """[num_own, ...]: gradients of the own rows, summed over the shards that read them. One all-to-all.

        gradient: [sum of halo sizes, ...], in the order of `fetch_all`.
        """

    @abstractmethod
    def exchange_masks(self, halo_masks: Sequence[Tensor]) -> list[Tensor]:
        """Tell every shard which of its rows this one still reads, and learn the same from the others.

        halo_masks: by round, [halo size] bool, the rows of the halo that this shard reads.
        Returns by round, [number of rows sent] bool, the rows of `layout.sends` that the receiver reads.
        """

    def end_step(self) -> None:  # noqa: B027 - most transports keep no figures of a step
        """Called when the step's last gradient has arrived.

        `HalfPrecisionTransport` reports the step's rounding errors, and begins a new sum.
        """

    def with_layout(self, layout: ShardLayout) -> Self:
        """A transport for another layout of the same shards. Both count bytes in the same `traffic`."""
        other = copy.copy(self)
        other.layout = layout
        return other

    def count(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """Count the bytes of tensors, here and as a counter of the run."""
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.traffic[kind] += num_bytes
        trace.count(f"bytes.{kind}", num_bytes)


class LocalTransport(Transport):
    """Virtual shards in one process: the rows of a part are a slice of all rows, and nothing is copied.

    `traffic` counts, for each part, the rows that its edges read. Ranks count a row once for each
    other shard that receives it, and no own rows. So the two figures cannot be compared.
    """

    def __init__(self, layout: ShardLayout) -> None:
        super().__init__(layout)
        if layout.num_shards > 1 and not layout.virtual:
            raise ValueError(
                f"shard {layout.rank} of {layout.num_shards} needs rows of the others: use P2PTransport, or a layout "
                "by virtual_layout, in which all shards are in one process"
            )

    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, deferred: DeferredCalls | None = None
    ) -> Iterator[list[Tensor]]:
        for k in range(self.layout.num_shards):
            first, stop = self.layout.own_range(k)
            part = [t[first:stop] for t in rows]
            self.count_read(k, kind, part)
            yield part

    def start_return(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        return _LocalReturn(self, like)

    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        self._count_all(rows, kind)
        return rows

    def return_all(self, gradient: Tensor) -> Tensor:
        self._count_all(gradient, GRADIENT)
        return gradient

    def exchange_masks(self, halo_masks: Sequence[Tensor]) -> list[Tensor]:
        return list(halo_masks)

    def count_read(self, k: int, kind: str, part: Sequence[Tensor]) -> None:
        """Count the rows of part k that its edges read. All rows have equally many bytes: the first stand for them."""
        self.count(kind, [t[: self.layout.num_read(k)] for t in part])

    def _count_all(self, rows: Tensor, kind: str) -> None:
        for k in range(self.layout.num_shards):
            self.count_read(k, kind, [rows[slice(*self.layout.own_range(k))]])


class _LocalReturn:
    """The `GradientReturn` of virtual shards: the buffers are slices of the totals."""

    def __init__(self, transport: LocalTransport, like: Sequence[Tensor]) -> None:
        self.transport = transport
        self.totals = [t.new_zeros(t.shape) for t in like]

    def buffers(self, k: int) -> list[Tensor]:
        first, stop = self.transport.layout.own_range(k)
        return [t[first:stop] for t in self.totals]

    def push(self, k: int) -> None:
        self.transport.count_read(k, GRADIENT, self.buffers(k))

    def settle(self) -> None:
        """Nothing is in transfer."""

    def finish(self) -> list[Tensor]:
        return self.totals


class P2PTransport(Transport):
    """A shard per process: messages between two ranks at a time, in a fixed order.

    With gloo, tensors on a GPU go through host memory. With NCCL they go directly.

    world: the ranks. An error then names the rank that stopped. Default: those of torch's default group.
    """

    def __init__(self, layout: ShardLayout, world: World | None = None) -> None:
        super().__init__(layout)
        self.world = world
        size = dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        if size != layout.num_shards or rank != layout.rank:
            raise ValueError(
                f"shard {layout.rank} of {layout.num_shards} is open on rank {rank} of {size}: "
                "start as many ranks as there are shards"
            )
        self.on_host = dist.get_backend(self.group) == "gloo"

    @property
    def group(self) -> Any:
        """The process group of the messages. None is torch's default group."""
        return None if self.world is None else self.world.group

    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, deferred: DeferredCalls | None = None
    ) -> Iterator[list[Tensor]]:
        layout = self.layout
        in_transfer = deque[tuple[list[Tensor], list[Any]]]()
        last_requested = 0  # round 0 are the own rows, which need no request

        def request_up_to(last: int) -> None:
            """Post the messages of all rounds up to `last` that were not posted yet."""
            nonlocal last_requested
            while last_requested < min(last, layout.num_shards - 1):
                last_requested += 1
                k = last_requested
                sent = [t.index_select(0, layout.sends[k].to(t.device)) for t in rows]
                shapes = [(layout.halos[k].numel(), *t.shape[1:]) for t in rows]
                in_transfer.append(self.post(sent, layout.receiver(k), shapes, layout.sender(k), kind))

        for k in range(layout.num_shards):
            # Without `deferred`, rounds up to k + depth are requested now. With it, rounds up to k are, and
            # the caller gets a call that requests those up to k + depth.
            request_up_to(k if deferred is not None else k + depth)
            if deferred is not None and depth:
                deferred.append(partial(request_up_to, k + depth))
            # The rows have no name here, so that they are freed as soon as the caller drops them.
            yield list(rows) if k == 0 else self.wait_and_move(rows, *in_transfer.popleft())

    def start_return(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        return P2PReturn(self, like, depth)

    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        layout = self.layout
        # sends[0] and halos[0] are all own rows: the all-to-all hands them back to this rank.
        sent = [rows.index_select(0, index.to(rows.device)) for index in layout.sends]
        return self._all_to_all(sent, [halo.numel() for halo in layout.halos], kind)

    def return_all(self, gradient: Tensor) -> Tensor:
        layout = self.layout
        sent = list(gradient.split([halo.numel() for halo in layout.halos]))
        counts = [index.numel() for index in layout.sends]
        received = self._all_to_all(sent, counts, GRADIENT, backwards=True)
        # A row that several shards read gets a gradient from each. sends[0] are all own rows.
        total = gradient.new_zeros(layout.num_own, *gradient.shape[1:])
        return total.index_add_(0, torch.cat(layout.sends).to(gradient.device), received)

    def post(
        self, sent: list[Tensor], to: int, shapes: list[tuple[int, ...]], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        """Start the messages of one round, in both directions. Does not wait.

        sent: tensors for rank `to`.
        shapes: of the tensors that rank `source` sends, in the same order and of the same dtypes.

        Returns (the tensors that will be filled, handles with `wait()`). Tensors without elements are not
        sent.
        """
        sent = [self._to_message_device(t).contiguous() for t in sent]
        received = [t.new_empty(shape) for t, shape in zip(sent, shapes, strict=True)]
        self.count(kind, received)
        messages = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t in sent if t.numel()]
        messages += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in received if t.numel()]
        with self.blame_peers():
            return received, (dist.batch_isend_irecv(messages) if messages else [])

    def wait(self, tensors: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The tensors of a round, after they have arrived. Takes what `post` returns."""
        with self.blame_peers():
            for work in works:
                work.wait()
        return tensors

    def wait_and_move(self, rows: Sequence[Tensor], received: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The tensors of a round, after they have arrived, each moved to the device of the own rows."""
        return [t.to(own_rows.device) for t, own_rows in zip(self.wait(received, works), rows, strict=True)]

    def exchange_masks(self, halo_masks: Sequence[Tensor]) -> list[Tensor]:
        layout = self.layout
        masks = [halo_masks[0]]
        for k in range(1, layout.num_shards):
            # Backwards, from the receiver of rows to their sender.
            shape = (layout.sends[k].numel(),)
            sent = halo_masks[k].to(torch.uint8)
            posted = self.post([sent], layout.sender(k), [shape], layout.receiver(k), MASKS)
            masks.append(self.wait(*posted)[0].bool())
        return masks

    def blame_peers(self) -> AbstractContextManager[None]:
        """A context in which the error of a failed message names the rank at fault, if `world` is known."""
        return nullcontext() if self.world is None else self.world.collective_call()

    def _to_message_device(self, rows: Tensor) -> Tensor:
        return rows.cpu() if self.on_host else rows

    def _all_to_all(self, sent: list[Tensor], counts: list[int], kind: str, backwards: bool = False) -> Tensor:
        """The tensors that all ranks send to this one, in the order of rounds, by one all-to-all.

        sent: by round, the tensor for that round's peer.
        counts: by round, the number of rows that come from that round's peer.
        backwards: whether tensors go from the receivers of rows to their senders, as gradients do.
        """
        layout = self.layout
        num_shards = layout.num_shards
        to = layout.sender if backwards else layout.receiver
        source = layout.receiver if backwards else layout.sender

        # torch wants tensors in the order of ranks, and callers have them in the order of rounds.
        outgoing = [self._to_message_device(sent[k]) for k in sorted(range(num_shards), key=to)]
        incoming_rounds = sorted(range(num_shards), key=source)
        sizes = [counts[k] for k in incoming_rounds]
        incoming = outgoing[0].new_empty(sum(sizes), *sent[0].shape[1:])
        splits = [t.size(0) for t in outgoing]
        with self.blame_peers():
            dist.all_to_all_single(incoming, torch.cat(outgoing), sizes, splits, group=self.group)

        by_round = dict(zip(incoming_rounds, incoming.split(sizes), strict=True))
        self.count(kind, [by_round[k] for k in range(1, num_shards)])
        return torch.cat([by_round[k] for k in range(num_shards)]).to(sent[0].device)


class _PostedGradients(NamedTuple):
    """Messages of one round of gradients."""

    k: int
    received: list[Tensor]
    """By tensor: [number of rows sent in round k, ...], to be filled with their gradients."""
    works: list[Any]


class P2PReturn:
    """The `GradientReturn` of ranks. After each `push`, at most `depth` rounds are in transfer."""

    def __init__(self, transport: P2PTransport, like: Sequence[Tensor], depth: int) -> None:
        self.transport = transport
        self.depth = depth
        self.totals = [t.new_zeros(t.shape) for t in like]
        """By tensor: [num_own, ...], the gradients of the own rows that have arrived so far."""
        self.part_buffers: list[Tensor] = []
        """The buffers of the part at hand, until they are pushed."""
        self.in_transfer = deque[_PostedGradients]()

    def buffers(self, k: int) -> list[Tensor]:
        if k == 0:
            # Gradients of own rows need not travel: they are added to the totals directly.
            self.part_buffers = self.totals
        else:
            num_rows = self.transport.layout.halos[k].numel()
            self.part_buffers = [t.new_zeros(num_rows, *t.shape[1:]) for t in self.totals]
        return self.part_buffers

    def push(self, k: int) -> None:
        if k == 0:
            return
        self.post(k)
        # At most `depth` rounds stay in transfer. `settle` leaves one fewer.
        while len(self.in_transfer) > self.depth:
            self._receive_oldest()

    def post(self, k: int) -> None:
        """Start round k's messages: buffers to the rows' sender, own gradients from their receiver."""
        layout = self.transport.layout
        shapes = [(layout.sends[k].numel(), *t.shape[1:]) for t in self.totals]
        posted = self.transport.post(self.part_buffers, layout.sender(k), shapes, layout.receiver(k), GRADIENT)
        self.in_transfer.append(_PostedGradients(k, *posted))
        self.part_buffers = []

    def settle(self) -> None:
        while len(self.in_transfer) >= max(1, self.depth):
            self._receive_oldest()

    def finish(self) -> list[Tensor]:
        while self.in_transfer:
            self._receive_oldest()
        return self.totals

    def _receive_oldest(self) -> None:
        """Wait for the oldest round, and add its gradients to the totals of the rows that it sent."""
        oldest = self.in_transfer.popleft()
        gradients = self.transport.wait(oldest.received, oldest.works)
        rows = self.transport.layout.sends[oldest.k]
        for total, gradient in zip(self.totals, gradients, strict=True):
            total.index_add_(0, rows.to(total.device), gradient.to(total.device))
