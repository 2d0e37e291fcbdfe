"""Tables with hot rows on a device: reads equal plain rows; counters, writes, and input of kernels."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hopline.tables import CachedTable, TensorTable, TieredTable
from hopline.util import trace
from tests.support.helpers import randint, randn

ROWS = randn(60, 5, dtype=torch.float32)
HOT = torch.tensor([3, 40, 0, 59])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tiered(hot: torch.Tensor | None = HOT, **options) -> TieredTable:
    return TieredTable(TensorTable(ROWS.clone()), hot, "cpu", **options)


def test_hits_and_misses_are_those_of_numpy() -> None:
    table = tiered()
    batches = [randint(0, 60, 80, seed) for seed in range(3)]
    for ids in batches:
        assert torch.equal(table.read(ids), ROWS[ids])
    hits = int(torch.isin(torch.cat(batches), HOT).sum())
    assert table.counters() == {
        "hits": hits,
        "misses": 240 - hits,
        "hit_bytes": hits * 20,
        "miss_bytes": (240 - hits) * 20,
    }


def test_every_read_is_reported_once() -> None:
    table = tiered()
    counters = trace.Counters()
    table.read(torch.tensor([3, 3, 1]))
    with trace.listen(counters):
        table.report()
        table.report()
        table.read(torch.tensor([0]))
        table.end_epoch()
    assert counters.totals() == {
        "rows.cache_hit": 3,
        "rows.cache_miss": 1,
        "bytes.from_cache": 60,
        "bytes.from_host": 20,
    }


def test_tiers_gives_kernels_hot_rows_cold_rows_and_slots() -> None:
    table = tiered()
    tiers = table.tiers()
    assert tiers is not None
    hot, cold, hot_slot = tiers
    assert torch.equal(hot, ROWS[HOT])
    assert cold is table.below.storage()
    assert hot_slot is not None
    assert hot_slot.dtype == torch.int32
    assert hot_slot[HOT].tolist() == [0, 1, 2, 3]
    assert int((hot_slot >= 0).sum()) == 4
    assert table.counts().shape[1] == 3
    everything = tiered(None).tiers()
    assert everything is not None
    assert everything.cold is None
    assert everything.hot_slot is None


def test_rows_in_one_place_are_one_tensor() -> None:
    assert tiered().storage() is None
    everything = tiered(None)
    nothing = tiered(HOT[:0])
    assert torch.equal(everything.storage(), ROWS)  # type: ignore[arg-type]
    assert nothing.storage() is nothing.below.storage()
    assert everything.num_bytes == ROWS.nbytes
    assert tiered().num_bytes == 4 * 20 + 60 * 4


def test_what_was_read_most_is_kept_after_the_first_epoch() -> None:
    table = tiered(observe=True)
    before = table.tiers()
    table.read(torch.tensor([7, 7, 7, 9, 9, 40, 11, 11]))
    table.observe(torch.tensor([12] * 5))  # by a kernel that reads by itself
    table.end_epoch()
    assert sorted(table.hot_ids.tolist()) == [7, 9, 11, 12]  # type: ignore[union-attr]
    assert not table.observing
    after = table.tiers()
    assert before is not None
    assert after is not None
    assert after.hot.data_ptr() == before.hot.data_ptr()  # captured graphs know the address
    ids = torch.arange(60)
    assert torch.equal(table.read(ids), ROWS)
    table.read(torch.tensor([1] * 9))
    table.end_epoch()
    assert 1 not in table.hot_ids.tolist()  # type: ignore[union-attr]


def test_rows_read_equally_often_stay() -> None:
    table = tiered(observe=True)
    table.read(torch.tensor([50]))
    table.rebalance()
    assert set(table.hot_ids.tolist()) > {50}  # type: ignore[union-attr]
    assert len(set(table.hot_ids.tolist()) & set(HOT.tolist())) == 3  # type: ignore[union-attr]


def test_a_cache_over_a_cache_reads_the_same_rows() -> None:
    counters = trace.Counters()
    below = CachedTable(TensorTable(ROWS), torch.tensor([1, 2]), counter="rows.host")
    table = TieredTable(below, HOT, "cpu")
    table.read(HOT[:1])  # fills the cache
    with trace.listen(counters):
        assert torch.equal(table.read(torch.tensor([3, 1, 5])), ROWS[[3, 1, 5]])
        table.report()
    totals = counters.totals()
    assert (totals["rows.host_hit"], totals["rows.host_miss"]) == (1, 1)
    assert (totals["rows.cache_hit"], totals["rows.cache_miss"]) == (2, 2)
    assert table.tiers() is None  # kernels cannot read all rows by themselves
    assert table.storage() is None


def test_threads_read_concurrently() -> None:
    table = tiered(observe=True)
    batches = [randint(0, 60, 500, seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for ids, rows in zip(batches, pool.map(table.read, batches), strict=True):
            assert torch.equal(rows, ROWS[ids])
    counts = table.counters()
    assert counts["hits"] + counts["misses"] == 40 * 500
    assert int(table._device_tiers[torch.device("cpu")].seen.sum()) == 40 * 500  # type: ignore[union-attr]


def test_ids_on_another_device_are_read_below() -> None:
    table = TieredTable(TensorTable(ROWS), HOT, "cuda")  # no GPU is touched
    assert torch.equal(table.read(torch.tensor([3, 5])), ROWS[[3, 5]])
    assert table.counters()["hits"] == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("hot", [None, HOT, HOT[:0]], ids=["all", "some", "none"])
@pytest.mark.parametrize("sorted_from", [1, 1 << 14])
def test_a_gpu_reads_writes_and_counts_as_the_cpu_does(
    hot: torch.Tensor | None, sorted_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopline.tables.gpu_cache.SORTED_FROM", sorted_from)
    table = TieredTable(TensorTable(ROWS.clone()), hot, "cuda", observe=True)
    ids = torch.cat([randint(0, 60, 100), HOT])
    table.read(ids.cuda())
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        ours = table.read(ids.cuda(non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ours.cpu(), ROWS[ids])
    counts = table.counters()
    hits = ids.numel() if hot is None else int(torch.isin(ids, hot).sum())
    assert (counts["hits"], counts["misses"]) == (2 * hits, 2 * (ids.numel() - hits))
    table.end_epoch()
    assert torch.equal(table.read(ids.cuda()).cpu(), ROWS[ids])
    table.write(torch.tensor([3]), torch.ones(1, 5))
    assert table.read(torch.tensor([3], device="cuda")).cpu().tolist() == [[1.0] * 5]


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_over_rows_that_only_the_host_reads() -> None:
    table = TieredTable(CachedTable(TensorTable(ROWS), torch.tensor([1])), HOT, "cuda")
    ids = torch.tensor([3, 1, 5, -1])
    assert torch.equal(table.read(ids.cuda()).cpu(), torch.cat([ROWS[[3, 1, 5]], torch.zeros(1, 5)]))
    assert (table.counters()["hits"], table.counters()["misses"]) == (1, 2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_a_concurrent_view_reads_cold_memory_and_no_staged_row(device: str) -> None:
    table = TieredTable(TensorTable(ROWS.clone()), HOT, device)
    hot, cold, hot_slot = table.reserve(torch.device(device), 1).tiers
    assert hot_slot is not None
    # The seventh row is staged, and will be another one soon.
    hot[4] = -1.0
    hot_slot[7] = -2 - 4
    view = table.concurrent_view()
    ids = torch.tensor([7, 3])
    assert torch.equal(view.read(ids.to(device)).cpu(), ROWS[ids])
    if device == "cuda":  # else the host reads what is not hot
        assert table.read(ids.to(device))[0].tolist() == [-1.0] * 5
    assert (view.shape, view.dtype, view.storage()) == (table.shape, table.dtype, None)
    assert view.tiers(device) == (cold, None, None)
    everything = tiered(None)
    assert everything.concurrent_view().tiers() == everything.tiers()


def test_staging_memory_is_reserved_behind_the_hot_rows() -> None:
    table = tiered()
    hot, _, hot_slot = table.reserve(torch.device("cpu"), 3).tiers
    assert hot.shape == (7, 5)
    assert torch.equal(hot[:4], ROWS[HOT])
    assert hot_slot is not None
    assert hot_slot[HOT].tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("free", [0, 1 << 30], ids=["none", "some"])
def test_room_behind_the_hot_rows_of_a_gpu_that_has(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopline.tables.gpu_cache.free_bytes", lambda device: free)
    table = TieredTable(TensorTable(ROWS.clone()), HOT, "cuda")
    ids = randint(0, 60, 100)
    table.read(ids.cuda())
    assert table.reserve(torch.device("cuda"), 3).tiers.hot.shape == (7, 5)
    assert torch.equal(table.read(ids.cuda()).cpu(), ROWS[ids])
    assert table.counters()["hits"] == 2 * int(torch.isin(ids, HOT).sum())
