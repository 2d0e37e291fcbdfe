"""Training in several ranks for tests: by `launch.run`, under torchrun, or alone with the union of their batches."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import hopline as hl
from hopline.distributed.all_to_all import rank_and_size
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World
from hopline.training.callbacks import Callback, StepEnd
from tests.support.runs import in_float64, small

BATCH = 12
"""Seeds of a step over all ranks: divisible by 1, 2 and 3. 150 training nodes make 12 steps and a half."""


class KillRank(Callback):
    """Kills one rank by SIGKILL after a step; not again after a restart by torchrun."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_step_end(self, trainer: hl.Trainer, step: StepEnd) -> None:
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if trainer.world.rank == self.rank and step.step == self.step and not again:
            os.kill(os.getpid(), signal.SIGKILL)


class AgreeingWorld(World):
    """The world of a rank without other processes: each of them would say what this one says."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(RankSpec(rank=rank, size=size))

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return [content] * self.size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


def train(world: World | None, kind: str, out: str | None = None, **changes: Any) -> dict[str, Any]:
    """Losses, metrics and weights of a run whose step is BATCH seeds, however many ranks share it.

    world: None leaves it to the Trainer to find the ranks of torch.distributed.
    """
    rank, size = rank_and_size(world)
    data = in_float64(small(num_train=changes.pop("num_train", 150)))
    torch.manual_seed(3 + rank)  # other weights on every rank: the Trainer takes those of the first
    convs = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}[kind]
    model = hl.nn.GNN([convs(8, 8), convs(8, 4)], dropout=0.4).double()
    method = hl.Sampled(fanouts=(3, 2), batch_size=BATCH // size, workers=1)
    kill = changes.pop("kill", None)
    settings = {"epochs": 2, "show": False, "accumulate": 2, "checkpoint_s": 0.0, "resume": out is not None} | changes
    callbacks = [] if kill is None else [KillRank(*kill)]
    trainer = hl.Trainer(model, data, method, world=world, out=out, callbacks=callbacks, **settings)
    done = trainer.fit()
    return {
        "losses": [epoch.loss for epoch in done.history],
        "metrics": [evaluation.metrics for evaluation in done.evaluations],
        "weights": {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()},
        "size": trainer.world.size,
    }


def train_each(world: World | None, kinds: list[str], out: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Results by kind of model, and losses for 1, 2 and 13 training nodes, where a rank may have none in a step.

    out: the folder of a run that can be resumed; the latter runs are then left out.
    """
    results = {kind: train(world, kind, out, **changes) for kind in kinds}
    awkward_losses = {str(n): train(world, "sage", num_train=n)["losses"] for n in (1, 2, 13)} if out is None else {}
    return {"kinds": results, "awkward": awkward_losses}


def main() -> None:
    """Under torchrun: FILE OUT KINDS CHANGES, of which the last two are JSON. The first rank writes FILE."""
    file = sys.argv[1]
    out = sys.argv[2] or None
    kinds = json.loads(sys.argv[3])
    changes = json.loads(sys.argv[4])
    results = run(train_each, LaunchSettings(timeout_s=20), kinds, out, changes)
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
