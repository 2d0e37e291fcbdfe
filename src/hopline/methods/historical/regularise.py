"""Edges dropped at random, which keeps a model from leaning on single rows that may be stale."""

from __future__ import annotations

from dataclasses import replace

from hopline import ops
from hopline.core.batch import Block, edges_where
from hopline.ops.random import draw, uniform

EDGES = 1 << 20
"""Place of these draws among the keys of a step, apart from those of the layers' dropout."""


def drop_edges(block: Block, p: float, key: int) -> Block:
    """A block without a share `p` of its edges, drawn by (key, edge id); its nodes stay.

    Sums are not scaled up, but convs that normalise by degree weigh the edges that are left by degree / left, as they
    do with sampled ones.
    """
    edge_ids = block.part.edge_ids
    assert edge_ids is not None, "the block was made without edge ids"
    kept = uniform(draw(ops.derive_key(key, EDGES), edge_ids, 0), 53) >= p
    return replace(block, parts=(edges_where(block.part, kept),))
