"""The symmetric degree norm of GCN on a block, unbiased under sampling.

On the whole graph GCN computes the following sum. w_ji is the weight of an edge, loop_i that of the self-loop
of node i. The degree d_i is the weight of all in-edges of i and of its loop.

    out_i  =  loop_i / d_i  x_i  +  sum over in-edges (j, i) of   w_ji / sqrt(d_j d_i)  x_j

PyG takes degrees from the edges that it is given, which is wrong on a block. Here d is always the whole
graph's. Weights of sampled edges are multiplied by the sampling factor of their destination: in-edges in
the graph over in-edges in the block, or for draws by weight by 1 / `Block.inclusion`. So the expectation of the
sum is the full sum, over the edges of positive weight in the draws. Self-loops are added
exactly, and never sampled.

The expectation over several linear layers is that of the whole graph too (`ops.layer_key` says why). Activations
between the layers add a bias.

Sums of edge weights are computed once per graph, and cached with it. A block's edge weights are cached with
its edges, but not in the tree layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.core.graph import Graph, PartialGraph
from hopline.core.tree_layout import TreeBlock


class Weights(NamedTuple):
    """Weights of each node's in-edges and of its self-loop. Their sum is the node's degree."""

    total: Tensor
    """[num_nodes] float64: summed weight of a node's in-edges.

    Without the graph's self-loops, if loops are added.
    """
    loop: Tensor
    """[num_nodes] float64: weight of the loop that is added at each node. 0 if none is added."""


def gcn_weights(conv: Any, block: Block, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(weight of each edge, weight of each destination's own row) for a GCN-like conv on a block.

    edges: [num_edges], or [num_src] by slot for a tree on a GPU. None: all edges weigh 1.
    own rows: [num_dst]. None: the conv adds no loops.
    """
    if not conv.normalize:
        return block.edge.get("weight"), None
    weight = block.edge.get("weight")
    if isinstance(block, TreeBlock) or (weight is not None and weight.requires_grad):
        return _compute_weights(conv, block, dtype)
    # Cached with the edges, since the layers of a historical batch share them. Trees compute their weights
    # every time. So do weights with a gradient: a cached result would belong to the autograd graph of an
    # earlier step.
    cache = block.part.cache
    cache_key = ("GCN weights", bool(conv.add_self_loops), bool(getattr(conv, "improved", False)), dtype)
    if cache_key not in cache:
        cache[cache_key] = _compute_weights(conv, block, dtype)
    return cache[cache_key]


def _compute_weights(conv: Any, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(weight of each edge, weight of each destination's own row) with the degree norm.

    Computed in float64, and then converted to `dtype`.
    """
    graph = block.graph
    assert graph is not None
    add_loops = bool(conv.add_self_loops)
    # PyG applies `improved` only where edge weights are given.
    fill = 2.0 if getattr(conv, "improved", False) and "weight" in graph.edge else 1.0
    degree, loop = _degrees(graph, block.src_ids, add_loops, fill)
    inverse_root = torch.where(degree == 0, 0, degree.pow(-0.5))
    inclusion = block.inclusion
    dst_factor = inverse_root[: block.num_dst]
    if inclusion is None:
        dst_factor = dst_factor * block.sampling_factor
    src_ids = block.src_ids
    if isinstance(block, TreeBlock) and block.on_gpu:
        # A weight for every slot, that of the edge out of it. Seeds have the parent -1, and no edge leaves
        # them.
        parents = block.parents.clamp(min=0).long()
        weight = inverse_root * dst_factor[parents]
        src = src_ids
        dst = src_ids[parents]
    else:
        part = block.part
        # One expression, so that neither factor of the product, a number per edge each, outlives it.
        weight = inverse_root[part.src_idx] * torch.repeat_interleave(
            dst_factor, part.indptr.diff(), output_size=part.num_edges
        )
        # Global ids, since in a tree one node has several local ids, and loops are recognised by equal ids.
        src, dst = src_ids[part.edge_index]
    if inclusion is not None:
        weight = weight / inclusion
    if "weight" in block.edge:
        weight = weight * block.edge["weight"]
    if not add_loops:
        return weight.to(dtype), None
    if graph.self_loops.numel():  # `loop` includes them, so as edges they must not count again
        weight = weight.masked_fill(src == dst, 0)
    own_weight = loop[: block.num_dst] * inverse_root[: block.num_dst].square()
    return weight.to(dtype), own_weight.to(dtype)


def _degrees(graph: Graph, ids: Tensor, add_loops: bool, fill: float) -> tuple[Tensor, Tensor]:
    """([n] degree, [n] loop weight) of the given nodes, float64.

    ids: [n] global ids. fill: weight of a loop at a node that has none in the graph.
    """
    # Without edge weights and self-loops in the graph, in-degrees are enough.
    if "weight" not in graph.edge and not (add_loops and graph.self_loops.numel()):
        loop = torch.full((ids.numel(),), fill if add_loops else 0.0, dtype=torch.float64, device=ids.device)
        return graph.in_degrees(ids) + loop, loop
    if isinstance(graph, PartialGraph):  # it has no edges, but the weight sums of its nodes in the whole graph
        total, loop = graph.weight_sums(ids, add_loops, fill)
        return total + loop, loop
    cache_key = ("GCN weights", add_loops, fill)
    weights = graph.get_cached(cache_key, partial(weights_of, graph, add_loops, fill))
    total, loop = (array[ids.to(array.device)].to(ids.device) for array in weights)
    return total + loop, loop


def weights_of(graph: Graph, add_loops: bool, fill: float) -> Weights:
    """The weights of all nodes of a graph, on the graph's device. Computed once per graph and setting.

    fill: weight of a loop at a node that has none in the graph.
    """
    weight = graph.edge.get("weight")
    if weight is None:
        total = graph.in_degrees().double()
    else:
        offsets = graph.indptr.to(weight.device)
        total = torch.segment_reduce(weight.double(), "sum", offsets=offsets, initial=0)
    if not add_loops:
        return Weights(total.to(graph.device), torch.zeros_like(total, device=graph.device))
    # On the host, because the last of several loops of a node counts, as in PyG. A GPU does not define
    # which of several writes to one element comes last. Loops are few, and this runs once per graph.
    total = total.cpu()
    loop = torch.full_like(total, fill)
    positions = graph.self_loops
    nodes = graph.indices[positions.to(graph.indices.device)].long().cpu()
    if weight is None:
        existing = torch.ones(nodes.numel(), dtype=torch.float64)
    else:
        existing = weight[positions.to(weight.device)].double().cpu()
    total.index_add_(0, nodes, -existing)
    loop[nodes] = existing  # as in PyG, an existing loop keeps its weight
    return Weights(total.to(graph.device), loop.to(graph.device))
