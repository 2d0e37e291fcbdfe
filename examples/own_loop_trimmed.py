"""Full batch over shards, trimmed: each layer computes and sends only what the labelled nodes need of it.

python examples/own_loop_trimmed.py            # torchrun --nproc-per-node 2 examples/own_loop_trimmed.py
"""

from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, Any]:
    data = hl.open(name)
    torch.manual_seed(0)  # all ranks begin with the same weights
    model, losses = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=data.num_classes), []
    batch_model = hl.nn.as_batch_model(model)  # PyG's model, called with a batch
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches: Any = hl.FullBatch(trim=True).loader(data, "train", model=model, world=world)
    with hl.extend.own_threads(model):
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                scores = batch_model(batch)
                loss = torch.nn.functional.cross_entropy(scores, batch.labels, reduction="sum") / batch.total_seeds
                loss.backward()
                world.sum_gradients(model.parameters())
                optimizer.step()
                losses += world.sum([loss.item()])
    ids = data.splits["test"]
    return {"losses": losses, "test": hl.metrics.accuracy(hl.infer.exact(model, data, ids), data.labels[ids])}


def main(name: str = "demo", epochs: int = 10, devices: int = 1) -> dict[str, Any]:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"test accuracy {main()['test']:.4f}")
