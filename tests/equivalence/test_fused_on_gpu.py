"""Fused convs on a GPU equal plain PyG on an irregular graph: outputs and gradients, by every method and layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.core.graph import Graph
from hopline.data.placement import place
from hopline.methods.historical.step import HistoricalUnit
from hopline.nn import GNN
from hopline.nn.conv_adapter import edge_arguments
from hopline.nn.conv_facts import is_fused, is_fused_attention, takes_x0
from tests.support.grids import GPU_ONLY
from tests.support.helpers import (
    KERNEL_DEVICE,
    assert_close,
    assert_same_gradients,
    dataset_of,
    graph_of,
    mlp,
    randint,
    randn,
    twin,
)

pytestmark = list(GPU_ONLY)

NUM_NODES = 26
NUM_FEATURES = 6
WIDTH = 8
NUM_CLASSES = 3
TOLERANCE = 1e-9


@cache
def ugly_graph(weighted: bool) -> Graph:
    """Directed: a hub, double edges, loops (three at node 2), nodes without in-edges, and node 25 without any edge.

    Weights are also zero, at a loop and at all in-edges of node 5 too, and at the hub negative.
    """
    src = randint(0, NUM_NODES - 1, 40, seed=1)
    dst = randint(0, NUM_NODES - 4, 40, seed=2)
    hub = torch.arange(3, 12)
    double = torch.tensor([7, 7, 8])
    loop_nodes = torch.tensor([0, 1, 2, 2, 2, 13])
    src = torch.cat([src, hub, double, loop_nodes])
    dst = torch.cat([dst, torch.zeros_like(hub), torch.tensor([4, 4, 5]), loop_nodes])
    if not weighted:
        return graph_of(src, dst, NUM_NODES)
    weight = 0.2 + torch.rand(src.numel(), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight[::7] = 0
    weight[(dst == 5) | ((src == 1) & (dst == 1))] = 0
    weight[40:42] = -0.1
    return graph_of(src, dst, NUM_NODES, weight=weight)


def stack(conv: Callable[[int, int], nn.Module]) -> GNN:
    """Two layers of a conv."""
    return GNN([conv(NUM_FEATURES, WIDTH), conv(WIDTH, NUM_CLASSES)])


def stack_of_one_width(conv: Callable[[int], nn.Module]) -> GNN:
    """Two convs that keep the width of their rows, between an encoder and a head."""
    encoder = nn.Linear(NUM_FEATURES, WIDTH)
    head = nn.Linear(WIDTH, NUM_CLASSES)
    return GNN([conv(1), conv(2)], jk="last", encoder=encoder, head=head)


MODELS: dict[str, Callable[[], GNN]] = {
    "sage mean": lambda: stack(pyg.SAGEConv),
    "sage max": lambda: stack(lambda a, b: pyg.SAGEConv(a, b, aggr="max")),
    "sage sum": lambda: stack(lambda a, b: pyg.SAGEConv(a, b, aggr="sum", normalize=True)),
    "sage project": lambda: stack(lambda a, b: pyg.SAGEConv(a, b, project=True, root_weight=False)),
    "gin": lambda: stack(lambda a, b: pyg.GINConv(mlp(a, 5, b), train_eps=True)),
    "graph": lambda: stack(pyg.GraphConv),
    "graph mean": lambda: stack(lambda a, b: pyg.GraphConv(a, b, aggr="mean")),
    "graph max": lambda: stack(lambda a, b: pyg.GraphConv(a, b, aggr="max")),
    "gcn": lambda: stack(pyg.GCNConv),
    "gcn improved": lambda: stack(lambda a, b: pyg.GCNConv(a, b, improved=True)),
    "gcn without loops": lambda: stack(lambda a, b: pyg.GCNConv(a, b, add_self_loops=False)),
    "gcn without norm": lambda: stack(lambda a, b: pyg.GCNConv(a, b, normalize=False)),
    "gcn2": lambda: stack_of_one_width(lambda l: pyg.GCN2Conv(WIDTH, 0.1, 0.5, l)),
    "appnp": lambda: stack_of_one_width(lambda _: pyg.APPNP(K=1, alpha=0.1)),
    "gat": lambda: GNN([pyg.GATConv(NUM_FEATURES, 4, heads=2), pyg.GATConv(8, NUM_CLASSES, heads=2, concat=False)]),
    "gat without loops": lambda: stack(lambda a, b: pyg.GATConv(a, b, add_self_loops=False)),
    "gatv2": lambda: stack(lambda a, b: pyg.GATv2Conv(a, b, heads=2, concat=False)),
    "gatv2 shared": lambda: stack(lambda a, b: pyg.GATv2Conv(a, b, share_weights=True, add_self_loops=False)),
}
TAKE_WEIGHTS = ("graph", "gcn", "appnp")
CASES = [
    (name, weighted) for name in MODELS for weighted in (False, True) if not weighted or name.startswith(TAKE_WEIGHTS)
]

METHODS: dict[str, Callable[[int], hl.extend.Method]] = {
    "block": lambda most: hl.Sampled(fanouts=(-1, -1), batch_size=6, layout="block"),
    "tree": lambda most: hl.Sampled(fanouts=(most, most), batch_size=6, layout="tree"),
    "historical": lambda most: hl.Historical(num_parts=4, parts_per_batch=2, partition="random", compensate=True),
    "sweep": lambda most: hl.FullBatch(num_shards=3, partition="random", aggregation="sweep"),
    "sequential": lambda most: hl.FullBatch(num_shards=3, partition="random", aggregation="sequential"),
    "stored": lambda most: hl.FullBatch(num_shards=3, partition="random", aggregation="stored"),
    "one shot": lambda most: hl.FullBatch(num_shards=3, partition="random", aggregation="one_shot"),
    "trimmed": lambda most: hl.FullBatch(num_shards=3, partition="random", aggregation="sequential", trim=True),
}
"""Name -> function of the largest in-degree that makes a method. All edges are in its batches, so that gradients are
those of the whole graph."""


def model_and_data(name: str, weighted: bool) -> tuple[GNN, hl.Dataset]:
    """A model of fused convs alone, and the graph with training nodes of every kind."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    assert all(is_fused(conv) or is_fused_attention(conv) for conv in model.convs)
    data = dataset_of(ugly_graph(weighted), randn(NUM_NODES, NUM_FEATURES))
    train = torch.tensor([0, 2, 3, 5, 7, 11, 13, 19, 20, 22, 23, 24, 25])
    return model, dataclasses.replace(data, splits={"train": train, "test": torch.tensor([1, 4])})


