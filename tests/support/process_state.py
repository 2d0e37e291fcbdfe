"""A program that uses hopline and records which parts of its process each step has changed: FOLDER/changes.json.

    python -m tests.support.process_state FOLDER

`test_process_state.py` runs it in a process of its own, since a test runner changes much itself. Libraries that
hopline uses are imported first, so that changes by their import do not count.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba  # noqa: F401
import numpy as np
import torch
import torch_geometric.nn as pyg
from rich.console import Console
from torch_geometric.data import Data

told_malloc: dict[int, int] = {}
"""Setting of mallopt -> the value of its last call."""


class RecordingLibrary(ctypes.CDLL):
    """A C library that records calls of mallopt, and does not make them."""

    def __getattr__(self, name: str) -> Any:
        if name != "mallopt":
            return super().__getattr__(name)

        def mallopt(setting: int, value: int) -> int:
            told_malloc[setting] = value
            return 1

        return mallopt


LONG_LIVED = "hopline-ops"
"""The kernels' threads, which wait for work as long as the process lives, by design."""
GLIBC = {-1: 64 << 20, -3: 32 << 20}
"""The thresholds that glibc itself reaches once large blocks were freed: they count as no change."""


def threads_of_a_new_thread() -> int:
    """torch's number of threads in a thread that has set none: the one that was set last anywhere."""
    numbers: list[int] = []
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return numbers[0]


def state() -> dict[str, str]:
    """Everything that belongs to the process, by name, as text."""
    values = {
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "excepthook": (sys.excepthook, threading.excepthook),
        "unraisablehook": sys.unraisablehook,
        "warning filters": list(warnings.filters),
        "functions called at exit": atexit._ncallbacks(),
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith(LONG_LIVED)),
        "malloc": {} if told_malloc == GLIBC else dict(told_malloc),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch threads of a new thread": threads_of_a_new_thread(),
        "torch draws": torch.get_rng_state().tolist(),
        "other draws": (random.getstate(), [np.asarray(part).tolist() for part in np.random.get_state()]),
        "torch modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "torch defaults": (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "folder and path": (os.getcwd(), list(sys.path)),
        "logging": [
            (logger.level, list(logger.handlers)) for logger in (logging.getLogger(), logging.getLogger("hopline"))
        ],
    }
    if "hopline.util.trace" in sys.modules:
        from hopline.util import progress, trace

        values["trace listeners"] = trace._trace.listeners
        values["progress displays"] = dict(progress._displays)
    return {name: repr(value) for name, value in values.items()}


NAMES = list(dict.fromkeys([*state(), "trace listeners", "progress displays"]))
"""The names of all parts of the state that are compared."""


class Planned(Exception):
    """Raised by a step on purpose."""


