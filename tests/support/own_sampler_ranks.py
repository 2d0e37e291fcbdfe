"""Samplers of the user's over ranks, in float64: those of examples/own_sampler and hopline's own, wrapped."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphConv, SAGEConv

import hopline as hl
from hopline.distributed.world import World
from tests.support.ranks import KillRank
from tests.support.runs import in_float64, small

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_sampler"
sys.path.append(str(FOLDER))
example: Any = importlib.import_module("sampler")


class Wrapped:
    """hopline's sampler, as somebody else would write one."""

    def __init__(self, graph: hl.Graph) -> None:
        self._inner = hl.extend.NeighborSampler(graph, (4, 3))

    def sample(self, seeds: Tensor, key: int) -> tuple[hl.extend.Block, ...]:
        return self._inner.sample(seeds, key)


METHODS: dict[str, Callable[[hl.Dataset], hl.Sampled]] = {
    "walks": lambda data: hl.Sampled(sampler=example.RandomWalks(neighbors=(4, 3)), batch_size=40),
    "wrapped": lambda data: hl.Sampled(sampler=Wrapped(data.graph), batch_size=40),
    "built in": lambda data: hl.Sampled(fanouts=(4, 3), batch_size=40),
}


def train(world: World, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses, metrics and weights of a few steps with dropout. Steps have 40 of 150 seeds, and the last one fewer."""
    data = in_float64(small())
    method = METHODS[name](data)
    settings: dict[str, Any] = {"epochs": 2, "show": False, "lr": 0.05, "resume": "out" in changes} | changes
    kill = settings.pop("kill", None)
    conv: Any = SAGEConv
    if name == "walks":  # with weights, so that outputs are those of sampled inference
        conv = GraphConv

        def test_step(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
            batches = METHODS[name](data).loader(data, ids, model=model, world=World.alone())
            return {"accuracy": hl.metrics.accuracy(hl.infer.sampled(model, batches), data.labels[ids])}

        settings["test_step"] = test_step
    # As many seeds in a step with any number of ranks.
    method = hl.Sampled(**{**vars(method), "batch_size": 40 // world.size, "workers": 1})
    torch.manual_seed(3)
    model = hl.nn.GNN([conv(8, 8), conv(8, 4)], dropout=0.3).double()
    callbacks = [] if kill is None else [KillRank(*kill)]
    done = hl.Trainer(model, data, method, world=world, callbacks=callbacks, **settings).fit()
    return {
        "losses": [epoch.loss for epoch in done.history],
        "metrics": [evaluation.metrics for evaluation in done.evaluations],
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
