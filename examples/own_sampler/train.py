"""Train by the sampler: `python train.py` alone, `python train.py 2` with two processes, or, with the same numbers,
`torchrun --nproc-per-node 2 train.py` and `srun --ntasks 2 python train.py`. `train.py 1 DATASET`: another dataset."""

import sys
from functools import partial
from typing import Any

import torch
from sampler import HubsFirst, SharedDraws
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings


class SmoothTrainer(hl.Trainer):  # with an option more: the share of every label that goes to all classes
    def __init__(self, model: Any, data: Any, method: SharedDraws, smoothing: float, **settings: Any) -> None:
        step = partial(method.train_step, smoothing=smoothing)
        super().__init__(model, data, method, train_step=step, test_step=method.test_step, **settings)


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, list[float]]:
    data = hl.open(name)
    plain = SharedDraws()
    as_it_is = partial(hl.Trainer, method=plain, train_step=plain.train_step, test_step=plain.test_step)
    losses: dict[str, list[float]] = {}
    for make in (as_it_is, partial(SmoothTrainer, method=HubsFirst(power=0.25), smoothing=0.1)):
        torch.manual_seed(0)
        model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
        done = make(model, data, world=world, epochs=epochs, show=False).fit()
        losses[make.func.__name__] = [epoch.loss for epoch in done.history]
        if world.rank == 0:
            print(f"{make.func.__name__}, {world.size} ranks: loss {done.history[-1].loss:.4f}, test {done.test:.4f}")
    return losses


if __name__ == "__main__":
    words = dict(enumerate(sys.argv))
    run(train, LaunchSettings(devices=int(words.get(1, 1))), words.get(2, "demo"), 3)
