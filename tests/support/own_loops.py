"""Examples of custom loops and Trainers with the same seeds, in float64: losses that tests compare.

Both run alone, or in each of several ranks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GCNConv, GraphSAGE, SAGEConv

import hopline as hl
from hopline.distributed.world import World

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EPOCHS = 4
NAMES = ("own_loop_historical", "own_loop_layers", "own_loop_one_shot", "own_loop_trimmed", "own_loop_shards")


class Losses(hl.Callback):
    """Records the loss of every step, summed over the ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.found += trainer.world.sum([float(step.loss)])  # the loss of a rank is its share of the step's


def trainer_like(name: str, data: hl.Dataset, **options: Any) -> hl.Trainer:
    """A Trainer with the model, method and settings of an example."""
    torch.manual_seed(0)
    features = data.num_features
    classes = data.num_classes
    if name == "own_loop_historical":
        convs = [GCNConv(features, 64), GCNConv(64, 64), GCNConv(64, classes)]
        model = hl.nn.GNN(convs, dropout=0.5)
        method = hl.Historical(num_parts=40, parts_per_batch=10)
        return hl.Trainer(model, data, method, lr=0.01, **options)
    if name == "own_loop_shards":
        model = hl.nn.GNN([SAGEConv(features, 64), SAGEConv(64, classes)], dropout=0.5)
        return hl.Trainer(model, data, hl.Sampled(fanouts=(10, 5), batch_size=512), lr=0.003, **options)
    if name == "own_loop_layers":
        model = hl.nn.GNN([SAGEConv(features, 64), SAGEConv(64, classes)])
        method = hl.FullBatch(aggregation="sequential", num_shards=4)
    elif name == "own_loop_one_shot":
        model = hl.nn.GNN([SAGEConv(features, 64), SAGEConv(64, classes)], norm="batch")
        method = hl.FullBatch(aggregation="one_shot")
    else:
        model = GraphSAGE(features, 64, num_layers=2, out_channels=classes)
        method = hl.FullBatch(aggregation="sequential", trim=True)
    return hl.Trainer(model, data, method, lr=0.01, **options)


def losses_of_example_and_trainer(world: World, name: str, graph: str, folder: str) -> dict[str, Any]:
    """The results of an example, and under "trainer" the losses of a Trainer like it."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if str(FOLDER) not in sys.path:
            sys.path.insert(0, str(FOLDER))
        data_arguments = (graph, folder) if name == "own_loop_shards" else (graph,)
        example_results = importlib.import_module(name).train(world, *data_arguments, EPOCHS)
        data = hl.shards.open(folder, world) if name == "own_loop_shards" else hl.open(graph)
        losses = Losses()
        run = trainer_like(name, data, epochs=EPOCHS, show=False, callbacks=[losses], world=world).fit()
    finally:
        torch.set_default_dtype(default_dtype)
    return {**example_results, "trainer": losses.found, "epochs": run.epochs}


def all_losses_of_examples_and_trainer(world: World, graph: str, folder: str) -> dict[str, Any]:
    """Results of all examples, by name."""
    return {name: losses_of_example_and_trainer(world, name, graph, folder) for name in NAMES}
