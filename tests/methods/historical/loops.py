"""A custom loop over historical batches, and a Trainer; both return the gradients of every step.

`difference` compares them. `on_ranks` does so in each of several ranks.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.distributed.world import World
from tests.support.helpers import dataset_of, randn, random_graph

DATA = dataset_of(random_graph(num_nodes=60, num_edges=300, loops=True), randn(60, 6))
"""With loops, double edges, nodes without edges and parts without seeds."""
EPOCHS = 3


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "pyg":
        return pyg.GAT(6, 8, num_layers=3, out_channels=3, heads=2).double()
    norm = "batch" if kind == "norm" else None
    convs = [pyg.GCNConv(6, 8), pyg.SAGEConv(8, 8, aggr="max"), pyg.GCNConv(8, 3)]
    return hl.nn.GNN(convs, dropout=0.3, norm=norm).double()


def method_of(**settings: Any) -> hl.Historical:
    return hl.Historical(**({"num_parts": 7, "parts_per_batch": 2, "partition": "range"} | settings))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def own_loop(world: World, kind: str, accumulate: int = 1, **settings: Any) -> list[list[Tensor]]:
    """The gradients of every step of a custom loop, summed over ranks."""
    model = model_of(kind).to(world.device)
    batch_model = hl.nn.as_batch_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = method_of(**settings).loader(DATA, model=model, seed=4, device=world.device, world=world)
    steps = []
    for _ in range(EPOCHS):
        batches = iter(loader)
        while group := list(islice(batches, accumulate)):
            total = sum(batch.total_seeds or 0 for batch in group)
            optimizer.zero_grad()
            for batch in group:
                (nn.functional.cross_entropy(batch_model(batch), batch.labels, reduction="sum") / total).backward()
            world.sum_gradients(model.parameters())
            steps.append(gradients_of(model))
            optimizer.step()
            for batch in group:
                batch.commit()
    return steps


def trainers(world: World, kind: str, accumulate: int = 1, **settings: Any) -> list[list[Tensor]]:
    """The gradients of every step of a Trainer."""
    return gradients_of_trainer(model_of(kind), DATA, method_of(**settings), world=world, accumulate=accumulate)


def gradients_of_trainer(
    model: nn.Module, data: hl.Dataset, method: hl.extend.Method, **options: Any
) -> list[list[Tensor]]:
    """The gradients of every step of a Trainer, as its optimizer gets them."""
    steps = list[list[Tensor]]()

    class RecordingTrainer(hl.Trainer):
        def make_optimizer(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(lambda *_: steps.append(gradients_of(self.model)))
            return optimizer

    RecordingTrainer(model, data, method, epochs=EPOCHS, seed=4, show=False, **options).fit()
    return steps


def difference(ours: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """The largest absolute difference between the gradients of two lists of steps."""
    assert len(ours) == len(expected) > 2
    largest = 0.0
    for our_gradients, expected_gradients in zip(ours, expected, strict=True):
        assert len(our_gradients) == len(expected_gradients) > 0
        largest = max(
            largest, *(float((a - b).abs().max()) for a, b in zip(our_gradients, expected_gradients, strict=True))
        )
    assert max(float(g.abs().max()) for g in expected[-1]) > 1e-3
    return largest


def on_ranks(world: World, cases: list[dict[str, Any]]) -> list[float]:
    """The difference of every case, computed in each rank."""
    return [difference(own_loop(world, **case), trainers(world, **case)) for case in cases]
