"""Local SGD: every rank steps by its own gradients, and the ranks average their weights every few steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings


@dataclass
class LocalSGD(hl.extend.Gradients):
    every: int = 8
    steps: int = field(default=0, init=False)
    local = True  # ranks have weights of their own in between, which checkpoints keep

    def begin(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        self.steps = 0

    def combine(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            gradient *= world.size  # it is this rank's share of the mean over all ranks

    def after_step(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.after_epoch(parameters, world)

    def after_epoch(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        world.sum_tensors(parameters)
        for parameter in parameters:
            parameter /= world.size

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


def train(world: hl.extend.World, name: str, epochs: int) -> float:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 5), batch_size=256)
    return hl.Trainer(model, data, method, gradients=LocalSGD(every=8), world=world, epochs=epochs).fit().test


def main(name: str = "demo", epochs: int = 3, devices: int = 2) -> float:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
