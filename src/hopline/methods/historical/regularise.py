"""Edge dropout, which keeps a model from relying on single rows that may be stale."""

from __future__ import annotations

from dataclasses import replace

from hopline import ops
from hopline.core.batch import Block, edges_where
from hopline.ops.random import draw, uniform

EDGES = 1 << 20
"""Number that derives the key of edge dropout from that of a batch, apart from the numbers of layers' dropout."""


def drop_edges(block: Block, p: float, key: int) -> Block:
    """A block from which each edge is dropped with probability `p`. All nodes stay.

    An edge is drawn by (key, edge id), so all blocks of a batch that hold an edge treat it alike.

    Sums are not scaled up. Convs that normalise by degree weigh the remaining edges by degree / (number left), as
    they do with sampled edges.
    """
    edge_ids = block.part.edge_ids
    assert edge_ids is not None, "the block was made without edge ids"
    is_kept = uniform(draw(ops.derive_key(key, EDGES), edge_ids, 0), 53) >= p
    return replace(block, parts=(edges_where(block.part, is_kept),))
