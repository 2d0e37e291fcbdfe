"""What the Numba kernels share: the random generator, prefetching, threads, and their errors."""

from __future__ import annotations

import concurrent.futures
import importlib
import pkgutil
import threading

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

from hopline.ops import cpu, random
from hopline.ops.cpu import runtime as cpu_runtime
from tests.support.helpers import torch_threads


@cpu_runtime.kernel
def _mixed(values, out):
    for i in range(values.shape[0]):
        out[i] = cpu_runtime.mix(np.uint64(values[i]))


@cpu_runtime.kernel
def _bounded(values, limit, out):
    for i in range(values.shape[0]):
        out[i] = cpu_runtime.bounded(np.uint64(values[i]), limit)


@cpu_runtime.kernel
def _prefetch_all(array, indices):
    for i in range(indices.shape[0]):
        cpu_runtime.prefetch(array, indices[i])


RAW = torch.cat([torch.tensor([0, -1, 2**63 - 1, -(2**63)]), random.draw(2, torch.arange(500), 0)])


def test_no_kernel_holds_up_other_threads() -> None:
    kernels = 0
    for module in sorted(info.name for info in pkgutil.iter_modules(cpu.__path__)):
        for name, value in vars(importlib.import_module(f"hopline.ops.cpu.{module}")).items():
            if isinstance(value, Dispatcher):
                kernels += 1
                assert value.targetoptions.get("nogil"), f"{module}.{name} keeps Python's lock"
    assert kernels > 10


def test_mix_equals_the_reference() -> None:
    out = np.empty(RAW.numel(), dtype=np.uint64)
    _mixed(RAW.numpy(), out)
    assert torch.equal(torch.from_numpy(out.view(np.int64)), random.mix(RAW))


@pytest.mark.parametrize("limit", [1, 2, 7, 1000, 2**31 - 1])
def test_bounded_equals_the_reference(limit: int) -> None:
    out = np.empty(RAW.numel(), dtype=np.int64)
    _bounded(RAW.numpy(), limit, out)
    assert torch.equal(torch.from_numpy(out), random.bounded(RAW, torch.tensor(limit)))


def test_prefetch_of_any_index_reads_nothing() -> None:
    array = np.arange(4.0)
    _prefetch_all(array, np.array([0, 3, 4, -1, 10**12, -(10**12)]))
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 1000])
def test_ranges_cover_everything_once(threads: int, size: int) -> None:
    visits = np.zeros(size, dtype=np.int64)

    def visit(start: int, stop: int) -> None:
        visits[start:stop] += 1

    with torch_threads(threads):
        cpu_runtime.over_ranges(visit, size, work=1 << 24)
    assert (visits == 1).all()


def test_small_work_stays_on_the_calling_thread() -> None:
    used = []
    with torch_threads(4):
        cpu_runtime.over_ranges(lambda a, b: used.append(threading.get_ident()), 100, work=100)
    assert used == [threading.get_ident()]


def test_an_error_in_any_range_reaches_the_caller() -> None:
    def fail_at_the_end(start: int, stop: int) -> None:
        if stop == 100:
            raise ValueError("here")

    with torch_threads(2), pytest.raises(ValueError, match="here"):
        cpu_runtime.over_ranges(fail_at_the_end, 100, work=1 << 24)


def test_a_serial_thread_starts_no_more_threads() -> None:
    ranges: list[tuple[int, int]] = []

    def work() -> None:
        cpu_runtime.serial_here()
        cpu_runtime.over_ranges(lambda a, b: ranges.append((a, b)), 1000, 1 << 30)

    with torch_threads(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ranges == [(0, 1000)]
        cpu_runtime.over_ranges(lambda a, b: ranges.append((a, b)), 1000, 1 << 30)
    assert len(ranges) > 2
    assert sum(stop - start for start, stop in ranges[1:]) == 1000


def test_own_threads_leave_torch_one_thread_and_give_it_back() -> None:
    used = set()
    another_came = threading.Event()

    def visit(start: int, stop: int) -> None:
        used.add((threading.get_ident(), torch.get_num_threads()))
        if len(used) > 1:
            another_came.set()
        another_came.wait(timeout=10)

    def fail_within() -> None:
        with cpu_runtime.own_threads(3):
            assert torch.get_num_threads() == 1
            cpu_runtime.over_ranges(visit, 1000, 1 << 30)
            raise KeyError

    with torch_threads(2):
        with pytest.raises(KeyError):
            fail_within()
        assert torch.get_num_threads() == 2
    assert 1 < len(used) <= 3
    assert {threads for _, threads in used} == {1}


def test_threads_do_not_wait_for_one_that_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_run(task: object, count: int) -> list[concurrent.futures.Future[None]]:
        return [concurrent.futures.Future() for _ in range(count)]

    monkeypatch.setattr(cpu_runtime._kernel_threads, "submit", never_run)
    tasks_run: list[int] = []
    cpu_runtime.in_threads(tasks_run.append, 5, threads=3)
    assert tasks_run == [0, 1, 2, 3, 4]


def test_a_pool_that_is_replaced_has_taken_its_tasks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask for pools of different sizes at once: neither is given one that takes no task any more."""
    threads = cpu_runtime._KernelThreads()
    monkeypatch.setattr(cpu_runtime, "_kernel_threads", threads)
    errors: list[BaseException] = []

    def call(sizes: range) -> None:
        try:
            for size in sizes:
                cpu_runtime.in_threads(lambda number: None, 100, threads=size)
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(sizes,)) for sizes in (range(2, 40, 2), range(3, 41, 2))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    threads.submit(lambda: None, 1)
    assert not errors
    assert threads._pool is not None
    threads._pool.shutdown()


def test_threads_that_work_alone_leave_other_threads_their_number() -> None:
    num_threads: list[int] = []

    def ask() -> None:
        num_threads.append(torch.get_num_threads())

    with torch_threads(3):
        with cpu_runtime.start_threads(2, "test") as pool:
            assert {f.result() for f in [pool.submit(torch.get_num_threads) for _ in range(8)]} == {1}
        later = threading.Thread(target=ask)
        later.start()
        later.join()
        assert torch.get_num_threads() == 3
    assert num_threads == [3]
