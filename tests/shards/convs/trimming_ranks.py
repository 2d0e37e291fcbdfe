"""Trimmed layers against plain PyG at some seeds. Runs in one process and on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hopline as hl
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.partition import make_partition
from hopline.distributed.world import World
from hopline.shards.convs.runner import ShardConvs
from hopline.shards.convs.trimming import trimmed_convs
from hopline.shards.layout import ShardLayout, shard_layouts
from hopline.shards.transports import LocalTransport, P2PTransport, Transport
from tests.support.helpers import CONVS, plain_gnn, randn, random_graph

NAMES = ("sage-mean", "sage-max", "gcn", "gin", "gat", "gat-edges", "transformer", "transformer-edges")
SEEDS = torch.tensor([2, 9, 30, 31])
BYTES = ("forward", "refetch", "gradient")


def case(name: str) -> tuple[hl.nn.GNN, Graph, Tensor]:
    """Three layers on a graph so thin that its nodes do not all lead to the seeds."""
    edges = name.endswith("-edges")
    graph = random_graph(60, 130, weight=not edges, attr=2 if edges else 0, loops=True)
    torch.manual_seed(0)
    convs = [CONVS[name](4, 4), CONVS[name](4, 4), CONVS[name](4, 4)]
    return hl.nn.GNN(convs, residual=True).double(), graph, randn(60, 4)


def run_plain(model: hl.nn.GNN, graph: Graph, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs at the seeds and the input's gradient by plain PyG. Parameters keep their gradients."""
    model.zero_grad()
    h = x.clone().requires_grad_()
    out = plain_gnn(model, h, graph)[SEEDS]
    out.square().sum().backward()
    assert h.grad is not None
    return out.detach(), h.grad


def run_on_layout(
    model: hl.nn.GNN, x: Tensor, layout: ShardLayout, transport: Transport, trim: bool, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions of this layout's seeds in `SEEDS`, their outputs, the gradient of its own input rows)."""
    model.zero_grad()
    is_needed = torch.isin(layout.own_ids, SEEDS)
    untrimmed = ShardConvs.of(layout, transport, **options)
    convs = trimmed_convs(untrimmed, is_needed, 3, **options) if trim else (untrimmed,) * 3
    blocks = tuple(each.block() for each in convs)
    own_idx = is_needed.nonzero().view(-1)
    h = x[layout.own_ids].requires_grad_()
    seeds = layout.own_ids[own_idx]
    out = model(Batch(seeds, blocks, h, None, output_idx=own_idx))
    out.square().sum().backward()
    assert h.grad is not None
    return torch.searchsorted(SEEDS, seeds), out.detach(), h.grad


def relative_error(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the tolerance."""
    return float(((a - b).abs() / (1e-12 + 1e-10 * b.abs())).max()) if a.numel() else 0.0


def compare(name: str, layout: ShardLayout, world: World, **options: Any) -> tuple[float, dict[str, list[int]]]:
    """(the largest error, the bytes that travelled without and with trimming)."""
    model, graph, x = case(name)
    traffic = {}
    out, of_input = run_plain(model, graph, x)
    weights = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for trim in (False, True):
        transport = LocalTransport(layout) if layout.virtual else P2PTransport(layout, world=world)
        seeds, ours, gradient = run_on_layout(model, x, layout, transport, trim, **options)
        traffic[str(trim)] = [transport.traffic[kind] for kind in BYTES]
    world.sum_gradients(model.parameters())
    worst = max(relative_error(ours, out[seeds]), relative_error(gradient, of_input[layout.own_ids]))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return max([worst, *(relative_error(a, b) for a, b in zip(grads, weights, strict=True))]), traffic


def on_ranks(world: World) -> dict[str, Any]:
    """By conv and mode: the largest error of any rank, and the share of bytes left by trimming."""
    results: dict[str, Any] = {}
    for name in NAMES:
        _, graph, _ = case(name)
        layout = shard_layouts(graph, make_partition(graph, world.size, "random", seed=1))[world.rank]
        for mode in ("sequential", "one_shot"):
            worst, traffic = compare(name, layout, world, mode=mode)
            whole = world.sum(traffic["False"])
            trimmed = world.sum(traffic["True"])
            results[f"{name} {mode}"] = (world.max([worst])[0], sum(trimmed) / sum(whole))
    return results
