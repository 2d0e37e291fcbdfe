"""The callback that keeps the best weights of a run, in memory and in the run folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline.device.snapshots import copy_weights
from hopline.training.callbacks import Callback, EpochEnd, Evaluation
from hopline.util.files import CheckedFile

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


class KeepWeights(Callback):
    """Keeps the best weights, and writes best.pt and last.pt as `state_dict`s of the user's model.

    A checksum lies beside each of them (`CheckedFile`).

    The validation metric decides which weights are the best. Without one, the last weights are the best.

    folder: the run folder. None: nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._files = {} if folder is None else {name: CheckedFile(folder / name) for name in ("best.pt", "last.pt")}
        self.best: dict[str, Tensor] | None = None
        """A copy of the best weights, on the device of the model. None before the first validation."""
        self.best_value = -math.inf
        """The score of the best weights (`Trainer.score`): higher is better."""
        self.best_epoch = 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_value": self.best_value, "best_epoch": self.best_epoch}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.best_value = state["best_value"]
        self.best_epoch = state["best_epoch"]

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        if evaluation.split != "valid":
            return
        score = trainer.score(evaluation.metrics)
        if score > self.best_value:
            self.best_value = score
            self.best_epoch = evaluation.epoch
            self.best = copy_weights(trainer.evaluated_weights())
            self._save("best.pt", self.best)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.save_last(trainer)

    def save_last(self, trainer: Trainer) -> None:
        if self.folder is not None:
            self._save("last.pt", trainer.model.state_dict())

    def restore(self, trainer: Trainer, last_epoch: int) -> int:
        """Load the best weights into the model, and return their epoch. Without validation they are the last ones."""
        if self.best is None:
            self._save("best.pt", trainer.model.state_dict())
            return last_epoch
        trainer.model.load_state_dict(self.best)
        return self.best_epoch

    def _save(self, name: str, weights: dict[str, Any]) -> None:
        """Replace a file of weights in the run folder, if there is a folder."""
        if self.folder is None:
            return
        try:
            with self._files[name].replacing() as file:
                torch.save(weights, file)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise ValueError(
                f"cannot write {self.folder / name} ({error}): free some space, or choose another folder with out="
            ) from error
