"""`PartialGraph`: what a batch knows of a graph that is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hopline.core.graph import Graph


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PartialGraph(Graph):
    """Degrees and weights of the nodes of one batch; it has no edges, since those of the batch are in its blocks."""

    ids: Tensor
    """[n] int64: the batch's nodes, in any order."""
    degrees: Tensor
    """[n] int64: their in-edges in the whole graph."""
    has_loops: bool = False
    """Whether some node of the whole graph has an edge to itself."""
    weights: Tensor | None = None
    """[n, 3] float64, of a graph with weights or loops: the weight of all in-edges; the same without loops; the loop's
    own, NaN where there is none."""

    @classmethod
    def of(
        cls, names: Mapping[str, Tensor], ids: Tensor, degrees: Tensor, has_loops: bool, weights: Tensor | None
    ) -> PartialGraph:
        """names: an array of each kind that the edges have, of which only the type is looked at."""
        nothing = torch.zeros(0, dtype=torch.int64)
        edge = {name: array[:0] for name, array in names.items()}
        known = {"ids": ids, "degrees": degrees, "has_loops": has_loops, "weights": weights}
        return cls(torch.zeros(1, dtype=torch.int64), nothing, edge, **known)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        found = self.ids.sort()
        return found.values, found.indices

    def _places(self, ids: Tensor) -> Tensor:
        known, order = self._sorted
        at = torch.searchsorted(known, ids.cpu()).clamp(max=max(0, known.numel() - 1))
        assert torch.equal(known[at], ids.cpu()), "a node is not of this batch"
        return order[at]

    def in_degrees(self, ids: Tensor | None = None) -> Tensor:
        return self.degrees if ids is None else self.degrees[self._places(ids)].to(ids.device)

    def weight_sums(self, ids: Tensor, add_loops: bool, fill: float) -> tuple[Tensor, Tensor]:
        """(weight of the in-edges, weight of the loop that is added) of some nodes: float64."""
        assert self.weights is not None
        total, without_loops, loop = self.weights[self._places(ids)].to(ids.device).unbind(1)
        if not add_loops:
            return total, torch.zeros_like(total)
        return without_loops, torch.where(loop.isnan(), fill, loop)

    @property
    def self_loops(self) -> Tensor:
        """Not where they are, only whether there are any: one entry, or none."""
        return torch.zeros(int(self.has_loops), dtype=torch.int64)
