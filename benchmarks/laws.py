"""What the laws of drawing cost and save: distinct nodes of a batch, and the time to prepare and to train an epoch.

    PYTHONPATH=src python benchmarks/laws.py [--plot FILE.svg] [--batches 6] [--rounds 3] [--kernels]

On products-shaped, with random edge weights for the draws by weight. Nodes: distinct nodes of a batch, by the number of
its seeds. Repeated: the share of a batch's input nodes that the batch before it had too. Times: CPU seconds of an
epoch's 193 batches of 1024 seeds, from a few batches: all work is done in one thread, and laws take turns, so that
other work on the machine changes little. The best of some rounds counts. About ten minutes on 2 cores.

--kernels: only the draws of all nodes of regular graphs at fan-out 10, in a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from svg_file import svg_file
from torch.nn.functional import cross_entropy
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline import ops
from hopline.core.seed_order import seed_batches
from hopline.data.built_in import BUILT_IN
from hopline.data.synthetic import planted_partition
from hopline.ops import derive_key

FANOUTS = [(15, 10, 5), (10, 10, 10)]
LAWS: dict[str, dict[str, Any]] = {"uniform": {}, "labor": {"law": "labor"}, "weight": {"weight": "w"}}
SEEDS = (256, 1024, 4096, 16384)
"""Seeds of a batch."""
NUM_BATCHES = 3
"""Batches of which sizes are the mean."""


def products_shaped() -> hl.Dataset:
    """The graph with random weights."""
    data = planted_partition(BUILT_IN["products-shaped"][0])
    weight = torch.rand(data.graph.num_edges, generator=torch.Generator().manual_seed(1))
    return replace(data, graph=replace(data.graph, edge={"w": weight}))


def nodes_of_batches(data: hl.Dataset, fanouts: tuple[int, ...], num_seeds: int, **law: Any) -> float:
    """Distinct nodes of a batch, on average."""
    sampler = hl.extend.NeighborSampler(data.graph, fanouts, **law)
    batches = islice(seed_batches(data.splits["train"], num_seeds, key=1), NUM_BATCHES)
    return sum(sampler.sample(seeds, derive_key(1, i))[0].num_src for i, seeds in enumerate(batches)) / NUM_BATCHES


def repeated(data: hl.Dataset, **law: Any) -> float:
    """The share of input nodes that the batch before had too, on average over a group's later steps."""
    loader = hl.Sampled(fanouts=FANOUTS[0], workers=0, **law).loader(data, "train")
    nodes = [batch.input_ids for batch in islice(loader.epoch(1), NUM_BATCHES + 1)]
    shares = [torch.isin(ours, before).double().mean() for before, ours in pairwise(nodes)]
    return float(torch.stack(shares).mean())


def seconds(data: hl.Dataset, num_batches: int, train: bool, **law: Any) -> float:
    """CPU seconds of a step: to prepare a batch, and if `train` to train on it."""
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(100, 64), SAGEConv(64, 64), SAGEConv(64, 47)])
    loader = hl.Sampled(fanouts=FANOUTS[0], workers=0, **law).loader(data, "train")
    batches = loader.epoch(1)
    next(batches)  # compiles, and reads what is read once
    begin = time.process_time()
    for batch in islice(batches, num_batches):
        if train:
            cross_entropy(model(batch), batch.labels).backward()
    return (time.process_time() - begin) / num_batches


def time_kernels() -> None:
    """Print CPU ns for each in-edge."""
    for degree, num_nodes in ((8, 200_000), (39, 60_000), (764, 3000)):
        indptr = torch.arange(num_nodes + 1) * degree
        indices = torch.randint(0, num_nodes, (int(indptr[-1]),), dtype=torch.int32)
        nodes, weight = torch.randperm(num_nodes), torch.rand(indices.numel())
        calls: dict[str, Callable[[], object]] = {
            "uniform": partial(ops.sample_neighbors, indptr, indices, nodes, 10, 3),
            "labor": partial(ops.sample_labor, indptr, indices, nodes, 10, 3),
            "weight": partial(ops.sample_weighted, indptr, indices, weight, nodes, 10, 3),
        }
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(7):
            for name, call in calls.items():
                begin = time.thread_time()
                call()
                best[name] = min(best[name], time.thread_time() - begin)
        times = ", ".join(f"{name} {1e9 * found / indices.numel():.1f}" for name, found in best.items())
        print(f"in-degree {degree}, ns for each in-edge: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.kernels:
        time_kernels()
        return
    data = products_shaped()
    curves: dict[str, list[tuple[float, float]]] = {}
    for fanouts in FANOUTS:
        for num_seeds in SEEDS:
            found = {name: nodes_of_batches(data, fanouts, num_seeds, **law) for name, law in LAWS.items()}
            shares = ", ".join(f"{name} {count:,.0f}" for name, count in found.items())
            ratio = found["labor"] / found["uniform"]
            print(f"{fanouts}, {num_seeds} seeds: {shares}; labor / uniform {ratio:.2f}", flush=True)
            curves.setdefault(f"labor / uniform, {fanouts}", []).append((num_seeds, ratio))
    if args.plot:
        args.plot.write_text(svg_file(curves, "seeds of a batch", always_shown=0.0))
    for name, law in {**LAWS, "labor, law_every=8": {"law": "labor", "law_every": 8}}.items():
        print(f"input nodes that the batch before had too, {name}: {repeated(data, **law):.1%}", flush=True)
    steps = -(-data.splits["train"].numel() // 1024)
    for train in (False, True):
        best = dict.fromkeys(LAWS, float("inf"))
        for _ in range(args.rounds):
            for name, law in LAWS.items():
                best[name] = min(best[name], seconds(data, args.batches, train, **law))
        what = "prepare and train" if train else "prepare"
        print(f"{what}, CPU s an epoch: {', '.join(f'{n} {steps * s:.0f}' for n, s in best.items())}", flush=True)


if __name__ == "__main__":
    main()
