"""The halo of a batch: neighbours in other parts, whose rows between layers come from the histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hopline.layerwise.engine import Recorder
from hopline.tables.history import RowReader


class Halo(Recorder):
    """Completes a batch's rows between two layers by stored rows of its halo, and records its own for `commit`.

    Args:
        slabs: The places of the batch's nodes, in their order.
        positions: Those of the halo, on the host. In the batch's block the halo's nodes come behind its own.
        row_reader: Where rows of the halo are read.
        last: The last layer, after which no rows are needed.
        keeps_gradients: Whether gradients of the batch's own rows are wanted.
        measures: Whether to measure how far noise moves each layer.
    """

    def __init__(
        self,
        row_ranges: Sequence[slice],
        positions: Tensor,
        row_reader: RowReader,
        last: int,
        *,
        keeps_gradients: bool = False,
        measures: bool = False,
    ) -> None:
        super().__init__(keeps_gradients=keeps_gradients, measures=measures)
        self.row_ranges, self.positions, self.row_reader, self.last = row_ranges, positions, row_reader, last

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        if l == self.last or not self.positions.numel():
            return super().after_layer(l, h)
        self.record(l, h)
        return torch.cat([h, self.row_reader.read(l, self.positions, h)])

    def commits(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, the batch's own rows after it) to write into the tables: all but the last layer's."""
        for l, rows in self.rows.items():
            if l != self.last:
                yield l, rows.detach()

    def reset(self) -> None:
        """Drop what a step that failed has recorded."""
        self.rows.clear()
        self.spreads.clear()
