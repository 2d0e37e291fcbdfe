"""The sampler of examples/own_sampler over ranks, in float64."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.world import World
from tests.support.ranks import KillRank
from tests.support.runs import small

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_sampler"
sys.path.append(str(FOLDER))
example: Any = importlib.import_module("sampler")


@dataclasses.dataclass(frozen=True)
class AllSeeds(example.SharedDraws):
    """The same sampler in a method that knows nothing of ranks either: each has all seeds of a step."""

    def bind(self, job: hl.extend.Job) -> AllSeedsWork:
        return AllSeedsWork(example.SeedWork(self, dataclasses.replace(job, world=World.alone())), job)


@dataclasses.dataclass
class AllSeedsWork(hl.extend.Work):
    work: Any
    job: hl.extend.Job

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        for unit in self.work.units(epoch, done, examples):
            yield hl.extend.BatchUnit(self.job, dataclasses.replace(unit.batch, total_seeds=None))


METHODS = {"share": example.SharedDraws, "hubs": example.HubsFirst, "all seeds": AllSeeds}


def train(world: World, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses, metrics and weights of a few steps with dropout. Batches have 40 of 150 seeds, and the last one fewer."""
    data = small()
    rows = data.x.read(torch.arange(len(data.x))).double()
    data = dataclasses.replace(data, tables={"x": hl.extend.TensorTable(rows)})
    torch.manual_seed(3)
    model = hl.nn.GNN([SAGEConv(8, 8), SAGEConv(8, 4)], dropout=0.3).double()
    method = METHODS[name](fanouts=(4, 3), batch_size=40)
    kill = changes.pop("kill", None)
    trainer = hl.Trainer(
        model,
        data,
        method,
        train_step=method.train_step,
        test_step=method.test_step,
        world=world,
        callbacks=[] if kill is None else [KillRank(*kill)],
        **{"epochs": 2, "show": False, "lr": 0.05, "resume": "out" in changes} | changes,
    )
    done = trainer.fit()
    return {
        "losses": [epoch.loss for epoch in done.history],
        "metrics": [evaluation.metrics for evaluation in done.evaluations],
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
