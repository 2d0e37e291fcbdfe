"""PyG convs over shards against plain PyG: outputs and every gradient. Used in one process and by several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.core.graph import Graph
from hopline.core.partition import make_partition
from hopline.distributed.world import World
from hopline.nn.conv_adapter import edge_arguments
from hopline.shards.convs.runner import ShardConvs, run_conv
from hopline.shards.layout import ShardLayout, shard_layouts
from hopline.shards.transports import P2PTransport, Transport
from tests.support.helpers import CONVS, graph_of, mlp, randint, randn, random_graph

RELATIVE = 1e-10
ABSOLUTE = 1e-12
CHUNK_BYTES = 4000
"""So few that every part is cut into several chunks."""

MORE: dict[str, Callable[[int, int], nn.Module]] = {
    "sage-min": lambda a, b: pyg.SAGEConv(a, b, aggr="min"),
    "sage-var": lambda a, b: pyg.SAGEConv(a, b, aggr="var"),
    "sage-multi": lambda a, b: pyg.SAGEConv(a, b, aggr=["mean", "max", "std", "min"]),
    "sage-softmax": lambda a, b: pyg.SAGEConv(a, b, aggr=pyg.aggr.SoftmaxAggregation(learn=True)),
    "sage-powermean": lambda a, b: pyg.SAGEConv(a, b, aggr=pyg.aggr.PowerMeanAggregation(learn=True)),
    "gat-fill-edges": lambda a, b: pyg.GATConv(a, b, edge_dim=2, fill_value=0.5),
    "nn-edges": lambda a, b: pyg.NNConv(a, b, mlp(2, 5, a * b)),
    "edge-mean": lambda a, b: pyg.EdgeConv(mlp(2 * a, 5, b), aggr="mean"),
    "resgated": lambda a, b: pyg.ResGatedGraphConv(a, b),
    "resgated-edges": lambda a, b: pyg.ResGatedGraphConv(a, b, edge_dim=2),
    "tag": lambda a, b: pyg.TAGConv(a, b, K=2),
    "sg": lambda a, b: pyg.SGConv(a, b, K=2),
    "film": lambda a, b: pyg.FiLMConv(a, b),
    "leconv": lambda a, b: pyg.LEConv(a, b),
}
SUITE = {**CONVS, **MORE}
"""Convs by name; those in "-edges" read edge attributes of width 2, the others edge weights where they can."""
TIES = ["sage-max", "edge", "sage-multi", "sage-min", "graph-max", "pna"]
"""Convs with maxima or minima, which are compared on discrete rows too."""


def case(name: str, discrete: bool = False) -> tuple[Graph, Tensor]:
    """A graph with loops, double edges and nodes without in-edges, and its rows; discrete ones have many ties."""
    edges = name.endswith("-edges")
    graph = random_graph(40, 220, weight=not edges, attr=2 if edges else 0, loops=True)
    x = (randint(0, 3, 160, seed=5) - 1).view(40, 4).double() if discrete else randn(40, 4)
    return graph, x


def model(name: str, discrete: bool = False) -> nn.Module:
    """A conv that keeps the width. For discrete rows with weights in eighths and ReLU: products are exact, so that
    ties stay ties."""
    torch.manual_seed(0)
    conv = SUITE[name](4, 4).double()
    if discrete:
        for module in [m for m in conv.modules() if isinstance(m, nn.Sequential) and len(m) > 1]:
            module[1] = nn.ReLU()
        for p in conv.parameters():
            p.data = (p.data * 8).round() / 8
    return conv


def plain(conv: nn.Module, graph: Graph, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients of plain PyG: the conv run twice, with edges in the graph's order."""
    edge = {name: rows.clone().requires_grad_() for name, rows in graph.edge.items()}

    def layer(h: Tensor) -> Tensor:
        return conv(h, graph.edge_index(), **edge_arguments(conv, edge, torch.float64))

    return _run(conv, x.clone(), edge, layer, torch.arange(graph.num_nodes))


def sharded(
    conv: nn.Module, graph: Graph, x: Tensor, layout: ShardLayout, transport: Transport | None, **options: Any
) -> dict[str, Tensor]:
    """Outputs and gradients of the conv run twice over the nodes and edges of a layout."""
    edge = {name: rows[layout.edge_ids].requires_grad_() for name, rows in graph.edge.items()}
    convs = ShardConvs.of(layout, transport, edge_rows=edge, **{"chunk_bytes": CHUNK_BYTES, **options})
    return _run(conv, x[layout.own_ids], edge, lambda h: run_conv(conv, h, convs), layout.own_ids)


