"""Writes what this commit writes: a dataset folder, shards of it, and two run folders with checkpoints.

    PYTHONPATH=src python -m tests.formats.write tests/formats/NAME

NAME is the commit that is run, by `git rev-parse --short HEAD`. The folder is kept for ever:
`tests/test_formats.py` opens, resumes or sees refused by name what every such folder holds. Each
was written by the commit of that name.

    dataset     by `Dataset.save`: weights of edges, a dense and a sparse table, two splits
    shards      the same by `hopline partition shards=2`
    run         by `hopline train`: two epochs of a sampled run, to be resumed to four
    historical  by `Trainer`, float64: a historical run that failed in its second epoch
    expected.json  what the same commit found: values of the dataset, losses of runs that went on, scores

No file names a folder of the machine: DATASET stands where the path of the dataset was.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import hopline as hl
from tests.golden_cases import checksum, dyadic, make_data, projection, whole_numbers
from tests.runs import command, records

DATASET = "DATASET"
"""Stands for the path of the dataset in a run's config.json."""
OVERRIDES = (
    "model.name=gcn",
    "model.layers=2",
    "model.hidden=6",
    "model.dropout=0.25",
    "method.fanouts=4,3",
    "method.batch_size=16",
    "method.workers=0",
    "lr=0.01",
    "show=false",
)
"""Settings of the run by `hopline train`."""


def made_dataset() -> hl.Dataset:
    """48 nodes: whatever a dataset folder can hold of a graph with classes."""
    large = make_data("dense")
    num_nodes, num_edges = 48, 240
    src = whole_numbers(num_edges, 31, num_nodes)
    dst = whole_numbers(num_edges, 32, num_nodes - 1).sort().values
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    x = large.x.read(torch.arange(num_nodes)).float()
    nodes = torch.arange(num_nodes)
    splits = {"train": nodes[:32], "valid": nodes[32:40], "test": nodes[40:]}
    other = {"train": nodes[16:], "valid": nodes[8:16], "test": nodes[:8]}
    return hl.Dataset(
        name="kept",
        graph=hl.Graph(indptr, src, {"weight": dyadic(num_edges, 33).float() + 2}),
        tables={"x": hl.extend.TensorTable(x), "counts": hl.extend.SparseTable.from_dense(x.relu())},
        y=large.labels[:num_nodes],
        splits=splits,
        alternatives=(splits, other),
        num_classes=large.num_classes,
        meta={"origin": "tests/formats/write.py"},
    )


class Fails(hl.Callback):
    """Fails in a step, as a user's own callback could."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.step == self.step:
            raise RuntimeError("enough")


def historical_trainer(data: hl.Dataset, out: Path, **options: Any) -> hl.Trainer:
    """Three epochs of two batches, with everything that a historical checkpoint can hold."""
    torch.manual_seed(5)
    convs = [pyg.GCNConv(8, 6), pyg.GCNConv(6, 6), pyg.GCNConv(6, 4)]
    model = hl.nn.GNN(convs, dropout=0.25, norm="layer").double()
    method = hl.Historical(
        num_parts=4,
        parts_per_batch=2,
        partition="random",
        compensate=True,
        lag=1,
    )
    settings: dict[str, Any] = {"epochs": 3, "lr": 0.01, "seed": 4, "show": False, "checkpoint_s": 0.0}
    return hl.Trainer(model, data, method, out=out, **(settings | options))


def weights_of(trainer: hl.Trainer) -> list[float]:
    """A number per tensor of the last epoch's weights."""
    assert trainer.out is not None
    last = torch.load(trainer.out / "last.pt", weights_only=True)
    return [projection(tensor) for tensor in last.values()]


def dataset_checksums(data: hl.Dataset) -> dict[str, str]:
    """Of everything in a dataset."""
    every = torch.arange(data.num_nodes)
    tensors: dict[str, list[Tensor]] = {
        "graph": [data.graph.indptr, data.graph.indices],
        "edge": list(data.graph.edge.values()),
        "y": [data.labels],
        **{f"table {name}": [table.read(every)] for name, table in data.tables.items()},
        **{f"splits {k}": list(split.values()) for k, split in enumerate(data.all_splits)},
    }
    return {name: checksum(found) for name, found in tensors.items()}


def _losses(folder: Path) -> list[float]:
    """Of each epoch, by a run's metrics.jsonl."""
    return [record["loss"] for record in records(folder) if "loss" in record]


def _succeed(*arguments: object) -> None:
    outcome = command(*arguments)
    assert outcome.status == 0, outcome.err


def write(folder: Path) -> None:
    """Write all folders, and what is expected of them."""
    folder.mkdir(parents=True)
    data = made_dataset()
    data.save(folder / "dataset")
    expected: dict[str, Any] = {"dataset": dataset_checksums(data)}
    _succeed("partition", folder / "dataset", folder / "shards", "shards=2", "how=random")
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "run"
        _succeed("train", folder / "dataset", *OVERRIDES, "epochs=4", f"out={whole}")
        expected["losses"] = _losses(whole)
        _succeed("train", folder / "dataset", *OVERRIDES, "epochs=2", f"out={folder / 'run'}")
        _succeed("infer", folder / "run", "write=scores", f"out={scratch}/scores.npy")
        expected["scores"] = np.load(f"{scratch}/scores.npy").astype(float).tolist()
        trainer = historical_trainer(data, Path(scratch) / "historical")
        expected["historical losses"] = [epoch.loss for epoch in trainer.fit().history]
        expected["historical weights"] = weights_of(trainer)
    with contextlib.suppress(RuntimeError):
        historical_trainer(data, folder / "historical", callbacks=[Fails(4)]).fit()
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in expected.items()]
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name in ("run", "historical"):
        _without_paths(folder / name, folder.resolve())


def _without_paths(folder: Path, top: Path) -> None:
    """What a run says of the machine, taken out."""
    for path in folder.iterdir():
        if path.suffix in (".json", ".jsonl", ".log", ".html"):
            text = path.read_text().replace(str(top / "dataset"), DATASET).replace(str(top), "FORMATS")
            path.write_text(text)
    config = folder / "config.json"
    stored = json.loads(config.read_text())
    stored["platform"] = "Linux"
    stored["command"] = ["hopline"]
    config.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
