"""Laws: which in-edges of a node a sampler draws. All are functions of a key, and none draws an edge twice in a node.

    law                   the next edge is drawn                  keys             a scaled sum counts an edge
    UniformLaw            with the same chance as any other       a pair of layers in-edges / drawn edges times
    WeightedLaw           with a chance like its weight           a pair of layers 1 / inclusion times
    LaborLaw              if its source has the smallest number   a layer          in-edges / drawn edges times

`UniformLaw` may also draw with replacement. A law is made once for a graph, and used by several threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import INCLUSION
from hopline.core.graph import Graph
from hopline.ops import Neighbors
from hopline.util.config import check_law


class Law(ABC):
    """Draws in-edges of nodes of one graph.

    Args:
        indptr: [num_nodes + 1] int64.
        indices: [num_edges] int32 or int64: what is drawn: sources, or in shards the numbers of edges.
    """

    key_per_layer: bool = False
    """Whether each layer draws by a key of its own, and not each pair of layers (`ops.layer_key`)."""

    def __init__(self, indptr: Tensor, indices: Tensor) -> None:
        self.indptr = indptr
        self.indices = indices

    @abstractmethod
    def draw(
        self, nodes: Tensor, fanout: int, key: int | Tensor, draw_ids: Tensor | None = None
    ) -> tuple[Neighbors, dict[str, Tensor]]:
        """(up to `fanout` in-edges of each node, arrays with a row for each of them that the law adds).

        The arguments are those of `ops.sample_neighbors`.
        """


class UniformLaw(Law):
    """Every in-edge of a node has the same chance. replace: whether it may be drawn again."""

    def __init__(self, indptr: Tensor, indices: Tensor, replace: bool = False) -> None:
        super().__init__(indptr, indices)
        self.replace = replace

    def draw(
        self, nodes: Tensor, fanout: int, key: int | Tensor, draw_ids: Tensor | None = None
    ) -> tuple[Neighbors, dict[str, Tensor]]:
        drawn = ops.sample_neighbors(self.indptr, self.indices, nodes, fanout, key, self.replace, draw_ids=draw_ids)
        return drawn, {}


class WeightedLaw(Law):
    """An in-edge has a chance like its weight. weight: [num_edges] float32 or float64, see `ops.sample_weighted`."""

    def __init__(self, indptr: Tensor, indices: Tensor, weight: Tensor) -> None:
        super().__init__(indptr, indices)
        self.weight = weight

    def draw(
        self, nodes: Tensor, fanout: int, key: int | Tensor, draw_ids: Tensor | None = None
    ) -> tuple[Neighbors, dict[str, Tensor]]:
        drawn = ops.sample_weighted(self.indptr, self.indices, self.weight, nodes, fanout, key, draw_ids)
        return Neighbors(drawn.indptr, drawn.ids, drawn.edge_ids), {INCLUSION: drawn.inclusion}


class LaborLaw(Law):
    """Nodes with sources in common draw the same ones, as in LABOR.

    copies: `ops.edge_copies` of the sources. sources: [num_edges], if not `indices`.
    """

    # The sources of two layers must have other numbers. Else a node and its in-neighbour, which have in-neighbours in
    # common, would draw dependently, and the mean output of two linear layers would be off.
    key_per_layer = True

    def __init__(self, indptr: Tensor, indices: Tensor, copies: Tensor | None, sources: Tensor | None = None) -> None:
        super().__init__(indptr, indices)
        self.copies = copies
        self.sources = indices if sources is None else sources

    def draw(
        self, nodes: Tensor, fanout: int, key: int | Tensor, draw_ids: Tensor | None = None
    ) -> tuple[Neighbors, dict[str, Tensor]]:
        drawn = ops.sample_labor(self.indptr, self.sources, nodes, fanout, key, self.copies)
        if self.sources is not self.indices:
            drawn = drawn._replace(ids=ops.gather_rows(self.indices, drawn.edge_ids))
        return drawn, {}


def law_of(graph: Graph, law: str = "uniform", weight: str | None = None, replace: bool = False) -> Law:
    """The law by which a graph is sampled. The arguments are those of `hl.Sampled`.

    Raises:
        ValueError: The settings do not go together, or the graph has no such weights.
    """
    check_law(law, weight, replace)
    if weight is not None:
        array = weights_of_draws(graph.edge, weight)
        graph.get_cached(("weights of draws", weight), lambda: _check_values(weight, array))
        return WeightedLaw(graph.indptr, graph.indices, array)
    if law == "labor":
        return LaborLaw(graph.indptr, graph.indices, graph.get_cached("edge copies", lambda: _copies_in(graph)))
    return UniformLaw(graph.indptr, graph.indices, replace)


def _copies_in(graph: Graph) -> Tensor | None:
    copies = ops.edge_copies(graph.indptr.to(graph.indices.device), graph.indices)
    # If the edges are in pinned host memory, to the GPU, which could not read a plain array on the host.
    return None if copies is None else copies.to(graph.device)


def weights_of_draws(edge: Mapping[str, Tensor], name: str) -> Tensor:
    """[num_edges]: the edge array by which edges are drawn. Its values are not looked at.

    Raises:
        ValueError: There is no such array, or it is not one number per edge.
    """
    if name not in edge:
        names = ", ".join(edge) or "none"
        raise ValueError(f"there is no edge array {name!r} to draw by: set weight to one of the dataset's, {names}")
    if INCLUSION in edge:
        raise ValueError(
            f"draws by weight give their edges an array {INCLUSION!r}, and the dataset has one of this name: rename it"
        )
    array = edge[name]
    if array.dim() != 1 or array.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"weight={name} must be an edge array of float32 or float64, one number per edge, not "
            f"{list(array.shape)} {array.dtype}: convert it by .float()"
        )
    return array


def are_weights(array: Tensor) -> bool:
    """Whether edges can be drawn by these weights, see `ops.sample_weighted`. Reads all of them."""
    for values in array.split(1 << 24):  # to limit the memory of temporary arrays
        is_allowed = (values == 0) | ((values >= ops.SMALLEST_WEIGHT) & (values <= ops.LARGEST_WEIGHT))
        if not bool(is_allowed.all()):
            return False
    return True


def wrong_weights(name: str) -> ValueError:
    """The error for an edge array by which edges cannot be drawn."""
    return ValueError(
        f"the edge array {name!r} has weights that are negative, NaN, infinite, or beyond {ops.SMALLEST_WEIGHT:g} .. "
        f"{ops.LARGEST_WEIGHT:g}: give every edge a finite weight, 0 for edges that are never drawn"
    )


def _check_values(name: str, array: Tensor) -> None:
    if not are_weights(array):
        raise wrong_weights(name)
