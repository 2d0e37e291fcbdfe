"""The seam of `hl.Sampled(sampler=...)`: what its checks cost, and random walks beside hopline's own sampler.

    python benchmarks/own_sampler.py [--batches 20] [--times 3]

A graph of 300,000 nodes and 3 million edges (64 features, 16 classes), batch 1024, ten and five neighbours. Rows:

    built in    fan-outs (10, 5)
    wrapped     the same sampler given as an object: the same blocks, each of them checked
    walks       examples/own_sampler, 20 walks of 3 steps around each node

"batch" is the blocks of one batch, in one thread, in CPU time. "epoch" is a training epoch of GraphSAGE (hidden 64)
with threads that prepare batches; "epoch CPU" is the time of all its threads. Medians, the rows in turn.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.data.synthetic import planted_partition

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "own_sampler"))
RandomWalks: Any = importlib.import_module("sampler").RandomWalks

FANOUTS = (10, 5)
BATCH = 1024
NUM_THREADS = torch.get_num_threads()


def batch_s(data: hl.Dataset, method: hl.Sampled, num_batches: int) -> float:
    """Seconds of a batch: blocks alone, in this thread."""
    sampler = method.loader(data, data.train_ids).neighbor_sampler
    batches = data.train_ids.split(BATCH)[:num_batches]
    torch.set_num_threads(1)  # as in a thread that prepares batches
    started = time.process_time()
    for number, seeds in enumerate(batches):
        sampler.sample(seeds, number)
    seconds = (time.process_time() - started) / len(batches)
    torch.set_num_threads(NUM_THREADS)
    return seconds


def epoch_s(data: hl.Dataset, method: hl.Sampled, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the second of two epochs."""
    torch.manual_seed(0)
    model = hl.nn.GNN([SAGEConv(64, 64), SAGEConv(64, 16)])
    times: list[float] = []

    class Times(hl.Callback):
        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            times.append(clock())

    hl.Trainer(model, data, method, epochs=2, show=False, callbacks=[Times()]).fit()
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    data = planted_partition(
        num_nodes=300_000, num_edges=3_000_000, num_classes=16, num_features=64, num_train=50_000, num_valid=0
    )
    data = replace(data, splits={"train": data.train_ids})  # nothing to evaluate
    methods = {
        "built in": hl.Sampled(fanouts=FANOUTS, batch_size=BATCH),
        "wrapped": hl.Sampled(sampler=hl.extend.NeighborSampler(data.graph, FANOUTS), batch_size=BATCH),
        "walks": hl.Sampled(sampler=RandomWalks(neighbors=FANOUTS), batch_size=BATCH),
    }
    tasks: dict[str, Callable[[hl.Sampled], float]] = {
        "batch, ms": lambda method: 1e3 * batch_s(data, method, options.batches),
        "epoch, s": lambda method: epoch_s(data, method),
        "epoch CPU, s": lambda method: epoch_s(data, method, time.process_time),
    }
    for task, run in tasks.items():
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(options.times):
            for name, method in methods.items():
                seconds[name].append(run(method))
        for name, values in seconds.items():
            print(f"{task:<13} {name:<10} {statistics.median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