def plain(model: GNN, data: hl.Dataset) -> Tensor:
    """The model as PyG has it: all nodes, all edges."""
    graph = data.graph
    x = data.x.read(torch.arange(NUM_NODES))
    x = x if model.encoder is None else model.encoder(x).relu()
    x0 = x
    last = len(model.convs) - 1
    for l, conv in enumerate(model.convs):
        first = (x0,) if takes_x0(conv) else ()
        x = conv(x, *first, graph.edge_index(), **edge_arguments(conv, graph.edge, x.dtype))
        x = x.relu() if l < last or model.acts_last else x
    return model.lin(x) if hasattr(model, "lin") else x


def gradient_by(method: hl.extend.Method, model: GNN, data: hl.Dataset) -> None:
    """The gradient of the mean loss of the training nodes, over all steps of an epoch with the same weights."""
    trainer = hl.Trainer(model, data, method, device=KERNEL_DEVICE, show=False)
    num_seeds = data.train_ids.numel()
    work = trainer.work
    trainer.model.train()
    if isinstance(method, hl.Historical):
        work.refresh()  # type: ignore[attr-defined]
        for group in work.groups.groups_of(1):  # type: ignore[attr-defined]
            HistoricalUnit(work, work.batch(group, None)).forward_backward(num_seeds)  # type: ignore[arg-type, attr-defined]
        return
    # All before the first is run: to capture a step forgets the gradients that are there. In a second epoch a tree's
    # last step is captured too.
    for unit in list(work.units(2)):
        unit.forward_backward(num_seeds)


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize(("name", "weighted"), CASES)
def test_gradients_equal_those_of_plain_pyg(name: str, weighted: bool, how: str):
    model, data = model_and_data(name, weighted)
    plain_model = twin(model)
    assert isinstance(plain_model, GNN)
    ids = data.train_ids
    y = data.y
    assert y is not None
    nn.functional.cross_entropy(plain(plain_model, data)[ids], y[ids]).backward()
    gradient_by(METHODS[how](int(data.graph.in_degrees().max())), model, data)

    assert_same_gradients(model.cpu(), plain_model, TOLERANCE)


@pytest.mark.parametrize(("name", "weighted"), CASES)
def test_outputs_equal_those_of_plain_pyg(name: str, weighted: bool):
    model, data = model_and_data(name, weighted)
    model.eval()
    with torch.no_grad():
        expected = plain(model, data)
    model = model.to(KERNEL_DEVICE)
    max_degree = int(data.graph.in_degrees().max())
    some_ids = torch.tensor([25, 2, 0, 24, 5])
    on_device = place(data, device=KERNEL_DEVICE)
    for placed_data in (data, on_device):
        for chunk_edges in (None, 9):
            ours = hl.infer.exact(model, placed_data, device=KERNEL_DEVICE, chunk_edges=chunk_edges)
            assert_close(ours, expected, TOLERANCE)
        assert_close(hl.infer.exact(model, placed_data, some_ids, device=KERNEL_DEVICE), expected[some_ids], TOLERANCE)
    for how in ("block", "tree"):
        method: Any = dataclasses.replace(METHODS[how](max_degree), shuffle=False)  # type: ignore[type-var]
        batches = method.loader(on_device, some_ids, model=model, device=KERNEL_DEVICE)
        assert_close(hl.infer.sampled(model, batches), expected[some_ids], TOLERANCE)
