"""Pieces of a historical batch: some of its nodes, so many as fit, and their edges.

They are runs of nodes, that end with parts of the graph where these are small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.micro_batches import check_split, piece_of, sizes_of
from hopline.budget.predictor import Predictor, Sizes, costs_of
from hopline.core.batch import Batch, Block, Readable, Rows
from hopline.nn.gnn import GNN
from hopline.util.config import format_size

if TYPE_CHECKING:
    from hopline.methods.historical.step import HistoricalBatch

MOST_GROWTH = 1.4
"""By how much more pieces there are at the next attempt, at most."""
UNEVEN = 1.1
"""How much more than its share a piece may have, where it then ends with a part of the graph."""


# ---- where a batch is cut


def balanced(weight: Tensor, ends: Sequence[int], num_pieces: int) -> list[slice]:
    """Runs of nodes of about equal weight, that end with the parts of a batch where these are small enough.

    weight: [num_nodes]; ends: of the parts, ascending.
    """
    upto = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    share, cuts, start = float(upto[-1]) / num_pieces, [0], 0
    for stop in ends:
        if float(upto[stop] - upto[cuts[-1]]) > UNEVEN * share:
            cuts.append(start)
        here = float(upto[stop] - upto[start])
        if here > UNEVEN * share:
            count = math.ceil(here / share)
            inner = upto[start] + here / count * torch.arange(1, count, dtype=torch.float64)
            cuts += [*torch.searchsorted(upto, inner.to(upto.dtype)).tolist(), stop]
        start = stop
    cuts = sorted({*cuts, ends[-1]})
    return [slice(a, b) for a, b in pairwise(cuts)]


def runs_to_fit(
    block: Block, ends: Sequence[int], bytes_of: Callable[[Sizes], float], limit: float
) -> tuple[list[slice], float]:
    """(a block's destinations in few runs that take no more than `limit` bytes each, what the largest takes)."""
    alone, weight = _alone(block), block.part.indptr.cpu().diff() + 1
    num_pieces = max(1, math.ceil(bytes_of(Sizes.of(alone)) / limit)) if limit > 0 else block.num_dst
    while True:
        num_pieces = min(num_pieces, block.num_dst)
        runs = balanced(weight, ends, num_pieces)
        worst = max(map(bytes_of, sizes_of(alone, [_positions(run) for run in runs])))
        if worst <= limit:
            return runs, worst
        if num_pieces == block.num_dst:
            raise ValueError(
                f"one node of a batch takes {format_size(worst)} and {format_size(max(0, limit))} are left beside the "
                f"batch's own rows: give the budget {format_size(worst - limit)} more, or make parts_per_batch smaller"
            )
        num_pieces = max(num_pieces + 1, math.floor(num_pieces * min(worst / limit, MOST_GROWTH)))


def _positions(run: slice) -> Tensor:
    return torch.arange(run.start, run.stop)


def usual_run(made: HistoricalBatch, count: int, with_seeds: bool) -> slice:
    """So many of a batch's nodes in a row, with as many edges as such runs usually have, or with a loss."""
    indptr, seeds = made.block.part.indptr.cpu(), made.batch.output_idx
    start = int((indptr[count:] - indptr[:-count]).median(dim=0).indices)
    if with_seeds and seeds is not None and seeds.numel():
        start = min(max(0, int(seeds[seeds.numel() // 2]) - count // 2), made.block.num_dst - count)
    return slice(start, start + count)


def _alone(block: Block) -> Batch:
    """A block as a batch of all its destinations, without rows."""
    return Batch(block.dst_ids, (block.scaling_sums(block.scale_sums),), None, None)


def at_layer(model: GNN, sizes: Sizes, l: int) -> Sizes:
    """What a block of these sizes has where layer `l` is computed alone."""
    (src, dst), (edges,) = sizes.nodes, sizes.edges
    nodes = [0] * (model.num_layers + 1)
    nodes[l], nodes[l + 1] = src, dst
    nodes[0] += dst if l and model.encodes else 0  # initial rows are made again
    return Sizes(tuple(nodes), tuple(edges if i == l else 0 for i in range(model.num_layers)))


class LayerBytes:
    """What the layers of a model take one at a time, each learnt apart from what it took."""

    def __init__(self, model: GNN, x: Readable | None) -> None:
        costs = costs_of(model, x, model.num_layers)
        self.model, self.predictors = model, [Predictor(costs) for _ in range(model.num_layers)]

    @property
    def is_sure(self) -> bool:
        return all(predictor.is_sure for predictor in self.predictors)

    def promise(self, l: int, sizes: Sizes) -> float:
        """Bytes that layer `l` at a block of these sizes will not exceed, there and back."""
        return self.predictors[l].promise(at_layer(self.model, sizes, l))

    def together(self, sizes: Sizes) -> float:
        """The same for all layers of a batch at once, of which none keeps more than it has alone."""
        own = sizes.nodes[-1]
        return sum(self.promise(l, Sizes((sizes.nodes[l], own), (e,))) for l, e in enumerate(sizes.edges))

    def learn(self, l: int, sizes: Sizes, peak_bytes: int) -> None:
        self.predictors[l].observe(at_layer(self.model, sizes, l), peak_bytes)


def whole_sizes(made: HistoricalBatch) -> Sizes:
    """Of a batch at once: the layers of its own nodes, and of those that send to it."""
    nodes, edges = list(Sizes.of(made.batch).nodes), list(Sizes.of(made.batch).edges)
    last = len(edges) - 1
    beside = [(made.later.block, 1, last + 1)] if made.later is not None else []
    for block, first, stop in beside:
        for l in range(first, stop):
            nodes[l], edges[l] = nodes[l] + block.num_src, edges[l] + block.num_edges
        nodes[stop] += block.num_dst
    return Sizes(tuple(nodes), tuple(edges))


def check_pieces(model: GNN) -> None:
    """Refuse, by name, a model for which a batch in pieces is not the batch."""
    check_split(model, instead="make parts_per_batch smaller")
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        if drops and name.startswith("encoder."):
            raise ValueError(
                f"{name} draws anew wherever a node's row is encoded, so no batch can be split: use input_dropout= or "
                "dropout= of hl.nn.GNN, or make parts_per_batch smaller"
            )


# ---- pieces


@dataclass(frozen=True, eq=False)
class Edges:
    """All in-edges of a piece's nodes; sources that are the batch's own stand before those of the halo."""

    block: Block
    near_idx: Tensor
    """The former among the batch's own nodes,"""
    halo_idx: Tensor
    """and the latter in the halo; on the host."""


@dataclass(eq=False)
class NanoPiece:
    """Some of a batch's own nodes; their edges are there from when they are asked for until they are let go."""

    made: HistoricalBatch
    number: int
    run: slice
    """Which of the batch's own nodes they are."""

    @cached_property
    def edges(self) -> Edges:
        whole = self.made.block
        piece = piece_of(_alone(whole), _positions(self.run))
        (block,), is_halo = piece.blocks, piece.input_idx >= whole.num_dst
        order = is_halo.long().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        src_idx = place[block.part.src_idx.long()].to(block.part.src_idx.dtype)
        block = replace(block, src_ids=block.src_ids[order], parts=(replace(block.part, src_idx=src_idx),))
        near, far = piece.input_idx[order].split([order.numel() - int(is_halo.sum()), int(is_halo.sum())])
        return Edges(block, near, (far - whole.num_dst).cpu())

    @property
    def block(self) -> Block:
        return self.edges.block

    @property
    def batch(self) -> Batch:
        whole, block = self.made.batch, self.block
        seed_idx = self._seed_idx
        chosen = (seed_idx >= 0).nonzero().view(-1)

        def rows(of: Rows | Tensor) -> Rows | Tensor:
            if isinstance(of, Tensor):
                halo_idx = self.edges.halo_idx.to(of.device) + self.made.block.num_dst
                return ops.gather_rows(of, torch.cat([self.edges.near_idx, halo_idx]))
            return Rows(of.table, block.src_ids)

        return replace(
            whole,
            seeds=whole.seeds[chosen],
            blocks=(block,) * len(whole.blocks),
            x=None if whole.x is None else rows(whole.x),
            y=None if whole.y is None else whole.y[chosen],
            tables={name: rows(of) for name, of in whole.tables.items()},
            output_idx=seed_idx[chosen],
        )

    @property
    def _seed_idx(self) -> Tensor:
        """Where the batch's seeds are in the piece, -1 for those that are not."""
        seeds = self.made.batch.output_idx
        assert seeds is not None
        return torch.where((seeds >= self.run.start) & (seeds < self.run.stop), seeds - self.run.start, -1)

    @property
    def has_seeds(self) -> bool:
        return bool((self._seed_idx >= 0).any())

    def let_go(self) -> None:
        self.__dict__.pop("edges", None)


@dataclass(frozen=True, eq=False)
class Runs:
    """A block in runs of its destinations: (run, its edges, which of the block's sources they have)."""

    block: Block
    runs: Sequence[slice]

    def __iter__(self) -> Iterator[tuple[slice, Block, Tensor]]:
        for run in self.runs:
            piece = piece_of(_alone(self.block), _positions(run))
            yield run, piece.blocks[0], piece.input_idx
