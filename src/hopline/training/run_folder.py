"""The folder of a run while it trains: locked, with its records, and in place of an earlier run if asked for.

    fit begins                 lock the folder; refuse another run in it, unless resume= or overwrite= allows it
    begin                      open the report, and move the files of a replaced run to FOLDER/.overwritten
    first step is done         delete these
    fit ends                   close the report and release the lock; a new run without a step leaves no records,
                               and the replaced run is moved back, since the new one was refused or failed at once

Files that no run writes stay where they are. What a killed process has left in .overwritten is moved back when the
folder is opened the next time.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopline.report.writer import FILES as REPORT_FILES
from hopline.report.writer import Report, has_run, is_complete
from hopline.training import checkpoint
from hopline.training.callbacks import Callback, EpochEnd, Evaluation, Run, StepEnd
from hopline.training.run_facts import run_facts, stored_settings
from hopline.training.settings import TrainSettings
from hopline.util import trace
from hopline.util.file_lock import FileLock
from hopline.util.files import remove_unfinished

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer

HANDOVER_S = 5.0
"""Seconds that a resumed run waits for the earlier run to end and release the folder. Ranks may need seconds to
end after their launcher was stopped."""
ASIDE = ".overwritten"
WEIGHTS = ("best.pt", "last.pt")
FILES = (*REPORT_FILES, checkpoint.FILE, *WEIGHTS, *(f"{name}.sha256" for name in WEIGHTS), "predictions.csv")
"""All files that a run writes into its folder, and predictions with its weights."""


class RunFolder:
    """The folder of a run: its lock, its report, and the run that it replaces. A context.

    The trainer owns it, and enters it once per `fit`. Only the first rank of a run with out= has a path. All
    else does nothing.
    """

    def __init__(self, path: Path | None, settings: TrainSettings) -> None:
        self.path = path
        self.settings = settings
        self.report: Report | None = None
        """The records. None before `begin` and after the run, and if nothing is left to record."""
        self._stack = ExitStack()

    def __enter__(self) -> RunFolder:
        self._stack = ExitStack()
        if self.path is None:
            return self
        resumes = self.settings.resume
        # A run that resumes waits for the processes of the earlier one to release the folder.
        wait_s = HANDOVER_S if resumes else 0.0
        lock = FileLock(self.path / "run.lock", self.path, wait_s, "choose another folder with out=")
        with ExitStack() as stack:
            stack.enter_context(lock)
            restore_overwritten(self.path)
            if has_run(self.path) and not (resumes or self.settings.overwrite):
                raise ValueError(
                    f"{self.path} already holds a run. Resume it with resume=true, replace it with overwrite=true, or "
                    "choose another folder with out="
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin(self, trainer: Trainer, state: dict[str, Any] | None) -> list[Callback]:
        """Open the report, and move a replaced run aside. Returns the callbacks that write into the folder.

        state: of the checkpoint that the run resumes from. None for a new run.
        """
        if self.path is None:
            return []
        remove_unfinished(self.path)
        callbacks: list[Callback] = []
        if self.settings.overwrite and has_run(self.path):
            replace_run = ReplaceRun(self.path)
            callbacks.append(replace_run)
            self._stack.callback(lambda: replace_run.end(has_trained=trainer.num_steps > 0))
        is_over = state is not None and checkpoint.is_over(state, self.settings.epochs)
        # A run that is over is only tested again. Its folder has all records, so no report is opened.
        if not (is_over and is_complete(self.path)):
            callbacks.append(WriteReport(self._open_report(self.path, trainer, state)))
        return callbacks

    def drop_after(self, epoch: int) -> None:
        """Remove the records of the epochs after `epoch`, the one that ended the run."""
        if self.report is not None:
            of_epoch = ("epoch", "budget", "pipeline")
            self.report.keep(lambda r: r.get("event") not in of_epoch or (r.get("epoch") or 0) <= epoch)

    def _open_report(self, path: Path, trainer: Trainer, state: dict[str, Any] | None) -> Report:
        """Start the records of the run, or continue those that are in the checkpoint."""
        if state is None:
            report = Report(path, **stored_settings(trainer))
        else:
            is_kept = partial(checkpoint.was_recorded, state=state)
            report = Report(path, **stored_settings(trainer), resume=True, is_kept=is_kept)

        def end_report(kind: type[BaseException] | None, *_: object) -> None:
            """Remove the records of a new run that failed before its first step."""
            self.report = None
            has_trained = state is not None or trainer.num_steps > 0
            if kind is not None and not has_trained:
                report.discard()

        # Pushed before the report, so that it runs after the report is closed.
        self._stack.push(end_report)
        self.report = self._stack.enter_context(report)
        self._stack.enter_context(trace.listen(report))
        return report


class WriteReport(Callback):
    """Writes the records of a run into metrics.jsonl."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_fit_start(self, trainer: Trainer) -> None:
        self.report.log_once({"event": "start", **run_facts(trainer)})

    def on_epoch_end(self, trainer: Trainer, epoch: EpochEnd) -> None:
        self.report.log({"event": "epoch", **vars(epoch)})

    def on_evaluate_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        record: dict[str, Any] = {"event": "evaluate", **vars(evaluation)}
        if evaluation.split == "valid" and trainer.best_is == "min":
            record["best_is"] = "min"
        self.report.log(record)

    def on_fit_end(self, trainer: Trainer, run: Run) -> None:
        self.report.log(
            {
                "event": "end",
                "epochs": run.epochs,
                "dropped": run.dropped,
                "best_epoch": run.best_epoch,
                "reason": run.reason,
                "valid": {run.metric: run.valid},
                "test": {run.metric: run.test},
                "peak_rss_bytes": run.peak_bytes.get("host"),
                "peak_device_bytes": run.peak_bytes.get("device"),
                "seconds": run.seconds,
                "stages": [vars(region) for region in run.stages],
            }
        )


def restore_overwritten(folder: Path) -> None:
    """Move back the files of a run that another one began to replace, if there are any."""
    aside = folder / ASIDE
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
        self.aside = folder / ASIDE
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
