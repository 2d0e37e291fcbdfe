"""What it costs that not all layers of a batch draw by one key, and what it mends: nodes of a batch, and bias of GCN.

    PYTHONPATH=src python benchmarks/layer_keys.py

Three ways are compared: one key for all layers, one for each two layers next to each other (as hopline samples), and
one for each layer. Nodes: distinct nodes of a batch on products-shaped, the mean of ten batches of 1024 seeds. Bias: a
linear GCN of one to three layers at fan-out 2 on the demo graph; the mean output over all nodes, and how many standard
errors of 60 draws it is from the exact one.

Then the same of convs that sample self-loops of the data, where every second node has one and the feature 1, and the
others 0: all nodes by a key per pair, or those with a loop by a key per layer (as hopline samples). Last, what no key
mends: a ReLU between two layers, on features of noise. About three minutes on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv

import hopline as hl
from hopline.core.sampler import HopKey, NeighborSampler, hop_keys
from hopline.core.seed_order import seed_batches
from hopline.data.built_in import BUILT_IN
from hopline.data.synthetic import planted_partition
from hopline.nn import GNN
from hopline.ops import derive_key
from hopline.ops.random import LAYERS

NUM_BATCHES, NUM_DRAWS, FANOUT = 10, 60, 2
FANOUTS = [(15, 10), (15, 10, 5), (10, 10, 10), (10, 5, 5, 3)]
Ways = dict[str, Callable[[int, int, bool, bool], list[HopKey]]]
WAYS: Ways = {
    "one key": lambda key, num_hops, *_: [HopKey(key, False)] * num_hops,
    "a key per pair": hop_keys,
    "a key per layer": lambda key, num_hops, *_: [
        HopKey(derive_key(key, LAYERS + hop), False) for hop in range(num_hops)
    ],
}
LOOP_WAYS: Ways = {
    "a key per pair": lambda key, num_hops, *_: [
        HopKey(hop.key, False) for hop in hop_keys(key, num_hops, False, False)
    ],
    "per layer at loops": hop_keys,
}
CONVS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(1, 1, bias=False),
    "GCN, add_self_loops=False": lambda: GCNConv(1, 1, bias=False, add_self_loops=False),
    "SAGE": lambda: SAGEConv(1, 1, bias=False),
    "GraphConv, scale_sums": lambda: GraphConv(1, 1, bias=False),
}


def num_nodes(data: hl.Dataset, fanouts: tuple[int, ...]) -> float:
    """Distinct nodes of a batch, on average."""
    sampler, total = NeighborSampler(data.graph, fanouts), 0
    batches = seed_batches(data.splits["train"], 1024, key=1)
    for step, seeds in zip(range(NUM_BATCHES), batches, strict=False):
        total += sampler.sample(seeds, derive_key(1, step))[0].num_src
    return total / NUM_BATCHES


def bias(
    graph: hl.Graph, x: Tensor, num_layers: int, conv_name: str = "GCN", fanout: int = FANOUT, act: str | None = None
) -> tuple[float, float]:
    """(relative error of the mean over draws, in standard errors) of a model's output summed over all nodes."""
    model = GNN([CONVS[conv_name]() for _ in range(num_layers)], act=act).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    nodes = torch.arange(graph.num_nodes)
    with torch.no_grad():
        h = x
        for layer, conv in enumerate(model.convs):
            h = conv(h.relu() if act and layer else h, graph.edge_index())
        exact = float(h.sum())
        sampler, sums = NeighborSampler(graph, (fanout,) * num_layers), []
        for draw in range(NUM_DRAWS):
            blocks = sampler.sample(nodes, derive_key(2, draw))
            blocks = tuple(block.with_scale_sums("scale_sums" in conv_name) for block in blocks)
            sums.append(model(hl.Batch(nodes, blocks, x[blocks[0].src_ids], None)).sum())
    error = torch.stack(sums) - exact
    mean, spread = float(error.mean()), float(error.std() / NUM_DRAWS**0.5)
    return mean / exact, mean / spread


def show_bias(title: str, ways: Ways, bias_of: Callable[[], tuple[float, float]]) -> None:
    """Print a line: the bias with each way to choose keys."""
    found: list[str] = []
    for name, way in ways.items():
        with patch("hopline.core.sampler.hop_keys", way):
            relative, z = bias_of()
        found.append(f"{name} {relative:+.3%}, z {z:+.1f}")
    print(f"{title}: {'; '.join(found)}", flush=True)


def with_loops(graph: hl.Graph) -> hl.Graph:
    """The graph with a self-loop at every second node."""
    loops = torch.arange(0, graph.num_nodes, 2)
    edges = torch.cat([graph.edge_index(), loops.expand(2, -1)], 1)
    return hl.from_edges(edges, num_nodes=graph.num_nodes).graph


def main() -> None:
    data = planted_partition(replace(BUILT_IN["products-shaped"][0], num_features=1))
    for fanouts in FANOUTS:
        found: dict[str, float] = {}
        for name, way in WAYS.items():
            with patch("hopline.core.sampler.hop_keys", way):
                found[name] = num_nodes(data, fanouts)
        growth = [f"{name} {count:,.0f} ({count / found['one key'] - 1:+.1%})" for name, count in found.items()]
        print(f"nodes of a batch at fan-outs {fanouts}: {', '.join(growth)}", flush=True)
    graph = hl.open("demo", num_features=1).graph
    x = torch.rand(graph.num_nodes, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for num_layers in (1, 2, 3):
        show_bias(f"bias of {num_layers} GCN layers", WAYS, partial(bias, graph, x, num_layers))
    graph = with_loops(graph)
    x = (1 - torch.arange(graph.num_nodes) % 2).double()[:, None]
    for num_layers in (2, 3):
        for name in CONVS:
            title = f"{num_layers} layers of {name}, with loops"
            show_bias(title, LOOP_WAYS, partial(bias, graph, x, num_layers, name))
    x = torch.randn(graph.num_nodes, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for fanout in (FANOUT, 10):
        for name in CONVS:
            title = f"2 layers of {name}, with loops, a ReLU and fan-out {fanout}"
            show_bias(title, {"per layer at loops": hop_keys}, partial(bias, graph, x, 2, name, fanout, "relu"))


if __name__ == "__main__":
    main()
