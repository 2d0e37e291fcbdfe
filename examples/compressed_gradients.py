"""Compressed gradients: ranks exchange the largest entries, and keep the rest for the next step (error feedback)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings


@dataclass
class TopK(hl.extend.Gradients):
    share: float = 0.05
    rest: torch.Tensor = field(default_factory=lambda: torch.zeros(0), init=False)  # what this rank has not sent yet

    def begin(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        self.rest = torch.cat([torch.zeros_like(p).flatten() for p in parameters])

    def combine(self, parameters: Sequence[torch.nn.Parameter], world: hl.extend.World) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.rest += torch.cat([gradient.flatten() for gradient in gradients])
        ids = self.rest.abs().topk(max(1, int(self.share * self.rest.numel()))).indices
        values = self.rest[ids]
        self.rest[ids] = 0
        total = torch.zeros_like(self.rest)
        for one in zip(world.all_to_all([ids] * world.size), world.all_to_all([values] * world.size), strict=True):
            total.index_add_(0, *one)  # in the order of the ranks, so that all get the same bits
        sums = total.split([p.numel() for p in parameters])
        for parameter, gradient, summed in zip(parameters, gradients, sums, strict=True):
            parameter.grad = gradient.copy_(summed.view_as(gradient))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"rest": self.rest}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.rest.copy_(state["rest"])


def train(world: hl.extend.World, name: str, epochs: int) -> float:
    data = hl.open(name)
    model = hl.nn.GNN([SAGEConv(data.num_features, 64), SAGEConv(64, data.num_classes)], dropout=0.5)
    method = hl.Sampled(fanouts=(10, 5), batch_size=256)
    return hl.Trainer(model, data, method, gradients=TopK(share=0.05), world=world, epochs=epochs).fit().test


def main(name: str = "demo", epochs: int = 3, devices: int = 2) -> float:
    return run(train, LaunchSettings(devices=devices), name, epochs)


if __name__ == "__main__":
    print(f"test accuracy {main():.4f}")
