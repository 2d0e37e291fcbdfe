"""`Examples`: the terms of a loss or of a metric. Several of them may be of one node.

    example   a term of the loss: a node with a label
    seed      a row of a batch's last block: a node whose output is computed, once for all its examples

Examples are numbered as they are given. A batch has the seeds of its examples, the label of each example, and in
`Batch.output_idx` the row of each. Where no node is repeated, examples and seeds are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from hopline import ops


@dataclass(frozen=True, eq=False)
class Examples:
    """The nodes of a loss or of a metric, with labels of their own if they have any.

    Raises:
        ValueError: `nodes` is not [n] int64, or there is not one label per example.

    Example:
        >>> examples = hl.extend.Examples(torch.tensor([2, 0, 2]), y=torch.tensor([0, 1, 1]))  # node 2 twice
        >>> len(examples), examples.seeds.tolist()
        (3, [0, 2])
    """

    nodes: Tensor
    """[n] int64: the node of each example. A node may come several times."""
    y: Tensor | None = None
    """[n, ...]: the label of each example. None: the dataset's label of its node."""

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, Tensor) or self.nodes.dim() != 1 or self.nodes.dtype != torch.int64:
            raise ValueError("the nodes of examples must be a 1-D int64 tensor: give torch.tensor([...])")
        if self.y is not None and (self.y.dim() == 0 or self.y.size(0) != len(self)):
            raise ValueError(
                f"{len(self)} examples have labels of shape {list(self.y.shape)}: give one label per example, [n, ...]"
            )

    def __len__(self) -> int:
        return self.nodes.numel()

    @cached_property
    def seeds(self) -> Tensor:
        """[num_seeds] int64: the nodes, each once. They are `nodes` itself if none is repeated, else ascending."""
        distinct = self.nodes.unique()
        return self.nodes if distinct.numel() == len(self) else distinct

    @property
    def repeats(self) -> bool:
        """Whether a node comes several times."""
        return self.seeds is not self.nodes

    @property
    def max_per_seed(self) -> int:
        """The most examples of one node."""
        return int(self.nodes.unique(return_counts=True)[1].max()) if self.repeats else 1

    @overload
    def labels(self, y: Tensor, numbers: Tensor | None = None) -> Tensor: ...
    @overload
    def labels(self, y: Tensor | None, numbers: Tensor | None = None) -> Tensor | None: ...

    def labels(self, y: Tensor | None, numbers: Tensor | None = None) -> Tensor | None:
        """[n, ...]: labels of examples, on their own device; None without any.

        y: [num_nodes, ...], those of the dataset. numbers: [n] int64, which examples. None: all, in their order.
        """
        if self.y is not None:
            return self.y if numbers is None else self.y[numbers.to(self.y.device)]
        if y is None:
            return None
        nodes = self.nodes if numbers is None else self.nodes[numbers.to(self.nodes.device)]
        return ops.gather_rows(y, nodes.to(y.device))

    def distinct(self, nodes: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the seeds of some examples, the position of each example's seed). The second is None if none is repeated.

        nodes: [n] int64, those of the examples.
        """
        if not self.repeats:
            return nodes, None
        seeds, idx = nodes.unique(return_inverse=True)
        return (nodes, None) if seeds.numel() == nodes.numel() else (seeds, idx)


def as_examples(nodes: Tensor | Examples) -> Examples:
    return nodes if isinstance(nodes, Examples) else Examples(nodes)


class FoundExamples(NamedTuple):
    """The examples of some nodes, in the order of these nodes."""

    seed_idx: Tensor
    """[num_seeds] int64: positions of the nodes that have examples, ascending."""
    output_idx: Tensor
    """[n] int64: the position of each example's node."""
    numbers: Tensor | None
    """[n] int64: the numbers of the examples, ascending at each node. None if examples have no labels of their own."""


class ExampleIndex:
    """Finds the examples of nodes, for methods whose batches are sets of nodes. All tensors are on the host."""

    def __init__(self, examples: Examples, num_nodes: int) -> None:
        self.examples = examples
        self.is_seed = torch.zeros(num_nodes, dtype=torch.bool)
        """[num_nodes] bool: the nodes that have examples."""
        nodes = examples.nodes.cpu()
        self.is_seed[nodes] = True
        self._sorted_nodes, self._order = torch.empty(0), torch.empty(0)
        if self._is_looked_up:
            # Stable: the examples of a node keep their order.
            self._sorted_nodes, self._order = torch.sort(nodes, stable=True)

    @property
    def _is_looked_up(self) -> bool:
        return self.examples.repeats or self.examples.y is not None

    def find(self, nodes: Tensor) -> FoundExamples:
        """The examples of some nodes. nodes: [n] int64 on the host, each once."""
        seed_idx = self.is_seed[nodes].nonzero().view(-1)
        if not self._is_looked_up:
            return FoundExamples(seed_idx, seed_idx, None)
        seeds = nodes[seed_idx]
        first = torch.searchsorted(self._sorted_nodes, seeds)
        count = torch.searchsorted(self._sorted_nodes, seeds, right=True) - first
        # The examples of seed i are at first[i], first[i] + 1, ... of the sorted ones.
        ends = count.cumsum(0)
        at = torch.arange(int(count.sum())) + (first - ends + count).repeat_interleave(count)
        return FoundExamples(seed_idx, seed_idx.repeat_interleave(count), self._order[at])
