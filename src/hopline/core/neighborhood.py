"""The full neighbourhood of a few seeds as one square block, for modules that cannot be run layer by layer.

Such a module computes all its layers on one graph. If it passes messages over `num_hops` hops, its outputs at the
seeds depend on the edges of this block alone. The block grows fast with the hops, so its size can be limited. The
degrees tell before each hop whether the limit would be exceeded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph


def neighborhood(
    graph: Graph,
    seeds: Tensor,
    num_hops: int,
    max_nodes_and_edges: int | None = None,
    id_map: ops.AnyIdMap | None = None,
) -> Block | None:
    """The square block of all in-edges of the nodes less than `num_hops` hops away from the seeds.

    The seeds come first among its nodes. The nodes `num_hops` away have no in-edges in the block.

    seeds: [n] int64, distinct.
    max_nodes_and_edges: the most nodes and edges together. Returns None if the block would have more.
    id_map: an empty id map for the graph, which is empty again afterwards. By default a new one is made.
    """
    # The seeds go to the graph's GPU. If the graph is in host memory, they stay on their device.
    seeds = seeds if graph.device.type == "cpu" else seeds.to(graph.device)
    id_map = ops.new_id_map(graph.num_nodes, seeds.device) if id_map is None else id_map
    # One entry per hop.
    in_degrees: list[Tensor] = []
    src_idx: list[Tensor] = []
    edge_ids: list[Tensor] = []

    num_edges = 0
    num_done = 0  # nodes whose in-edges are in the block
    try:
        id_map.add(seeds)
        for _ in range(num_hops):
            new_ids = id_map.ids()[num_done:]
            num_done += new_ids.numel()
            # The degrees give the number of edges of this hop before any of them is read.
            num_edges += int(graph.in_degrees(new_ids).sum())
            if max_nodes_and_edges is not None and num_done + num_edges > max_nodes_and_edges:
                return None
            # Fan-out -1 takes all in-edges, so the key 0 decides nothing.
            in_edges = ops.sample_neighbors(graph.indptr, graph.indices, new_ids, -1, 0)
            in_degrees.append(in_edges.indptr.diff())
            src_idx.append(id_map.add(in_edges.ids))
            edge_ids.append(in_edges.edge_ids)
        node_ids = id_map.ids()
    finally:
        id_map.clear()
    if max_nodes_and_edges is not None and node_ids.numel() + num_edges > max_nodes_and_edges:
        return None
    # The edges are sorted by destination already: hops read the in-edges of nodes in the order of their local ids.
    indptr = torch.zeros(node_ids.numel() + 1, dtype=torch.int64, device=seeds.device)
    # The nodes after the first `num_done` were reached by the last hop, and have no edges.
    if in_degrees:
        indptr[1 : num_done + 1] = torch.cat(in_degrees).cumsum(0)
        indptr[num_done + 1 :] = indptr[num_done]
    all_edge_ids = torch.cat(edge_ids) if edge_ids else indptr[:0]
    all_src_idx = torch.cat(src_idx) if src_idx else indptr[:0].int()
    edge = {name: ops.gather_rows(array, all_edge_ids) for name, array in graph.edge.items()}
    return Block(node_ids, node_ids.numel(), (Part(indptr, all_src_idx, edge),), graph)