def _run(
    conv: nn.Module, x: Tensor, edge: Mapping[str, Tensor], layer: Callable[..., Tensor], ids: Tensor
) -> dict[str, Tensor]:
    x.requires_grad_()
    conv.zero_grad()
    out = layer(layer(x).relu())
    (out * randn(40, 4, seed=7)[ids]).sum().backward()
    results = {"out": out.detach(), "x": x.grad}
    results |= {f"edge.{name}": rows.grad for name, rows in edge.items()}
    results |= {f"parameter.{name}": p.grad for name, p in conv.named_parameters()}
    return {name: value.clone() for name, value in results.items() if value is not None}


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], layout: ShardLayout) -> float:
    """The largest difference between own and expected results, in units of the tolerance.

    expected: results of all nodes and edges, of which the layout's are taken.
    """
    worst = 0.0
    for name in found.keys() | expected.keys():
        theirs = expected.get(name, torch.zeros(()))
        if name in expected and not name.startswith("parameter"):
            theirs = theirs[layout.edge_ids if name.startswith("edge") else layout.own_ids]
        ours = found.get(name, torch.zeros(()))
        allowed = ABSOLUTE + RELATIVE * theirs.abs()
        worst = max(worst, float(((ours - theirs).abs() / allowed).max()) if (ours - theirs).numel() else 0.0)
    return worst


def on_ranks(world: World, names: list[str]) -> dict[str, Any]:
    """The largest error of each conv on this rank's shard, and the bytes that travelled."""
    errors: dict[str, float] = {}
    for name in names:
        for discrete in (False, True) if name in TIES[:3] else (False,):
            how = "random" if discrete else "metis"
            errors[f"{name} {how}"] = _on_rank(world, model(name, discrete), *case(name, discrete), how)
    for name in ("gat", "edge", "sage-multi", "gcn"):
        errors[f"{name} no edges"] = _on_rank(world, model(name), *one_way_case(), "range")
    errors |= {f"modes {name}": _modes_and_depths(world, name) for name in ("sage-mean", "gat", "sage-max", "gcn")}
    return {"errors": dict(zip(errors, world.max(list(errors.values())), strict=True)), "traffic": _traffic(world)}


def one_way_case() -> tuple[Graph, Tensor]:
    """All edges lead from the second half of the nodes to the first.

    Some shards have no edges, and need no rows of others.
    """
    return graph_of(randint(20, 40, 100), randint(0, 20, 100, seed=1), 40), randn(40, 4)


def _on_rank(world: World, conv: nn.Module, graph: Graph, x: Tensor, how: str, **options: Any) -> float:
    expected = plain(conv, graph, x)
    layout = shard_layouts(graph, make_partition(graph, world.size, how, seed=1))[world.rank]
    ours = sharded(conv, graph, x, layout, P2PTransport(layout), **options)
    world.sum_gradients(conv.parameters())
    ours |= {f"parameter.{name}": p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return error(ours, expected, layout)


def _modes_and_depths(world: World, name: str) -> float:
    """Depths must give the same bits; modes the same numbers."""
    graph, x = case(name)
    layout = shard_layouts(graph, make_partition(graph, world.size, "random", seed=2))[world.rank]
    conv = model(name)
    first = sharded(conv, graph, x, layout, P2PTransport(layout), depth=0)
    for depth in (1, 2, 5):
        again = sharded(conv, graph, x, layout, P2PTransport(layout), depth=depth)
        assert all(torch.equal(first[key], again[key]) for key in first), (name, depth)
    return max(_on_rank(world, conv, graph, x, "random", mode=mode) for mode in ("stored", "one_shot"))


def _traffic(world: World) -> dict[str, dict[str, float]]:
    """Bytes over all ranks, by conv and mode and by purpose. No edge array has a gradient."""
    num_bytes = {}
    for name, mode in (("sage-mean", "sequential"), ("gat", "sequential"), ("gat", "stored"), ("gat", "one_shot")):
        graph, x = case(name)
        layout = shard_layouts(graph, make_partition(graph, world.size, "random", seed=2))[world.rank]
        transport = P2PTransport(layout)
        convs = ShardConvs.of(layout, transport, mode=mode)
        run_conv(model(name), x[layout.own_ids].requires_grad_(), convs).sum().backward()
        kinds = ("forward", "refetch", "gradient")
        num_bytes[f"{name} {mode}"] = dict(zip(kinds, world.sum([transport.traffic[k] for k in kinds]), strict=True))
    rows = shard_layouts(graph, make_partition(graph, world.size, "random", seed=2))[world.rank].halos
    halo = world.sum([sum(rows[k].numel() for k in range(1, world.size))])[0]
    return {**num_bytes, "halo": {"rows": halo}}
