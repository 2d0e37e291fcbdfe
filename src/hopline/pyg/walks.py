"""pyg-lib's operators on whole graphs: `random_walk` (node2vec) and `metis`."""

from __future__ import annotations

from torch import Tensor

from hopline.core.graph import Graph
from hopline.core.partition import by_metis, check_edges
from hopline.ops.cpu import walks
from hopline.pyg.operators import check_arrays, new_key


def random_walk(rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float, q: float) -> Tensor:
    """[n, walk_length + 1], of the seeds' dtype: the nodes of a walk from each seed, by p and q of node2vec.

    A node without edges is not left. Raises ValueError for ids outside the graph, and unless p and q are positive.
    """
    check_arrays({"rowptr": rowptr, "col": col, "seed": seed}, rowptr)
    if not (0 < p < float("inf") and 0 < q < float("inf")):
        raise ValueError(f"p and q must be positive, not {p} and {q}")
    if rowptr.device.type != "cpu":
        raise ValueError(
            f"random walks run on the CPU: pass rowptr.cpu(), col.cpu() and seed.cpu(), not {rowptr.device}"
        )
    return walks.random_walk(rowptr, col, seed, walk_length, p, q, new_key()).to(seed.dtype)


def metis(
    rowptr: Tensor,
    col: Tensor,
    num_partitions: int,
    node_weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
    recursive: bool = False,
) -> Tensor:
    """[num_nodes], of rowptr's dtype: the part of each node by METIS, every edge taken in both directions.

    node_weight: [num_nodes] integers above 0, of which parts get equal sums. No part is empty, and equal calls give
    equal parts. Raises ValueError for edge weights, for ids outside the graph, and without pymetis.
    """
    check_arrays({"rowptr": rowptr, "col": col}, rowptr)
    num_nodes = rowptr.numel() - 1
    if edge_weight is not None:
        raise ValueError("METIS runs without edge weights here: leave out edge_weight")
    if node_weight is not None:
        check_arrays({"node_weight": node_weight}, rowptr)
        if node_weight.numel() != num_nodes or bool((node_weight <= 0).any()):
            raise ValueError(f"node_weight must hold {num_nodes} integers above 0")
    if not 1 <= num_partitions <= num_nodes:
        raise ValueError(f"num_partitions must be in 1 .. {num_nodes}, the number of nodes, not {num_partitions}")
    graph = Graph(rowptr.cpu().long(), col.cpu())
    check_edges(graph)
    part_of = by_metis(graph, num_partitions, 0, False, None if node_weight is None else node_weight.cpu(), recursive)
    return part_of.to(rowptr.device, rowptr.dtype)
