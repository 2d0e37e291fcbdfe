"""Messages between ranks that carry less than all rows in full: in half precision, the largest rows, some rows drawn.

These are approximations. What travels for other ends, such as degrees, is left exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline import ops
from hopline.methods.full_batch.transports import FORWARD, GRADIENT, REFETCH, P2PTransport
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.distributed.world import World
    from hopline.shards.layout import ShardLayout

Shape = tuple[int, ...]


class Codec(ABC):
    """How the rows of a message travel. A message is a few tensors with a row for each node; both ends know its key."""

    @abstractmethod
    def encode(self, rows: Sequence[Tensor], key: int) -> list[Tensor]:
        """What travels."""

    @abstractmethod
    def shapes(self, of_rows: Sequence[Shape], key: int) -> list[Shape]:
        """The shapes of what travels for rows of these shapes."""

    @abstractmethod
    def decode(self, arrived: Sequence[Tensor], like: Sequence[Tensor], key: int) -> list[Tensor]:
        """Rows again, as those of `like`, whose numbers are not looked at."""

    @abstractmethod
    def lost(self, rows: Sequence[Tensor], encoded: Sequence[Tensor], key: int) -> Tensor:
        """[2] float64: the sums of squares of what is lost by compression, and of all that was compressed."""


class HalfPrecision(Codec):
    """As bfloat16."""

    def encode(self, rows: Sequence[Tensor], key: int) -> list[Tensor]:
        return [t.bfloat16() if t.is_floating_point() else t for t in rows]

    def shapes(self, of_rows: Sequence[Shape], key: int) -> list[Shape]:
        return list(of_rows)

    def decode(self, arrived: Sequence[Tensor], like: Sequence[Tensor], key: int) -> list[Tensor]:
        return [t.to(other.dtype) for t, other in zip(arrived, like, strict=True)]

    def lost(self, rows: Sequence[Tensor], encoded: Sequence[Tensor], key: int) -> Tensor:
        errors = [t - e.to(t.dtype) for t, e in zip(rows, encoded, strict=True)]
        return torch.stack([_squares(errors), _squares(rows)])


@dataclass(frozen=True)
class LargestRows(Codec):
    """Of each message the rows with the largest norm; the others arrive as zeros."""

    share: float
    """Of the rows, rounded up."""

    def encode(self, rows: Sequence[Tensor], key: int) -> list[Tensor]:
        norms = torch.stack([t.detach()[:, None].flatten(1).double().square().sum(1) for t in rows]).sum(0)
        chosen = torch.topk(norms, self._count(norms.numel())).indices.sort().values
        return [chosen.int(), *(t.index_select(0, chosen) for t in rows)]

    def shapes(self, of_rows: Sequence[Shape], key: int) -> list[Shape]:
        count = self._count(of_rows[0][0])
        return [(count,), *((count, *shape[1:]) for shape in of_rows)]

    def decode(self, arrived: Sequence[Tensor], like: Sequence[Tensor], key: int) -> list[Tensor]:
        chosen, *values = arrived
        return [torch.zeros_like(o).index_copy_(0, chosen.long(), v) for o, v in zip(like, values, strict=True)]

    def lost(self, rows: Sequence[Tensor], encoded: Sequence[Tensor], key: int) -> Tensor:
        all_ = _squares(rows)
        return torch.stack([(all_ - _squares(encoded[1:])).clamp(min=0), all_])

    def _count(self, num_rows: int) -> int:
        return math.ceil(self.share * num_rows)


@dataclass(frozen=True)
class DrawnRows(Codec):
    """Each row with a probability, drawn anew for each key and made larger by as much; the others arrive as zeros.

    Both ends draw the same, so that no row that was not drawn is sent or asked for.
    """

    rate: float

    def encode(self, rows: Sequence[Tensor], key: int) -> list[Tensor]:
        drawn = self._drawn(rows[0].size(0), key).to(rows[0].device)
        chosen = [t.index_select(0, drawn) for t in rows]
        return [t / self.rate if t.is_floating_point() else t for t in chosen]

    def shapes(self, of_rows: Sequence[Shape], key: int) -> list[Shape]:
        count = self._drawn(of_rows[0][0], key).numel()
        return [(count, *shape[1:]) for shape in of_rows]

    def decode(self, arrived: Sequence[Tensor], like: Sequence[Tensor], key: int) -> list[Tensor]:
        drawn = self._drawn(like[0].size(0), key).to(like[0].device)
        return [torch.zeros_like(o).index_copy_(0, drawn, v.to(o.dtype)) for o, v in zip(like, arrived, strict=True)]

    def lost(self, rows: Sequence[Tensor], encoded: Sequence[Tensor], key: int) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)  # it is right in the mean

    def _drawn(self, num_rows: int, key: int) -> Tensor:
        generator = torch.Generator().manual_seed(key)
        return (torch.rand(num_rows, generator=generator) < self.rate).nonzero().view(-1)


@dataclass(frozen=True)
class Both(Codec):
    """Rows are drawn first, and those are compressed."""

    first: DrawnRows
    second: Codec

    def encode(self, rows: Sequence[Tensor], key: int) -> list[Tensor]:
        return self.second.encode(self.first.encode(rows, key), key)

    def shapes(self, of_rows: Sequence[Shape], key: int) -> list[Shape]:
        return self.second.shapes(self.first.shapes(of_rows, key), key)

    def decode(self, arrived: Sequence[Tensor], like: Sequence[Tensor], key: int) -> list[Tensor]:
        between = self.first.shapes([tuple(t.shape) for t in like], key)
        inner = [t.new_empty(shape) for t, shape in zip(like, between, strict=True)]
        return self.first.decode(self.second.decode(arrived, inner, key), like, key)

    def lost(self, rows: Sequence[Tensor], encoded: Sequence[Tensor], key: int) -> Tensor:
        return self.second.lost(self.first.encode(rows, key), encoded, key)


def _squares(rows: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all numbers, without a copy of them."""
    norms = [torch.linalg.vector_norm(t.detach() if t.is_floating_point() else t.double()) for t in rows]
    return torch.stack([norm.double().square().cpu() for norm in norms]).sum()


