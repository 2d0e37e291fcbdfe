"""What it costs to try convs before they are trusted: milliseconds for three layers on a model's first use.

    PYTHONPATH=src python benchmarks/probe.py

Three layers (100 to 256 to 256 to 47) of each conv are tried on the tiny graph, in the layouts that a run uses. Kernels
are warm: the first of some rounds is left out, and the least time of the others counts, since a machine is only ever
slower than it could be.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
from torch import nn

from hopline.nn import GNN
from hopline.nn.conv_adapter import Layout, calling_convention
from hopline.nn.probe import probe_graph
from hopline.shards.convs.runner import ShardConvs, run_conv
from hopline.shards.layout import contiguous_layout

WIDTHS = (100, 256, 256, 47)
CONVS: dict[str, Callable[[int, int], nn.Module]] = {
    "SAGEConv": pyg.SAGEConv,
    "GCNConv": pyg.GCNConv,
    "GATConv": pyg.GATConv,
    "GATv2Conv": pyg.GATv2Conv,
    "GINConv": lambda a, b: pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b))),
    "GraphConv": pyg.GraphConv,
    "TransformerConv": pyg.TransformerConv,
    "PNAConv": lambda a, b: pyg.PNAConv(a, b, ["mean", "max", "std"], ["identity"], torch.tensor([1, 2, 3])),
    "SAGEConv(aggr='median')": lambda a, b: pyg.SAGEConv(a, b, aggr="median"),
    "SuperGATConv": pyg.SuperGATConv,
}


def on_blocks(model: GNN, layout: Layout) -> None:
    model.check_blocks(WIDTHS[0], {})
    for conv, width in zip(model.convs, WIDTHS, strict=False):
        calling_convention(conv, width, {}, layout)


def on_shards(model: GNN) -> None:
    graph = probe_graph({})
    convs = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, graph.num_nodes])))
    for conv, width in zip(model.convs, WIDTHS, strict=False):
        run_conv(conv, torch.randn(graph.num_nodes, width), convs)


PLACES: dict[str, Callable[[GNN], None]] = {
    "blocks": lambda model: on_blocks(model, "block"),
    "trees": lambda model: on_blocks(model, "tree"),
    "shards": on_shards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    print("| conv | " + " | ".join(f"{place}, ms" for place in PLACES) + " |\n|---" * 1 + "|---" * len(PLACES) + "|")
    for name, make in CONVS.items():
        cells = []
        for place in PLACES.values():
            seconds = []
            for _ in range(1 + arguments.times):
                model = GNN([make(a, b) for a, b in itertools.pairwise(WIDTHS)])
                began = time.perf_counter()
                try:
                    place(model)
                except ValueError:
                    break
                seconds.append(time.perf_counter() - began)
            cells.append(f"{1e3 * min(seconds[1:]):.0f}" if seconds[1:] else "refused")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
