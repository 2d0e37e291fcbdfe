"""Ways to divide a graph: from edges, labels or ids to the part of each node."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.ops.cpu import partition as cpu_partition
from hopline.util.progress import progress
from hopline.util.spec import format_size

HOW = ("metis", "streaming", "random", "range")
"""The ways to divide a graph, besides given labels."""
METIS_BYTES = 110
"""Memory that METIS takes per direction of an edge, as measured."""
SNAP = 0.05
"""Share of a part's size by which its ends move to where a label ends."""


def check_edges(graph: Graph) -> None:
    """Refuse edges that lead out of the graph: kernels follow them."""
    low, high = (int(v) for v in torch.aminmax(graph.indices)) if graph.num_edges else (0, 0)
    if low < 0 or high >= graph.num_nodes or bool((graph.indptr[1:] < graph.indptr[:-1]).any()):
        raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")


def divide(
    graph: Graph, num_parts: int, how: str, labels: Tensor | None, seed: int, slack: float, passes: int, show: bool
) -> Tensor:
    """[N] int32: the part of each node of a graph on the host; none is empty."""
    num_nodes = graph.num_nodes
    if labels is not None:
        return by_labels(labels.cpu(), num_parts)
    even = (torch.arange(num_nodes) * num_parts // num_nodes).int()
    if how == "range" or num_parts == 1:
        return even
    if how == "random":
        return even[ops.permutation(ops.derive_key(seed), num_nodes)]
    check_edges(graph)
    if how == "metis":
        return by_metis(graph, num_parts, seed, show)
    if num_nodes >= 2**31:
        raise ValueError(f"streaming numbers nodes by int32 and there are {num_nodes}: use how='range' or labels")
    with progress("Partitioning", None, "nodes", enabled=show) as shown:
        found = cpu_partition.stream_parts(
            graph.indptr.numpy(), graph.indices.numpy(), num_parts, slack, ops.derive_key(seed), passes, shown.advance
        )
    return torch.from_numpy(found)


def by_metis(graph: Graph, num_parts: int, seed: int, show: bool) -> Tensor:
    try:
        import pymetis
    except ImportError as error:
        raise ValueError("METIS is not installed: type `pip install pymetis`, or use how='streaming'") from error
    dtype = pymetis.zero_copy_dtype()
    if 2 * graph.num_edges > np.iinfo(dtype).max:
        raise ValueError(f"this METIS counts edges by {dtype} and there are too many: use how='streaming'")
    _check_memory(2 * graph.num_edges * dtype.itemsize)
    with progress("Partitioning by METIS", None, "nodes", enabled=show) as shown:
        starts, neighbors = cpu_partition.undirected(graph.indptr.numpy(), graph.indices.numpy(), dtype)
        _check_memory(METIS_BYTES * neighbors.shape[0])
        options = pymetis.Options()
        options.seed = seed % 2**31
        adjacency = pymetis.CSRAdjacency(cast(Any, starts), cast(Any, neighbors))
        found = pymetis.part_graph(num_parts, adjacency, options=options, recursive=False)
        shown.advance(graph.num_nodes)
    return without_empty(torch.from_numpy(np.array(found.vertex_part, dtype=np.int32)), num_parts)


def _check_memory(num_bytes: int) -> None:
    """Refuse in time: a process that takes too much is killed without a word."""
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise ValueError(
            f"METIS would take about {format_size(num_bytes)} and {format_size(free)} are free: use how='streaming'"
        )


def by_labels(labels: Tensor, num_parts: int) -> Tensor:
    values, compact = torch.unique(labels, return_inverse=True)
    if values.numel() == num_parts:
        return compact.int()
    num_nodes = labels.numel()
    ends = torch.bincount(compact).cumsum(0)
    cuts = torch.arange(1, num_parts) * num_nodes // num_parts
    after = torch.searchsorted(ends, cuts).clamp(max=ends.numel() - 1)
    before = ends[(after - 1).clamp(min=0)]
    near = torch.where((cuts - before).abs() < (ends[after] - cuts).abs(), before, ends[after])
    cuts = torch.where((near - cuts).abs() <= int(SNAP * num_nodes / num_parts), near, cuts)
    found = torch.empty(num_nodes, dtype=torch.int32)
    found[torch.argsort(compact, stable=True)] = torch.bucketize(torch.arange(num_nodes), cuts, right=True).int()
    return found


def without_empty(part_of: Tensor, num_parts: int) -> Tensor:
    """METIS may leave parts empty, of small graphs: each gets a node of the part that is largest then."""
    sizes = torch.bincount(part_of, minlength=num_parts)
    for part in (sizes == 0).nonzero().view(-1).tolist():
        largest = int(sizes.argmax())
        part_of[(part_of == largest).nonzero()[-1]] = part
        sizes[largest] -= 1
        sizes[part] += 1
    return part_of
