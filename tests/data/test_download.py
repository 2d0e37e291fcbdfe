"""Downloads of named datasets, with PyG's classes and the network replaced by stand-ins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.data
import torch_geometric.datasets
from torch_geometric.data import Data

from hopline.data import download
from hopline.data.store import open_folder


class FakeDataset:
    """A PyG dataset class with one graph that needs no network. Records the arguments of its calls."""

    calls: list[tuple[str, dict[str, Any]]]
    num_graphs = 1

    def __init__(self, root: str, **settings: Any) -> None:
        FakeDataset.calls.append((root, settings))

    def __len__(self) -> int:
        return self.num_graphs

    def __getitem__(self, index: int) -> Data:
        y = torch.arange(200) % 2
        return Data(x=torch.ones(200, 3), y=y, edge_index=torch.arange(400).reshape(2, 200) % 200)


@pytest.fixture
def fake_amazon(monkeypatch: pytest.MonkeyPatch) -> type[FakeDataset]:
    """`FakeDataset` in place of PyG's `Amazon`, with no calls recorded."""
    FakeDataset.calls = []
    monkeypatch.setattr(torch_geometric.datasets, "Amazon", FakeDataset)
    return FakeDataset


def test_a_source_is_found_by_any_spelling_of_its_name() -> None:
    for name in ("cora", "Cora", "amazon_photo", "ogbn-products", "OGBN-papers100M"):
        assert download.find(name) is not None
    assert download.find("nothing") is None
    general = download.find("pyg:Planetoid:Cora")
    assert general is not None
    assert (general.name, general.kind, general.settings) == ("pyg-planetoid-cora", "Planetoid", {"name": "Cora"})


def test_every_pyg_source_names_a_real_class() -> None:
    for source in download.SOURCES.values():
        assert source.is_ogb or hasattr(torch_geometric.datasets, source.kind), source.name


def test_a_pyg_dataset_is_fetched_and_converted(fake_amazon: type[FakeDataset], tmp_path: Path) -> None:
    source = download.SOURCES["amazon-photo"]
    source.fetch(tmp_path / "raw", tmp_path / "amazon-photo", {"symmetrize": True})
    assert fake_amazon.calls == [(str(tmp_path / "raw" / "Amazon"), {"name": "Photo"})]
    dataset = open_folder(tmp_path / "amazon-photo")
    assert (dataset.name, dataset.num_nodes) == ("amazon-photo", 200)
    assert [ids.numel() for ids in dataset.splits.values()] == [40, 60, 100]
    assert dataset.meta["origin"] == "torch_geometric.datasets.Amazon"


def test_failures_are_one_sentence_that_names_the_place(
    fake_amazon: type[FakeDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise ConnectionError("Cannot connect\nto the host")

    monkeypatch.setattr(torch_geometric.datasets, "Reddit", no_network)
    with pytest.raises(ValueError, match=r"'reddit' \(Cannot connect\).*raw/Reddit") as caught:
        download.SOURCES["reddit"].fetch(tmp_path / "raw", tmp_path / "reddit", {})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "reddit").exists()
    monkeypatch.setattr(FakeDataset, "num_graphs", 5)
    with pytest.raises(ValueError, match=r"5 graphs.*hl\.from_pyg\(dataset\[i\]\)") as caught:
        download.SOURCES["amazon-photo"].fetch(tmp_path / "raw", tmp_path / "a", {})
    assert "network" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pyg:Planetoit", "has no 'Planetoit'.*Did you mean 'Planetoid'"),
        ("pyg:os:system", "has no 'os': type pyg:CLASS or pyg:CLASS:NAME"),
        ("pyg:planetoid:Cora", "has no 'planetoid'.*Did you mean 'Planetoid'"),
        ("pyg:__builtins__", "has no '__builtins__'"),
        ("pyg:Planetoid", "Planetoid cannot be made.*'name'.*type pyg:Planetoid:NAME"),
        ("pyg:Reddit:large", r"Reddit cannot be made for 'pyg-reddit-large'.*hl\.from_pyg"),
    ],
)
def test_a_name_that_is_no_dataset_of_pyg_is_refused_and_never_called(name: str, message: str, tmp_path: Path) -> None:
    source = download.find(name)
    assert source is not None
    with pytest.raises(ValueError, match=message) as caught:
        source.fetch(tmp_path / "raw", tmp_path / "a", {})
    assert "network" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_graphs_of_ppi_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def graphs(root: str, split: str) -> list[Data]:
        count = {"train": 3, "val": 1, "test": 2}[split]
        edges = torch.tensor([[0, 1], [1, 2]])
        return [Data(x=torch.ones(3, 2), y=torch.ones(3, 4), edge_index=edges) for _ in range(count)]

    monkeypatch.setattr(torch_geometric.datasets, "PPI", graphs)
    download.SOURCES["ppi"].fetch(tmp_path / "raw", tmp_path / "ppi", {})
    dataset = open_folder(tmp_path / "ppi")
    assert (dataset.task, dataset.num_nodes, dataset.num_edges) == ("multi", 18, 12)
    assert [ids.numel() for ids in dataset.splits.values()] == [9, 3, 6]
    assert dataset.splits["valid"].tolist() == [9, 10, 11]


def test_an_ogb_archive_is_fetched_unpacked_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_ogb_folder: Callable[..., object]
) -> None:
    make_ogb_folder(tmp_path / "served" / "arxiv")
    archive = shutil.make_archive(str(tmp_path / "arxiv"), "zip", tmp_path / "served")
    urls = []

    def serve(url: str, folder: str) -> str:
        urls.append(url)
        return shutil.copy(archive, folder)

    monkeypatch.setattr(torch_geometric.data, "download_url", serve)
    source = download.SOURCES["ogbn-arxiv"]
    source.fetch(tmp_path / "raw", tmp_path / "ogbn-arxiv", {})
    assert open_folder(tmp_path / "ogbn-arxiv").name == "ogbn-arxiv"
    assert urls == ["http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    assert [p.name for p in (tmp_path / "raw").iterdir()] == ["ogbn_arxiv"]
    source.fetch(tmp_path / "raw", tmp_path / "again", {})
    assert len(urls) == 1, "what is on disk is not downloaded again"
