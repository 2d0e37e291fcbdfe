"""The numbers of nodes and edges of a batch, layer by layer. A step's memory is predicted from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hopline.core.batch import Batch, Block


@dataclass(frozen=True)
class Sizes:
    """The numbers of nodes and edges of a batch, layer by layer."""

    nodes: tuple[int, ...]
    """[num_layers + 1]: the sources of each block in the order of computation, then the rows of the output."""
    edges: tuple[int, ...]
    """[num_layers]: the edges of each block in the order of computation."""

    @classmethod
    def of(cls, batch: Batch) -> Sizes:
        """The sizes of a batch."""
        return cls.of_blocks(batch.blocks).with_outputs(batch.num_examples)

    @classmethod
    def of_blocks(cls, blocks: Sequence[Block]) -> Sizes:
        """The sizes of a batch that has these blocks, in the order of computation."""
        return cls((*[b.num_src for b in blocks], blocks[-1].num_dst), tuple([b.num_edges for b in blocks]))

    def with_outputs(self, num_examples: int) -> Sizes:
        """The sizes where the output has a row per example, of which some nodes have several."""
        return Sizes((*self.nodes[:-1], max(self.nodes[-1], num_examples)), self.edges)

    @cached_property
    def array(self) -> np.ndarray:
        """[2 * num_layers + 2] float64: nodes, edges, and a 1.

        `budget.predictor` models the memory of a step as the dot product with costs in bytes: per node of each layer,
        per edge of each layer, and a fixed cost.
        """
        return np.array((*self.nodes, *self.edges, 1), dtype=np.float64)

    @cached_property
    def shape(self) -> np.ndarray:
        """[2 * num_layers + 1] float64: the logarithms of nodes and edges, minus their mean.

        They describe proportions: a batch with twice as many of everything has nearly the same shape.
        """
        logarithms = np.log1p(self.array[:-1])
        return logarithms - np.add.reduce(logarithms) / logarithms.size
