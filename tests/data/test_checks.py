"""Checks of a dataset's arrays: each wrong number is refused with its position."""

from __future__ import annotations

import pytest
import torch

from hopline.core.graph import Graph
from hopline.data import checks
from hopline.data.dataset import Dataset
from hopline.tables import SparseTable, TensorTable


@pytest.fixture(autouse=True, params=[1 << 22, 7])
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ELEMENTS_AT_ONCE", request.param)


def test_indptr_must_rise_from_zero_to_the_number_of_edges() -> None:
    checks.check_indptr(torch.arange(30), 29, "p")
    with pytest.raises(ValueError, match=r"p runs .*to 29, not .*to 30"):
        checks.check_indptr(torch.arange(30), 30, "p")
    for at in range(1, 28):
        falling = torch.arange(30) * 10
        falling[at] = falling[at + 1] + 1
        with pytest.raises(ValueError, match=f"p decreases at entry {at + 1}"):
            checks.check_indptr(falling, 290, "p")


def test_ids_must_be_in_range() -> None:
    checks.check_ids(torch.arange(50), 50, "p")
    checks.check_ids(torch.empty(0, dtype=torch.int64), 0, "p")
    for bad in (-1, 50):
        ids = torch.arange(50)
        ids[33] = bad
        with pytest.raises(ValueError, match=f"p holds {bad} at position 33.* 50 nodes"):
            checks.check_ids(ids, 50, "p")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_must_be_finite(dtype: torch.dtype, value: float) -> None:
    rows = torch.zeros(20, 3, dtype=dtype)
    checks.check_finite(rows, "p")
    rows[17, 2] = value
    with pytest.raises(ValueError, match=rf"{value} in row 17, column 2.*nan_to_num"):
        checks.check_finite(rows, "p")


def test_labels_must_be_classes() -> None:
    y = torch.arange(20) % 4
    y[3] = -1
    checks.check_labels(y, "single", 4, "y.npy")
    with pytest.raises(ValueError, match=r"y\.npy .*3 at node 7: .*0 to 2"):
        checks.check_labels(y, "single", 3, "y.npy")
    y[11] = -2
    with pytest.raises(ValueError, match="label -2 at node 11"):
        checks.check_labels(y, "binary", 4, "y.npy")
    many = torch.ones(20, 5)
    checks.check_labels(many, "multi", 5, "y.npy")
    many[15, 2] = 0.5
    with pytest.raises(ValueError, match=r"0\.5 at node 15: .*0 or 1"):
        checks.check_labels(many, "multi", 5, "y.npy")


def test_splits_must_be_sorted_and_labelled_and_may_repeat_a_node() -> None:
    y = torch.zeros(20, dtype=torch.int64)
    y[9] = -1
    checks.check_split(torch.tensor([1, 2, 8]), 20, y, "train", "s")
    checks.check_split(torch.tensor([9]), 20, y, "predict", "s")
    with pytest.raises(ValueError, match=r"s has node 9, .*no label"):
        checks.check_split(torch.arange(20), 20, y, "train", "s")
    checks.check_split(torch.tensor([1, 2, 2]), 20, y, "train", "s")
    with pytest.raises(ValueError, match="not sorted at node 1"):
        checks.check_split(torch.tensor([2, 1]), 20, y, "train", "s")
    with pytest.raises(ValueError, match="s holds 20"):
        checks.check_split(torch.tensor([1, 20]), 20, y, "train", "s")


def test_every_array_of_a_dataset_is_checked(tiny: Dataset) -> None:
    messages = checks.check_dataset(tiny, str)
    assert len(messages) == 2 + 1 + 3 + 1 + 6
    graph = tiny.graph
    indices = graph.indices.clone()
    indices[5] = 40
    tiny.graph = Graph(graph.indptr, indices, graph.edge)
    with pytest.raises(ValueError, match="indices holds 40 at position 5"):
        checks.check_dataset(tiny, str)
    tiny.graph = Graph(graph.indptr, graph.indices, {"weight": torch.full((200,), float("nan"))})
    with pytest.raises(ValueError, match=r"edge\.weight holds nan in row 0"):
        checks.check_dataset(tiny, str)


def test_a_sparse_table_is_checked_as_a_matrix() -> None:
    good = SparseTable.from_dense(torch.eye(6))
    checks.check_table("x", good, str)
    with pytest.raises(ValueError, match=r"table\.x\.columns .*5 at position 5.* 5 columns"):
        checks.check_table("x", SparseTable(good.indptr, good.columns, good.values, 5), str)
    with pytest.raises(ValueError, match=r"table\.x\.values holds nan"):
        checks.check_table("x", SparseTable(good.indptr, good.columns, good.values * float("nan"), 6), str)
    with pytest.raises(ValueError, match=r"table\.x holds inf"):
        checks.check_table("x", TensorTable(torch.full((2, 2), float("inf"))), str)
