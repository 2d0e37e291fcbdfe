"""Edge dropout, which keeps a model from relying on single rows that may be stale."""

from __future__ import annotations

from dataclasses import replace

from hopline import ops
from hopline.core.batch import Block, edges_where
from hopline.ops.random import draw, uniform

EDGES = 1 << 20
"""The number of edge dropout among the keys of a batch. Far above those of the layers' dropout, so that no two draws
share a key."""


def drop_edges(block: Block, p: float, key: int) -> Block:
    """A block from which each edge is dropped with probability `p`. All nodes stay.

    An edge is drawn by (key, edge id), so all blocks of a batch that hold an edge treat it alike.

    Sums are not scaled up. Convs that normalise by degree weigh the remaining edges by degree / (number left), as
    they do with sampled edges.
    """
    edge_ids = block.part.edge_ids
    assert edge_ids is not None, "the block was made without edge ids"
    # The first draw of each edge, and 53 of its bits: as many as a float64 holds.
    is_kept = uniform(draw(ops.derive_key(key, EDGES), edge_ids, 0), 53) >= p
    return replace(block, parts=(edges_where(block.part, is_kept),))
