"""A sweep over parts that computes, layer by layer, only the rows that the training nodes need.

A node that is needed has all its in-edges, and degrees are those of the whole graph, so loss and gradients are those of
a sweep over all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.core.batch import Batch, Block
from hopline.core.sampler import full_block, in_neighborhood
from hopline.methods.partitioned.sweep import Swept, backward, forward
from hopline.tables.history import Sums

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork


@dataclass(frozen=True, eq=False)
class NeededPiece:
    """The nodes of a part whose rows are needed after a layer, with all their in-edges."""

    part: int
    batch: Batch
    """With seeds and labels after the last layer alone."""
    places: Tensor
    """Of all sources, on the host: those of the nodes themselves stand first."""

    @property
    def block(self) -> Block:
        return self.batch.blocks[-1]

    @property
    def own_places(self) -> Tensor:
        return self.places[: self.block.num_dst]


class NeededRows:
    """Which rows are needed after each layer, and the edges that lead to them; the same in every step."""

    def __init__(self, work: HistoricalWork) -> None:
        self.work, self.graph = work, work.job.data.graph
        needed = [work.job.train_ids.cpu()]
        for _ in range(work.model.num_layers - 1):
            needed.insert(0, in_neighborhood(self.graph, needed[0]))
        self.places = [work.partition.position[nodes].sort().values for nodes in needed]
        """[n] int64 by layer, ascending: the places of the nodes whose rows are needed after it."""
        self._blocks: dict[tuple[int, int], tuple[Block, Tensor]] = {}

    @cached_property
    def num_rows(self) -> int:
        """Rows that one pass over the layers computes."""
        return sum(places.numel() for places in self.places)

    @cached_property
    def num_edges(self) -> int:
        """Edges over which it does."""
        order = self.work.partition.order
        return sum(int(self.graph.in_degrees(order[places]).sum()) for places in self.places)

    def blocks(self, l: int) -> Iterable[tuple[int, Block, Tensor]]:
        """(part, in-edges of its nodes that are needed after layer `l`, places of their sources)."""
        partition = self.work.partition
        bounds = torch.searchsorted(self.places[l], partition.ptr)
        for part, places in enumerate(self.places[l].split(bounds.diff().tolist())):
            # What is needed later is part of what is needed earlier: as many nodes are the same nodes.
            known = (part, places.numel())
            if places.numel() and known not in self._blocks:
                block = full_block(self.work.parts.sampler, partition.order[places])
                self._blocks[known] = block, partition.position[block.src_ids]
            if places.numel():
                yield part, *self._blocks[known]

    def forward(self, key: int | None) -> None:
        """Fill the tables at the rows that are needed. key: of the draws."""
        with torch.no_grad():
            forward(_NeededParts(self, key))

    def backward(self, key: int | None, scale: float) -> Tensor:
        """Add the gradient of `scale` times the summed loss to the parameters'; returns that loss."""
        with torch.enable_grad():
            return backward(_NeededParts(self, key), scale)


class _NeededParts(Swept[NeededPiece]):
    def __init__(self, needed: NeededRows, key: int | None) -> None:
        super().__init__(needed.work, key)
        self.needed, self.histories = needed, needed.work.histories
        self.last = needed.work.model.num_layers - 1
        self.totals: dict[int, Sums] = {}
        self.known: Sums | None = None
        """The gradient after one layer at the rows that are needed there."""

    def pieces(self, l: int) -> Iterable[NeededPiece]:
        batches = self.work.batches
        for part, block, places in self.needed.blocks(l):
            block = replace(block, key=self.key, graph=batches.graph)
            if l == self.last:
                batch = batches.batch_of(block, block.dst_ids, self.key, inputs=False)
            else:
                batch = batches.moved(Batch(block.dst_ids, (block,), None, None, key=self.key))
            yield NeededPiece(part, batch, places)

    def number(self, piece: NeededPiece) -> int:
        return piece.part

    def inputs(self, l: int, piece: NeededPiece) -> Tensor:
        return self._rows(l, piece.places)

    def own(self, l: int, piece: NeededPiece) -> Tensor:
        return self._rows(l, piece.own_places)

    def _rows(self, l: int, places: Tensor) -> Tensor:
        return self.histories.rows(l, places).to(self.work.job.device, self.work.dtype)

    def put(self, l: int, piece: NeededPiece, rows: Tensor) -> None:
        self.histories.write_at(l, piece.own_places, rows)

    def end(self, l: int) -> None:
        """A single process has written all."""

    def turn(self) -> None:
        """Sums are made when there is something to add."""

    def add(self, l: int, piece: NeededPiece, rows: Tensor | None, *, own: bool = False) -> None:
        if rows is None or l == self.last:
            return
        self._total(l, rows).add(self._at(l, piece.own_places if own else piece.places), rows)

    def _total(self, l: int, like: Tensor) -> Sums:
        if l not in self.totals:
            shape = (self.needed.places[l].numel(), *like.shape[1:])
            self.totals[l] = self.histories.sums(l, shape, self.work.dtype)
        return self.totals[l]

    def _at(self, l: int, places: Tensor) -> Tensor:
        return torch.searchsorted(self.needed.places[l], places)

    def gathered(self, l: int) -> None:
        if l < self.last:
            self.known = self._total(l, self.histories.tables[l])
            del self.totals[l]

    def gradient(self, l: int, piece: NeededPiece) -> Tensor:
        assert self.known is not None
        return self.known.read(self._at(l, piece.own_places))