def codecs_of(
    compress: str = "none", share: float = 1.0, gradients: bool = False, rate: float = 1.0
) -> dict[str, Codec]:
    """By what a message is for, how it travels; left out is what travels as it is.

    compress: "none", "bf16" or "topk", of which `share` is the share of rows; gradients: whether theirs are compressed
    too. rate: of rows that are drawn.
    """
    squeezed = {"none": None, "bf16": HalfPrecision(), "topk": LargestRows(share)}[compress]
    drawn, found = DrawnRows(rate) if rate < 1 else None, {}
    for kind in (FORWARD, REFETCH, GRADIENT):
        second = squeezed if gradients or kind != GRADIENT else None
        codec = Both(drawn, second) if drawn and second else drawn or second
        if codec is not None:
            found[kind] = codec
    return found


@dataclass(eq=False)
class Step:
    """What the messages of a step have in common."""

    key: int = 0
    lost: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Then:
    """Messages under way, and what is to be done when they have arrived."""

    works: list[Any]
    finish: Callable[[], None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.finish()


class LossyTransport(P2PTransport):
    """A shard per process, with codecs for messages by what they are for.

    The relative error of a step's messages is counted as `error.forward`, `error.refetch` and `error.gradient`.
    """

    def __init__(self, layout: ShardLayout, world: World | None = None, codecs: Mapping[str, Codec] | None = None):
        super().__init__(layout, world=world)
        self.codecs, self.step = dict(codecs or {}), Step()

    def begin_step(self, key: int) -> None:
        self.step.key = key

    def end_step(self) -> None:
        for kind, (lost, all_) in self.step.lost.items():
            if all_ > 0:
                trace.count(f"error.{kind}", float(lost / all_) ** 0.5)
        self.step.lost.clear()

    def post(
        self, sent: list[Tensor], to: int, shapes: list[Shape], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        codec = self.codecs.get(kind)
        if codec is None:
            return super().post(sent, to, shapes, source, kind)
        there, here = self._key(kind, to), self._key(kind, source, arrives=True)
        arrived, works = super().post(
            self._encoded(codec, kind, sent, there), to, codec.shapes(shapes, here), source, kind
        )
        device = arrived[0].device
        received = [torch.empty(shape, dtype=t.dtype, device=device) for t, shape in zip(sent, shapes, strict=True)]

        def finish() -> None:
            for t, rows in zip(received, codec.decode(arrived, received, here), strict=True):
                t.copy_(rows)

        return received, [Then(works, finish)]

    def _all_to_all(self, sent: list[Tensor], counts: list[int], kind: str, backwards: bool = False) -> Tensor:
        codec, layout = self.codecs.get(kind), self.layout
        if codec is None or layout.num_shards == 1:
            return super()._all_to_all(sent, counts, kind, backwards)
        to, source = (layout.sender, layout.receiver) if backwards else (layout.receiver, layout.sender)
        rounds = range(1, layout.num_shards)
        keys = [self._key(kind, source(k), arrives=True) for k in rounds]
        shapes = [codec.shapes([(counts[k], *sent[k].shape[1:])], key) for k, key in zip(rounds, keys, strict=True)]
        encoded = [self._encoded(codec, kind, [sent[k]], self._key(kind, to(k))) for k in rounds]
        columns = []  # one exchange for each of the tensors that a message consists of
        for i, pieces in enumerate(zip(*encoded, strict=True)):
            coming = [shape[i][0] for shape in shapes]
            got = super()._all_to_all([pieces[0][:0], *pieces], [0, *coming], kind, backwards)
            columns.append(got.split(coming))
        found = [sent[0]]  # own rows are whole
        for k, key, *arrived in zip(rounds, keys, *columns, strict=True):
            like = sent[k].new_empty(counts[k], *sent[k].shape[1:])
            found += codec.decode(arrived, [like], key)
        return torch.cat(found)

    def _encoded(self, codec: Codec, kind: str, rows: list[Tensor], key: int) -> list[Tensor]:
        encoded = codec.encode(rows, key)
        self.step.lost[kind] = self.step.lost.get(kind, 0) + codec.lost(rows, encoded, key)
        return encoded

    def _key(self, kind: str, peer: int, arrives: bool = False) -> int:
        """Of a message between this rank and another: the same for rows, and for their gradients on the way back."""
        rank = self.layout.rank
        owns = arrives == (kind == GRADIENT)
        return ops.derive_key(self.step.key, *((rank, peer) if owns else (peer, rank)))
