"""The symmetric degree norm of GCN on a block, unbiased under sampling.

Degrees are the full graph's. A sampled edge is weighted by degree / sampled, so that its expectation is the full
sum. Self-loops are added exactly and never sampled. So is the mean of several layers the full graph's, but for
activations (`ops.layer_key` says why); loops that are sampled as edges, by `add_self_loops=False`, are the exception.
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
    """What the in-edges of nodes weigh."""

    total: Tensor
    """[num_nodes] float64: summed weight of a node's in-edges, without those from itself where loops are added."""
    loop: Tensor
    """[num_nodes] float64: weight of the loop that is added at each node."""


def gcn_weights(conv: Any, block: Block, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(weight of each edge, weight of each destination's own row) for a GCN-like conv."""
    if not conv.normalize:
        return block.edge.get("weight"), None
    weight = block.edge.get("weight")
    if isinstance(block, TreeBlock) or (weight is not None and weight.requires_grad):
        return _normalised(conv, block, dtype)
    # The layers of a historical batch have their edges in common.
    known = block.part.cache
    name = ("GCN weights", bool(conv.add_self_loops), bool(getattr(conv, "improved", False)), dtype)
    if name not in known:
        known[name] = _normalised(conv, block, dtype)
    return known[name]


def _normalised(conv: Any, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    graph = block.graph
    assert graph is not None
    add_loops = bool(conv.add_self_loops)
    # PyG applies `improved` only where edge weights are given.
    fill = 2.0 if getattr(conv, "improved", False) and "weight" in graph.edge else 1.0
    degree, loop = _degrees(graph, block.src_ids, add_loops, fill)
    inverse = torch.where(degree == 0, 0, degree.pow(-0.5))
    by_dst = inverse[: block.num_dst] * block.sampling_factor
    src_ids = block.src_ids
    if isinstance(block, TreeBlock) and block.on_gpu:  # by the slot that an edge comes out of
        parents = block.parents.clamp(min=0).long()
        weight, src, dst = inverse * by_dst[parents], src_ids, src_ids[parents]
    else:
        part = block.part
        weight = inverse[part.src_idx] * torch.repeat_interleave(by_dst, part.indptr.diff(), output_size=part.num_edges)
        src, dst = src_ids[part.edge_index]  # in a tree one node has several places
    if "weight" in block.edge:
        weight = weight * block.edge["weight"]
    if not add_loops:
        return weight.to(dtype), None
    if graph.self_loops.numel():  # they are in `loop`
        weight = weight.masked_fill(src == dst, 0)
    own = loop[: block.num_dst] * inverse[: block.num_dst].square()
    return weight.to(dtype), own.to(dtype)


def _degrees(graph: Graph, ids: Tensor, add_loops: bool, fill: float) -> tuple[Tensor, Tensor]:
    """(degree, loop weight) of the given nodes, float64."""
    if "weight" not in graph.edge and not (add_loops and graph.self_loops.numel()):
        loop = torch.full((ids.numel(),), fill if add_loops else 0.0, dtype=torch.float64, device=ids.device)
        return graph.in_degrees(ids) + loop, loop
    if isinstance(graph, PartialGraph):
        total, loop = graph.weight_sums(ids, add_loops, fill)
        return total + loop, loop
    name = ("GCN weights", add_loops, fill)
    weights = graph.get_cached(name, partial(weights_of, graph, add_loops, fill))
    total, loop = (array[ids.to(array.device)].to(ids.device) for array in weights)
    return total + loop, loop


def weights_of(graph: Graph, add_loops: bool, fill: float) -> Weights:
    """The weights of all nodes of a graph, where its kernels run."""
    weight = graph.edge.get("weight")
    if weight is None:
        total = graph.in_degrees().double()
    else:
        offsets = graph.indptr.to(weight.device)
        total = torch.segment_reduce(weight.double(), "sum", offsets=offsets, initial=0)
    if not add_loops:
        return Weights(total.to(graph.device), torch.zeros_like(total, device=graph.device))
    # Loops are few and this runs once per graph, so on the host: of several loops of a node the last one counts, and on
    # a GPU which of several writes to one place comes last is left open.
    total = total.cpu()
    loop = torch.full_like(total, fill)
    positions = graph.self_loops
    nodes = graph.indices[positions.to(graph.indices.device)].long().cpu()
    if weight is None:
        existing = torch.ones(nodes.numel(), dtype=torch.float64)
    else:
        existing = weight[positions.to(weight.device)].double().cpu()
    total.index_add_(0, nodes, -existing)
    loop[nodes] = existing  # as PyG: an existing loop keeps its weight, the last one where there are several
    return Weights(total.to(graph.device), loop.to(graph.device))
