"""The commands that prepare data and export weights: convert, partition, export."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline.core.partition import describe, make_partition
from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import from_csv
from hopline.data.formats.dgl import from_dgl
from hopline.data.formats.npz import from_npz
from hopline.data.formats.ogb import from_ogb_folder
from hopline.data.options import EdgeOptions
from hopline.data.paths import default_name, dgl_config, is_dataset, is_ogb_folder
from hopline.data.registry import open_dataset
from hopline.data.splits import random_split
from hopline.data.store import verify
from hopline.data.writer import locked
from hopline.run.saved import load
from hopline.run.settings import (
    EDGE_LISTS,
    ConvertConfig,
    ExportConfig,
    PartitionConfig,
    check_conversion,
)
from hopline.shards.write import cut
from hopline.util.files import replacing


def export(folder: Path, file: Path, config: ExportConfig) -> list[Path]:
    """Write a run's weights with PyG's names, and the form of its training data as JSON. Returns both files.

    `torch.load(file, weights_only=True)` reads a .pt file, `safetensors.torch.load_file` a .safetensors file. The JSON
    has the names of feature columns and classes, and the statistics of standardised features.

    Raises:
        ValueError: The run or its weights cannot be read, or a file cannot be written.
    """
    # The model is built, so that the weights are checked against it.
    run = load(folder, weights=config.weights, trust=config.trust)
    weights = run.model.state_dict()
    description = file.with_suffix(".json")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            if file.suffix == ".safetensors":
                unfinished.write(_as_safetensors(weights))
            else:
                torch.save(weights, unfinished)
        with replacing(description) as unfinished:
            unfinished.write((json.dumps(run.inputs.to_dict(), indent=1) + "\n").encode())
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ValueError(f"cannot write {file} ({error}): choose another file") from error
    return [file, description]


def _as_safetensors(weights: Mapping[str, Any]) -> bytes:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(
            ".safetensors needs a package: run pip install 'hopline[safetensors]', or choose FILE.pt"
        ) from error
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"the model's {others[0]!r} is no tensor, and .safetensors holds tensors alone: choose FILE.pt"
        )
    # Copies, since tensors that share memory are refused.
    return safetensors.torch.save({name: value.contiguous().clone() for name, value in weights.items()})


def convert(source: str, folder: Path, config: ConvertConfig) -> Dataset:
    """Convert a source into a dataset folder, verify the folder, and return its dataset.

    Raises:
        ValueError: The source cannot be read, or a setting means nothing for it, or another process is writing the
            folder.
    """
    with locked(folder):  # until the end: else a dataset that appears meanwhile would be replaced without a question
        check_conversion(source, folder, config)
        _convert(source, folder, config)
        verify(folder)
    return open_dataset(str(folder))


def _convert(source: str, folder: Path, config: ConvertConfig) -> None:
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    edge_options = {field.name: getattr(config, field.name) for field in dataclasses.fields(EdgeOptions)}
    # A source such as an .npz file may hold these options itself. Only those that the user has changed
    # override them.
    changed_options = {key: value for key, value in edge_options.items() if value != getattr(EdgeOptions(), key)}
    node_options: dict[str, Any] = {}
    if config.split is not None:
        node_options["split_shares"] = config.split
    if config.num_nodes is not None:
        node_options["num_nodes"] = config.num_nodes
    if config.task is not None:
        node_options["task"] = config.task

    if suffix in (*EDGE_LISTS, ".npy"):
        ids = "map" if config.ids == "map" else "number"
        from_csv(path, config.nodes, folder=folder, columns=config.columns, ids=ids, **node_options, **edge_options)
    elif suffix == ".npz":
        from_npz(path, folder=folder, **node_options, **changed_options)
    elif dgl_config(path) is not None:
        ids = None if config.ids == ConvertConfig().ids else config.ids
        from_dgl(path, folder=folder, ids=ids, **node_options, **changed_options)
    elif is_ogb_folder(path):
        from_ogb_folder(path, folder=folder, **node_options, **changed_options)
    else:
        if config.num_nodes is not None:
            raise ValueError(f"num_nodes= cannot be changed in {source}: leave it out")
        if config.task is not None:
            changed_options["task"] = config.task
        data = open_dataset(source, **changed_options)
        if config.split is not None:
            data = random_split(data, config.split)
        dataclasses.replace(data, name=default_name(folder, data.name)).save(folder)


def partition_dataset(source: str, folder: Path, config: PartitionConfig) -> str:
    """Partition a dataset into a folder of shards. Returns a description of the partition.

    Raises:
        ValueError: The number of shards is missing, the folder holds a dataset, or there are no such
        labels.
    """
    if config.shards < 1:
        raise ValueError(f"say how many shards to make: hopline partition {source} {folder} shards=4")
    with locked(folder):
        if is_dataset(folder) and not config.overwrite:
            raise ValueError(f"{folder} is not empty: choose another folder, or replace it with overwrite=true")
        data = open_dataset(source)
        if config.how == "labels":
            how = "metis"  # not used: labels take precedence
            labels = _labels(data, config.labels)
        else:
            how = config.how
            labels = None
        partition = make_partition(
            data.graph,
            config.shards,
            how,
            labels=labels,
            seed=config.seed,
            slack=config.slack,
            passes=config.passes,
            show=True,
        )
        cut(data, partition, folder, show=True)
        return describe(data.graph, partition)


def _labels(data: Dataset, name: str) -> Tensor:
    """[num_nodes] integers: `y` of the dataset, or a table of one column."""
    labels: Tensor | None = None
    if name == "y":
        labels = data.y
    elif name in data.tables:
        labels = data.tables[name].read(torch.arange(data.num_nodes))
    if labels is not None and labels.dim() == 2 and labels.size(1) == 1:
        labels = labels.view(-1)
    if labels is None or labels.dim() > 1 or labels.is_floating_point():
        names = ", ".join(["y", *data.tables])
        raise ValueError(f"labels={name} must name one whole number per node, and does not: choose labels= of {names}")
    return labels
