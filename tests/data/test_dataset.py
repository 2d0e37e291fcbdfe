"""`Dataset`: its description, tasks, splits and derived features, and parts that do not fit together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopline.core.graph import Graph
from hopline.data.dataset import Dataset, as_table
from hopline.tables import SparseTable, TensorTable


def test_the_repr_of_a_dataset_says_what_it_holds(tiny: Dataset) -> None:
    assert (tiny.num_nodes, tiny.num_edges, tiny.num_features, tiny.num_classes) == (40, 200, 5, 3)
    assert repr(tiny).startswith("Dataset('tiny', 40 nodes, 200 directed edges, 5 features, 3 classes, ")
    assert "\n" not in repr(tiny)
    text = tiny.describe()
    for part in (
        "edge weight: [200] float32",
        "table words: [40, 5] float32, sparse",
        "train 20",
        "one of 2",
    ):
        assert part in text
    assert tiny.num_bytes > tiny.graph.num_bytes


def test_each_task_has_its_metric_and_outputs(tiny: Dataset) -> None:
    assert (tiny.metric, tiny.num_outputs) == ("accuracy", 3)
    y = (tiny.y == 1).long()
    binary = replace(tiny, y=y, task="binary", num_classes=2)
    assert (binary.metric, binary.num_outputs) == ("roc_auc", 1)
    multi = replace(tiny, y=torch.zeros(40, 7), task="multi", num_classes=7)
    assert (multi.metric, multi.num_outputs) == ("micro_f1", 7)


def test_another_published_split_can_be_chosen(tiny: Dataset) -> None:
    assert tiny.splits["train"].tolist() == list(range(20))
    other = tiny.with_split(1)
    assert other.splits["train"].tolist() == list(range(10, 30))
    assert other.splits["valid"].tolist() == tiny.splits["valid"].tolist()
    with pytest.raises(ValueError, match=r"split 2: .*0 to 1"):
        tiny.with_split(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "several"}, "choose one of single, multi, binary, regression"),
        ({"y": torch.zeros(39, dtype=torch.int64)}, "39 labels for 40 nodes"),
        ({"y": torch.zeros(40)}, "must be a 1-D int64 tensor"),
        ({"y": torch.zeros(40, 2), "task": "multi"}, "Multi-label y must be"),
        ({"tables": {"x": TensorTable(torch.zeros(3, 2))}}, "Table 'x' has 3 rows for 40 nodes"),
        ({"tables": {"a.b": TensorTable(torch.zeros(40, 2))}}, "cannot name an array"),
        ({"splits": {"train": torch.zeros(40, dtype=torch.bool)}}, "Split 'train' must be a 1-D int64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tiny: Dataset, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(tiny, **changes)


def test_a_graph_without_features_says_so() -> None:
    graph = Graph(torch.zeros(3, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    bare = Dataset(name="bare", graph=graph)
    assert bare.num_features == 0
    assert bare.all_splits == ()
    with pytest.raises(ValueError, match="'bare' has no features"):
        _ = bare.x


def test_unlabelled_training_nodes_are_refused(tiny: Dataset) -> None:
    assert tiny.validate()
    tiny.splits["train"] = torch.arange(40)
    with pytest.raises(ValueError, match=r"'split\.0\.train' of dataset 'tiny' has node 39"):
        tiny.validate()


def test_every_node_can_have_a_column_of_its_own(tiny: Dataset) -> None:
    data = replace(tiny, tables={}).one_hot()
    assert torch.equal(data.x.read(torch.arange(40)), torch.eye(40))
    assert data.num_features == 40


def test_columns_can_be_standardized(tiny: Dataset) -> None:
    rows = torch.rand(40, 5) * torch.arange(5)
    data = replace(tiny, tables={**tiny.tables, "x": TensorTable(rows)}).standardized()
    rows_out = data.x.read(torch.arange(40))
    assert torch.allclose(rows_out.mean(0), torch.zeros(5), atol=1e-5)
    assert torch.allclose(rows_out.std(0), torch.tensor([0.0, 1, 1, 1, 1]), atol=1e-5)
    words = tiny.standardized("words").tables["words"].read(torch.arange(40))
    assert words.isfinite().all()


def test_rows_can_be_normalized(tiny: Dataset) -> None:
    tiny.tables["x"] = TensorTable(torch.full((40, 5), 2.0))
    assert torch.allclose(tiny.normalized().x.read(torch.arange(40)), torch.full((40, 5), 0.2))
    tiny.tables["words"] = SparseTable.from_dense(torch.eye(40, 5) * 4)
    rows = tiny.normalized("words").tables["words"].read(torch.arange(40))
    assert torch.equal(rows, torch.eye(40, 5))


def test_anything_with_rows_becomes_a_table() -> None:
    from scipy.sparse import csr_array

    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    for rows in (dense, dense.numpy(), dense.to_sparse_coo(), csr_array(dense.numpy()), TensorTable(dense)):
        assert torch.equal(as_table(rows).read(torch.arange(3)), dense)
    assert isinstance(as_table(dense.to_sparse_coo()), SparseTable)
