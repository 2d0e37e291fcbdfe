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
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hopline.util import trace

if TYPE_CHECKING:
    from hopline.distributed.world import World
    from hopline.shards.layout import ShardLayout

FORWARD, REFETCH, GRADIENT, DEGREES, MASKS = "forward", "refetch", "gradient", "degrees", "masks"
"""What the bytes of an exchange are for."""
DeferredCall = list[Callable[[], None]]
"""What is put off until there is room for it."""


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
        self, rows: Sequence[Tensor], kind: str, depth: int, later: DeferredCall | None = None
    ) -> Iterator[list[Tensor]]:
        """The source rows of each part in turn. rows: own rows; depth: how many rounds are asked for ahead.

        later: takes what asks for rows ahead, for the caller to call when he has done some of a part.
        """

    @abstractmethod
    def returns(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
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
    def still_wanted(self, of_halos: Sequence[Tensor]) -> list[Tensor]:
        """By round: which of the rows that are sent the receivers still want. of_halos: which are wanted here."""

    def end_step(self) -> None:  # noqa: B027 - most transports remember nothing
        """The step's last gradient has arrived."""

    def on(self, layout: ShardLayout) -> Self:
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
        self, rows: Sequence[Tensor], kind: str, depth: int, later: DeferredCall | None = None
    ) -> Iterator[list[Tensor]]:
        for k in range(self.layout.num_shards):
            first, stop = self.layout.own_range(k)
            part = [t[first:stop] for t in rows]
            self.count_read(k, kind, part)
            yield part

    def returns(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        return _LocalReturns(self, like)

    def fetch_all(self, rows: Tensor, kind: str) -> Tensor:
        self._count_all(rows, kind)
        return rows

    def return_all(self, gradient: Tensor) -> Tensor:
        self._count_all(gradient, GRADIENT)
        return gradient

    def still_wanted(self, of_halos: Sequence[Tensor]) -> list[Tensor]:
        return list(of_halos)

    def count_read(self, k: int, kind: str, part: Sequence[Tensor]) -> None:
        """Part k's rows, as far as its edges read them."""
        self.count(kind, [t[: self.layout.num_read(k)] for t in part])

    def _count_all(self, rows: Tensor, kind: str) -> None:
        for k in range(self.layout.num_shards):
            self.count_read(k, kind, [rows[slice(*self.layout.own_range(k))]])


class _LocalReturns:
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
        self.own_group, self.world = group, world
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if size != layout.num_shards or rank != layout.rank:
            raise ValueError(
                f"shard {layout.rank} of {layout.num_shards} is open on rank {rank} of {size}: "
                "start as many ranks as there are shards"
            )
        self.on_host = dist.get_backend(self.group) == "gloo"

    @property
    def group(self) -> Any:
        """The process group of the messages: the one that was given, or the world's; None is torch's default group."""
        return self.world.group if self.own_group is None and self.world is not None else self.own_group

    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, later: DeferredCall | None = None
    ) -> Iterator[list[Tensor]]:
        layout, posted, asked = self.layout, deque[tuple[list[Tensor], list[Any]]](), 0

        def ask(last: int) -> None:
            nonlocal asked
            while asked < min(last, layout.num_shards - 1):
                asked += 1
                sent = [t.index_select(0, layout.sends[asked].to(t.device)) for t in rows]
                shapes = [(layout.halos[asked].numel(), *t.shape[1:]) for t in rows]
                posted.append(self.post(sent, layout.receiver(asked), shapes, layout.sender(asked), kind))

        for k in range(layout.num_shards):
            ask(k if later is not None else k + depth)
            if later is not None and depth:
                later.append(partial(ask, k + depth))
            # Nothing here holds on to a round's rows: they are gone when the caller is done with them.
            yield list(rows) if k == 0 else self.wait_on_device(rows, *posted.popleft())

    def returns(self, like: Sequence[Tensor], depth: int) -> GradientReturn:
        return P2PReturns(self, like, depth)

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
        sent = [self._staged(t).contiguous() for t in sent]
        received = [t.new_empty(shape) for t, shape in zip(sent, shapes, strict=True)]
        self.count(kind, received)
        wanted = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for t in sent if t.numel()]
        wanted += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in received if t.numel()]
        with self.blame_peers():
            return received, dist.batch_isend_irecv(wanted) if wanted else []

    def wait(self, tensors: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The tensors of a round, when they have arrived."""
        with self.blame_peers():
            for work in works:
                work.wait()
        return tensors

    def wait_on_device(self, rows: Sequence[Tensor], received: list[Tensor], works: list[Any]) -> list[Tensor]:
        """The same, where the own rows are."""
        return [t.to(own.device) for t, own in zip(self.wait(received, works), rows, strict=True)]

    def still_wanted(self, of_halos: Sequence[Tensor]) -> list[Tensor]:
        layout, found = self.layout, [of_halos[0]]
        for k in range(1, layout.num_shards):
            shape, sent = (layout.sends[k].numel(),), of_halos[k].to(torch.uint8)
            found.append(self.wait(*self.post([sent], layout.sender(k), [shape], layout.receiver(k), MASKS))[0].bool())
        return found

    def blame_peers(self) -> AbstractContextManager[None]:
        """Whatever goes wrong inside is another rank's doing, and the world says whose."""
        return nullcontext() if self.world is None else self.world.exchange()

    def _staged(self, rows: Tensor) -> Tensor:
        return rows.cpu() if self.on_host else rows

    def _all_to_all(self, sent: list[Tensor], counts: list[int], kind: str, backwards: bool = False) -> Tensor:
        """Tensors by round to and from all ranks; `backwards`: from the receivers of the rows to their senders."""
        layout, num = self.layout, self.layout.num_shards
        to = layout.sender if backwards else layout.receiver
        source = layout.receiver if backwards else layout.sender
        outgoing = [self._staged(sent[k]) for k in sorted(range(num), key=to)]
        rounds = sorted(range(num), key=source)
        sizes = [counts[k] for k in rounds]
        incoming = outgoing[0].new_empty(sum(sizes), *sent[0].shape[1:])
        splits = [t.size(0) for t in outgoing]
        with self.blame_peers():
            dist.all_to_all_single(incoming, torch.cat(outgoing), sizes, splits, group=self.group)
        by_round = dict(zip(rounds, incoming.split(sizes), strict=True))
        self.count(kind, [by_round[k] for k in range(1, num)])
        return torch.cat([by_round[k] for k in range(num)]).to(sent[0].device)


class P2PReturns:
    """Gradients that go back by messages, a few rounds at a time."""

    def __init__(self, transport: P2PTransport, like: Sequence[Tensor], depth: int) -> None:
        self.transport, self.depth = transport, depth
        self.totals = [t.new_zeros(t.shape) for t in like]
        self.filled: list[Tensor] = []
        self.posted = deque[tuple[int, list[Tensor], list[Any]]]()

    def buffers(self, k: int) -> list[Tensor]:
        count = self.transport.layout.halos[k].numel()
        self.filled = self.totals if k == 0 else [t.new_zeros(count, *t.shape[1:]) for t in self.totals]
        return self.filled

    def push(self, k: int) -> None:
        if k == 0:
            return
        self.post(k)
        while len(self.posted) > self.depth:
            self._drain()

    def post(self, k: int) -> None:
        layout = self.transport.layout
        shapes = [(layout.sends[k].numel(), *t.shape[1:]) for t in self.totals]
        posted = self.transport.post(self.filled, layout.sender(k), shapes, layout.receiver(k), GRADIENT)
        self.posted.append((k, *posted))
        self.filled = []

    def settle(self) -> None:
        while len(self.posted) >= max(1, self.depth):
            self._drain()

    def finish(self) -> list[Tensor]:
        while self.posted:
            self._drain()
        return self.totals

    def _drain(self) -> None:
        k, received, works = self.posted.popleft()
        self.add(k, self.transport.wait(received, works))

    def add(self, k: int, gradients: Sequence[Tensor]) -> None:
        """Round k's gradients to those of the rows that were sent."""
        rows = self.transport.layout.sends[k]
        for total, gradient in zip(self.totals, gradients, strict=True):
            total.index_add_(0, rows.to(total.device), gradient.to(total.device))
