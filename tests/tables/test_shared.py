"""Tables that other processes read: by a handle to the same memory, never by a copy per process."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

import hopline as hl
from hopline.tables import CachedTable, SparseTable, Table, TensorTable, TieredTable
from hopline.tables.shareable import share
from tests.device.test_pinned import Driver
from tests.support.helpers import randn


def test_memory_of_this_process_is_copied_once_and_then_known() -> None:
    rows = randn(50, 3, dtype=torch.bfloat16)
    table = TensorTable(rows)
    first = pickle.loads(pickle.dumps(table))
    start = table.rows.data_ptr()
    second = pickle.loads(pickle.dumps(table))
    third = pickle.loads(pickle.dumps(first))  # sent on
    assert start == table.rows.data_ptr() != rows.data_ptr()
    table.rows[4] = 7  # in one place, seen in all
    for received in (first, second, third):
        assert received.read(torch.tensor([4])).tolist() == [[7, 7, 7]]
        assert torch.equal(received.rows[5:], rows[5:])


def test_a_mapped_file_stays_where_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(3 << 12, dtype=np.float32).reshape(-1, 3))
    map_tensor = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r+"))
    table = TensorTable(map_tensor)
    received = pickle.loads(pickle.dumps(table))
    assert table.rows.data_ptr() == map_tensor.data_ptr()
    map_tensor[2] = -1
    assert received.read(torch.tensor([2])).tolist() == [[-1, -1, -1]]


def test_rows_that_were_replaced_are_sent_anew() -> None:
    table = TensorTable(randn(5, 2))
    pickle.dumps(table)
    table.rows = torch.ones(5, 2)
    assert pickle.loads(pickle.dumps(table)).rows.eq(1).all()


def test_pinned_memory_cannot_move() -> None:
    from hopline.device import pinned

    rows = randn(30, 4)
    pinned.register(rows, Driver())
    with pytest.raises(ValueError, match=r"devices=\[0, 1\]"):
        share(rows)


def _tables(folder: Path) -> dict[str, Table]:
    rows = randn(100, 4, dtype=torch.float32)
    np.save(folder / "rows.npy", rows.numpy())
    hot = torch.arange(0, 100, 3)
    return {
        "memory": TensorTable(rows),
        "file": TensorTable(torch.from_numpy(np.load(folder / "rows.npy", mmap_mode="r+")), read_only=True),
        "cached": CachedTable(TensorTable(rows), hot, counter="rows.host"),
        "sparse": SparseTable.from_dense(rows),
        "tiered": TieredTable(TensorTable(rows), hot, "cpu"),
        "all hot": TieredTable(TensorTable(rows), None, "cpu"),
        "three tiers": hl.table(folder / "rows.npy", device_cache=160, host_cache=320, order=hot, device="cpu"),
    }


@pytest.mark.parametrize("name", ["memory", "file", "cached", "sparse", "tiered", "all hot", "three tiers"])
def test_a_pickled_table_is_a_handle(name: str, tmp_path: Path) -> None:
    table = _tables(tmp_path)[name]
    sent = pickle.dumps(table)
    assert len(sent) < 1500
    received = pickle.loads(sent)
    assert type(received) is type(table)
    ids = torch.tensor([99, 0, 5])
    assert torch.equal(received.read(ids), table.read(ids))


def _child(table: TieredTable, pipe: Connection) -> None:
    assert not table._device_tiers  # filled at the first read
    ids = torch.arange(10)
    before = table.read(ids)
    pipe.send((before.tolist(), table.counters()))
    pipe.recv()
    pipe.send(table.read(ids).tolist())


def test_a_spawned_process_reads_the_same_memory_through_a_cache_of_its_own() -> None:
    rows = randn(100, 4, dtype=torch.float32)
    table = hl.table(rows, device_cache=3 * 16, order=torch.tensor([2, 5, 7]), devices=["cpu", "cpu"])
    table.read(torch.tensor([1]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(table, theirs))
    process.start()
    theirs.close()  # so that a child that fails ends our waiting
    try:
        first, counters = ours.recv()
        assert first == rows[:10].tolist()
        assert (counters["hits"], counters["misses"]) == (3, 7)
        assert (table.counters()["hits"], table.counters()["misses"]) == (0, 1)
        storage = table.below.storage()
        assert storage is not None
        storage[:10] = 1  # below their cache: they see it where they have no copy
        ours.send("changed")
        second = torch.tensor(ours.recv())
        assert second[[0, 1, 3, 4, 6, 8, 9]].eq(1).all()
        assert torch.equal(second[[2, 5, 7]], rows[[2, 5, 7]])
    finally:
        process.join(timeout=60)
    assert process.exitcode == 0


def _gpu_child(table: TieredTable, pipe: Connection) -> None:
    rows = table.read(torch.arange(10, device="cuda"))
    tiers = table.tiers()
    assert tiers is not None
    assert tiers.cold is not None
    assert tiers.cold.is_pinned()
    pipe.send((rows.tolist(), table.counters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_spawned_process_pins_the_same_memory_for_its_gpu() -> None:
    rows = randn(5000, 4, dtype=torch.float32)
    table = hl.table(rows, device_cache=3 * 16, order=torch.tensor([2, 5, 7]), devices=[0, 0])
    assert torch.equal(table.read(torch.arange(10, device="cuda")).cpu(), rows[:10])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_gpu_child, args=(table, theirs))
    process.start()
    theirs.close()  # so that a child that fails ends our waiting
    try:
        rows_in_child, counters = ours.recv()
        assert rows_in_child == rows[:10].tolist()
        assert (counters["hits"], counters["misses"]) == (3, 7)
    finally:
        process.join(timeout=60)
    assert process.exitcode == 0
