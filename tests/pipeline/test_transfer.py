"""Moving batches to a device through staging buffers that are reused only after their copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopline.core.batch import Batch
from hopline.core.row_handles import Rows
from hopline.pipeline.transfer import ALIGN_BYTES, CudaCopies, Mover, PendingBatch
from hopline.tables import TensorTable
from tests.support.helpers import assert_same_batches, batch_of, generator, randint, randn, random_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ELSEWHERE = torch.device("meta")
"""A device that is not the host: the stand-in below leaves tensors on the host all the same."""


class Event:
    def __init__(self, pending: list[Callable[[], object]]) -> None:
        self.pending = pending

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()


class LateCopies(CudaCopies):
    """Copies that happen as late as they may, so a buffer that is written too early shows in the result."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self.buffers: list[Tensor] = []
        self.waited = 0

    def buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def within(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, staged: Tensor) -> Tensor:
        out = torch.zeros_like(staged)
        self.pending.append(lambda: out.copy_(staged))
        assert staged.storage_offset() * staged.element_size() % ALIGN_BYTES == 0
        return out

    def mark(self) -> Event:
        pending = self.pending
        self.pending = []
        return Event(pending)

    def wait(self, event: Event, tensors: list[Tensor]) -> None:
        event.synchronize()
        self.waited += len(tensors)


def batches(count: int) -> list[Batch]:
    graph = random_graph(weight=True, attr=2, dtype=torch.int32)
    made_batches = []
    for key in range(count):
        seeds = torch.randperm(50, generator=generator(key))[: 3 + key % 5]
        batch = batch_of(graph, randn(50, 7, seed=key, dtype=torch.bfloat16), (3, 2), seeds, key=key)
        made_batches.append(replace(batch, y=randint(0, 3, seeds.numel(), key)))
    return made_batches


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_batches_arrive_as_they_were(look_ahead: int) -> None:
    copies = LateCopies()
    mover = Mover(ELSEWHERE, look_ahead, copies)
    sent = batches(12)
    moved = [mover.move(batch) for batch in sent]  # more than there are buffers
    assert len(copies.buffers) <= 2 * look_ahead  # each may have grown
    for ours, expected in zip(moved, sent, strict=True):
        assert isinstance(ours, PendingBatch)
        assert_same_batches(mover.ready(ours), expected)
        assert ours.batch.x is not expected.x
        assert torch.equal(ours.batch.blocks[0].part.edge_ids, expected.blocks[0].part.edge_ids)  # type: ignore[arg-type]
    assert copies.waited == sum(len(ours.tensors) for ours in moved if isinstance(ours, PendingBatch))


def test_batches_of_several_threads_arrive_as_they_were() -> None:
    mover = Mover(ELSEWHERE, 2, EagerCopies())
    sent = batches(20)
    with ThreadPoolExecutor(4) as pool:
        for ours, expected in zip(pool.map(lambda batch: mover.move(batch), sent), sent, strict=True):
            assert_same_batches(mover.ready(ours), expected)


def test_a_batch_that_runs_out_of_memory_is_moved_when_it_is_needed() -> None:
    class Full(LateCopies):
        def copy(self, staged: Tensor) -> Tensor:
            if self.full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().copy(staged)

        full = False

    copies = Full()
    mover = Mover(ELSEWHERE, 1, copies)
    first, second = batches(2)
    begun = mover.move(first)
    copies.full = True
    stayed = mover.move(second)
    assert stayed is second, "on the host"
    mover.ready(begun)
    moved = mover.ready(stayed)
    assert moved.seeds.device == moved.blocks[0].src_ids.device == ELSEWHERE


class EagerCopies(LateCopies):
    """Copies that are done at once, so that threads need not take turns."""

    def copy(self, staged: Tensor) -> Tensor:
        return staged.clone()


def test_handles_and_tensors_on_the_device_stay() -> None:
    (batch,) = batches(1)
    handle = Rows(TensorTable(randn(50, 3)), batch.input_ids)
    mover = Mover(ELSEWHERE, 2, LateCopies())
    moved = mover.ready(mover.move(replace(batch, x=handle, y=torch.empty(3, device="meta"))))
    assert moved.x is handle
    assert moved.labels.device == ELSEWHERE


def test_a_tensor_that_does_not_fit_the_buffer_is_moved_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopline.pipeline.transfer.GAP_BYTES", -1000)
    (batch,) = batches(1)
    copies = LateCopies()
    mover = Mover(ELSEWHERE, 1, copies)
    moved = mover.ready(mover.move(batch))
    assert any(t.device == ELSEWHERE for t in mover_tensors(moved))  # torch's own way
    assert any(t.device.type == "cpu" for t in mover_tensors(moved))


def mover_tensors(batch: Batch) -> list[Tensor]:
    parts = [block.part for block in batch.blocks]
    return [batch.seeds, *(p.indptr for p in parts), *(p.src_idx for p in parts), *(b.src_ids for b in batch.blocks)]


def test_an_error_gives_the_buffer_back() -> None:
    class Broken(LateCopies):
        def copy(self, staged: Tensor) -> Tensor:
            raise RuntimeError("no memory")

    mover = Mover(ELSEWHERE, 1, Broken())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory"):
            mover.move(batches(1)[0])


def test_on_the_cpu_batches_stay() -> None:
    mover = Mover("cpu")
    (batch,) = batches(1)
    assert mover.ready(mover.move(batch)) is batch


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_batches_equal_those_of_a_blocking_copy() -> None:
    mover = Mover("cuda:0", 2)
    sent = batches(40)
    with ThreadPoolExecutor(3) as pool:
        for moved, expected in zip(pool.map(lambda batch: mover.move(batch), sent), sent, strict=True):
            ours = mover.ready(moved)
            blocking = expected.to("cuda:0")
            assert_same_batches(ours, blocking)
            assert ours.seeds.device == blocking.seeds.device


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_neither_side_waits() -> None:
    mover = Mover("cuda:0", 2)
    sent = batches(2)
    mover.ready(mover.move(sent[0]))  # buffers are made once
    mover.ready(mover.move(sent[0]))
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        moved = mover.ready(mover.move(sent[0]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_batches(moved.to("cpu"), sent[0])
