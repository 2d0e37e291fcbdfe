"""Rows and gradients of other ranks from the step before, while those of this one are on their way (PipeGCN).

An approximation: nothing waits for messages but the end of the step. The first step has no step before it and waits.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hopline.methods.full_batch.compression import LossyTransport
from hopline.methods.full_batch.transports import FORWARD, GRADIENT, Later, P2PReturns, Returns

Place = tuple[str, int]
"""What for, and the how-manieth exchange of its kind in a step: the same one in every step."""


@dataclass(eq=False)
class Memory:
    """What arrived in the step before, and what is under way."""

    calls: Counter[str] = field(default_factory=Counter)
    known: dict[Place, list[list[Tensor]]] = field(default_factory=dict)
    """By exchange and round, from the first on that is another's."""
    under_way: dict[Place, list[tuple[list[Tensor], list[Any]]]] = field(default_factory=dict)

    def to_bytes(self) -> Tensor:
        """[n] uint8: what arrived in the step before."""
        buffer = io.BytesIO()
        torch.save(
            [[*place, [[t.cpu() for t in rows] for rows in rounds]] for place, rounds in self.known.items()], buffer
        )
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def read_bytes(self, content: Tensor) -> None:
        found = torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=True)
        self.known = {(kind, number): rounds for kind, number, rounds in found}

    def next(self, kind: str) -> Place:
        self.calls[kind] += 1
        return kind, self.calls[kind]


class StaleTransport(LossyTransport):
    """A shard per process, whose rows are read by the others one step late, and whose gradients come as late."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory = Memory()

    def fetch(
        self, rows: Sequence[Tensor], kind: str, depth: int, later: Later | None = None
    ) -> Iterator[list[Tensor]]:
        if kind != FORWARD:
            yield from super().fetch(rows, kind, depth, later)
            return
        layout, posted = self.layout, []
        for k in range(1, layout.num_shards):
            sent = [t.index_select(0, layout.sends[k].to(t.device)) for t in rows]
            shapes = [(layout.halos[k].numel(), *t.shape[1:]) for t in rows]
            posted.append(self.post(sent, layout.receiver(k), shapes, layout.sender(k), kind))
        yield list(rows)
        for received in self.before(kind, posted):
            yield [t.to(own.device) for t, own in zip(received, rows, strict=True)]

    def returns(self, like: Sequence[Tensor], depth: int) -> Returns:
        return _StaleReturns(self, like, depth)

    def before(self, kind: str, posted: list[tuple[list[Tensor], list[Any]]]) -> list[list[Tensor]]:
        """By round, what the same exchange had in the step before; what is posted will be there for the next."""
        place = self.memory.next(kind)
        if place not in self.memory.known:
            self.memory.known[place] = [self.wait(*of_round) for of_round in posted]
        else:
            self.memory.under_way[place] = posted
        return self.memory.known[place]

    def end_step(self) -> None:
        super().end_step()
        for place, posted in self.memory.under_way.items():
            self.memory.known[place] = [self.wait(*of_round) for of_round in posted]
        self.memory.under_way.clear()
        self.memory.calls.clear()


class _StaleReturns(P2PReturns):
    def push(self, k: int) -> None:
        if k:
            self.post(k)

    def settle(self) -> None:
        """All rounds stay under way until the next step."""

    def finish(self) -> list[Tensor]:
        transport = self.transport
        assert isinstance(transport, StaleTransport)
        posted = [(received, works) for _, received, works in self.posted]
        for k, received in enumerate(transport.before(GRADIENT, posted), start=1):
            self.add(k, received)
        return self.totals
