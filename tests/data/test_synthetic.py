"""Synthetic graphs: exact counts, the same bits for any chunks, threads and device, planted structure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from hopline.data import synthetic
from hopline.data.built_in import BUILT_IN, PlantedPartition, built_in
from hopline.data.dataset import Dataset
from hopline.data.registry import open_dataset
from hopline.data.store import verify
from hopline.data.synthetic import make_on, planted_partition
from tests.support.helpers import KERNEL_DEVICE

SMALL = PlantedPartition(
    num_nodes=5000, num_edges=100_000, num_classes=10, num_features=8, num_train=1000, num_valid=500
)


def assert_same(a: Dataset, b: Dataset) -> None:
    everyone = torch.arange(a.num_nodes)
    assert torch.equal(a.graph.indptr, b.graph.indptr)
    assert torch.equal(a.graph.indices, b.graph.indices)
    assert torch.equal(a.x.read(everyone), b.x.read(everyone))
    assert torch.equal(a.labels, b.labels)
    assert all(torch.equal(a.splits[name], b.splits[name]) for name in ("train", "valid", "test"))


def test_counts_are_exact_and_contents_valid() -> None:
    dataset = planted_partition(SMALL)
    dataset.validate()
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_features) == (5000, 100_000, 8)
    assert [ids.numel() for ids in dataset.splits.values()] == [1000, 500, 3500]
    assert torch.cat(list(dataset.splits.values())).unique().numel() == 5000
    assert torch.bincount(dataset.labels).tolist() == [500] * 10
    assert dataset.graph.self_loops.numel() == 0


def test_chunks_threads_and_folders_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planted_partition(SMALL)
    threads = torch.get_num_threads()
    monkeypatch.setattr(synthetic, "CHUNK_NODES", 777)
    try:
        torch.set_num_threads(1)
        assert_same(whole, planted_partition(SMALL))
        torch.set_num_threads(3)
        assert_same(whole, planted_partition(SMALL, folder=tmp_path / "d"))
    finally:
        torch.set_num_threads(threads)
    verify(tmp_path / "d")


def test_another_seed_makes_another_graph() -> None:
    a = planted_partition(SMALL)
    b = planted_partition(SMALL, seed=1)
    assert not torch.equal(a.graph.indices[:1000], b.graph.indices[:1000])
    assert not torch.equal(a.splits["train"], b.splits["train"])


@pytest.mark.parametrize("changes", [{}, {"dtype": "float16", "homophily": 0.3, "num_test": 0}, {"num_edges": 0}])
def test_a_device_makes_the_same_graph(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(synthetic, "DEVICE_CHUNK_NODES", 2048)
    settings = replace(SMALL, **changes)
    expected = planted_partition(settings)
    arrays = make_on(torch.device(KERNEL_DEVICE), settings)
    for name, array in (
        ("indptr", expected.graph.indptr),
        ("indices", expected.graph.indices),
        ("y", expected.labels),
        ("table.x", expected.x.storage()),
    ):
        assert array is not None
        assert arrays[name].device.type == KERNEL_DEVICE
        assert arrays[name].dtype == array.dtype
        assert torch.equal(arrays[name].cpu(), array), name
    for name, ids in expected.splits.items():
        assert arrays[f"split.0.{name}"].device.type == "cpu"
        assert torch.equal(arrays[f"split.0.{name}"], ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_dataset_made_on_a_gpu_equals_one_made_on_the_cpu(symmetric: bool) -> None:
    settings = replace(SMALL, symmetric=symmetric)
    expected = planted_partition(settings)
    dataset = planted_partition(settings, device="cuda")
    x = dataset.x.storage()
    assert x is not None
    assert {a.device.type for a in (dataset.graph.indptr, dataset.graph.indices, dataset.labels, x)} == {"cuda"}
    assert torch.equal(dataset.graph.indptr.cpu(), expected.graph.indptr)
    assert torch.equal(dataset.graph.indices.cpu(), expected.graph.indices)
    assert torch.equal(x.cpu(), expected.x.read(torch.arange(5000)))
    assert torch.equal(dataset.labels.cpu(), expected.labels)
    assert all(torch.equal(ids, expected.splits[name]) for name, ids in dataset.splits.items())


def test_a_device_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out device='cuda' or folder="):
        planted_partition(SMALL, device="cuda", folder=tmp_path / "d")
    with pytest.raises(ValueError, match="not a device"):
        planted_partition(SMALL, device="gpu")
    with pytest.raises(ValueError, match="not a device"):
        open_dataset("papers100m-shaped", data_root=tmp_path, scale=0.0001, device="gpu")


def test_homophily_is_the_share_of_edges_from_the_own_class() -> None:
    for homophily in (0.0, 0.4, 1.0):
        dataset = planted_partition(SMALL, homophily=homophily)
        src, dst = dataset.graph.edge_index()
        share = float((dataset.labels[src] == dataset.labels[dst]).float().mean())
        assert abs(share - (homophily + (1 - homophily) / 10)) < 0.02


def test_features_are_the_class_mean_and_unit_noise() -> None:
    dataset = planted_partition(SMALL, signal=3.0)
    rows = dataset.x.read(torch.arange(5000))
    centers = torch.stack([rows[dataset.labels == c].mean(0) for c in range(10)])
    assert torch.allclose(centers.norm(dim=1), torch.full((10,), 3.0), atol=0.3)
    assert torch.allclose((rows - centers[dataset.labels]).std(0), torch.ones(8), atol=0.03)
    assert planted_partition(SMALL, dtype="bfloat16").x.dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "scale"), [("products-shaped", 0.02), ("papers100m-shaped", 0.0005)])
def test_shaped_graphs_have_exact_counts_and_a_heavy_tail(name: str, scale: float, tmp_path: Path) -> None:
    full = BUILT_IN[name][0]
    settings = built_in(name, {"scale": scale})
    dataset = planted_partition(settings, name=name, folder=tmp_path / "d")
    assert dataset.num_nodes == round(full.num_nodes * scale)
    assert dataset.num_edges == round(full.num_edges * scale)
    assert dataset.splits["train"].numel() == round(full.split_sizes[0] * scale)
    degrees = dataset.graph.in_degrees()
    mean = float(degrees.double().mean())
    assert abs(mean / (full.num_edges / full.num_nodes) - 1) < 0.02
    # The tail that the module states: share of the top 1%, and the exponent by Hill's estimator.
    ordered = degrees.sort(descending=True).values.double()
    top = ordered[: dataset.num_nodes // 100]
    assert 0.20 < float(top.sum() / ordered.sum()) < 0.28
    assert 1.3 < float(1 / (top / top[-1]).log().mean()) < 1.8
    assert float(ordered[0]) > 100 * mean
    assert float(ordered.median()) < 0.6 * mean
    out_degrees = torch.bincount(dataset.graph.indices.long(), minlength=dataset.num_nodes)
    assert int(out_degrees.max()) > 20 * mean


def test_the_named_shapes_are_those_of_the_benchmarks() -> None:
    products = BUILT_IN["products-shaped"][0]
    papers = BUILT_IN["papers100m-shaped"][0]
    assert (products.num_nodes, products.num_edges) == (2_449_029, 123_718_280)
    assert (products.num_features, products.num_classes, products.num_train) == (100, 47, 196_615)
    assert (papers.num_nodes, papers.num_edges) == (111_059_956, 3_231_371_744)
    assert (papers.num_features, papers.num_classes, papers.num_train) == (128, 172, 1_207_179)


def test_a_symmetric_graph_has_every_edge_twice(tmp_path: Path) -> None:
    dataset = planted_partition(replace(SMALL, symmetric=True), folder=tmp_path / "d")
    src, dst = dataset.graph.edge_index()
    edges = (src * 5000 + dst).sort().values
    reversed_edges = (dst * 5000 + src).sort().values
    assert dataset.num_edges == 100_000
    assert torch.equal(edges, reversed_edges)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 10}, "give num_nodes >= 20"),
        ({"homophily": 1.5}, "share from 0 to 1"),
        ({"symmetric": True, "num_edges": 3}, "even if symmetric"),
        ({"num_train": 6000}, "give smaller ones"),
        ({"dtype": "float64"}, "choose float32, float16 or bfloat16"),
    ],
)
def test_settings_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)
    with pytest.raises(ValueError, match="positive factor"):
        SMALL.scaled(0)


def fit(features: torch.Tensor, dataset: Dataset) -> float:
    """Test accuracy of a linear classifier on fixed features."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(features.size(1), dataset.num_classes)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    train = dataset.splits["train"]
    test = dataset.splits["test"]
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(layer(features[train]), dataset.labels[train]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((layer(features[test]).argmax(1) == dataset.labels[test]).float().mean())


def test_neighbours_tell_the_class_of_the_demo_graph_and_own_features_hardly_do() -> None:
    dataset = planted_partition(BUILT_IN["demo"][0])
    x = dataset.x.read(torch.arange(dataset.num_nodes))
    src, dst = dataset.graph.edge_index()
    degrees = dataset.graph.in_degrees().clamp(min=1)[:, None]
    hops = [x]
    for _ in range(2):
        hops.append(torch.zeros_like(x).index_add_(0, dst, hops[-1][src]) / degrees)
    alone = fit(x, dataset)
    together = fit(torch.cat(hops, 1), dataset)
    assert 0.2 < alone < 0.45
    assert together > alone + 0.25
