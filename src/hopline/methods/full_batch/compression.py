"""Rows between ranks as bfloat16: half the bytes of float32, a quarter of float64.

    sender: rows -> bfloat16  --message-->  receiver: bfloat16 -> dtype of the rows

Training becomes approximate, so the rounding error is measured and counted in every step. A rank's own rows never
travel and are not rounded. Messages of other kinds, such as degrees, stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline.shards.transports import FORWARD, GRADIENT, REFETCH, P2PTransport
from hopline.util import trace

if TYPE_CHECKING:
    from hopline.distributed.world import World
    from hopline.shards.layout import ShardLayout

COMPRESSED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "bf16": frozenset({FORWARD, REFETCH}),
    "bf16_both": frozenset({FORWARD, REFETCH, GRADIENT}),
}
"""By value of the setting `compress`: the kinds of messages that travel as bfloat16."""


def _sum_of_squares(rows: Sequence[Tensor]) -> Tensor:
    """[] float64 on the host: the sum of squares of all elements. Floating-point rows are not copied."""
    squares = []
    for tensor in rows:
        values = tensor.detach() if tensor.is_floating_point() else tensor.double()
        squares.append(torch.linalg.vector_norm(values).double().square().cpu())
    return torch.stack(squares).sum()


@dataclass(eq=False)
class PendingMessages:
    """Messages in transfer, and a callback for their arrival. Has `wait()`, as handles of `torch.distributed` do."""

    works: list[Any]
    finish: Callable[[], None]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.finish()


class HalfPrecisionTransport(P2PTransport):
    """A shard per process. Messages of some kinds travel as bfloat16.

    The relative error of a step's messages is counted as `error.forward`, `error.refetch` and `error.gradient`:
    sqrt(sum of squared errors / sum of squares).

    kinds: the kinds of messages that are rounded.
    """

    def __init__(self, layout: ShardLayout, world: World | None = None, kinds: Collection[str] = ()) -> None:
        super().__init__(layout, world=world)
        self.kinds = frozenset(kinds)
        self.error_sums: dict[str, Tensor] = {}
        """By kind: [2] float64 on the host, over the step so far: sums of squares of the errors, and of the rows."""

    def end_step(self) -> None:
        """Count the relative errors of the step, and begin a new sum."""
        for kind, (error_squares, row_squares) in self.error_sums.items():
            if row_squares > 0:
                trace.count(f"error.{kind}", float(error_squares / row_squares) ** 0.5)
        self.error_sums.clear()

    def post(
        self, sent: list[Tensor], to: int, shapes: list[tuple[int, ...]], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        if kind not in self.kinds:
            return super().post(sent, to, shapes, source, kind)
        # Rows arrive in bfloat16 buffers, and get their own dtype when the caller waits. That is the dtype of the
        # sent rows: both sides send tensors of the same dtypes.
        arrived, works = super().post(self._round(sent, kind), to, shapes, source, kind)
        received = []
        for sent_rows, rounded in zip(sent, arrived, strict=True):
            received.append(torch.empty_like(rounded, dtype=sent_rows.dtype))

        def finish() -> None:
            for rows, rounded in zip(received, arrived, strict=True):
                rows.copy_(rounded)

        return received, [PendingMessages(works, finish)]

    def _all_to_all(self, sent: list[Tensor], counts: list[int], kind: str, backwards: bool = False) -> Tensor:
        if kind not in self.kinds or self.layout.num_shards == 1:
            return super()._all_to_all(sent, counts, kind, backwards)
        own_rows = sent[0]  # those that this rank would send to itself
        rounded = [self._round([rows], kind)[0] for rows in sent[1:]]
        # Own rows do not travel, so that they stay exact. An empty message takes their place.
        arrived = super()._all_to_all([rounded[0][:0], *rounded], [0, *counts[1:]], kind, backwards)
        return torch.cat([own_rows, arrived.to(own_rows.dtype)])

    def _round(self, rows: list[Tensor], kind: str) -> list[Tensor]:
        """Rows as bfloat16, with integers as they are. Adds the error to the step's sums."""
        rounded = [t.bfloat16() if t.is_floating_point() else t for t in rows]
        errors = [t - r.to(t.dtype) for t, r in zip(rows, rounded, strict=True)]
        sums = torch.stack([_sum_of_squares(errors), _sum_of_squares(rows)])
        self.error_sums[kind] = self.error_sums.get(kind, 0) + sums
        return rounded
