"""Full batch over shards, where the rows of all other shards come in one exchange per layer and direction.

python examples/own_loop_one_shot.py            # torchrun --nproc-per-node 2 examples/own_loop_one_shot.py
"""

from typing import Any

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, Any]:
    data = hl.open(name)
    torch.manual_seed(0)  # all ranks begin with the same weights
    convs = [SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)]
    model, losses = hl.nn.GNN(convs, norm="batch"), []  # batch norms take the rows of all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches: Any = hl.FullBatch(aggregation="one_shot").loader(data, "train", model=model, world=world)
    with hl.extend.own_threads(model):
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                scores = model(batch)
                loss = torch.nn.functional.cross_entropy(scores, batch.labels, reduction="sum") / batch.total_seeds
                loss.backward()
                world.sum_gradients(model.parameters())
                optimizer.step()
                losses += world.sum([loss.item()])
    return {"losses": losses}


def main(name: str = "demo", epochs: int = 10, devices: int = 1) -> dict[str, Any]:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"last loss {main()['losses'][-1]:.4f}")
