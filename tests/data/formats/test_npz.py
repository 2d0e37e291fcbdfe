"""Datasets from `.npz` files: real graphs, random splits, and damaged files by name."""

from __future__ import annotations

import io
import os
import random
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hopline.data.fingerprint import fingerprint
from hopline.data.formats import npz
from hopline.data.formats.npz import from_npz
from hopline.data.registry import open_dataset
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
    with pytest.raises(ValueError, match=r"hetero_dblp\.npz .*several node types"):
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
    with pytest.raises(ValueError, match=r"nothing\.npz: check the path"):
        from_npz(tmp_path / "nothing.npz")
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.arange(600, dtype=np.int32).reshape(2, 300))
    data = path.read_bytes()
    for damaged in (b"", b"not a zip", data[:-30], data[:200] + bytes(100) + data[300:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"g\.npz is damaged"):
            from_npz(path)
    np.savez(path, edge_index=np.array([object()]))
    with pytest.raises(ValueError, match="is damaged or not"):
        from_npz(path)
    np.savez(path, y=np.zeros(3))
    with pytest.raises(ValueError, match="has no edge_index"):
        from_npz(path)


def write_archive(path: Path, shape: tuple[int, ...], num_bytes: int) -> None:
    """An .npz whose edge_index claims a shape and has so many zero bytes, compressed a thousand times."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("edge_index.npy", header.getvalue() + bytes(num_bytes))


def test_a_zip_bomb_is_refused_before_it_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.npz"
    tracemalloc.start()
    try:
        for shape in ((2, 10**12), (2, 10**30), (2, 3), (-2, 10), (0, 10**30)):
            write_archive(path, shape, 1 << 20)
            with pytest.raises(ValueError, match=r"bomb\.npz is damaged .*edge_index\.npy"):
                from_npz(path)
        write_archive(path, (2, 1 << 22), 1 << 26)
        assert path.stat().st_size < 1 << 17
        monkeypatch.setattr(npz, "host_memory", lambda: SimpleNamespace(available=1 << 25))
        tracemalloc.reset_peak()
        with pytest.raises(ValueError, match=r"bomb\.npz .*64 MiB.* 32 MiB"):
            from_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_hundred_damaged_files_are_refused_or_read_as_they_were(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "g.npz"
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    save(path, edge_index=np.array([[0, 1, 8], [1, 2, 3]]), x=x, y=np.arange(9) % 3, meta="{}")
    content = path.read_bytes()
    draw = random.Random(0)
    expected = fingerprint(from_npz(path))
    num_refused = 0
    for number in range(100):
        damaged = bytearray(content)
        start = draw.randrange(len(damaged))
        if number % 4 == 0:
            del damaged[start:]
        else:
            for at in range(start, min(len(damaged), start + draw.choice((1, 4, 40)))):
                damaged[at] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            assert fingerprint(from_npz(path)) == expected
        except ValueError:
            num_refused += 1
    assert num_refused > 70


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "g.npz")  # to open it would wait for ever
    with pytest.raises(ValueError, match=r"g\.npz is a pipe"):
        from_npz(tmp_path / "g.npz")
    with pytest.raises(ValueError, match=r"g\.npz is a pipe"):
        open_dataset(tmp_path / "g.npz")
