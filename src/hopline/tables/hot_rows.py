"""Scores by which hot rows are chosen: how often batches will read the row of each node.

Sampling walks against the edges: a node is drawn as the source of an in-edge. So its out-degree, the number
of times that it occurs in the graph's `indices`, predicts how often its row is read. Its in-degree does
not.

There are two scores. `out_degrees` needs the graph alone, and one pass over its edges. `access_probability`
also knows the fan-outs and the training nodes, and takes one pass over the edges per layer. `hottest` picks
the best rows of any score.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.ops.cpu import partition as cpu_partition

LARGEST_TERM = 16.0
"""Largest value of -log(1 - p) for the probability p of a draw: p is taken to be at most 1 - exp(-16).

It keeps the logarithm finite, and bounds the sums of `access_probability`. A rule of thumb.
"""
CHUNK_EDGES = 1 << 26
"""Edges handled at once on a GPU, which limits the temporary memory."""


def out_degrees(graph: Graph) -> Tensor:
    """[num_nodes] int64: the number of edges of which each node is the source."""
    return add_to_sources(graph, torch.ones(graph.num_nodes, dtype=torch.int64, device=graph.indices.device))


def hottest(score: Tensor, count: int) -> Tensor:
    """[count] int64: the indices of the highest scores, the highest first. Of equal scores the first index wins."""
    if not 0 < count < score.numel():
        return score.argsort(descending=True, stable=True)[:count]
    # No sort of all scores: only the chosen ones are sorted. topk gives nothing but the lowest chosen
    # score, because which of several equal scores it takes is not defined.
    threshold = score.topk(count, sorted=False).values.min()
    above = (score > threshold).nonzero().view(-1)
    equal = (score == threshold).nonzero().view(-1)[: count - above.numel()]
    indices = torch.cat([above, equal])
    return indices[score[indices].argsort(descending=True, stable=True)]


def access_probability(graph: Graph, fanouts: Sequence[int], train_ids: Tensor, batch_size: int = 1024) -> Tensor:
    """[num_nodes] float32: the probability that a batch reads each node's row, if all draws were independent.

    This is the analysis of SALIENT++ (Kaler et al., 2023), changed for samples that nest within pairs of
    adjacent layers: a node draws once for both layers of a pair, as many in-edges as the wider fan-out. A
    node with a self-loop draws in each layer: for it, every layer is a pair of its own.

    Let p_h(v) be the probability that v is in the batch after hop h, and s(v) = p_0(v) that v is a seed. Then

        n_j(u)  =  p_j(u) - p_{j-1}(u), and n_0 = s                    u joins the batch at hop j
        q_P(u)  =  min(1, max(fan-outs of the pair P) / in-degree(u))  an in-edge of u is drawn for pair P
        d_h(u)  =  sum over j < h of  n_j(u) (1 - product over pairs P from j to h of (1 - q_P(u)))
                                                                       an in-edge of u is drawn up to hop h
        p_h(v)  =  1 - (1 - s(v)) * product over out-edges (v, u) of (1 - d_h(u))

    In words: v is missed if it is no seed and all its out-edges miss it. The product over edges is computed
    as a sum of logarithms.
    """
    device = graph.indices.device
    degrees = graph.in_degrees().to(device).clamp(min=1).float()
    seeds = torch.zeros(graph.num_nodes, device=device)
    seeds[train_ids.to(device)] = min(1.0, batch_size / max(1, train_ids.numel()))
    reached = seeds  # p_h
    joined = [seeds]  # n_0, n_1, ...
    # Logarithms are added as integers, so that the sum does not depend on its order. It cannot overflow: it
    # has at most num_edges terms, each at most LARGEST_TERM * scale, so it is at most 2**4 * 2**58 = 2**62.
    scale = 2.0 ** (58 - graph.num_edges.bit_length())
    for hop in range(1, len(fanouts) + 1):
        drawn = torch.zeros_like(seeds)  # d_h
        for j, new in enumerate(joined):
            not_drawn = _miss_probability(degrees, _pairs_of_layers(fanouts, j, hop))
            if graph.has_loop is not None:
                by_layer = _miss_probability(degrees, [[fanout] for fanout in fanouts[j:hop]])
                not_drawn = torch.where(graph.has_loop.to(device), by_layer, not_drawn)
            drawn += new * (1 - not_drawn)
        terms = -torch.log1p(-drawn.clamp(max=1.0))
        term_sums = add_to_sources(graph, (terms.clamp(max=LARGEST_TERM).double() * scale).round().long())
        # p_h = 1 - (1 - s) exp(-sum), written so that small probabilities keep their digits.
        reached_now = seeds - (1 - seeds) * torch.expm1(-term_sums.double() / scale).float()
        joined.append((reached_now - reached).clamp(min=0))
        reached = reached_now
    return reached


def _pairs_of_layers(fanouts: Sequence[int], first: int, last: int) -> list[list[int]]:
    """The fan-outs of hops `first` .. `last` - 1 by pairs of layers that draw once, counted from the last hop."""
    pairs: dict[int, list[int]] = {}
    for hop in range(first, last):
        pairs.setdefault((len(fanouts) - 1 - hop) // 2, []).append(fanouts[hop])
    return list(pairs.values())


def _miss_probability(degrees: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """[num_nodes] float32: the probability that an in-edge is drawn for none of these groups of layers' fan-outs."""
    missed = torch.ones_like(degrees)
    for group in groups:
        missed *= 1 - _draw_probability(degrees, group)
    return missed


def _draw_probability(degrees: Tensor, fanouts: Sequence[int]) -> Tensor:
    """[num_nodes] float32: the probability that an in-edge is among those drawn. A fan-out of -1 takes all."""
    if min(fanouts) < 0:
        return torch.ones_like(degrees)
    return (max(fanouts) / degrees).clamp(max=1.0)


def add_to_sources(graph: Graph, values: Tensor) -> Tensor:
    """[num_nodes] int64: at each node, the sum of `values` [num_nodes] over the nodes that its out-edges lead to."""
    indptr = graph.indptr.to(graph.indices.device)
    if indptr.device.type == "cpu":
        return cpu_partition.add_to_sources(indptr, graph.indices, values)
    return add_in_chunks(indptr, graph.indices, values)


def add_in_chunks(indptr: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """[num_nodes] int64: `add_to_sources` in plain torch, for any device."""
    out = torch.zeros_like(values)
    for first in range(0, indices.numel(), CHUNK_EDGES):
        sources = indices[first : first + CHUNK_EDGES]
        edges = torch.arange(first, first + sources.numel(), device=indices.device)
        destinations = torch.searchsorted(indptr, edges, right=True) - 1
        out.index_add_(0, sources.long(), values[destinations])
    return out
