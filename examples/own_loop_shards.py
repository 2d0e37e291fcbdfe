"""Neighbour sampling over shards in a loop of your own: each rank has a shard, and all of them sample together.

python examples/own_loop_shards.py            # torchrun --nproc-per-node 2 examples/own_loop_shards.py
"""

from typing import Any

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


def train(world: hl.extend.World, name: str, folder: str, epochs: int) -> dict[str, Any]:
    if world.rank == 0:
        hl.shards.cut(hl.open(name), folder, world.size)
    world.barrier()
    data, losses = hl.shards.open(folder, world), []
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    batches: Any = hl.Sampled(fanouts=(10, 5), batch_size=512).loader(data, "train", model=model, world=world)
    with hl.extend.own_threads(model):
        for _ in range(epochs):
            for batch in batches:  # as many on every rank; the last may be empty on some
                optimizer.zero_grad()
                scores = model(batch)
                loss = torch.nn.functional.cross_entropy(scores, batch.labels, reduction="sum") / batch.total_seeds
                loss.backward()
                world.sum_gradients(model.parameters())
                optimizer.step()
                losses += world.sum([loss.item()])
    return {"losses": losses}


def main(name: str = "demo", folder: str = "demo-shards", epochs: int = 3, devices: int = 1) -> dict[str, Any]:
    return run(train, LaunchSettings(devices=devices), name, folder, epochs)


if __name__ == "__main__":
    print(f"last loss {main()['losses'][-1]:.4f}")
