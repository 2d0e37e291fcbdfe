"""Small datasets, models, runs and commands for the tests of everything above the kernels.

small, sage, method    a dataset, a model and a method that fit each other
fit, quick             a run of them by the Trainer, or as settings of a run; `predictions` of one
command                the command line in this process, and `assert_refused` for its refusals
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.cli import main
from hopline.data.synthetic import planted_partition
from hopline.run.infer import predict
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import InferConfig, RunConfig
from hopline.training import checkpoint


def small(**changes: Any) -> hl.Dataset:
    """A planted graph of 400 nodes that two layers learn in a second."""
    settings: dict[str, Any] = {
        "num_nodes": 400,
        "num_edges": 4000,
        "num_classes": 4,
        "num_features": 8,
        "num_train": 150,
        "num_valid": 80,
        "signal": 2.0,
        "homophily": 0.8,
    }
    return planted_partition(**(settings | changes))


def without(data: hl.Dataset, *splits: str) -> hl.Dataset:
    """The dataset without some of its splits."""
    return dataclasses.replace(data, splits={k: v for k, v in data.splits.items() if k not in splits})


def sage(data: hl.Dataset, hidden: int = 16, outputs: int | None = None, **options: Any) -> hl.nn.GNN:
    """Two SAGE layers, always with the same first weights."""
    torch.manual_seed(7)
    last = SAGEConv(hidden, data.num_classes if outputs is None else outputs)
    return hl.nn.GNN([SAGEConv(data.num_features, hidden), last], **options)


def method(**changes: Any) -> hl.Sampled:
    """Neighbour sampling with three batches an epoch on `small()`."""
    settings: dict[str, Any] = {"fanouts": (4, 3), "batch_size": 50, "workers": 1} | changes
    return hl.Sampled(**settings)


def fit(
    data: hl.Dataset, model: nn.Module | None = None, how: hl.extend.Method | None = None, **settings: Any
) -> hl.Run:
    """Train quietly, by default two SAGE layers for two epochs."""
    settings = {"epochs": 2, "lr": 0.01, "show": False} | settings
    return hl.Trainer(sage(data) if model is None else model, data, how or method(), **settings).fit()


def quick(folder: Path, **changes: Any) -> RunConfig:
    """A run of a second on a small graph in a folder, to be written there too."""
    small().save(folder / "graph")
    settings: dict[str, Any] = {
        "data": str(folder / "graph"),
        "model": ModelSpec(hidden=8, layers=2),
        "method": method(),
        "epochs": 2,
        "lr": 0.01,
        "show": False,
        "out": folder / "run",
    }
    return RunConfig(**(settings | changes))


def predictions(folder: Path, /, **settings: Any) -> np.ndarray:
    """What the weights of a run predict: the values alone, from an .npy file."""
    settings = {"out": folder / "predictions.npy"} | settings
    written = predict(folder, InferConfig(**settings))
    assert written is not None
    return np.load(written.file, allow_pickle=False)


def labels(data: hl.Dataset, split: str) -> Tensor:
    """The labels of the nodes of a split."""
    return data.labels[data.splits[split]]


def losses(run: hl.Run) -> list[float]:
    """The loss of every epoch."""
    return [epoch.loss for epoch in run.history]


def evaluated(run: hl.Run, split: str = "valid") -> list[int]:
    """The epochs after which a split was evaluated."""
    return [evaluation.epoch for evaluation in run.evaluations if evaluation.split == split]


def copied(weights: dict[str, Any]) -> dict[str, Tensor]:
    """Clones of weights, which later steps do not change."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def same_weights(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether weights have the same names in the same order, and are equal to the bit."""
    return list(ours) == list(expected) and all(torch.equal(ours[name], expected[name]) for name in ours)


def records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, or those of one event."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line.get("event"))]


class Outcome(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def command(*arguments: object) -> Outcome:
    """`hopline ARGUMENTS` in this process."""
    out = io.StringIO()
    err = io.StringIO()
    argv = ["hopline", *map(str, arguments)]
    status: Any = None
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_request:
            status = exit_request.code
    return Outcome(status or 0, out.getvalue(), err.getvalue())


def assert_refused(outcome: Outcome, *words: str) -> None:
    """The command ended with one sentence for the user that holds all the words, and status 2."""
    *before, last = outcome.err.strip().splitlines()
    assert last.startswith("error: "), outcome.err
    assert outcome.status == 2, outcome.err
    assert not any(line.startswith(("Traceback", "error: ")) for line in before), outcome.err
    for word in words:
        assert word in last, outcome.err


class StopAfter(hl.Callback):
    """Fails after a number of steps, as an error in a user's code would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.step == self.steps:
            raise RuntimeError("enough")


class Recorder(hl.Callback):
    """Records every call of a hook with its payload."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_fit_start(self, trainer: hl.Trainer) -> None:
        self.calls.append(("fit_start", None))

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        self.calls.append(("step", step))

    def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
        self.calls.append(("epoch", epoch))

    def on_evaluate_end(self, trainer: hl.Trainer, evaluation: hl.extend.Evaluation) -> None:
        self.calls.append(("evaluate", evaluation))

    def on_fit_end(self, trainer: hl.Trainer, run: hl.Run) -> None:
        self.calls.append(("fit_end", run))

    def payloads(self, hook: str) -> list[Any]:
        """The payloads of all calls of a hook, in order."""
        return [payload for name, payload in self.calls if name == hook]


def overrides(**settings: object) -> Iterable[str]:
    """A quick run on the command line, as key=value texts."""
    quick: dict[str, object] = {"epochs": 1, "model.layers": 2, "model.hidden": 8}
    quick |= {"method.fanouts": "4,3", "method.batch_size": 50, "method.workers": 1}
    return [f"{key.replace('__', '.')}={value}" for key, value in (quick | settings).items()]


def in_float64(data: hl.Dataset) -> hl.Dataset:
    """The dataset with its features in float64, in memory."""
    rows = data.x.read(torch.arange(len(data.x))).double()
    return dataclasses.replace(data, tables={"x": hl.extend.TensorTable(rows)})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint file."""
    return checkpoint.parse(path.read_bytes(), path)
