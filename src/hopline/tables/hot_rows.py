"""Which rows will be read most: the ones to keep near.

Sampling walks against the edges: a node is drawn as the source of an in-edge. So what predicts how often its row is
read is how often it stands in the graph's `indices` (its out-degree), and not how many in-edges it has itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.ops.cpu import partition as cpu_partition

LARGEST_TERM = 16.0
"""A node that is missed with probability exp(-16) counts as always read."""
CHUNK_EDGES = 1 << 26
"""Edges handled at a time on a GPU."""


def out_degrees(graph: Graph) -> Tensor:
    """[num_nodes] int64: of how many edges each node is the source."""
    return add_to_sources(graph, torch.ones(graph.num_nodes, dtype=torch.int64, device=graph.indices.device))


def hottest(score: Tensor, count: int) -> Tensor:
    """[count] int64: the positions of the highest scores, in descending order; of equal ones the first."""
    if not 0 < count < score.numel():
        return score.argsort(descending=True, stable=True)[:count]
    # Only what is kept is sorted, and what is kept does not depend on how topk breaks ties.
    least = score.topk(count, sorted=False).values.min()
    above = (score > least).nonzero().view(-1)
    level = (score == least).nonzero().view(-1)[: count - above.numel()]
    chosen = torch.cat([above, level])
    return chosen[score[chosen].argsort(descending=True, stable=True)]


def access_probability(
    graph: Graph, fanouts: Sequence[int], train_ids: Tensor, batch_size: int = 1024, replace: bool = False
) -> Tensor:
    """[num_nodes] float32: how probable it is that a batch reads each node's row, had every draw been independent.

    The analysis of SALIENT++ (Kaler et al., 2023), for samples that nest within two layers next to each other: a node
    that joined a batch at hop j draws once for each such pair from there on, as many as the wider of its fan-outs, and
    the node at the other end of one of its in-edges is drawn with probability min(1, fan-out / in-degree). A node is
    missed if all its out-edges miss it.
    """
    device = graph.indices.device
    degrees = graph.in_degrees().to(device).clamp(min=1).float()
    seeds = torch.zeros(graph.num_nodes, device=device)
    seeds[train_ids.to(device)] = min(1.0, batch_size / max(1, train_ids.numel()))
    reached, joined = seeds, [seeds]
    # In whole numbers, so that the sums do not depend on their order; no sum can overflow.
    scale = 2.0 ** (58 - graph.num_edges.bit_length())
    for hop in range(1, len(fanouts) + 1):
        used = torch.zeros_like(seeds)
        for j, new in enumerate(joined):
            missed_by = torch.ones_like(seeds)
            for pair in _pairs_of_layers(fanouts, j, hop):
                missed_by *= 1 - _share(degrees, pair, replace)
            used += new * (1 - missed_by)
        terms = -torch.log1p(-used.clamp(max=1.0))
        missed = add_to_sources(graph, (terms.clamp(max=LARGEST_TERM).double() * scale).round().long())
        now = seeds - (1 - seeds) * torch.expm1(-missed.double() / scale).float()
        joined.append((now - reached).clamp(min=0))
        reached = now
    return reached


def _pairs_of_layers(fanouts: Sequence[int], first: int, last: int) -> list[list[int]]:
    """The fan-outs of the hops from `first` up to `last`, those together for which a node draws once."""
    pairs: dict[int, list[int]] = {}
    for hop in range(first, last):
        pairs.setdefault((len(fanouts) - 1 - hop) // 2, []).append(fanouts[hop])
    return list(pairs.values())


def _share(degrees: Tensor, fanouts: Sequence[int], replace: bool) -> Tensor:
    """How probable it is that one given in-edge of a node is among those drawn."""
    if min(fanouts) < 0:
        return torch.ones_like(degrees)
    if replace:
        return 1 - (1 - 1 / degrees) ** max(fanouts)
    return (max(fanouts) / degrees).clamp(max=1.0)


def add_to_sources(graph: Graph, values: Tensor) -> Tensor:
    """[num_nodes] int64: at each node the sum of `values` over the nodes that its out-edges reach."""
    indptr = graph.indptr.to(graph.indices.device)
    if indptr.device.type == "cpu":
        return cpu_partition.add_to_sources(indptr, graph.indices, values)
    return add_in_chunks(indptr, graph.indices, values)


def add_in_chunks(indptr: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """The same by torch, on any device."""
    out = torch.zeros_like(values)
    for first in range(0, indices.numel(), CHUNK_EDGES):
        sources = indices[first : first + CHUNK_EDGES]
        edges = torch.arange(first, first + sources.numel(), device=indices.device)
        destinations = torch.searchsorted(indptr, edges, right=True) - 1
        out.index_add_(0, sources.long(), values[destinations])
    return out
