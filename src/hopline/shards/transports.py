"""How rows of a layer's sources reach the shard that aggregates them, and their gradients go back.

A transport serves one `ShardLayout`. Rows arrive in rounds, one part in each, so that a shard need not hold the rows
of all others at once. Every rank must ask for the same exchanges in the same order.
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


FORWARD = "forward"
REFETCH = "refetch"
GRADIENT = "gradient"
DEGREES = "degrees"
MASKS = "masks"

DeferredCalls = list[Callable[[], None]]


class GradientReturn(Protocol):
    """Gradients on their way back to the rows' owners."""

    def buffers(self, k: int) -> list[Tensor]:
        """Zeros, one row per source row of part k, to which its gradients are added."""
        ...

    def push(self, k: int) -> None:
        """Send part k's buffers; they must not be changed any more."""
        ...

    def settle(self) -> None:
        """Wait for the oldest round if `depth` are under way: one less is in memory from here on."""
        ...

    def finish(self) -> list[Tensor]:
        """Gradients of all own rows, when those of every round have arrived."""
        ...


class Transport(ABC):
    """One shard's way to the rows of the others."""

    world: World | None = None
    """The ranks between which rows travel, where it is known."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.traffic: Counter[str] = Counter()
        """Bytes by what they were for; rows that never left their shard do not count."""

    @abstractmethod
    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, deferred: DeferredCalls | None = None
    ) -> Iterator[list[Tensor]]:
        """The source rows of each part in turn. rows: own rows; depth: how many rounds are asked for ahead.

        later: takes what asks for rows ahead, for the caller to call when he has done some of a part.
        """

    @abstractmethod
    def start_return(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        """Collects the gradients of rows that were fetched.

        like: tensors of the shape of the own rows; depth: rounds under way at a time.
        """

    @abstractmethod
    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        """The source rows of all parts, one after the other, in one exchange."""

    @abstractmethod
    def return_all(self, gradient: Tensor) -> Tensor:
        """Own rows' gradients, from those of all parts' source rows, in one exchange."""

    @abstractmethod
    def exchange_masks(self, halo_masks: Sequence[Tensor]) -> list[Tensor]:
        """By round: which of the rows that are sent the receivers still want. of_halos: which are wanted here."""

    def end_step(self) -> None:  # noqa: B027 - most transports remember nothing
        """The step's last gradient has arrived."""

    def with_layout(self, layout: ShardLayout) -> Self:
        """The same way for another layout between the same shards; bytes are counted together."""
        other = copy.copy(self)
        other.layout = layout
        return other

    def count(self, kind: str, tensors: Sequence[Tensor]) -> None:
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.traffic[kind] += num_bytes
        trace.count(f"bytes.{kind}", num_bytes)


class LocalTransport(Transport):
    """Virtual shards in one process: a part's rows are a slice of all rows, and nothing is copied."""

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
        """Part k's rows, as far as its edges read them."""
        self.count(kind, [t[: self.layout.num_read(k)] for t in part])

    def _count_all(self, rows: Tensor, kind: str) -> None:
        for k in range(self.layout.num_shards):
            self.count_read(k, kind, [rows[slice(*self.layout.own_range(k))]])


class _LocalReturn:
    def __init__(self, transport: LocalTransport, like: Sequence[Tensor]) -> None:
        self.transport = transport
        self.totals = [t.new_zeros(t.shape) for t in like]

    def buffers(self, k: int) -> list[Tensor]:
        first, stop = self.transport.layout.own_range(k)
        return [t[first:stop] for t in self.totals]

    def push(self, k: int) -> None:
        self.transport.count_read(k, GRADIENT, self.buffers(k))

    def settle(self) -> None:
        """Nothing is under way."""

    def finish(self) -> list[Tensor]:
        return self.totals


