"""All nodes and edges within some hops of a few seeds, as one block: what a module without layers is run on."""

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
    """The square block of all in-edges of the nodes less than `num_hops` hops from distinct seeds.

    Seeds come first. The nodes `num_hops` away have no in-edges in it. max_nodes_and_edges: where the block would have
    more nodes and
    edges than that together, it is not made, and None is returned. id_map: an empty one of the graph's, to use again.
    """
    seeds = seeds if graph.device.type == "cpu" else seeds.to(graph.device)
    id_map = ops.new_id_map(graph.num_nodes, seeds.device) if id_map is None else id_map
    counts: list[Tensor] = []
    sources: list[Tensor] = []
    edge_ids: list[Tensor] = []
    num_edges = num_done = 0
    try:
        id_map.add(seeds)
        for _ in range(num_hops):
            new_ids = id_map.ids()[num_done:]
            num_done += new_ids.numel()
            # Degrees tell how many edges a hop will bring before they are read.
            num_edges += int(graph.in_degrees(new_ids).sum())
            if max_nodes_and_edges is not None and num_done + num_edges > max_nodes_and_edges:
                return None
            found = ops.sample_neighbors(graph.indptr, graph.indices, new_ids, -1, 0)
            counts.append(found.indptr.diff())
            sources.append(id_map.add(found.ids))
            edge_ids.append(found.edge_ids)
        node_ids = id_map.ids()
    finally:
        id_map.clear()
    if max_nodes_and_edges is not None and node_ids.numel() + num_edges > max_nodes_and_edges:
        return None
    # A node's edges are read at the hop after the one that reached it, so they are sorted by destination.
    indptr = torch.zeros(node_ids.numel() + 1, dtype=torch.int64, device=seeds.device)
    if counts:
        indptr[1 : num_done + 1] = torch.cat(counts).cumsum(0)
        indptr[num_done + 1 :] = indptr[num_done]
    positions = torch.cat(edge_ids) if edge_ids else indptr[:0]
    src_idx = torch.cat(sources) if sources else indptr[:0].int()
    edge = {name: ops.gather_rows(array, positions) for name, array in graph.edge.items()}
    return Block(node_ids, node_ids.numel(), (Part(indptr, src_idx, edge),), graph)
