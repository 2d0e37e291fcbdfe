"""Datasets from `.npz` files: real graphs, random splits, and damaged files by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hopline.data.formats.npz import from_npz
from hopline.tables import SparseTable

# name: nodes, edges as stored by us, features, classes, (train, valid, test)
KNOWN = {
    "cora": (2708, 10556, 1433, 7, (140, 500, 1000)),
    "amazon_photo": (7650, 143663, 745, 8, (160, 240, 7250)),
    "github": (37700, 578006, 4005, 2, (40, 60, 37600)),
    "tolokers": (11758, 1038000, 10, 2, (5879, 2939, 2940)),
    "nell_0.1": (65755, 251550, 5414, 186, (1054, 0, 848)),
    "ogbn_arxiv_nofeat": (169343, 1166243, 0, 40, (90941, 29799, 48603)),
    "rdf_aifb": (8285, 29043, 0, 4, (140, 0, 36)),
    "temporal_collegemsg": (1899, 59835, 0, 0, (0, 0, 0)),
}


@pytest.mark.parametrize("name", list(KNOWN))
def test_real_graphs_have_their_known_sizes(name: str, real_data: Path) -> None:
    nodes, edges, features, classes, split = KNOWN[name]
    dataset = from_npz(real_data / f"{name}.npz")
    dataset.validate()
    assert (dataset.num_nodes, dataset.num_edges) == (nodes, edges)
    assert (dataset.num_features, dataset.num_classes) == (features, classes)
    empty = torch.empty(0)
    assert tuple(dataset.splits.get(n, empty).numel() for n in ("train", "valid", "test")) == split
    assert "origin" in dataset.meta


def test_real_graphs_keep_what_is_theirs(real_data: Path) -> None:
    cora = from_npz(real_data / "cora.npz")
    assert isinstance(cora.x, SparseTable)
    assert cora.x.read(torch.arange(2708)).sum() == 49216
    tolokers = from_npz(real_data / "tolokers.npz", split=9)
    assert (tolokers.task, tolokers.metric, len(tolokers.alternatives)) == ("binary", "roc_auc", 10)
    assert from_npz(real_data / "rdf_aifb.npz").graph.edge["type"].max() == 44
    assert from_npz(real_data / "temporal_collegemsg.npz").graph.edge["time"].dtype == torch.int64
    assert "node_year" in from_npz(real_data / "ogbn_arxiv_nofeat.npz").tables
    with pytest.raises(ValueError, match=r"hetero_dblp\.npz has several node types"):
        from_npz(real_data / "hetero_dblp.npz")


def test_without_node_arrays_the_largest_id_gives_the_number_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.array([[0, 4], [2, 1]]))
    assert (from_npz(path).num_nodes, from_npz(path).num_edges) == (5, 2)


def test_a_graph_without_split_gets_a_seeded_one(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.zeros((2, 3), dtype=np.int32), y=np.arange(60) % 2, x=np.ones((60, 2), np.float16))
    dataset = from_npz(path, split_per_class=(3, 4))
    assert [ids.numel() for ids in dataset.splits.values()] == [6, 8, 46]
    assert dataset.x.dtype == torch.float32
    other = from_npz(path, split_per_class=(3, 4), seed=1)
    assert not torch.equal(dataset.splits["train"], other.splits["train"])
    assert from_npz(path, split_per_class=None).splits == {}
    assert from_npz(path, symmetrize=True, self_loops="remove", name="mine").num_edges == 0


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no file .*nothing\.npz: check the path"):
        from_npz(tmp_path / "nothing.npz")
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.arange(600, dtype=np.int32).reshape(2, 300))
    data = path.read_bytes()
    for damaged in (b"", b"not a zip", data[:-30], data[:200] + bytes(100) + data[300:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"g\.npz is damaged or not an \.npz of plain arrays"):
            from_npz(path)
    np.savez(path, edge_index=np.array([object()]))
    with pytest.raises(ValueError, match="is damaged or not"):
        from_npz(path)
    np.savez(path, y=np.zeros(3))
    with pytest.raises(ValueError, match="has no edge_index"):
        from_npz(path)
