"""How many nodes and edges a batch has, layer by layer: what its memory depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hopline.core.batch import Batch, Block


@dataclass(frozen=True)
class Sizes:
    """How many rows and edges a batch has, layer by layer."""

    nodes: tuple[int, ...]
    """Sources of each block in the order of computation, and the destinations of the last."""
    edges: tuple[int, ...]
    """Of each block."""

    @classmethod
    def of(cls, batch: Batch) -> Sizes:
        return cls.of_blocks(batch.blocks)

    @classmethod
    def of_blocks(cls, blocks: Sequence[Block]) -> Sizes:
        return cls((*[b.num_src for b in blocks], blocks[-1].num_dst), tuple([b.num_edges for b in blocks]))

    @cached_property
    def array(self) -> np.ndarray:
        """All of them, and a one for what every step takes."""
        return np.array((*self.nodes, *self.edges, 1), dtype=np.float64)

    @cached_property
    def shape(self) -> np.ndarray:
        """The logarithms of their proportions: the same for a batch and for one that has twice of all."""
        logarithms = np.log1p(self.array[:-1])
        return logarithms - np.add.reduce(logarithms) / logarithms.size
