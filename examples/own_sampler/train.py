"""Train by the sampler: `python train.py` alone, `python train.py 2` with two processes, or, with the same numbers,
`torchrun --nproc-per-node 2 train.py` and `srun --ntasks 2 python train.py`. `train.py 1 DATASET`: another dataset."""

import sys
from typing import Any

import torch
from sampler import RandomWalks
from torch import Tensor
from torch_geometric.nn import GraphConv, SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings

METHOD = hl.Sampled(sampler=RandomWalks(), batch_size=512)


def test_step(model: torch.nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
    """The accuracy over edges of walks, since the edges of the graph have no visits to weigh them by."""
    batches = hl.Sampled(sampler=RandomWalks(), shuffle=False).loader(data, ids, model=model)
    return {"accuracy": hl.metrics.accuracy(hl.infer.sampled(model, batches), data.labels[ids])}


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, list[float]]:
    data = hl.open(name)
    losses: dict[str, list[float]] = {}
    convs: dict[str, tuple[Any, dict[str, Any]]] = {
        "mean": (SAGEConv, {}),  # reads no weights, so it is tested on the whole graph
        "by visits": (GraphConv, {"test_step": test_step}),
    }
    for pooling, (conv, options) in convs.items():
        torch.manual_seed(0)
        model = hl.nn.GNN([conv(data.num_features, 64), conv(64, data.num_classes)], dropout=0.5)
        done = hl.Trainer(model, data, METHOD, world=world, epochs=epochs, show=False, **options).fit()
        losses[pooling] = [epoch.loss for epoch in done.history]
        if world.rank == 0:
            print(f"{pooling}, {world.size} ranks: loss {done.history[-1].loss:.4f}, test {done.test:.4f}")
    return losses


if __name__ == "__main__":
    words = dict(enumerate(sys.argv))
    run(train, LaunchSettings(devices=int(words.get(1, 1))), words.get(2, "demo"), 3)
