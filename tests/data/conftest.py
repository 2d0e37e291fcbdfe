"""Small datasets that the tests of the data package share."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.tables import SparseTable


@pytest.fixture
def tiny() -> Dataset:
    """40 nodes, 200 edges with weights, dense and sparse features, two splits, one unlabelled node."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (40,), generator=generator)
    y[39] = -1
    chosen = torch.zeros(40, 2, dtype=torch.bool)
    chosen[:20, 0] = True
    chosen[10:30, 1] = True
    dense = torch.randn(40, 5, generator=generator)
    return from_edges(
        torch.randint(0, 40, (2, 200), generator=generator),
        edge={"weight": torch.rand(200, generator=generator)},
        x=dense,
        tables={"words": SparseTable.from_dense(dense.relu()), "half": dense.bfloat16()},
        y=y,
        splits={"train": chosen, "valid": torch.arange(30, 35), "test": torch.arange(35, 39)},
        name="tiny",
        meta={"origin": "a test"},
    )


def _write_csv(path: Path, rows: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    form = "%d" if rows.dtype.kind == "i" else "%.6f"
    with gzip.open(path, "wt") as file:
        np.savetxt(file, rows, fmt=form, delimiter=",")


@pytest.fixture
def make_ogb_folder() -> Callable[..., dict[str, np.ndarray]]:
    """Makes an OGB folder: call it with the folder, binary= and extra= arrays."""
    return _make_ogb_folder


def _make_ogb_folder(
    root: Path, *, binary: bool = False, extra: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """An OGB folder of 12 nodes and 30 edges in one of the two layouts."""
    rng = np.random.default_rng(1)
    arrays = {
        "edge": rng.integers(0, 12, (30, 2)),
        "node-feat": np.round(rng.random((12, 4)), 3),
        "node-label": rng.integers(0, 3, (12, 1)),
        "node_year": rng.integers(1990, 2020, (12, 1)),
    } | (extra or {})
    for name, ids in {"train": [3, 1], "valid": [5], "test": [9, 7, 8]}.items():
        _write_csv(root / "split" / "time" / f"{name}.csv.gz", np.array(ids)[:, None])
    if not binary:
        for name, rows in arrays.items():
            _write_csv(root / "raw" / f"{name}.csv.gz", rows)
        _write_csv(root / "raw" / "num-node-list.csv.gz", np.array([[12]]))
        return arrays
    (root / "raw").mkdir()
    np.savez(
        root / "raw" / "data.npz",
        edge_index=np.ascontiguousarray(arrays["edge"].T),
        num_nodes_list=np.array([12]),
        num_edges_list=np.array([30]),
        node_feat=arrays["node-feat"].astype(np.float32),
        node_year=arrays["node_year"],
    )
    labels = arrays["node-label"].astype(np.float32)
    labels[0] = np.nan
    np.savez(root / "raw" / "node-label.npz", node_label=labels)
    return arrays
