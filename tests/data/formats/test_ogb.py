"""Datasets from OGB folders in both layouts: edges, labels and features, and folders that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hopline.data.formats.ogb import from_ogb_folder
from hopline.data.paths import is_ogb_folder
from hopline.data.store import verify

MakeFolder = Callable[..., dict[str, np.ndarray]]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("to_folder", [False, True])
def test_both_layouts_are_read(binary: bool, to_folder: bool, tmp_path: Path, make_ogb_folder: MakeFolder) -> None:
    root = tmp_path / "ogbn_arxiv"
    arrays = make_ogb_folder(root, binary=binary)
    options = {"folder": tmp_path / "out"} if to_folder else {}
    dataset = from_ogb_folder(root, **options)
    dataset.validate()
    assert dataset.name == ("out" if to_folder else "ogbn-arxiv")
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (12, 30, 3)
    assert np.allclose(dataset.x.read(torch.arange(12)).numpy(), arrays["node-feat"], atol=1e-6)
    assert dataset.x.dtype == torch.float32
    expected = arrays["node-label"][:, 0].copy()
    expected[0] = -1 if binary else expected[0]
    assert dataset.labels.tolist() == expected.tolist()
    assert {k: v.tolist() for k, v in dataset.splits.items()} == {"train": [1, 3], "valid": [5], "test": [7, 8, 9]}
    assert dataset.tables["node_year"].read(torch.arange(12)).reshape(-1).tolist() == arrays["node_year"][:, 0].tolist()
    order = np.argsort(arrays["edge"][:, 1], kind="stable")
    assert dataset.graph.indices.tolist() == arrays["edge"][order, 0].tolist()
    if to_folder:
        assert verify(tmp_path / "out")
    assert sorted(p.name for p in (root / "raw").iterdir() if p.name.startswith(".")) == []


def test_edges_are_reversed_where_ogb_does_it(tmp_path: Path, make_ogb_folder: MakeFolder) -> None:
    make_ogb_folder(tmp_path / "ogbn_products")
    plain = from_ogb_folder(tmp_path / "ogbn_products", symmetrize=False)
    loops = plain.graph.self_loops.numel()
    assert from_ogb_folder(tmp_path / "ogbn_products").num_edges == 60 - loops


def test_a_folder_by_a_name_of_its_own_must_say_whether_edges_are_stored_once(
    tmp_path: Path, make_ogb_folder: MakeFolder
) -> None:
    make_ogb_folder(tmp_path / "my_products")
    with pytest.raises(ValueError, match=r"hopline convert .*symmetrize="):
        from_ogb_folder(tmp_path / "my_products")
    assert from_ogb_folder(tmp_path / "my_products", symmetrize=False).num_edges == 30


def test_multi_label_targets_and_edge_features_are_read(tmp_path: Path, make_ogb_folder: MakeFolder) -> None:
    root = tmp_path / "ogbn_proteins"
    labels = np.eye(12, 5).astype(np.int64)
    make_ogb_folder(root, extra={"edge-feat": np.arange(60.0).reshape(30, 2), "node-label": labels})
    dataset = from_ogb_folder(root, symmetrize=False)
    assert (dataset.task, dataset.num_classes, dataset.graph.edge["attr"].shape) == ("multi", 5, (30, 2))


def test_what_is_no_ogb_folder_is_refused(tmp_path: Path, make_ogb_folder: MakeFolder) -> None:
    assert not is_ogb_folder(tmp_path)
    with pytest.raises(ValueError, match=r"OGB folder.*raw/edge\.csv\.gz or raw/data\.npz"):
        from_ogb_folder(tmp_path)
    root = tmp_path / "ogbn_arxiv"
    make_ogb_folder(root, binary=True)
    (root / "raw" / "data.npz").write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match=r"data\.npz cannot"):
        from_ogb_folder(root)
    np.savez(root / "raw" / "data.npz", edge_index=np.zeros((2, 1), np.int64))
    with pytest.raises(ValueError, match=r"data\.npz cannot .*'num_nodes_list'"):
        from_ogb_folder(root)
    np.savez(root / "raw" / "data.npz", edge_index=np.zeros((2, 1), np.int64), num_nodes_list=[1])
    (root / "raw" / "node-label.npz").unlink()
    with pytest.raises(ValueError, match=r"node-label\.npz cannot"):
        from_ogb_folder(root)
    (root / "split" / "time" / "train.csv.gz").unlink()
    with pytest.raises(ValueError, match="one split folder"):
        from_ogb_folder(root)
