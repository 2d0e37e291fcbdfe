"""Rows on disk: cold pages are detected, requested in the order of the file, and read correctly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

from hopline import ops
from hopline.core.row_handles import Rows
from hopline.nn.conv_facts import facts_of
from hopline.nn.fused import read_ahead, run_fused
from hopline.ops.cpu import page_cache as cpu_page_cache
from hopline.tables import TensorTable
from tests.support.helpers import assert_close, batch_of, randint, randn, random_graph

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")


def map_file(path: Path, rows: Tensor) -> Tensor:
    rows.numpy().tofile(path)
    return torch.from_numpy(np.memmap(path, mode="c", dtype=rows.numpy().dtype, shape=tuple(rows.shape)))


def drop_from_memory(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def everything_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_page_cache, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(cpu_page_cache, "_all_in_memory", lambda *_: False)


def test_cold_rows_are_told_from_warm_ones(tmp_path: Path) -> None:
    rows = torch.arange(20_000 * 1000, dtype=torch.int32).view(20_000, 1000)
    file = map_file(tmp_path / "rows", rows)
    ids = randint(0, 20_000, 500)
    drop_from_memory(tmp_path / "rows")
    if not ops.is_cold(file, ids):
        pytest.skip("this file system keeps its files in memory")
    assert torch.equal(ops.gather_rows(file, ids), rows[ids])
    assert not ops.is_cold(file, ids)  # they have been read
    assert not ops.is_cold(rows, ids)


def test_small_arrays_and_no_ids_are_never_cold() -> None:
    assert not ops.is_cold(torch.zeros(10, 4), torch.tensor([1]))
    assert not ops.is_cold(torch.zeros(1 << 24, 2), torch.tensor([], dtype=torch.int64))


@pytest.mark.usefixtures("everything_is_cold")
@pytest.mark.parametrize("piece_bytes", [1, 100_000, 1 << 26])
@pytest.mark.parametrize("shape", [(), (3,), (700,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_cold_rows_are_read_right(
    piece_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_page_cache, "BYTES_AT_ONCE", piece_bytes)
    rows = randn(900, *shape)
    ids = randint(0, 900, 300).to(dtype)  # in no order, some of them twice
    assert torch.equal(ops.gather_rows(map_file(tmp_path / "rows", rows), ids), rows[ids.long()])


@pytest.mark.usefixtures("everything_is_cold")
def test_pieces_cover_every_position_once_in_the_order_of_the_file() -> None:
    rows = torch.zeros(5000, 2000)
    ids = randint(0, 5000, 3000).numpy()
    pieces = list(cpu_page_cache.in_order_of_file(rows, ids))
    assert len(pieces) == 1
    assert (np.diff(ids[pieces[0]]) >= 0).all()
    assert sorted(pieces[0]) == list(range(3000))


@pytest.mark.usefixtures("everything_is_cold")
def test_sampling_and_reading_ahead_are_the_same_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph()
    x = randn(50, 4)
    conv = SAGEConv(4, 3).double()

    def results() -> tuple[Tensor, Tensor]:
        block = batch_of(graph, None, (3, 2), torch.arange(6)).blocks[0]
        ahead = read_ahead(conv, Rows(TensorTable(x), block.src_ids), block)
        return block.src_ids, run_fused(conv, facts_of(conv), ahead, None, block)

    ids, out = results()
    monkeypatch.setattr(cpu_page_cache, "SMALLEST_BYTES", 1 << 60)
    warm_ids, warm_out = results()
    assert torch.equal(ids, warm_ids)
    assert_close(out, warm_out, 1e-14)


@pytest.mark.parametrize(
    ("ids", "requests"),
    [
        ([0], [(0, 1)]),
        ([0, 1, 2], [(0, 1)]),
        ([0, 40], [(0, 1), (10, 11)]),
        ([0, 12], [(0, 4)]),  # a short gap is read along
        ([3, 100, 103], [(0, 1), (25, 26)]),
        ([2047], [(511, 512)]),
    ],
)
def test_neighbouring_pages_are_one_request(
    ids: list[int], requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = cpu_page_cache._PAGE
    ranges = []
    monkeypatch.setattr(cpu_page_cache, "_madvise", lambda start, size, advice: ranges.append((start, start + size)))
    monkeypatch.setattr(cpu_page_cache, "LARGEST_GAP", 4)
    cpu_page_cache._request_pages.py_func(16 * page, page // 4, np.array(ids))
    assert [((a // page) - 16, (b // page) - 16) for a, b in ranges] == requests
