"""The Ray example with a worker that is killed: `python -m tests.engines.ray_killed DATA STORAGE`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hopline as hl
from examples.engines import ray_train

STEP = 5
"""In the second of three epochs, which have three steps each."""


def wait_until_ray_knows(storage: Path) -> None:
    """Ray's controller asks its workers every two seconds what they have reported: what it has not heard is lost."""
    for _ in range(600):
        if any(
            "checkpoint_dir_name" in file.read_text() for file in storage.glob("*/checkpoint_manager_snapshot.json")
        ):
            return
        time.sleep(0.1)
    raise AssertionError("Ray has not stored the checkpoint that was reported")


def train_until_killed(config: dict[str, Any]) -> None:
    """The example's own loop; rank 1 dies once, without a word."""

    folder = Path(config["data"]).parent

    class KillOnce(ray_train.ReportToRay):
        def __init__(self) -> None:
            self.first_step = 0

        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            self.first_step = self.first_step or step.step
            if trainer.world.rank == 1 and step.step == STEP and not (folder / "killed").exists():
                wait_until_ray_knows(Path(config["storage"]))
                (folder / "killed").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            if trainer.world.rank == 0 and run.finished:
                (folder / "first_step").write_text(str(self.first_step))

    ray_train.ReportToRay = KillOnce
    ray_train.train(config)


if __name__ == "__main__":
    stored = sys.argv[2]
    result = ray_train.main(
        sys.argv[1], stored, lambda config: train_until_killed(config | {"storage": stored}), checkpoint_s=0
    )
    assert result.checkpoint is not None
    print("RESULT", json.dumps({"metrics": result.metrics, "checkpoint": result.checkpoint.path}))