class Steps:
    """The steps of the program, in the order of their definition; each is a method."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def import_hopline(self) -> None:
        import hopline as hl

        self.hl = hl

    def build_loaders(self) -> None:
        hl = self.hl
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(200, 8, generator=generator)
        edge_index = torch.randint(200, (2, 2000), generator=generator)
        pyg_data = Data(x=x, edge_index=edge_index, y=torch.randint(3, (200,), generator=generator))
        pyg_data.train_mask = torch.arange(200) < 120
        pyg_data.val_mask = (torch.arange(200) >= 120) & (torch.arange(200) < 160)
        pyg_data.test_mask = torch.arange(200) >= 160
        self.data = hl.from_pyg(pyg_data)
        self.table = hl.table(x)
        self.sampler = hl.extend.NeighborSampler(self.data.graph, (3, 3))
        self.loader = hl.Sampled(fanouts=(3, 3), batch_size=16, workers=2).loader(self.data)
        self.pyg_loader = hl.NeighborLoader(
            pyg_data, [3, 3], batch_size=16, num_workers=2, seed=0, input_nodes=pyg_data.train_mask
        )

    def take_some_batches(self) -> None:
        for batches in (iter(self.loader), iter(self.pyg_loader)):
            next(batches)
            next(batches)
            batches.close()  # type: ignore[attr-defined]

    def take_all_batches(self) -> None:
        assert len(list(self.loader)) == 8
        assert len(list(self.pyg_loader)) == 8

    def build_trainer(self) -> None:
        self.trainer()

    def fit(self) -> None:
        self.trainer().fit()

    def fit_with_a_folder(self) -> None:
        self.trainer(out=self.folder / "whole").fit()

    def fit_with_a_budget(self) -> None:
        self.trainer(budget="1GiB").fit()

    def fit_with_async_evaluation(self) -> None:
        self.trainer(evaluate="async").fit()

    def fit_historical(self) -> None:
        self.trainer(self.hl.Historical(num_parts=4, parts_per_batch=2)).fit()

    def fit_full_batch(self) -> None:
        self.trainer(self.hl.FullBatch(num_shards=2)).fit()

    def fit_with_a_model_in_eval_mode(self) -> None:
        trainer = self.trainer()
        trainer.model.eval()
        trainer.fit()
        assert not any(module.training for module in trainer.model.modules())

    def fit_until_an_error(self) -> None:
        self.fit_until(Planned(), "on_step_end")

    def fit_until_an_error_at_the_start(self) -> None:
        self.fit_until(Planned(), "on_fit_start")

    def fit_until_an_error_in_a_step_and_another_at_the_end(self) -> None:
        self.fit_until(Planned(), "on_step_end", "on_fit_end")

    def fit_until_ctrl_c(self) -> None:
        self.fit_until(KeyboardInterrupt(), "on_step_end")

    def fit_until_an_error_with_async_evaluation(self) -> None:
        self.fit_until(Planned(), "on_step_end", evaluate="async", epochs=3)

    def fit_until_a_signal(self) -> None:
        trainer = self.trainer(out=self.folder / "signal", epochs=100)
        trainer.callbacks.append(self.callback(lambda: os.kill(os.getpid(), signal.SIGTERM), "on_step_end"))
        with suppress(KeyboardInterrupt):
            trainer.fit()
            raise AssertionError("the signal did not end the run")

    def change_everything(self) -> None:
        """Change each part of the state, to show that every change would be noticed."""
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.environ["HOPLINE_CHANGED"] = "1"
        threading.excepthook = lambda error: None
        sys.unraisablehook = lambda what: None
        warnings.simplefilter("ignore")
        atexit.register(print, end="")
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        ctypes.CDLL(None).mallopt(-3, 1 << 30)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.rand(1)
        random.random()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        gc.freeze()
        with suppress(OSError):
            os.nice(1)
        os.chdir("/")
        logging.getLogger("hopline").setLevel(logging.ERROR)
        from hopline.util import progress, trace

        terminal = Console(file=io.StringIO(), force_terminal=True)
        self.opened = trace.listen(trace.Timers()), progress.progress("left open", 1, console=terminal)
        for context in self.opened:
            context.__enter__()

    # ---- used by the steps

    def trainer(self, method: Any = None, **settings: Any) -> Any:
        hl = self.hl
        model = hl.nn.GNN([pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 3)], dropout=0.5)
        method = method or hl.Sampled(fanouts=(3, 3), batch_size=16, workers=2)
        trainer = hl.Trainer(model, self.data, method, **{"epochs": 2, "seed": 5, **settings})
        torch.manual_seed(0)  # the model has drawn its weights: what is compared begins here
        return trainer

    def callback(self, act: Callable[[], object], *hooks: str) -> Any:
        """A callback that calls `act` in some hooks."""
        methods = dict.fromkeys(hooks, lambda self, trainer, *args: act())
        return type("Acts", (self.hl.Callback,), methods)()

    def fit_until(self, error: BaseException, *hooks: str, **settings: Any) -> None:
        """Train until hooks raise the error."""
        calls = itertools.count()

        def fail() -> None:
            if next(calls) or "on_step_end" not in hooks:  # the progress bar opens after the first step
                raise error

        trainer = self.held = self.trainer(**settings)  # what it left open is not closed by its deletion
        trainer.callbacks.append(self.callback(fail, *hooks))
        with suppress(type(error)):
            trainer.fit()
            raise AssertionError("no hook was called")


STEPS = [name for name in vars(Steps) if not name.startswith("_")]
STEPS = STEPS[: STEPS.index("change_everything") + 1]


def main() -> None:
    ctypes.CDLL = RecordingLibrary  # type: ignore[misc]
    folder = Path(sys.argv[1]).resolve()
    steps = Steps(folder)
    changes = dict[str, list[str]]()
    for name in STEPS:
        torch.manual_seed(0)
        before = state()
        failed: list[str] = []
        try:
            getattr(steps, name)()
        except Exception as error:
            traceback.print_exc()
            failed = [f"failed: {error!r}"]
        after = state()
        changes[name] = failed + [what for what, value in after.items() if before.get(what, value) != value]
    (folder / "changes.json").write_text(json.dumps(changes))


if __name__ == "__main__":
    main()
