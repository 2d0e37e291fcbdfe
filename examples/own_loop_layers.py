"""Full batch over shards with a `for` over the layers of your own: each conv gets other shards' rows one at a time.

python examples/own_loop_layers.py            # torchrun --nproc-per-node 2 examples/own_loop_layers.py
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import LaunchSettings, run


class Net(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(i, o) for i, o in itertools.pairwise(widths))

    def forward(self, batch: Any) -> Tensor:
        h = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            h = hl.nn.convolve(conv, h if layer == 0 else h.relu(), block, layer=layer)
        return h[batch.output_idx]


def train(world: hl.extend.World, name: str, epochs: int) -> dict[str, Any]:
    data = hl.open(name)
    torch.manual_seed(0)  # all ranks begin with the same weights
    model, losses = Net(data.num_features, 64, data.num_classes), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = hl.FullBatch(aggregation="sequential", num_shards=4)  # over ranks, as many as there are
    batches: Any = method.loader(data, "train", num_layers=2, world=world)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum") / batch.total_seeds
            loss.backward()
            world.sum_gradients(model.parameters())
            optimizer.step()
            losses += world.sum([loss.item()])
    return {"losses": losses}


def main(name: str = "demo", epochs: int = 10, devices: int = 1) -> dict[str, Any]:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"last loss {main()['losses'][-1]:.4f}")
