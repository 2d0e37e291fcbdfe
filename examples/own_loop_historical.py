"""Historical embeddings in a loop of your own: calling the model pulls rows of the halo, `commit` pushes the batch's.

python examples/own_loop_historical.py            # torchrun --nproc-per-node 2 examples/own_loop_historical.py
"""

from typing import Any

import torch
from torch_geometric.nn import GCNConv

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, Any]:
    data, losses = hl.open(name), []
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = hl.nn.GNN([GCNConv(data.num_features, 64), GCNConv(64, 64), GCNConv(64, data.num_classes)], dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches: Any = hl.Historical(num_parts=40, parts_per_batch=10).loader(data, "train", model=model, world=world)
    with hl.extend.own_threads(model):
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                scores = model(batch)
                loss = torch.nn.functional.cross_entropy(scores, batch.labels, reduction="sum") / batch.total_seeds
                loss.backward()
                world.sum_gradients(model.parameters())
                optimizer.step()
                batch.commit()
                losses += world.sum([loss.item()])
    ids = data.splits["test"]
    return {"losses": losses, "test": hl.metrics.accuracy(hl.infer.exact(model, data, ids), data.labels[ids])}


def main(name: str = "demo", epochs: int = 10, devices: int = 1) -> dict[str, Any]:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"test accuracy {main()['test']:.4f}")
