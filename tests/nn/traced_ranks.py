"""Training of modules with a `forward` of their own, in each of several ranks."""

from __future__ import annotations

from typing import Any

import torch

import hopline as hl
from hopline.distributed.world import World
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.own_modules import MODULES

DATA = dataset_of(random_graph(num_nodes=60, num_edges=300, loops=True), randn(60, 8), num_classes=4)


def trained(world: World, cases: list[tuple[str, Any]]) -> list[list[list[float]]]:
    """The weights and buffers of modules after three epochs, for each (module, method)."""
    results = []
    for name, method in cases:
        torch.manual_seed(0)
        module = MODULES[name]().double()
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "seed": 4, "show": False}
        hl.Trainer(module, DATA, method, epochs=3, world=world, **options).fit()
        results.append([value.double().flatten().tolist() for value in module.state_dict().values()])
    return results
