"""Rows of the next steps, staged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import hopline as hl
from hopline.methods.sampled.prefetch_rows import RowPrefetcher, Staging, stage_tables
from hopline.ops.gather_tiers import gather_tiers
from tests.helpers import KERNEL_DEVICE, randint, randn

DEVICE = torch.device(KERNEL_DEVICE)
NUM_ROWS = 500


def table(num_hot: int = 100) -> hl.extend.TieredTable:
    return hl.extend.TieredTable(hl.extend.TensorTable(randn(NUM_ROWS, 6)), torch.arange(num_hot), DEVICE)


def test_an_epoch_reads_the_same_rows_and_hardly_any_from_the_host_itself():
    rows, trees = table(), [randint(-1, NUM_ROWS, 60, seed=s).int().to(DEVICE) for s in range(11)]
    waiting = iter(trees)
    ahead = RowPrefetcher([Staging(rows, DEVICE, 240, torch.int32)], DEVICE, 4, lambda: next(waiting))
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]
    ahead.start(len(trees))
    for step, nodes in enumerate(trees):
        ahead.before_step(step)
        found = gather_tiers(hot, cold, hot_slot, nodes, rows.counts(DEVICE))
        there = nodes.cpu() >= 0
        assert torch.equal(found.cpu()[there], rows.below.read(nodes.cpu()[there].long()))
    ahead.end()
    hits, direct, staged = rows.counts(DEVICE).sum(0).tolist()
    everything = torch.cat(trees).cpu()
    assert hits == int(((everything >= 0) & (everything < 100)).sum())
    assert (direct, staged) == (0, int((everything >= 100).sum()))
    counts = rows.counters()
    assert (counts["hits"], counts["misses"]) == (hits, staged)
    assert counts["miss_bytes"] < staged * rows.row_bytes  # each once, however often it was read
    assert hot_slot is not None
    assert bool((hot_slot[100:] == -1).all()), "nothing is staged after the epoch"
    assert torch.equal(hot_slot[:100].cpu(), torch.arange(100, dtype=torch.int32))


def test_what_does_not_fit_is_read_from_the_host():
    rows, nodes = table(), torch.arange(100, 400, device=DEVICE).int()
    ahead = RowPrefetcher([Staging(rows, DEVICE, 50, torch.int32)], DEVICE, 1, lambda: nodes)
    ahead.start(1)
    ahead.before_step(0)
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]
    found = gather_tiers(hot, cold, hot_slot, nodes, rows.counts(DEVICE))
    assert torch.equal(found.cpu(), rows.below.read(nodes.cpu().long()))
    assert rows.counts(DEVICE).sum(0).tolist() == [0, 250, 50]
    rows.write(torch.arange(100, 400), torch.ones(300, 6))  # staged copies follow
    assert bool((gather_tiers(hot, cold, hot_slot, nodes) == 1).all())


def test_without_hot_rows_everything_is_staged():
    rows, nodes = table(0), torch.arange(0, 300, device=DEVICE).int()
    ahead = RowPrefetcher([Staging(rows, DEVICE, 300, torch.int32)], DEVICE, 2, lambda: nodes)
    ahead.start(2)
    ahead.before_step(0)
    hot, cold, hot_slot = rows.tiers(DEVICE)  # type: ignore[misc]
    assert torch.equal(gather_tiers(hot, cold, hot_slot, nodes).cpu(), rows.below.read(nodes.cpu().long()))
    assert int(rows._on(DEVICE).fetched) == 300


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_without_rows_in_host_memory_need_none():
    here = hl.extend.TieredTable(hl.extend.TensorTable(randn(50, 4)), None, DEVICE)
    assert stage_tables([here, hl.extend.TensorTable(randn(50, 4))], DEVICE, 10, 4, torch.int32) == []
    (staging,) = stage_tables([table()], DEVICE, 10, 4, torch.int32)
    assert staging.staged_ids.size(1) == 40
