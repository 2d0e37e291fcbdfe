"""The commands that prepare and export: convert, partition, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline.core.partition import describe, make_partition
from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import from_csv
from hopline.data.formats.dgl import from_dgl, is_dgl_folder
from hopline.data.formats.npz import from_npz
from hopline.data.formats.ogb import from_ogb_folder
from hopline.data.options import EdgeOptions
from hopline.data.paths import default_name, is_dataset, is_ogb_folder
from hopline.data.registry import open_dataset
from hopline.data.splits import random_split
from hopline.data.store import verify
from hopline.inference.over_shards import AllShards
from hopline.run.models import make_model
from hopline.run.settings import (
    EDGE_LISTS,
    ConvertConfig,
    ExportConfig,
    PartitionConfig,
    check_conversion,
    load_trusted,
)
from hopline.run.train import load_weights, open_data
from hopline.shards.shard import is_shards
from hopline.shards.write import cut


def export(folder: Path, file: Path, config: ExportConfig) -> Path:
    """A run's weights as a plain `state_dict`, with PyG's names, for torch.load(..., weights_only=True)."""
    settings = load_trusted(folder, config.trust)
    data = AllShards(settings.data) if is_shards(settings.data) else open_data(settings)
    model = make_model(settings.model, data)
    load_weights(model, folder / f"{config.weights}.pt")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ValueError(f"cannot write {file} ({error}): choose another file") from error
    return file


def convert(source: str, folder: Path, config: ConvertConfig) -> Dataset:
    """Bring a source into hopline's folder format, and check what was written."""
    check_conversion(source, folder, config)
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(EdgeOptions)}
    changed = {k: v for k, v in options.items() if v != getattr(EdgeOptions(), k)}
    known: dict[str, Any] = {} if config.split is None else {"split_shares": config.split}
    if config.num_nodes is not None:
        known["num_nodes"] = config.num_nodes
    if suffix in EDGE_LISTS:
        from_csv(path, config.nodes, folder=folder, columns=config.columns, ids=config.ids, **known, **options)
    elif suffix == ".npz":
        from_npz(path, folder=folder, **known, **changed)
    elif suffix == ".npy":
        from_csv(path, config.nodes, folder=folder, columns=config.columns, **known, **options)
    elif is_dgl_folder(path):
        from_dgl(path, folder=folder, **known, **changed)
    elif is_ogb_folder(path):
        from_ogb_folder(path, folder=folder, **known, **changed)
    else:
        if config.num_nodes is not None:
            raise ValueError(f"num_nodes= cannot be changed in {source}: leave it out")
        data = open_dataset(source, **changed)
        data = data if config.split is None else random_split(data, config.split)
        dataclasses.replace(data, name=default_name(folder, data.name)).save(folder)
    verify(folder)
    return open_dataset(str(folder))


def partition_dataset(source: str, folder: Path, config: PartitionConfig) -> str:
    """Cut a dataset into shards; returns what they are like."""
    if config.shards < 1:
        raise ValueError(f"say how many shards to make: hopline partition {source} {folder} shards=4")
    if is_dataset(folder) and not config.overwrite:
        raise ValueError(f"{folder} is not empty: choose another folder, or replace it with overwrite=true")
    data = open_dataset(source)
    made = make_partition(
        data.graph,
        config.shards,
        "metis" if config.how == "labels" else config.how,
        labels=_labels(data, config.labels) if config.how == "labels" else None,
        seed=config.seed,
        slack=config.slack,
        passes=config.passes,
        show=True,
    )
    cut(data, made, folder, show=True)
    return describe(data.graph, made)


def _labels(data: Dataset, name: str) -> Tensor:
    """A label per node, by name."""
    found = data.y
    if name != "y":
        found = data.tables[name].read(torch.arange(data.num_nodes)) if name in data.tables else None
    if found is not None and found.dim() == 2 and found.size(1) == 1:
        found = found.view(-1)
    if found is None or found.dim() > 1 or found.is_floating_point():
        names = ", ".join(["y", *data.tables])
        raise ValueError(f"there are no labels {name!r}, one whole number per node: choose labels= of {names}")
    return found
