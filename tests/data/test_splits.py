"""Random splits: nodes, sizes and seeds, equal on every machine and for every source of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from torch_geometric.data import Data

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import from_csv
from hopline.data.formats.npz import from_npz
from hopline.data.formats.ogb import from_ogb_folder
from hopline.data.formats.pyg import from_pyg, from_scipy
from hopline.data.splits import random_split
from hopline.data.store import open_folder
from tests.support.runs import small, without

FIRST = {"train": [0, 1, 7, 8, 9], "valid": [5], "test": [3, 4]}
SECOND = {"train": [3, 5, 7, 8, 9], "valid": [1], "test": [0, 4]}
"""By seeds 0 and 1, of ten nodes of which numbers 2 and 6 have no label."""
EDGES = np.array([[0, 0, 5, 5, 9], [5, 5, 9, 5, 0]])
"""Of ten nodes, most of which have no edge: a self-loop and a repeated edge among them."""


def dataset_with_labels(y: Any, **changes: Any) -> Dataset:
    """`EDGES` with these labels."""
    return from_edges(EDGES, y=y, num_nodes=len(y), **changes)


def split_ids(dataset: Dataset) -> dict[str, list[int]]:
    """The node ids of each split."""
    return {name: nodes.tolist() for name, nodes in dataset.splits.items()}


def labels_with_gaps() -> torch.Tensor:
    """[303] int64: labels of three classes, every fifth missing."""
    y = torch.arange(303) % 3
    y[::5] = -1
    return y


# ---- the split


def test_a_split_is_of_the_labelled_nodes_each_in_one_part() -> None:
    data = random_split(dataset_with_labels(labels_with_gaps()))
    assert {name: nodes.numel() for name, nodes in data.splits.items()} == {"train": 145, "valid": 49, "test": 48}
    data.validate()  # sorted, distinct, labelled
    together = torch.cat(list(data.splits.values())).sort().values
    assert torch.equal(together, (labels_with_gaps() >= 0).nonzero().view(-1))


@pytest.mark.parametrize("shares", [(0.7, 0.2, 0.1), (0.3, 0.5, 0.2), (1 / 3, 1 / 3, 1 / 3), (1, 0, 0)])
@pytest.mark.parametrize("count", [2, 10, 101])
def test_shares_of_one_together_leave_no_node_out(shares: tuple[float, ...], count: int) -> None:
    data = random_split(from_edges(np.array([[0], [1]]), y=np.zeros(count)), shares)
    assert sorted(node for nodes in data.splits.values() for node in nodes.tolist()) == list(range(count))


def test_shares_may_leave_nodes_out_and_an_empty_part_is_no_split() -> None:
    data = random_split(dataset_with_labels(labels_with_gaps()), (0.5, 0, 0.1))
    assert {name: nodes.numel() for name, nodes in data.splits.items()} == {"train": 121, "test": 24}


def test_a_seed_gives_the_same_nodes_on_every_machine() -> None:
    y = [1, 0, -1, 1, 0, 1, -1, 0, 1, 0]
    assert split_ids(random_split(dataset_with_labels(y))) == FIRST
    assert split_ids(random_split(dataset_with_labels(y), seed=1)) == SECOND
    assert FIRST != SECOND


def test_a_split_looks_at_no_class_and_takes_nodes_from_everywhere() -> None:
    data = random_split(dataset_with_labels(torch.arange(3000) // 1000), (0.5, 0.25, 0.25), seed=7)
    per_class = torch.bincount(data.labels[data.splits["train"]])
    assert ((per_class - 500).abs() < 60).all()  # four standard deviations
    assert len(set(per_class.tolist())) > 1


def test_in_the_multi_label_task_a_node_without_labels_is_labelled() -> None:
    y = np.zeros((10, 3))
    y[:4, 1] = 1
    data = random_split(dataset_with_labels(y))
    assert data.task == "multi"
    assert sum(nodes.numel() for nodes in data.splits.values()) == 10


def test_missing_labels_of_a_binary_task_are_left_out() -> None:
    data = random_split(dataset_with_labels([1.0, 0.0, np.nan, 1.0, 0, 0, 0, 0, 0, np.nan], task="binary"), (1, 0, 0))
    assert split_ids(data) == {"train": [0, 1, 3, 4, 5, 6, 7, 8]}


def test_random_split_returns_a_new_dataset_without_the_published_splits(tiny: Dataset, tmp_path: Path) -> None:
    before = split_ids(tiny)
    published = len(tiny.alternatives)
    data = random_split(tiny, (0.5, 0.25, 0.25), seed=3)
    assert (split_ids(tiny), len(tiny.alternatives), tiny.meta) == (before, published, {"origin": "a test"})
    assert (len(data.all_splits), data.graph, data.name) == (1, tiny.graph, "tiny")
    assert data.meta["split"] == "drawn at random with seed 3 from 39 labelled nodes: 0.5 train, 0.25 valid, 0.25 test"
    data.save(tmp_path / "out")
    again = open_folder(tmp_path / "out")
    assert (split_ids(again), again.meta) == (split_ids(data), data.meta)
    assert split_ids(random_split(again, (0.5, 0.25, 0.25), seed=3)) == split_ids(data)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.6, 0.4), "three shares, such as 0.6,0.2,0.2 for train, valid and test, not \\(0.6, 0.4\\)"),
        ((), "three shares"),
        (0.6, "three shares, such as 0.6,0.2,0.2 for train, valid and test, not 0.6"),
        (("0.6", "0.2", "0.2"), "three shares"),
        ((0.6, 0.3, 0.2), "are 0.6,0.3,0.2, more than 1 together: give shares such as 0.6,0.2,0.2"),
        ((1.2, -0.1, -0.1), "none may be below 0"),
        ((float("nan"), 0.1, 0.1), "none may be below 0"),
        ((0, 0.5, 0.5), "leaves no training nodes"),
        ((0.04, 0.5, 0.4), "A share of 0.04 of 10 labelled nodes is no training node"),
    ],
)
def test_shares_that_make_no_split_are_refused(shares: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_split(dataset_with_labels([0] * 10), shares)


def test_without_labels_the_refusal_says_how_to_give_some() -> None:
    with pytest.raises(ValueError, match=r"'graph' has no labels: .*nodes=FILE.*columns\.label=NAME"):
        random_split(from_edges(EDGES))
    with pytest.raises(ValueError, match=r"labelled nodes.*nodes=FILE"):
        random_split(dataset_with_labels([-1] * 10))


# ---- training nodes, where there must be some


def test_a_dataset_without_training_nodes_is_refused_with_what_to_type() -> None:
    data = small()
    assert data.train_ids is data.splits["train"]
    with pytest.raises(ValueError, match=r"no training nodes: .*split=.*hl\.random_split\(data\)"):
        _ = without(data, "train").train_ids
    with pytest.raises(ValueError, match="has no labels"):
        _ = from_edges(EDGES).train_ids


# ---- conversion

Y = [1, 0, -1, 1, 0, 1, -1, 0, 1, 0]
X = np.arange(20, dtype=np.float32).reshape(10, 2)


def _csv(where: Path, **options: Any) -> Dataset:
    (where / "edges.csv").write_text("src,dst\n" + "\n".join(f"{a},{b}" for a, b in EDGES.T))
    rows = [f"{i},{a},{b},{',' if y < 0 else f'{y},test'}" for i, ((a, b), y) in enumerate(zip(X, Y, strict=True))]
    (where / "nodes.csv").write_text("id,f,g,label,split\n" + "\n".join(rows))
    return from_csv(where / "edges.csv", where / "nodes.csv", **options)


def _parquet(where: Path, **options: Any) -> Dataset:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"src": EDGES[0], "dst": EDGES[1]}), where / "edges.parquet")
    parquet.write_table(arrow.table({"f": X[:, 0], "label": Y}), where / "nodes.parquet")
    return from_csv(where / "edges.parquet", where / "nodes.parquet", **options)


def _npz(where: Path, **options: Any) -> Dataset:
    np.savez(where / "graph.npz", edge_index=EDGES, x=X, y=np.array(Y))
    return from_npz(where / "graph.npz", **options)


def _npz_with_masks(where: Path, **options: Any) -> Dataset:
    masks = np.eye(10, 2, dtype=bool)
    np.savez(where / "graph.npz", edge_index=EDGES, x=X, y=np.array(Y), train_mask=masks, val_mask=masks)
    return from_npz(where / "graph.npz", **options)


def _npy(where: Path, **options: Any) -> Dataset:
    np.save(where / "edges.npy", EDGES)
    return from_edges(where / "edges.npy", x=X, y=Y, **options)


def _pyg(where: Path, **options: Any) -> Dataset:
    return from_pyg(Data(torch.from_numpy(X), torch.from_numpy(EDGES), y=torch.tensor(Y)), **options)


def _scipy(where: Path, **options: Any) -> Dataset:
    return from_scipy(coo_array((np.ones(5), (EDGES[0], EDGES[1])), shape=(10, 10)), y=Y, **options)


SOURCES = [_csv, _parquet, _npz, _npz_with_masks, _npy, _pyg, _scipy]


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("to_folder", [False, True])
def test_every_source_gets_the_same_split(make: Callable[..., Dataset], to_folder: bool, tmp_path: Path) -> None:
    folder = {"folder": tmp_path / "out"} if to_folder else {}
    data = make(tmp_path, split_shares=(0.6, 0.2, 0.2), **folder)
    assert split_ids(data) == FIRST
    assert len(data.all_splits) == 1
    assert data.meta["split"].startswith("drawn at random with seed 0 from 8 labelled nodes")


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_a_dataset_is_called_as_its_folder(make: Callable[..., Dataset], tmp_path: Path) -> None:
    assert make(tmp_path, folder=tmp_path / "mine.v2").name == "mine.v2"
    assert make(tmp_path, folder=f"{tmp_path}/mine.v2/..//other/").name == "other"
    assert make(tmp_path, folder=tmp_path / "third", name="given").name == "given"
    assert open_folder(tmp_path / "third").name == "given"
    (tmp_path / "third").rename(tmp_path / "moved")
    assert open_folder(tmp_path / "moved").name == "given"  # so that runs on it can be resumed
    assert make(tmp_path).name in ("edges", "graph", "pyg", "scipy")


def test_a_folder_of_ogb_gets_a_split_too(tmp_path: Path, make_ogb_folder: Callable[..., Any]) -> None:
    make_ogb_folder(tmp_path / "ogbn_arxiv")
    data = from_ogb_folder(tmp_path / "ogbn_arxiv", folder=tmp_path / "out", split_shares=(0.5, 0.25, 0.25))
    assert [len(nodes) for nodes in data.splits.values()] == [6, 3, 3]
    assert split_ids(data) == split_ids(random_split(from_ogb_folder(tmp_path / "ogbn_arxiv"), (0.5, 0.25, 0.25)))


def test_a_split_that_is_replaced_need_not_be_right() -> None:
    with pytest.raises(ValueError, match="node 2, which has no label"):
        dataset_with_labels(Y, splits={"train": [2]})
    assert split_ids(dataset_with_labels(Y, splits={"train": [2]}, split_shares=(0.6, 0.2, 0.2))) == FIRST


def test_nothing_is_written_where_no_split_can_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are none"):
        from_edges(EDGES, folder=tmp_path / "out", split_shares=(0.6, 0.2, 0.2))
    assert list(tmp_path.iterdir()) == []
