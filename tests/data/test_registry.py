"""`open_dataset`: folders, files, built-in graphs and PyG names, converted once and found again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import Data

from hopline.data import synthetic
from hopline.data.dataset import Dataset
from hopline.data.registry import default_data_root, names, open_dataset


def test_folders_and_files_are_opened(tiny: Dataset, tmp_path: Path, real_data: Path) -> None:
    tiny.save(tmp_path / "mine")
    assert open_dataset(tmp_path / "mine").name == "tiny"
    assert open_dataset(str(tmp_path / "mine"), split=1, verify=True).splits["train"][0] == 10
    assert open_dataset("mine", data_root=tmp_path).name == "tiny"
    assert open_dataset(real_data / "cora.npz", verify=True).num_nodes == 2708
    assert open_dataset("cora", data_root=real_data).num_nodes == 2708
    assert open_dataset("Amazon-Photo", data_root=real_data).num_nodes == 7650
    assert open_dataset("tolokers", data_root=real_data, split=3).task == "binary"
    with pytest.raises(ValueError, match="leave out symmetrize"):
        open_dataset(tmp_path / "mine", symmetrize=True)
    with pytest.raises(ValueError, match=r"dataset folder .*other: check the path"):
        open_dataset(tmp_path / "other")


def test_verify_finds_what_opening_does_not(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "mine")
    path = tmp_path / "mine" / "y.npy"
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(data)
    open_dataset(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"y\.npy is damaged"):
        open_dataset(tmp_path / "mine", verify=True)


def test_built_in_graphs_are_made(tmp_path: Path) -> None:
    demo = open_dataset("demo", data_root=tmp_path)
    assert demo.num_nodes >= 50_000
    assert demo.num_edges >= 1_000_000
    assert list(tmp_path.iterdir()) == []
    small = open_dataset("planted", num_nodes=500, num_edges=2000, num_train=100, num_valid=50, seed=3)
    assert (small.num_nodes, small.num_edges) == (500, 2000)
    with pytest.raises(ValueError, match=r"'demo' .*'sede'.*'seed'"):
        open_dataset("demo", sede=1)


def test_large_built_in_graphs_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset("products-shaped", data_root=tmp_path, scale=0.001, seed=5)
    assert (first.num_nodes, first.num_edges) == (2449, 123718)
    assert [p.name for p in tmp_path.iterdir()] == ["products-shaped-scale=0.001-seed=5"]
    monkeypatch.setattr(synthetic, "_write_folder", lambda *_: pytest.fail("made again"))
    again = open_dataset("products-shaped", data_root=tmp_path, scale=0.001, seed=5, verify=True)
    assert torch.equal(first.graph.indices, again.graph.indices)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A stand-in for PyG's Planetoid, and the list of what it was asked for."""
    calls: list[tuple[str, str]] = []

    def fake(root: str, name: str) -> list[Data]:
        calls.append((root, name))
        masks = {f"{k}_mask": torch.eye(3, dtype=torch.bool)[i] for i, k in enumerate(("train", "val", "test"))}
        return [Data(x=torch.eye(3), y=torch.arange(3), edge_index=torch.tensor([[0], [1]]), **masks)]

    monkeypatch.setattr(torch_geometric.datasets, "Planetoid", fake)
    return calls


def test_a_pyg_name_is_downloaded_and_converted_once(tmp_path: Path, downloads: list[tuple[str, str]]) -> None:
    for name in ("Cora", "cora", "pyg:Planetoid:Cora", "pyg:Planetoid:Cora"):
        dataset = open_dataset(name, data_root=tmp_path)
        assert dataset.splits["valid"].tolist() == [1]
    assert downloads == [(str(tmp_path / "raw" / "Planetoid"), "Cora")] * 2
    listed = {info.name: info.where for info in names(tmp_path)}
    assert listed["cora"] == str(tmp_path / "cora")
    assert "pyg-planetoid-cora" in listed


def test_each_choice_of_options_is_converted_once_and_kept_apart(
    tmp_path: Path, downloads: list[tuple[str, str]]
) -> None:
    for _ in range(2):
        assert open_dataset("cora", data_root=tmp_path).num_edges == 1
        assert open_dataset("cora", data_root=tmp_path, symmetrize=True).num_edges == 2
    assert len(downloads) == 2


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'coraa' .*`hopline datasets`.*'cora'"):
        open_dataset("coraa", data_root=tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'products-shaped'"):
        open_dataset("product-shaped", data_root=tmp_path)


def test_the_list_says_where_everything_is(tiny: Dataset, tmp_path: Path) -> None:
    tiny.save(tmp_path / "mine")
    listed = {info.name: info for info in names(tmp_path)}
    assert listed["demo"].where == "built in"
    assert listed["mine"].where == str(tmp_path / "mine")
    assert listed["ogbn-products"].where == "download"
    assert all(info.what for info in listed.values())


def test_the_data_root_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOPLINE_DATA", str(tmp_path))
    assert default_data_root() == tmp_path
    monkeypatch.delenv("HOPLINE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_data_root() == tmp_path / "cache" / "hopline"
