"""The halo of a batch: sources in other parts, whose rows between layers are historical embeddings.

The model calls `Halo.after_layer` between two layers. It records the batch's own rows, for the push after the step.
Then it appends the halo's rows from the tables, for the next layer:

    own rows after layer l  ->  record  ->  [own rows | halo rows of the table of layer l]  ->  layer l + 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hopline.layerwise.engine import Recorder
from hopline.tables.history import RowReader


class Halo(Recorder):
    """Appends historical embeddings of the halo between two layers, and records the batch's own rows for `commit`.

    It belongs to one batch. Recorded rows stay until `reset`.

    Args:
        row_ranges: Positions of the batch's own nodes in the tables, in the order of the batch.
        positions: [n] int64 on the host: positions of the halo in the tables, in the order of the block's sources.
        row_reader: Reads rows of the halo.
        last: The number of the last layer, after which nothing is read or pushed.
        keeps_gradients: Whether autograd keeps the gradients at the batch's own rows.
        measures: Whether to measure how far noise on a layer's input moves its output, for `Historical.lipschitz`.
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
        self.row_ranges = row_ranges
        self.positions = positions
        self.row_reader = row_reader
        self.last = last

    def after_layer(self, l: int, h: Tensor) -> Tensor:
        if l == self.last or not self.positions.numel():
            return super().after_layer(l, h)  # records, and appends nothing
        self.record(l, h)
        # Concatenation copies, so nothing later can change the recorded rows in place.
        return torch.cat([h, self.row_reader.read(l, self.positions, h)])

    def commits(self) -> Iterator[tuple[int, Tensor]]:
        """The rows to push: (layer, the batch's own rows after it) for all layers but the last."""
        for l, rows in self.rows.items():
            if l != self.last:
                yield l, rows.detach()

    def reset(self) -> None:
        """Drop the recorded rows, when a step is undone or its rows are pushed."""
        self.rows.clear()
        self.spreads.clear()
