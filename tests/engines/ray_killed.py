"""The Ray example with a worker that is killed: `python -m tests.engines.ray_killed DATA STORAGE`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hopline as hl
from examples.engines import ray_train

STEP = 5
"""In the second of three epochs, which have three steps each."""


def train_until_killed(config: dict[str, Any]) -> None:
    """The example's own loop; rank 1 dies once, without a word."""

    class KillOnce(ray_train.ReportToRay):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            mark = Path(config["data"]).parent / "killed"
            if trainer.world.rank == 1 and step.step == STEP and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
            if trainer.world.rank == 0 and run.finished:
                began = Path(config["data"]).parent / "first_step_of_the_second_start"
                began.write_text(str(self.first))

        def on_fit_start(self, trainer: hl.Trainer) -> None:
            self.first = trainer.num_steps

    ray_train.ReportToRay = KillOnce
    ray_train.train(config)


if __name__ == "__main__":
    result = ray_train.main(sys.argv[1], sys.argv[2], 3, train_until_killed)
    assert result.checkpoint is not None
    print("RESULT", json.dumps({"metrics": result.metrics, "checkpoint": result.checkpoint.path}))
