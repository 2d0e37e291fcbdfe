"""What several ranks do in tests of full-batch training, and one process that does the same."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.core.batch import Batch
from hopline.distributed.world import World
from hopline.shards.data import open_sharded
from hopline.util.errors import PeerError
from tests.support.helpers import dataset_of, randn, random_graph, usual_task

DATA = dataset_of(random_graph(num_nodes=80, num_edges=500), randn(80, 6))


def gin(i: int, o: int) -> nn.Module:
    return pyg.GINConv(nn.Sequential(nn.Linear(i, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, o)))


CONVS = {
    "gcn": lambda: [pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.GCNConv(8, 3)],
    "sage": lambda: [pyg.SAGEConv(6, 8, aggr="max"), pyg.SAGEConv(8, 3)],
    "gat": lambda: [pyg.GATConv(6, 4, heads=2), pyg.GATConv(8, 3)],
    "gin": lambda: [gin(6, 8), gin(8, 3)],
}


def model_of(kind: str, **options: Any) -> hl.nn.GNN:
    torch.manual_seed(0)
    return hl.nn.GNN(CONVS[kind](), **options).double()


def weighted_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Class weights, whose mean divides by the weights of all rows, and a penalty on the parameters."""
    weight = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    penalty = sum(p.square().sum() for p in model.parameters())
    return nn.functional.cross_entropy(model(batch), batch.labels, weight=weight) + 0.01 * penalty


def mean_and_deviation(model: nn.Module, batch: Batch) -> Tensor:
    """No mean over rows."""
    scores = model(batch)
    return scores.mean().square() + scores.std()


def mortal(model: nn.Module, batch: Batch) -> Tensor:
    """The usual loss. The process dies at the step that the environment names, which is no part of the run."""
    loss = usual_task(DATA.num_classes).loss(model, batch)
    if "DIES_AT_STEP" in os.environ:
        step = int(os.environ.get("STEP", "0")) + 1
        os.environ |= {"STEP": str(step), "STEP_STARTED": str(time.monotonic())}
        if str(step) == os.environ["DIES_AT_STEP"]:
            os.kill(os.getpid(), signal.SIGKILL)
    return loss


LOSSES = {"weighted": weighted_loss, "spread": mean_and_deviation, "mortal": mortal}


def result_of(trainer: hl.Trainer) -> dict[str, Any]:
    """Losses, weights, test score and counters of a run."""
    run = trainer.fit()
    tensors = [*trainer.model.parameters(), *(b for b in trainer.model.buffers() if b.is_floating_point())]
    return {
        "losses": [epoch.loss for epoch in run.history],
        "weights": torch.cat([t.detach().cpu().double().flatten() for t in tensors]).tolist(),
        "test": run.test,
        "counters": run.history[-1].counters,
    }


def train(world: World, kind: str, settings: dict[str, Any], folder: str | None = None, **more: Any) -> dict[str, Any]:
    """Train by full batch in this rank; returns the result of the run.

    folder: the shards, one per rank. more: options of the model and the Trainer, and `again`: fit a second time,
    and then once more by a new Trainer from the same weights ("fresh").
    """
    model = {name: more.pop(name) for name in ("dropout", "norm", "residual", "jk") if name in more}
    if "seed_of_weights" in more:  # other weights on every rank: those of the first are used
        torch.manual_seed(more.pop("seed_of_weights") + world.rank)
        gnn = hl.nn.GNN(CONVS[kind](), **model).double()
    else:
        gnn = model_of(kind, **model)
    data = DATA if folder is None else open_sharded(Path(folder), world)
    method = hl.FullBatch(**({"partition": "random", "num_shards": 4} | settings))
    options = {"epochs": 3, "show": False} | more
    if "loss" in options:
        options["train_step"] = LOSSES[options.pop("loss")]
    fits_again = options.pop("again", False)
    trainer = hl.Trainer(gnn, data, method, world=world, **options)
    first_result = result_of(trainer)
    if not fits_again:
        return first_result
    weights = {name: tensor.clone() for name, tensor in gnn.state_dict().items()}
    second = result_of(trainer)
    gnn.load_state_dict(weights)
    return second | {"fresh": result_of(hl.Trainer(gnn, data, method, world=world, **options))["losses"]}


def differences(world: World, folder: str) -> list[str]:
    """What a rank says whose model, method, data, layers or number of shards is not that of the others."""
    other_data = dataset_of(random_graph(num_nodes=80, num_edges=500, seed=world.rank), randn(80, 6))
    changes: list[dict[str, Any]] = [
        {"model": [pyg.SAGEConv(6, 8 + world.rank), pyg.SAGEConv(8 + world.rank, 3)]},
        {"trim": True, "model": [pyg.SAGEConv(6, 6) for _ in range(2 + world.rank)]},
        {"aggregation": "sequential" if world.rank else "one_shot"},
        {"data": other_data},
    ]
    return [_error_of_training(world, **change) for change in changes] + [_error_of_opening(world, folder)]


def _error_of_training(
    world: World, model: list[nn.Module] | None = None, data: hl.Dataset = DATA, **settings: Any
) -> str:
    """The error of a rank, or "trained"."""
    gnn = hl.nn.GNN([pyg.SAGEConv(6, 3)] if model is None else model)
    try:
        hl.Trainer(gnn, data, hl.FullBatch(partition="random", **settings), world=world, epochs=1, show=False).fit()
    except ValueError as error:
        return str(error)
    return "trained"


def _error_of_opening(world: World, folder: str) -> str:
    """The error of opening shards, or "opened"."""
    try:
        open_sharded(folder, world)
    except ValueError as error:
        return str(error)
    return "opened"


def train_all(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result of every case, one after the other."""
    return [train(world, **case) for case in cases]


def train_until_death(world: World, case: dict[str, Any], folder: str) -> None:
    """Rank 1 dies between forward and backward of the third step; rank 0 writes down what it learns, and when."""
    os.environ["DIES_AT_STEP"] = "3" if world.rank == 1 else "never"
    try:
        train(world, **case)
    except PeerError as error:
        seconds = time.monotonic() - float(os.environ["STEP_STARTED"])
        lost = {"error": str(error), "seconds": seconds, "steps": int(os.environ["STEP"])}
        (Path(folder) / "lost").write_text(json.dumps(lost))
        raise
