"""Splits, labels and features of nodes in every form that users give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hopline.data.nodes import (
    node_data,
    node_ids,
    per_class_split,
    split_name,
    split_sets,
)
from hopline.tables import SparseTable


def test_masks_and_ids_become_sorted_ids() -> None:
    mask = torch.tensor([True, False, True, False])
    assert node_ids(mask, 4).tolist() == [0, 2]
    assert node_ids(np.array([3, 1]), 4).tolist() == [1, 3]
    assert node_ids([2, 0], 4).tolist() == [0, 2]
    with pytest.raises(ValueError, match="one entry per node, 5"):
        node_ids(mask, 5)
    with pytest.raises(ValueError, match=r"boolean mask .*or a 1-D"):
        node_ids(torch.rand(4), 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_several_masks_are_several_splits(transposed: bool) -> None:
    train = torch.zeros(6, 3, dtype=torch.bool)
    train[torch.arange(3), torch.arange(3)] = True
    shared = torch.tensor([4, 5])
    sets = split_sets({"train_mask": train.t() if transposed else train, "test_mask": shared}, 6)
    assert [s["train"].tolist() for s in sets] == [[0], [1], [2]]
    assert all(s["test"].tolist() == [4, 5] for s in sets)
    with pytest.raises(ValueError, match="Split masks have shape"):
        split_sets({"train": train}, 7)


def test_splits_get_our_names() -> None:
    ours = [split_name(name) for name in ("val_mask", "train_idx", "validation", "test")]
    assert ours == ["valid", "train", "valid", "test"]


def test_a_split_per_class_is_seeded_and_covers_the_labelled_nodes() -> None:
    y = torch.arange(300) % 3
    y[::7] = -1
    split = per_class_split(y, num_train=5, num_valid=10, seed=1)
    for name, count in (("train", 5), ("valid", 10)):
        assert torch.bincount(y[split[name]]).tolist() == [count] * 3
    together = torch.cat(list(split.values())).sort().values
    assert torch.equal(together, (y >= 0).nonzero().reshape(-1))
    assert torch.equal(split["train"], per_class_split(y, num_train=5, num_valid=10, seed=1)["train"])
    assert not torch.equal(split["train"], per_class_split(y, num_train=5, num_valid=10, seed=2)["train"])


def test_features_become_floating_point() -> None:
    nodes = node_data(3, x=torch.ones(3, 2, dtype=torch.int64), tables={"year": torch.tensor([1990, 2000, 2010])})
    assert nodes.tables["x"].dtype == torch.float32
    assert nodes.tables["year"].dtype == torch.int64
    sparse = node_data(3, x=SparseTable.from_dense(torch.eye(3, dtype=torch.uint8))).tables["x"]
    assert isinstance(sparse, SparseTable)
    assert sparse.dtype == torch.float32
    assert node_data(3, x=torch.ones(3, 2, dtype=torch.float16)).tables["x"].dtype == torch.float16


def test_what_does_not_fit_the_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="'x' has 2 rows for 3"):
        node_data(3, x=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="2 labels for 3 nodes"):
        node_data(3, y=[0, 1])
    with pytest.raises(ValueError, match=r"'table\.x' holds nan in row 1"):
        node_data(2, x=[[0.0], [float("nan")]])
    with pytest.raises(ValueError, match=r"'y' .* 5 at node 1: .*0 to 2"):
        node_data(2, y=[0, 5], num_classes=3)
    with pytest.raises(ValueError, match="node 1, which has no label"):
        node_data(2, y=[0, -1], splits={"train": [0, 1]})
