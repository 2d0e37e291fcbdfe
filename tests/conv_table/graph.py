"""One small graph on which everything that is unusual about graphs occurs at once.

    node 0        a hub: most in-edges, some of them double, one from itself
    node 1        a source of many
    node 5        three edges from itself beside others; node 7 has an edge from itself and no other
    node 8        the same edge three times
    nodes 9, 10   in-edges whose weights are all 0, or cancel
    nodes 32-36   no in-edges, but out-edges
    nodes 37-39   no edges at all

Edges are directed, weights are negative and zero too (each node's sum is not negative, or plain PyG's norm by degrees
is not a number), types leave one of three out at most nodes. The nodes without in-edges come last, so that the last of
five parts by range has nothing else.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset
from hopline.tables import TensorTable
from tests.support.helpers import graph_of, randint, randn

NUM_NODES = 40
NUM_FEATURES = 6
HIDDEN = 4
NUM_CLASSES = 3
NUM_TYPES = 3
ATTR_WIDTH = 2
HUB = 0

NUM_PARTS = 5
BATCH_SIZE = 4
SEEDS = torch.tensor([36, 39, 35, 38, 7, 8, 5, 9, 1, 2, 3, 34, 10, 20, 12, 30, HUB])
"""Training nodes by batches of four: without in-edges; with unusual edges; two of others; the hub alone."""
SOME_IDS = torch.tensor([17, HUB, 39, 5, 33])


def _edges() -> tuple[Tensor, Tensor]:
    """(sources, destinations), in no order."""
    src, dst = [], []

    def connect(sources: list[int], node: int) -> None:
        src.extend(sources)
        dst.extend([node] * len(sources))

    connect([*range(1, 25, 2), 33, 34, 3, 3, HUB], HUB)
    for node in range(1, 32):
        if node in (7, 8):
            continue
        sources = randint(0, 37, 1 + node % 4, seed=node).tolist()
        connect([s for s in sources if s != node] + [1] * (node % 3 == 0), node)
    connect([5, 5, 5, 2], 5)
    connect([7], 7)
    connect([2, 2, 2], 8)
    connect([12, 13], 9)
    connect([14, 15], 10)
    order = torch.randperm(len(src), generator=torch.Generator().manual_seed(0))
    return torch.tensor(src)[order], torch.tensor(dst)[order]


def _weights(src: Tensor, dst: Tensor) -> Tensor:
    weight = randn(src.numel(), seed=1).abs() + 0.2
    weight[::7] = 0.0
    hub = (dst == HUB).nonzero().view(-1)
    weight[hub[1:4]] = -0.3
    weight[(dst == 9) | (dst == 7)] = 0.0
    ten = (dst == 10).nonzero().view(-1)
    weight[ten] = 0.0
    weight[ten[:2]] = torch.tensor([0.5, -0.5], dtype=weight.dtype)
    return weight


def _types(num_edges: int) -> Tensor:
    types = torch.zeros(num_edges, dtype=torch.int64)
    types[::3], types[::11] = 1, 2
    return types


@cache
def dataset(*edge: str) -> Dataset:
    """The graph with some of the edge arrays "weight", "attr", "type"."""
    src, dst = _edges()
    arrays = {
        "weight": _weights(src, dst),
        "attr": randn(src.numel(), ATTR_WIDTH, seed=2).sigmoid(),
        "type": _types(src.numel()),
    }
    return Dataset(
        name="unusual",
        graph=graph_of(src, dst, NUM_NODES, **{name: arrays[name] for name in edge}),
        tables={"x": TensorTable(randn(NUM_NODES, NUM_FEATURES, seed=3))},
        y=randint(0, NUM_CLASSES, NUM_NODES, seed=4),
        splits={"train": SEEDS},
        num_classes=NUM_CLASSES,
    )


def max_degree(graph: Graph) -> int:
    return int(graph.in_degrees().max())
