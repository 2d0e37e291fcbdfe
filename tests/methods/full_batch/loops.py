"""A custom loop over shards, and a Trainer; both return the gradients of every step.

`apart` compares them, and `on_ranks` does so in each of several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.core.batch import Batch
from hopline.distributed.world import World
from tests.methods.historical.loops import EPOCHS, difference, gradients_of, gradients_of_trainer
from tests.support.helpers import dataset_of, randn, random_graph

DATA = dataset_of(random_graph(num_nodes=70, num_edges=400, loops=True), randn(70, 6))
"""With loops, double edges and nodes without edges."""


class OwnLayers(nn.Module):
    """A custom module with a loop over its layers, and a batch norm after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(6, 8), pyg.GATConv(8, 8), pyg.GCNConv(8, 3)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, batch: Batch) -> Tensor:
        h = batch.input_rows
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            h = hl.nn.convolve(conv, h, block, layer=layer)
            h = self.norm(h).relu() if layer == 0 else h.relu() if layer == 1 else h
        assert isinstance(h, Tensor)
        return h[batch.output_idx]


def model_of(kind: str) -> nn.Module:
    """A model by kind; "as own" is the `GNN` with the layers of `OwnLayers`."""
    torch.manual_seed(0)
    if kind == "own":
        return OwnLayers().double()
    if kind == "as own":
        convs = [pyg.SAGEConv(6, 8), pyg.GATConv(8, 8), pyg.GCNConv(8, 3)]
        return hl.nn.GNN(convs, norm=[nn.BatchNorm1d(8), nn.Identity(), nn.Identity()]).double()
    if kind == "pyg":
        return pyg.GCN(6, 8, num_layers=2, out_channels=3, dropout=0.2).double()
    if kind == "median":
        return hl.nn.GNN([pyg.SAGEConv(6, 8, aggr="median"), pyg.SAGEConv(8, 3)]).double()
    norm = "batch" if kind == "norm" else None
    return hl.nn.GNN([pyg.GCNConv(6, 8), pyg.GATConv(8, 8), pyg.SAGEConv(8, 3)], dropout=0.3, norm=norm).double()


def method_of(settings: dict[str, Any]) -> hl.FullBatch:
    return hl.FullBatch(**({"num_shards": 3, "partition": "random", "aggregation": "sequential"} | settings))


def own_loop(world: World, kind: str, folder: str | None = None, **settings: Any) -> list[list[Tensor]]:
    """The gradients of every step of a custom loop, summed over ranks. folder: shards, one per rank."""
    model = model_of(kind).to(world.device)
    world.broadcast_tensors(model.state_dict().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DATA if folder is None else hl.shards.open(Path(folder), world)
    batch_model = model if kind == "own" else hl.nn.as_batch_model(model)
    depth: dict[str, Any] = {"num_layers": 3} if kind == "own" else {"model": model}
    loader = method_of(settings).loader(data, seed=4, device=world.device, world=world, **depth)
    steps = []
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            with hl.shards.norms_over_ranks(world) if kind == "own" else torch.enable_grad():
                scores = batch_model(batch)
            assert batch.total_seeds is not None
            (nn.functional.cross_entropy(scores, batch.labels, reduction="sum") / batch.total_seeds).backward()
            world.sum_gradients(model.parameters())
            steps.append(gradients_of(model))
            optimizer.step()
    return steps


def trainers(world: World, kind: str, folder: str | None = None, **settings: Any) -> list[list[Tensor]]:
    """The gradients of every step of a Trainer."""
    data = DATA if folder is None else hl.shards.open(Path(folder), world)
    model = model_of("as own" if kind == "own" else kind)
    return gradients_of_trainer(model, data, method_of(settings), world=world)


def apart(world: World, **case: Any) -> float:
    """The largest difference between the gradients of the custom loop and of the Trainer."""
    return difference(own_loop(world, **case), trainers(world, **case))


def on_ranks(world: World, cases: list[dict[str, Any]]) -> list[float]:
    """The difference of every case, computed in each rank."""
    return [apart(world, **case) for case in cases]


def predict(world: World, folder: str, weights: dict[str, Any]) -> list[list[float]]:
    """Outputs of all nodes by a plain PyG model whose weights came from elsewhere; each rank has a shard."""
    model = pyg.GAT(6, 8, num_layers=2, out_channels=3, heads=2).double().eval()
    model.load_state_dict({name: torch.tensor(rows, dtype=torch.float64) for name, rows in weights.items()})
    data = hl.shards.open(Path(folder), world)
    (batch,) = hl.FullBatch().loader(data, torch.arange(data.num_nodes), model=model, world=world)
    with torch.no_grad():
        outputs = torch.zeros(data.num_nodes, 3, dtype=torch.float64)
        outputs[batch.seeds] = hl.nn.as_batch_model(model)(batch)
    return [world.sum(column.tolist()) for column in outputs.t()]
