"""Datasets from PyG `Data` objects and SciPy matrices, and back to PyG."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from torch_geometric.data import Data, HeteroData, TemporalData

from hopline.data.dataset import Dataset
from hopline.data.formats.pyg import from_pyg, from_scipy, to_pyg
from hopline.tables import SparseTable


def make_pyg_data() -> Data:
    """30 nodes with edge weights and attributes, three masks, and a table of years."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(30, dtype=torch.bool)
    mask[:10] = True
    return Data(
        x=torch.rand(30, 4, generator=generator),
        y=torch.randint(0, 3, (30,), generator=generator),
        edge_index=torch.randint(0, 30, (2, 100), generator=generator),
        edge_weight=torch.rand(100, generator=generator),
        edge_attr=torch.rand(100, 2, generator=generator),
        train_mask=mask,
        val_mask=mask.roll(10),
        test_mask=mask.roll(20),
        node_year=torch.arange(30),
    )


def test_a_pyg_graph_survives_conversion_and_back() -> None:
    data = make_pyg_data()
    dataset = from_pyg(data, name="there")
    assert (dataset.name, dataset.num_classes) == ("there", 3)
    assert set(dataset.graph.edge) == {"weight", "attr"}
    assert dataset.splits["valid"].tolist() == list(range(10, 20))
    assert dataset.tables["node_year"].read(torch.tensor([7])).tolist() == [7]
    back = dataset.to_pyg()
    order = torch.argsort(data.edge_index[1], stable=True)  # type: ignore[index]
    for key in ("edge_index", "edge_weight", "edge_attr"):
        expected = data[key][:, order] if key == "edge_index" else data[key][order]
        assert torch.equal(back[key], expected)
    for key in ("x", "y", "train_mask", "val_mask", "test_mask", "node_year"):
        assert torch.equal(back[key], data[key])
    assert back.edge_index is not None
    assert back.edge_index.dtype == torch.int64
    assert back.validate()


def test_sparse_features_stay_sparse() -> None:
    data = make_pyg_data()
    dense = torch.eye(30)
    data.x = dense.to_sparse_coo()
    dataset = from_pyg(data)
    assert isinstance(dataset.x, SparseTable)
    assert torch.equal(to_pyg(dataset).x, dense)  # type: ignore[arg-type]


def test_several_masks_are_several_splits_and_other_labels_are_read() -> None:
    data = make_pyg_data()
    masks = torch.zeros(30, 3, dtype=torch.bool)
    masks[5:8] = torch.eye(3, dtype=torch.bool)
    data.train_mask = masks
    data.y = data.y[:, None]  # type: ignore[index]
    assert from_pyg(data, split=2).splits["train"].tolist() == [7]
    data.y = torch.ones(30, 6)
    assert from_pyg(data).task == "multi"
    del data["y"]
    assert from_pyg(data).y is None


def test_an_adjacency_matrix_is_read_by_rows_of_destinations() -> None:
    edges = torch.tensor([[0, 1, 2], [2, 2, 0]])
    values = torch.tensor([1.0, 2.0, 3.0])
    data = Data(num_nodes=3)
    data.adj_t = torch.sparse_coo_tensor(edges.flip(0), values, (3, 3), check_invariants=True)
    dataset = from_pyg(data)
    assert dataset.graph.indices.tolist() == [2, 0, 1]
    assert dataset.graph.edge["weight"].tolist() == [3, 1, 2]


def test_what_is_not_one_graph_is_refused() -> None:
    others: list[tuple[Any, str]] = [
        (HeteroData(), r"\.to_homogeneous\(\)"),
        (TemporalData(src=torch.tensor([0])), "with time.*hl.from_edges"),
        ([Data()], "Batch.from_data_list"),
    ]
    for other, words in others:
        with pytest.raises(ValueError, match=words):
            from_pyg(other)
    with pytest.raises(ValueError, match="has no edge_index"):
        from_pyg(Data(x=torch.zeros(3, 2)))


def test_a_scipy_matrix_is_edges_from_row_to_column() -> None:
    matrix = coo_array((np.array([1.0, 1.0, 1.0]), ([0, 1, 2], [2, 2, 0])), shape=(4, 4))
    dataset = from_scipy(matrix.tocsr(), y=[0, 1, 0, 1])
    assert (dataset.num_nodes, dataset.graph.indices.tolist()) == (4, [2, 0, 1])
    assert dataset.graph.edge == {}
    weighted = from_scipy(matrix * 2.5, symmetrize=True)
    assert isinstance(weighted, Dataset)
    assert weighted.num_edges == 6
    assert weighted.graph.edge["weight"].tolist() == [2.5] * 6
    with pytest.raises(ValueError, match="square sparse matrix"):
        from_scipy(np.zeros((2, 2)))
