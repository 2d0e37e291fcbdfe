"""What it costs that not all layers of a batch draw by one key, and what it mends: nodes of a batch, and bias of GCN.

    PYTHONPATH=src python benchmarks/layer_keys.py

Three ways are compared: one key for all layers, one for each two layers next to each other (as hopline samples), and
one for each layer. Nodes: distinct nodes of a batch on products-shaped, the mean of ten batches of 1024 seeds. Bias: a
linear GCN of one to three layers at fan-out 2 on the demo graph; the mean output over all nodes, and how many standard
errors of 60 draws it is from the exact one. About two minutes on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import nn
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.core.sampler import NeighborSampler, hop_keys
from hopline.core.seed_order import seed_batches
from hopline.data.built_in import BUILT_IN
from hopline.data.synthetic import planted_partition
from hopline.nn import GNN
from hopline.ops import derive_key
from hopline.ops.random import LAYERS

NUM_BATCHES, NUM_DRAWS, FANOUT = 10, 60, 2
FANOUTS = [(15, 10), (15, 10, 5), (10, 10, 10), (10, 5, 5, 3)]
Ways = dict[str, Callable[[int, int, bool], list[int]]]
WAYS: Ways = {
    "one key": lambda key, num_hops, _: [key] * num_hops,
    "a key per pair": lambda key, num_hops, _: [int(key) for key in hop_keys(key, num_hops, one_list=False)],
    "a key per layer": lambda key, num_hops, _: [derive_key(key, LAYERS + hop) for hop in range(num_hops)],
}


def num_nodes(data: hl.Dataset, fanouts: tuple[int, ...]) -> float:
    """Distinct nodes of a batch, on average."""
    sampler, total = NeighborSampler(data.graph, fanouts), 0
    batches = seed_batches(data.splits["train"], 1024, key=1)
    for step, seeds in zip(range(NUM_BATCHES), batches, strict=False):
        total += sampler.sample(seeds, derive_key(1, step))[0].num_src
    return total / NUM_BATCHES


def bias(data: hl.Dataset, num_layers: int) -> tuple[float, float]:
    """(relative error of the mean over draws, in standard errors) of a linear GCN's output summed over all nodes."""
    model = GNN([GCNConv(1, 1, bias=False) for _ in range(num_layers)], act=None).double()
    for conv in model.convs:
        assert isinstance(conv, GCNConv)
        nn.init.ones_(conv.lin.weight)
    nodes = torch.arange(data.num_nodes)
    x = torch.rand(data.num_nodes, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        h, edge_index = x, data.graph.edge_index()
        for conv in model.convs:
            h = conv(h, edge_index)
        exact = float(h.sum())
        sampler, sums = NeighborSampler(data.graph, (FANOUT,) * num_layers), []
        for draw in range(NUM_DRAWS):
            blocks = sampler.sample(nodes, derive_key(2, draw))
            sums.append(model(hl.Batch(nodes, blocks, x[blocks[0].src_ids], None)).sum())
    error = torch.stack(sums) - exact
    mean, spread = float(error.mean()), float(error.std() / NUM_DRAWS**0.5)
    return mean / exact, mean / spread


def main() -> None:
    data = planted_partition(replace(BUILT_IN["products-shaped"][0], num_features=1))
    for fanouts in FANOUTS:
        found: dict[str, float] = {}
        for name, way in WAYS.items():
            with patch("hopline.core.sampler.hop_keys", way):
                found[name] = num_nodes(data, fanouts)
        growth = [f"{name} {count:,.0f} ({count / found['one key'] - 1:+.1%})" for name, count in found.items()]
        print(f"nodes of a batch at fan-outs {fanouts}: {', '.join(growth)}", flush=True)
    data = hl.open("demo", num_features=1)
    for num_layers in (1, 2, 3):
        found_bias: list[str] = []
        for name, way in WAYS.items():
            with patch("hopline.core.sampler.hop_keys", way):
                relative, z = bias(data, num_layers)
            found_bias.append(f"{name} {relative:+.3%}, z {z:+.1f}")
        print(f"bias of {num_layers} GCN layers: {'; '.join(found_bias)}", flush=True)


if __name__ == "__main__":
    main()