class P2PTransport(Transport):
    """A shard per process: messages between two ranks at a time, in a fixed order, without threads or barriers.

    Tensors on a GPU go through host memory with gloo, and directly with NCCL.

    world: names the rank that stopped where a message fails; without it, the processes of torch.distributed.
    """

    own_group: Any = None

    def __init__(self, layout: ShardLayout, group: Any = None, world: World | None = None) -> None:
        super().__init__(layout)
        self.own_group = group
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
        """The process group of the messages: the one that was given, or the world's; None is torch's default group."""
        if self.own_group is None and self.world is not None:
            return self.world.group
        return self.own_group

    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, deferred: DeferredCalls | None = None
    ) -> Iterator[list[Tensor]]:
        layout = self.layout
        in_transfer = deque[tuple[list[Tensor], list[Any]]]()
        last_requested = 0

        def request_up_to(last: int) -> None:
            nonlocal last_requested
            while last_requested < min(last, layout.num_shards - 1):
                last_requested += 1
                k = last_requested
                sent = [t.index_select(0, layout.sends[k].to(t.device)) for t in rows]
                shapes = [(layout.halos[k].numel(), *t.shape[1:]) for t in rows]
                in_transfer.append(self.post(sent, layout.receiver(k), shapes, layout.sender(k), kind))

        for k in range(layout.num_shards):
            request_up_to(k if deferred is not None else k + depth)
            if deferred is not None and depth:
                deferred.append(partial(request_up_to, k + depth))
            yield list(rows) if k == 0 else self.wait_and_move(rows, *in_transfer.popleft())

    def start_return(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        return P2PReturn(self, like, depth)

    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        layout = self.layout
        sent = [rows.index_select(0, index.to(rows.device)) for index in layout.sends]
        return self._all_to_all(sent, [halo.numel() for halo in layout.halos], kind)

    def return_all(self, gradient: Tensor) -> Tensor:
        layout = self.layout
        sent = list(gradient.split([halo.numel() for halo in layout.halos]))
        counts = [index.numel() for index in layout.sends]
        received = self._all_to_all(sent, counts, GRADIENT, backwards=True)
        total = gradient.new_zeros(layout.num_own, *gradient.shape[1:])
        return total.index_add_(0, torch.cat(layout.sends).to(gradient.device), received)

    def post(
        self, sent: list[Tensor], to: int, shapes: list[tuple[int, ...]], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        """Start one round's messages both ways: (tensors that will be filled, what to wait for)."""
        sent = [self._to_message_device(t).contiguous() for t in sent]
        received = [t.new_empty(shape) for t, shape in zip(sent, shapes, strict=True)]
        self.count(kind, received)
        messages = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t in sent if t.numel()]
        messages += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in received if t.numel()]
        with self.blame_peers():
            return received, dist.batch_isend_irecv(messages) if messages else []

    def wait(self, tensors: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The tensors of a round, when they have arrived."""
        with self.blame_peers():
            for work in works:
                work.wait()
        return tensors

    def wait_and_move(self, rows: Sequence[Tensor], received: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The same, where the own rows are."""
        return [t.to(own_rows.device) for t, own_rows in zip(self.wait(received, works), rows, strict=True)]

    def exchange_masks(self, halo_masks: Sequence[Tensor]) -> list[Tensor]:
        layout = self.layout
        masks = [halo_masks[0]]
        for k in range(1, layout.num_shards):
            shape = (layout.sends[k].numel(),)
            sent = halo_masks[k].to(torch.uint8)
            posted = self.post([sent], layout.sender(k), [shape], layout.receiver(k), MASKS)
            masks.append(self.wait(*posted)[0].bool())
        return masks

    def blame_peers(self) -> AbstractContextManager[None]:
        """Whatever goes wrong inside is another rank's doing, and the world says whose."""
        return nullcontext() if self.world is None else self.world.exchange()

    def _to_message_device(self, rows: Tensor) -> Tensor:
        return rows.cpu() if self.on_host else rows

    def _all_to_all(self, sent: list[Tensor], counts: list[int], kind: str, backwards: bool = False) -> Tensor:
        """Tensors by round to and from all ranks; `backwards`: from the receivers of the rows to their senders."""
        layout = self.layout
        num_shards = layout.num_shards
        to = layout.sender if backwards else layout.receiver
        source = layout.receiver if backwards else layout.sender

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
    k: int
    received: list[Tensor]
    works: list[Any]


class P2PReturn:
    """Gradients that go back by messages, a few rounds at a time."""

    def __init__(self, transport: P2PTransport, like: Sequence[Tensor], depth: int) -> None:
        self.transport = transport
        self.depth = depth
        self.totals = [t.new_zeros(t.shape) for t in like]
        self.part_buffers: list[Tensor] = []
        self.in_transfer = deque[_PostedGradients]()

    def buffers(self, k: int) -> list[Tensor]:
        if k == 0:
            self.part_buffers = self.totals
        else:
            num_rows = self.transport.layout.halos[k].numel()
            self.part_buffers = [t.new_zeros(num_rows, *t.shape[1:]) for t in self.totals]
        return self.part_buffers

    def push(self, k: int) -> None:
        if k == 0:
            return
        self.post(k)
        while len(self.in_transfer) > self.depth:
            self._receive_oldest()

    def post(self, k: int) -> None:
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
        oldest = self.in_transfer.popleft()
        gradients = self.transport.wait(oldest.received, oldest.works)
        rows = self.transport.layout.sends[oldest.k]
        for total, gradient in zip(self.totals, gradients, strict=True):
            total.index_add_(0, rows.to(total.device), gradient.to(total.device))
