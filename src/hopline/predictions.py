"""Predictions of a finished run, as an .npy file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hopline import infer
from hopline.data.dataset import Dataset
from hopline.methods import Sampled
from hopline.models import make_model
from hopline.run import load_config, load_weights, open_data


@dataclass(frozen=True, kw_only=True)
class InferConfig:
    """What `hopline infer RUN` takes as key=value."""

    nodes: Literal["all", "train", "valid", "test"] = "all"
    """Which nodes to predict."""
    write: Literal["classes", "scores"] = "classes"
    """Class numbers (0/1 per label for several labels), or the model's raw scores."""
    inference: Literal["exact", "sampled"] = "exact"
    """Over every edge, or over sampled ones with the run's fan-outs."""
    weights: Literal["best", "last"] = "best"
    """Which weights of the run."""
    data: str | None = None
    """Another dataset with the same features, instead of the run's own."""
    data_root: Path | None = None
    """Where datasets are kept, if not where they were for the run."""
    out: Path | None = None
    """The .npy file to write; RUN/predictions.npy by default."""


def predict(folder: Path, config: InferConfig) -> Path:
    """Predict with a run's weights; returns the file written."""
    settings = load_config(folder)
    root = config.data_root or settings.data_root
    data = open_data(dataclasses.replace(settings, data=config.data or settings.data, data_root=root))
    model = make_model(settings.model, data)
    load_weights(model, folder / f"{config.weights}.pt")
    ids = torch.arange(data.num_nodes) if config.nodes == "all" else _split(data, config.nodes)
    if config.inference == "exact":
        scores = infer.exact(model, data, ids, show=True)
    else:
        if not isinstance(settings.method, Sampled):
            raise ValueError("inference=sampled needs the fan-outs of a run by method=sampled: set inference=exact")
        in_order = dataclasses.replace(settings.method, shuffle=False, drop_last=False)
        scores = infer.sampled(
            model, in_order.loader(data, ids, seed=settings.seed, model=model), num_nodes=ids.numel(), show=True
        )
    rows = scores.float() if config.write == "scores" else _classes(scores, data.task)
    out = config.out or folder / "predictions.npy"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("wb") as file:
            np.save(file, rows.numpy(), allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "the disk is full"  # numpy writes fewer bytes and gives no number
        raise ValueError(f"cannot write {out} ({reason}): choose another file with out=") from error
    return out


def _split(data: Dataset, name: str) -> Tensor:
    if name not in data.splits:
        raise ValueError(f"dataset {data.name!r} has no split {name!r}: choose nodes=all or one of {list(data.splits)}")
    return data.splits[name]


def _classes(scores: Tensor, task: str) -> Tensor:
    if task == "multi":
        return (scores > 0).to(torch.uint8)
    if scores.size(-1) == 1:
        return (scores > 0).view(-1).to(torch.uint8)
    return scores.argmax(dim=-1)
