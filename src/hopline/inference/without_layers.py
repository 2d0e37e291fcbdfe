"""Exact inference of a module that is not made of layers: on the whole graph, or on parts of it.

A *part* is the graph within some hops of some nodes (`neighborhoods`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hopline.budget.predictor import costs_of
from hopline.core.batch import Block, Part
from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import Rows
from hopline.data.dataset import Dataset
from hopline.inference.neighborhoods import LocalInference
from hopline.nn.whole_module import Whole
from hopline.nn.whole_module_probe import find_hops, find_reach
from hopline.util.config import format_size

WHOLE_BYTES = 2 << 30
"""A module without layers runs on the whole graph if a float32 feature row per edge takes at most these bytes."""
ReadRows = Callable[[Tensor], Tensor]
"""A function from node ids, [m] int64, to their rows, [m, ...] on the host."""


def whole_rows(
    batch_model: Whole,
    data: Dataset,
    ids: Tensor | None,
    part_hops: int | None,
    *,
    device: torch.device,
    show: bool = False,
    chunk_edges: int | None = None,
    chunk_bytes: int | None = None,
) -> ReadRows:
    """A function from some of `ids` to the outputs of a module without layers.

    part_hops: the hops of the parts that the module runs on; None for the whole graph at once. Without a
    limit on chunks, the whole graph is also used if it is small enough and parts would cost more.
    """
    if part_hops is None:
        if is_too_large(data):
            enough_hops = find_hops(batch_model, data.x, data.graph.edge)
            advice = "" if enough_hops is None else f"give hops={enough_hops}, "
            raise ValueError(
                f"{type(batch_model.module).__name__} has no layers that could be computed one by one, and the whole "
                f"graph is too large for it: {advice}build it as hl.nn.GNN([...convs...]), or set inference=sampled"
            )
        return run_whole(batch_model, data, device).__getitem__
    seeds = torch.arange(data.num_nodes) if ids is None else torch.unique(ids.cpu().long())
    local = LocalInference(batch_model, data, part_hops, device, chunk_edges=chunk_edges, chunk_bytes=chunk_bytes)
    has_limit = chunk_edges is not None or chunk_bytes is not None
    if not has_limit and not is_too_large(data) and local.is_dearer_than_whole(seeds):
        return run_whole(batch_model, data, device).__getitem__
    rows = local.rows(seeds, show)

    def read(node_ids: Tensor) -> Tensor:
        return rows[torch.searchsorted(seeds, node_ids.cpu().long())]

    return read


def part_hops_of(batch_model: Whole, data: Dataset, hops: int | None, limits: list[str]) -> int | None:
    """The hops of the parts that a module runs on. None for the whole graph.

    They are `hops`, or one more if the module also needs all in-edges of the nodes that are `hops` away.

    Raises a ValueError if `hops` is too few, or if there are limits on the size of parts but no hops.

    hops: the hops around a node that the module reads, says the user; None if the user does not say.
    limits: the names of the arguments that the user set to limit the size of parts.
    """
    name = type(batch_model.module).__name__
    if hops is None and limits:
        enough_hops = find_hops(batch_model, data.x, data.graph.edge)
        advice = "leave it out" if enough_hops is None else f"add hops={enough_hops}"
        raise ValueError(
            f"{limits[0]}= needs the number of hops around a node that {name} reads, since it has no layers to compute "
            f"one by one: {advice}, or build it as hl.nn.GNN([...convs...])"
        )
    if hops is None:
        return None
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 0:
        raise ValueError(f"hops must be a number from 0, not {hops!r}")
    reach = find_reach(batch_model, hops, data.x, data.graph.edge)
    if reach.part_hops is None:
        enough_hops = find_hops(batch_model, data.x, data.graph.edge)
        advice = "" if enough_hops is None or enough_hops <= hops else f"hops={enough_hops}, or "
        raise ValueError(
            f"{name} with hops={hops} would not give its outputs on the whole graph: {reach.reason or reach.refusal}. "
            f"Give {advice}no hops=, which runs it on the whole graph at once"
        )
    return reach.part_hops


def describe_whole(batch_model: Whole, data: Dataset) -> str:
    """A sentence for the log: the memory of one forward pass over the whole graph."""
    return (
        f"exact inference runs {type(batch_model.module).__name__} on the whole graph at once, which takes about "
        f"{format_size(whole_bytes(batch_model, data))}"
    )


def is_too_large(data: Dataset) -> bool:
    """Whether a float32 feature row per edge would take more than `WHOLE_BYTES`."""
    return data.graph.num_edges * data.num_features * 4 > WHOLE_BYTES


def whole_bytes(batch_model: Whole, data: Dataset) -> int:
    """The bytes of a module's forward pass over the whole graph, by the widths of its parameters.

    An upper bound for modules of convs. Too little for a module that compares all pairs of nodes.
    """
    costs = costs_of(batch_model, data.x, num_blocks=1).forward_only()
    # One block, whose sources and destinations are all nodes.
    sizes = Sizes(nodes=(data.num_nodes, data.num_nodes), edges=(data.num_edges,))
    return int(costs.bound(sizes))


def run_whole(batch_model: Whole, data: Dataset, device: torch.device) -> Tensor:
    """The outputs of all nodes by one forward pass over the whole graph: [num_nodes, ...] on the host."""
    graph = data.graph
    # `Part` is the class of a block's edges, and not a part as above.
    all_edges = Part(graph.indptr, graph.indices, graph.edge).to(device)
    block = Block(torch.arange(graph.num_nodes, device=device), graph.num_nodes, (all_edges,), graph)
    return batch_model.on_block(Rows(data.x, block.src_ids).read_on(device), block).cpu()
