"""hopline's convs beside stock PyG's, on the same sampled batches: time of a training step and largest memory.

    python benchmarks/stock_convs.py

A planted graph of 500k nodes and 12M edges, 100 float32 features, 50k seeds, batch 1024, fan-outs (15, 10, 5), three
layers, hidden 64. Both sides train on identical blocks, interleaved batch by batch; stock PyG gets each layer's
own trimmed edges. A step begins with the ids of its input rows: hopline reads them as it aggregates, stock PyG gathers
each row once and then aggregates. Freed memory is kept for both. Ratios are from one run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as pyg

import hopline as hl
from hopline.data.synthetic import planted_partition

NUM_BATCHES = 30


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operation made; views of what was there count nothing."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.numel() * t.element_size())
        return out


def ours(model: hl.nn.GNN, batch: hl.Batch, table: hl.extend.Table) -> Tensor:
    return model(replace(batch, x=hl.extend.Rows(table, batch.input_ids)))  # as without a pipeline: nothing read ahead


def stock(model: hl.nn.GNN, batch: hl.Batch, table: hl.extend.Table) -> Tensor:
    h = table.read(batch.input_ids)
    for l, (conv, block) in enumerate(zip(model.convs, batch.blocks, strict=True)):
        h = conv((h, h[: block.num_dst]), block.edge_index)
        h = h.relu() if l < model.num_layers - 1 else h
    return h


def step(forward: Callable[[hl.nn.GNN, hl.Batch], Tensor], model: hl.nn.GNN, batch: hl.Batch) -> float:
    started = time.perf_counter()
    model.zero_grad()
    nn.functional.cross_entropy(forward(model, batch), batch.labels).backward()
    return time.perf_counter() - started


def largest(forward: Callable[[hl.nn.GNN, hl.Batch], Tensor], model: hl.nn.GNN, batch: hl.Batch) -> int:
    with LargestTensor() as mode:
        step(forward, model, batch)
    return mode.largest


def main() -> None:
    data = planted_partition(num_nodes=500_000, num_edges=12_000_000, num_classes=47, num_features=100, seed=0)
    seeds = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))[:50_000]
    convs: dict[str, Callable[[int, int], nn.Module]] = {
        "SAGE mean": lambda i, o: pyg.SAGEConv(i, o),
        "SAGE max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
        "GIN": lambda i, o: pyg.GINConv(nn.Linear(i, o)),
        "GraphConv": lambda i, o: pyg.GraphConv(i, o),
    }
    print(f"{'conv':<10} {'hopline ms':>10} {'stock ms':>10} {'ratio':>6} {'largest tensor, MiB':>22}")
    for name, make in convs.items():
        torch.manual_seed(0)
        model = hl.nn.GNN([make(data.num_features, 64), make(64, 64), make(64, data.num_classes)])
        loader = hl.Sampled(fanouts=(15, 10, 5), workers=0).loader(data, seeds)
        sides = {"hopline": partial(ours, table=data.x), "stock": partial(stock, table=data.x)}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for batch in itertools.islice(loader, NUM_BATCHES + 1):
            for side, forward in sides.items():
                times[side].append(step(forward, model, batch))
        mine, theirs = (statistics.median(times[side][1:]) * 1e3 for side in sides)
        sizes = [largest(forward, model, batch) / 2**20 for forward in sides.values()]
        print(
            f"{name:<10} {mine:10.1f} {theirs:10.1f} {theirs / mine:6.2f} {sizes[0]:11.1f} {sizes[1]:10.1f}", flush=True
        )


if __name__ == "__main__":
    main()
