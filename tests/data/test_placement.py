"""Placement of graph, features and labels on device or host: the layout, and the rows read from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.data import placement as module
from hopline.data.placement import DataBytes, Layout, apply_layout, describe, make_layout, place
from hopline.data.placement_settings import Placement
from hopline.tables import SparseTable, TensorTable, TieredTable
from tests.support.helpers import dataset_of, randint, randn, random_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = DataBytes(graph=1000, indptr=200, features=4000, hot_slots=50, labels=30)
CPU = torch.device("cpu")


def data() -> hl.Dataset:
    return dataset_of(random_graph(), randn(50, 4, dtype=torch.float32))


@pytest.mark.parametrize(
    ("free", "graph", "features", "cache", "labels"),
    [
        (10_000, "device", "device", 0, True),
        (6_290, "device", "device", 0, True),  # 80% of it are 5032 for 5030
        (6_280, "device", "pinned", 5024 - 1030 - 50, True),
        (2_000, "device", "pinned", 1600 - 1030 - 50, True),
        (1_250, "device", "pinned", 0, False),
        (1_000, "pinned", "pinned", 800 - 230 - 50, True),
        (250, "pinned", "pinned", 0, False),
    ],
)
def test_what_fits_goes_to_the_device_the_graph_first(
    free: int, graph: Any, features: Any, cache: int, labels: bool
) -> None:
    layout = make_layout(SIZES, free, Placement())
    assert (layout.graph, layout.features, layout.cache, layout.labels) == (graph, features, cache, labels)


def test_a_placement_that_is_asked_for_is_followed() -> None:
    layout = make_layout(SIZES, 10_000, Placement(features="pinned", graph="pinned", cache="1K"))
    assert (layout.graph, layout.features, layout.cache) == ("pinned", "pinned", 1024)
    assert make_layout(SIZES, 10_000, Placement(cache=0)).features == "pinned"
    layout = make_layout(SIZES, 10_000, Placement(features="host", graph="host"))
    assert (layout.graph, layout.features, layout.cache) == ("host", "host", 0)
    assert make_layout(replace(SIZES, can_cache=False), 2_000, Placement()).features == "host"


@pytest.mark.parametrize(
    ("free", "options", "says"),
    [
        (900, {"graph": "device"}, r"graph needs 1000 B .* 900 B free: set graph=pinned, or leave it at auto$"),
        (100, {"graph": "pinned"}, r"graph needs 200 B .* 100 B free: set graph=host$"),
        (100, {}, r"graph needs 200 B .* 100 B free: set graph=host$"),
        (3_000, {"features": "device"}, "set features=pinned, or leave it at auto$"),
        (1_000, {"cache": "2K"}, "cache needs .* make it smaller"),
    ],
)
def test_what_cannot_fit_is_refused(free: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_layout(SIZES, free, Placement(**options))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="features must be"):
        Placement(features="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as a size"):
        Placement(cache="much")
    with pytest.raises(ValueError, match="features=pinned"):
        Placement(features="device", cache="1G")


def test_on_the_cpu_a_dataset_stays_where_it_is() -> None:
    dataset = data()
    assert place(dataset, device="cpu") is dataset
    assert describe(dataset) == "graph 2.7 KiB on the host; x 800 B on the host; labels 400 B on the host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="set device=cpu"):
        place(data(), device="cuda")


def test_a_plan_is_carried_out() -> None:
    dataset = data()
    plan = Layout(graph="device", features="pinned", cache=160, labels=True, spare_bytes=0)
    placed = apply_layout(dataset, plan, CPU, (3, 2), dataset.splits["train"], 8)
    x = placed.tables["x"]
    assert isinstance(x, TieredTable)
    assert (x.num_hot, x.observing) == (10, False)
    by_access = hl.table(
        dataset.x,
        device_cache=160,
        order="access",
        graph=dataset.graph,
        fanouts=(3, 2),
        train_ids=dataset.splits["train"],
        batch_size=8,
        device=CPU,
    )
    assert x.hot_ids is not None
    assert by_access.hot_ids is not None
    assert torch.equal(x.hot_ids, by_access.hot_ids)
    assert torch.equal(x[torch.arange(50)], dataset.x[torch.arange(50)])
    assert "x 800 B pinned, with 160 B (20% of the rows) on cpu" in describe(placed)


def test_other_tables_are_placed_while_spare_bytes_last() -> None:
    dataset = data()
    dataset.tables |= {"a": TensorTable(randn(50, 1)), "b": TensorTable(randn(50, 1))}
    plan = Layout(graph="host", features="device", cache=0, labels=False, spare_bytes=500)
    placed = apply_layout(dataset, plan, CPU)
    assert [type(placed.tables[name]) for name in ("x", "a", "b")] == [TieredTable, TieredTable, TensorTable]
    assert "x 800 B on cpu" in describe(placed)


def test_sparse_rows_are_moved_whole_or_not_at_all() -> None:
    sparse = SparseTable.from_dense(randn(50, 4))
    dataset = replace(data(), tables={"x": sparse})
    assert not DataBytes.of(dataset).can_cache
    for where in ("device", "pinned", "host"):
        plan = Layout(graph="host", features=where, cache=99, labels=False, spare_bytes=0)
        table = apply_layout(dataset, plan, CPU).x
        assert isinstance(table, SparseTable)
        assert torch.equal(table[torch.arange(50)], sparse[torch.arange(50)])


def test_without_fan_outs_the_order_is_by_degree() -> None:
    plan = Layout(graph="host", features="pinned", cache=160, labels=False, spare_bytes=0)
    table = apply_layout(data(), plan, CPU).x
    assert isinstance(table, TieredTable)
    assert table.hot_ids is not None
    sources = torch.bincount(data().graph.indices, minlength=50)
    assert int(sources[table.hot_ids].sum()) == int(sources.topk(10).values.sum())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"graph": "pinned"}, {"features": "pinned"}, {"cache": 160}, {"features": "host", "graph": "host"}],
    ids=str,
)
def test_a_placed_dataset_reads_the_same_rows_and_edges_on_a_gpu(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of(random_graph(500, 9000), randn(500, 8, dtype=torch.float32))
    dataset.save(tmp_path / "data")
    for source in (dataset, hl.open(tmp_path / "data")):  # in memory, and mapped from files
        placed = place(source, Placement(**options), fanouts=(3, 2), batch_size=8)
        assert torch.equal(placed.graph.edge_index().cpu(), dataset.graph.edge_index())
        assert placed.graph.is_pinned == (options.get("graph") == "pinned")
        ids = randint(0, 500, 300)
        ids_where_read = ids if options.get("features") == "host" else ids.cuda()
        assert torch.equal(placed.x[ids_where_read].cpu(), dataset.x[ids])
        assert torch.equal(placed.x[ids], dataset.x[ids])  # and for who asks from the host
        assert placed.splits["train"].device == CPU
        assert describe(placed)


def test_rows_that_cannot_be_pinned_are_copied_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.pinned, "register", lambda tensor: "CUDA error 1")
    table = TensorTable(randn(50, 4))
    assert module._host_cache(table, torch.device("cuda")) == "all"
    monkeypatch.setattr(module, "HOST_SHARE", 0.0)
    assert module._host_cache(table, torch.device("cuda")) == 0
    assert module._host_cache(table, CPU) is None
