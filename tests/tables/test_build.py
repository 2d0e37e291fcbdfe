"""`hl.table`: sizes and orders of caches, files, devices, and settings that are refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import hopline as hl
from hopline.tables import CachedTable, TensorTable
from tests.support.helpers import randint, randn, random_graph

ROWS = randn(50, 4, dtype=torch.float32)
GRAPH = random_graph()
ACCESS = {"fanouts": (4, 2), "train_ids": torch.arange(10)}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("size", "num_hot"),
    [
        (0, 0),
        ("0", 0),
        (160, 10),
        ("160", 10),
        ("160b", 10),
        (".25K", 16),
        ("0.25k", 16),
        ("0.5KB", 31),
        ("0.5KiB", 32),
        ("1G", 50),
        (".1g", 50),
        ("3GB", 50),
        ("200M", 50),
        ("64KB", 50),
        ("all", 50),
        ("ALL", 50),
        ("20%", 10),
        ("100%", 50),
    ],
)
def test_a_cache_size_is_bytes_text_or_a_share(size: str | int, num_hot: int) -> None:
    table = hl.table(ROWS, device_cache=size, graph=GRAPH, device="cpu")
    assert table.num_hot == num_hot
    ids = randint(0, 50, 70)
    assert torch.equal(table[ids], ROWS[ids])


@pytest.mark.parametrize("bad", ["much", "-1G", "1X", "", "1..2G", "x%", None, True])
def test_a_bad_size_says_what_to_type(bad: str) -> None:
    with pytest.raises(ValueError, match=r"device_cache=.*'0\.1G', '200M'"):
        hl.table(ROWS, device_cache=bad, graph=GRAPH, device="cpu")
    if bad is not None:
        with pytest.raises(ValueError, match="host_cache="):
            hl.table(ROWS, host_cache=bad, graph=GRAPH, device="cpu")


@pytest.mark.parametrize("order", ["degree", "access", "observed"])
def test_with_any_order_the_cache_holds_distinct_rows(order: str) -> None:
    table = hl.table(ROWS, device_cache="20%", order=order, graph=GRAPH, device="cpu", **ACCESS)  # type: ignore[arg-type]
    assert table.hot_ids is not None
    assert table.hot_ids.unique().numel() == 10
    assert table.observing == (order == "observed")
    assert torch.equal(table[torch.arange(50)], ROWS)


def test_an_order_without_its_arguments_is_refused() -> None:
    assert hl.table(ROWS, device_cache=160, order="observed", device="cpu").num_hot == 10
    assert hl.table(ROWS, device_cache=0, device="cpu").num_hot == 0  # nothing to order
    assert hl.table(ROWS, device_cache="all", device="cpu").num_hot == 50
    with pytest.raises(ValueError, match=r"graph=data\.graph"):
        hl.table(ROWS, device_cache=160, device="cpu")
    with pytest.raises(ValueError, match="fanouts and train_ids"):
        hl.table(ROWS, device_cache=160, order="access", graph=GRAPH, device="cpu")
    with pytest.raises(ValueError, match="degree, access, observed"):
        hl.table(ROWS, device_cache=160, order="size", graph=GRAPH, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="51 rows for the 50"):
        hl.table(torch.zeros(51, 4), device_cache=160, graph=GRAPH, device="cpu")


@pytest.mark.parametrize("ids", [[1, 1], [50], [-1]], ids=str)
def test_an_order_of_ones_own_must_name_rows(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="each at most once"):
        hl.table(ROWS, device_cache=160, order=torch.tensor(ids), device="cpu")


def test_rows_in_memory_are_not_copied() -> None:
    table = hl.table(ROWS, device_cache=160, order=torch.tensor([4, 2]), device="cpu")
    storage = table.below.storage()
    assert storage is not None
    assert storage.data_ptr() == ROWS.data_ptr()
    assert table.hot_ids is not None
    assert table.hot_ids.tolist() == [4, 2]


@pytest.mark.parametrize("form", ["path", "text", "map", "array", "table"])
def test_a_file_is_read_through_a_ram_tier(form: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, ROWS.numpy())
    x = {
        "path": path,
        "text": str(path),
        "map": np.load(path, mmap_mode="r"),
        "array": ROWS.numpy(),
        "table": TensorTable(ROWS),
    }[form]
    table = hl.table(x, device_cache=160, host_cache="320", graph=GRAPH, device="cpu")
    ram = table.below
    assert isinstance(ram, CachedTable)
    assert table.hot_ids is not None
    in_ram = (ram.slot >= 0).nonzero().view(-1)
    assert in_ram.numel() == 20
    assert not torch.isin(in_ram, table.hot_ids).any()  # a row that the device has is not needed twice
    assert torch.equal(table[torch.arange(50)], ROWS)


def test_a_file_can_be_copied_into_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    table = hl.table(tmp_path / "rows.npy", device_cache=160, host_cache="all", graph=GRAPH, device="cpu")
    storage = table.below.storage()
    assert storage is not None
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(0)
    assert torch.equal(table[torch.arange(50)], ROWS)


def test_a_table_for_several_processes_is_in_shared_memory() -> None:
    table = hl.table(ROWS, device_cache=160, graph=GRAPH, devices=["cpu", "cpu"])
    storage = table.below.storage()
    assert storage is not None
    received = pickle.loads(pickle.dumps(table))
    assert table.below.storage() is storage  # it did not move: it was there
    storage[3] = 5
    assert received[torch.tensor([3])].eq(5).all()


def test_a_map_that_may_only_be_read_is_not_written(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    table = hl.table(tmp_path / "rows.npy", device="cpu")
    with pytest.raises(TypeError, match="read-only"):
        table.write(torch.tensor([1]), torch.zeros(1, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": 0}, {"devices": [0, 1]}], ids=str)
def test_a_gpu_that_is_not_there_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"no GPU .*device=cpu"):
        hl.table(ROWS, **options)


def test_devices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        hl.table(ROWS, devices=[])
    with pytest.raises(ValueError, match="not both"):
        hl.table(ROWS, device="cpu", devices=["cpu"])
    with pytest.raises(ValueError, match="no file"):
        hl.table("nowhere.npy", device="cpu")
    with pytest.raises(ValueError, match="needs rows"):
        hl.table(torch.tensor(1.0), device="cpu")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_rows_are_pinned_in_place() -> None:
    rows = randn(50_000, 8, dtype=torch.float32)
    start = rows.data_ptr()
    table = hl.table(rows, device_cache="10%", order="observed", device="cuda")
    tiers = table.tiers()
    assert tiers is not None
    assert tiers.cold is not None
    assert tiers.cold.data_ptr() == start
    assert tiers.cold.is_pinned()
    ids = randint(0, 50_000, 1000)
    assert torch.equal(table[ids.cuda()].cpu(), rows[ids])


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_mapped_file_is_read_in_place_or_the_error_says_what_to_type(tmp_path: Path) -> None:
    rows = randn(50_000, 8, dtype=torch.float32)
    np.save(tmp_path / "rows.npy", rows.numpy())
    ids = randint(0, 50_000, 1000)
    try:
        assert torch.equal(hl.table(tmp_path / "rows.npy", device="cuda")[ids.cuda()].cpu(), rows[ids])
    except ValueError as error:
        assert "host_cache='all'" in str(error)  # noqa: PT017 - both are right
    for host_cache in ("all", "100K"):
        table = hl.table(tmp_path / "rows.npy", host_cache=host_cache, order="observed", device="cuda")
        assert torch.equal(table[ids.cuda()].cpu(), rows[ids])
