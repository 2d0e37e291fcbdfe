"""Prefetched rows: those that the next steps read from host memory are staged on the device before.

A `RowPrefetcher` stages cold rows for several steps at once. Steps must read the same rows as without it, and
staged rows in place of the host's.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import hopline as hl
from hopline.methods.sampled.prefetch_rows import RowPrefetcher, Staging, stage_tables
from hopline.ops.gather_tiers import gather_tiers
from tests.support.helpers import KERNEL_DEVICE, randint, randn

DEVICE = torch.device(KERNEL_DEVICE)
NUM_ROWS = 500


def table(num_hot: int = 100) -> hl.extend.TieredTable:
    """A table of 500 rows, the first `num_hot` of which are on the device."""
    return hl.extend.TieredTable(hl.extend.TensorTable(randn(NUM_ROWS, 6)), torch.arange(num_hot), DEVICE)


def test_an_epoch_reads_the_rows_of_the_table_and_all_cold_ones_staged():
    rows = table()
    trees = [randint(-1, NUM_ROWS, 60, seed=s).int().to(DEVICE) for s in range(11)]
    waiting = iter(trees)
    prefetcher = RowPrefetcher([Staging(rows, DEVICE, 240, torch.int32)], DEVICE, 4, lambda: next(waiting))
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]
    prefetcher.start(len(trees))
    for step, nodes in enumerate(trees):
        prefetcher.before_step(step)
        ours = gather_tiers(hot, cold, hot_slot, nodes, rows.counts(DEVICE))
        is_node = nodes.cpu() >= 0
        assert torch.equal(ours.cpu()[is_node], rows.below.read(nodes.cpu()[is_node].long()))
    prefetcher.end()
    hits, direct, staged = rows.counts(DEVICE).sum(0).tolist()
    all_nodes = torch.cat(trees).cpu()
    assert hits == int(((all_nodes >= 0) & (all_nodes < 100)).sum())
    assert (direct, staged) == (0, int((all_nodes >= 100).sum()))

    counts = rows.counters()
    assert (counts["hits"], counts["misses"]) == (hits, staged)
    assert counts["miss_bytes"] < staged * rows.row_bytes  # a row that several steps read is staged once

    assert hot_slot is not None
    assert bool((hot_slot[100:] == -1).all()), "nothing is staged after the epoch"
    assert torch.equal(hot_slot[:100].cpu(), torch.arange(100, dtype=torch.int32))


def test_rows_beyond_the_staging_buffer_are_read_from_the_host():
    rows = table()
    nodes = torch.arange(100, 400, device=DEVICE).int()
    prefetcher = RowPrefetcher([Staging(rows, DEVICE, 50, torch.int32)], DEVICE, 1, lambda: nodes)
    prefetcher.start(1)
    prefetcher.before_step(0)
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]
    ours = gather_tiers(hot, cold, hot_slot, nodes, rows.counts(DEVICE))
    assert torch.equal(ours.cpu(), rows.below.read(nodes.cpu().long()))
    assert rows.counts(DEVICE).sum(0).tolist() == [0, 250, 50]

    rows.write(torch.arange(100, 400), torch.ones(300, 6))  # a write also reaches staged copies
    assert bool((gather_tiers(hot, cold, hot_slot, nodes) == 1).all())


def test_without_hot_rows_all_rows_are_staged():
    rows = table(0)
    nodes = torch.arange(0, 300, device=DEVICE).int()
    prefetcher = RowPrefetcher([Staging(rows, DEVICE, 300, torch.int32)], DEVICE, 2, lambda: nodes)
    prefetcher.start(2)
    prefetcher.before_step(0)
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]

    assert torch.equal(gather_tiers(hot, cold, hot_slot, nodes).cpu(), rows.below.read(nodes.cpu().long()))
    assert int(rows._on(DEVICE).fetched) == 300


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_without_rows_in_host_memory_are_not_staged():
    on_device = hl.extend.TieredTable(hl.extend.TensorTable(randn(50, 4)), None, DEVICE)
    assert stage_tables([on_device, hl.extend.TensorTable(randn(50, 4))], DEVICE, 10, 4, torch.int32) == []
    (staging,) = stage_tables([table()], DEVICE, 10, 4, torch.int32)
    assert staging.staged_ids.size(1) == 40
