"""A run that replaces another one in its folder: overwrite=true.

    fit begins                 the files of the earlier run are moved to FOLDER/.overwritten
    first step is done         they are deleted
    fit ends without a step    they are moved back, since the new run was refused or failed at once

Files that no run writes stay where they are. What a killed process has left in .overwritten is moved back when the
folder is opened the next time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hopline.report.writer import FILES as REPORT_FILES
from hopline.training import checkpoint
from hopline.training.callbacks import Callback, StepEnd

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

FOLDER = ".overwritten"
WEIGHTS = ("best.pt", "last.pt")
FILES = (*REPORT_FILES, checkpoint.FILE, *WEIGHTS, *(f"{name}.sha256" for name in WEIGHTS), "predictions.csv")
"""All files that a run writes into its folder, and predictions with its weights."""


def restore_overwritten(folder: Path) -> None:
    """Move back the files of a run that another one began to replace, if there are any."""
    aside = folder / FOLDER
    if aside.exists():
        for path in aside.iterdir():
            path.replace(folder / path.name)
        aside.rmdir()


class ReplaceRun(Callback):
    """Replaces the run in a folder by the run that calls it, with its first step."""

    def __init__(self, folder: Path) -> None:
        """Move the files aside. Raises ValueError if they are not those of a run."""
        self.folder = folder
        try:
            stored = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            stored = None
        if not isinstance(stored, dict) or not stored.keys() >= {"format", "config", "versions"}:
            raise ValueError(
                f"{folder} is not a run folder, since its config.json is not that of a run, and overwrite= replaces "
                "nothing else: choose another folder with out="
            )
        self.aside = folder / FOLDER
        self.aside.mkdir()
        for name in FILES:
            if (folder / name).exists():
                (folder / name).replace(self.aside / name)

    def on_step_end(self, trainer: Trainer, step: StepEnd) -> None:
        self.end(has_trained=True)

    def end(self, *, has_trained: bool) -> None:
        """Delete the earlier run, or move it back if the new one has trained nothing."""
        if not has_trained:
            restore_overwritten(self.folder)
        elif self.aside.exists():
            shutil.rmtree(self.aside)
