"""The tools that all Numba kernels share: compilation, keyed random numbers, prefetch, and threads.

Threads. Kernels release the GIL, so plain Python threads run them in parallel. A kernel for several threads
takes a range start .. stop - 1 of its output, and `over_ranges` divides the work:

    over_ranges(run, size, work)     0 .. size - 1 in ranges, four for each thread
      in_threads(run, count)         the caller and helpers of a pool take the next range until none is left

Ranges are taken by whichever thread is free, so a kernel must give the same result for any division. The
kernels do: each number of the output is computed by one range alone, or is a sum of integers.

The number of threads is that of torch, `torch.get_num_threads()`, unless the calling thread has set another
one by `serial_here` or `own_threads`.

Random numbers are those of `ops.random`: draw j of a node is mix(mix(key ^ node) + (j + 1) * GOLDEN).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hopline.ops import random
from hopline.ops.cpu.kernel_cache import cache_on_disk

# Numba turns a product of uint64 and int64 into float64, so every constant of the generator is a uint64.
GOLDEN = np.uint64(random.GOLDEN)
"""The step of SplitMix64's state between two draws."""
_MIX_1 = np.uint64(random.MIX_1)
_MIX_2 = np.uint64(random.MIX_2)
# Shifts, in bits.
_U27 = np.uint64(27)
_U30 = np.uint64(30)
_U31 = np.uint64(31)
_U32 = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of every kernel: no GIL, cached on disk, no check for division by zero."""
    return cache_on_disk(numba.njit(nogil=True, error_model="numpy")(function))


def inlined(function: Callable[..., Any]) -> Any:
    """Decorator of small functions that kernels call: `kernel`, and inlined by Numba."""
    return cache_on_disk(numba.njit(nogil=True, error_model="numpy", inline="always")(function))


@intrinsic
def _prefetch(typingctx, array, index):
    """Ask the processor to load the cache line of array[index]. Nothing waits, and any index is safe.

    For an array of several dimensions, `index` counts elements from the start of its memory.
    """
    signature = types.void(array, index)

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        data = cgutils.create_struct_proxy(array_type)(context, builder, args[0]).data
        position = context.cast(builder, args[1], signature.args[1], types.intp)
        address = builder.bitcast(builder.gep(data, [position]), cgutils.voidptr_t)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3]),
            "llvm.prefetch.p0",
        )
        # Into the second-level cache. The first-level cache can have only a few lines under way, and these
        # are left to the loads.
        read, second_level, data_cache = (ir.Constant(ir.IntType(32), v) for v in (0, 2, 1))
        builder.call(function, [address, read, second_level, data_cache])
        return context.get_dummy_value()

    return signature, codegen


prefetch: Any = _prefetch  # Numba supplies the first argument, which type checkers cannot know


@inlined
def mix(z):
    """The output function of SplitMix64: uint64 to uint64, one to one."""
    z = (z ^ (z >> _U30)) * _MIX_1
    z = (z ^ (z >> _U27)) * _MIX_2
    return z ^ (z >> _U31)


@inlined
def bounded(raw, limit):
    """A 64-bit draw scaled to 0 .. limit - 1: the integer part of raw / 2**64 * limit. limit: below 2**31.

    The product has up to 95 bits, so it is computed from the two halves of `raw`.
    """
    n = np.uint64(limit)
    return np.int64(((raw >> _U32) * n + (((raw & _LOW_HALF) * n) >> _U32)) >> _U32)


_local = threading.local()
"""Thread-local. `threads` is the number of threads that a kernel called from this thread may use.

It is set by `serial_here`, and inside `own_threads`. If it is missing or None, torch's number counts.
"""
_WORK_PER_THREAD = 1 << 18
"""Numbers to add up (edges times columns, for example) for which waking another thread pays."""
_RANGES_PER_THREAD = 4
"""Ranges for each thread. Threads take them one by one, so a thread that lost its core for a while does not
hold up the others. The number is a rule of thumb.
"""


def serial_here() -> None:
    """Make kernels and torch's operations use no other thread when they are called from this one.

    For threads of a pool, which work in parallel already.
    """
    _local.threads = 1
    # The first call of get_num_threads in a thread sets the thread's number, so it must come before
    # set_num_threads.
    torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread only


@contextlib.contextmanager
def own_threads(threads: int) -> Generator[None, None, None]:
    """Give kernels called from this thread `threads` threads of hopline, and torch's operations one.

    At the end of every operation torch's threads wait for each other, at first by spinning. The spinning
    takes cores from the threads that prepare batches. It costs more than torch's threads gain if the long
    operations are hopline's kernels.
    """
    previous_threads = getattr(_local, "threads", None)
    torch_threads = torch.get_num_threads()
    _local.threads = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        _local.threads = previous_threads


def start_threads(count: int, name: str, begin: Callable[[], object] = serial_here) -> ThreadPoolExecutor:
    """A pool of `count` threads, each of which has already started and called `begin`.

    A thread that asks torch for its number of threads for the first time gets the number that any thread
    set last. So all threads of the pool set theirs before this function returns, and then the caller's
    number is set again.
    """
    torch_threads = torch.get_num_threads()
    all_started = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin)
    # A task that waits holds its thread, so `count` such tasks make the pool start all of its threads.
    for _ in range(count):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(torch_threads)
    return pool


class _KernelThreads:
    """The pool of threads that help with kernels.

    This module owns the only instance, `_kernel_threads`: the cores belong to the process, and so does the
    pool. The threads start with the first kernel that needs them, and wait for work until the process ends.
    Any thread may ask for the pool.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0
        self._lock = threading.Lock()

    def submit(self, task: Callable[[], None], count: int) -> list[Future[None]]:
        """Give the pool a task `count` times. A pool of fewer than `count` threads is replaced by a larger one."""
        # Held until the pool has the tasks: another thread that needs a larger pool shuts this one down,
        # and a pool that is shut down takes no task. The lock also keeps two threads from starting a pool
        # each.
        with self._lock:
            if self._pool is None or self._size < count:
                if self._pool is not None:
                    self._pool.shutdown(wait=False)  # tasks that it was given still run
                self._pool = start_threads(count, "hopline-ops")
                self._size = count
            return [self._pool.submit(task) for _ in range(count)]


_kernel_threads = _KernelThreads()


def _max_threads() -> int:
    return getattr(_local, "threads", None) or torch.get_num_threads()


def over_ranges(run: Callable[[int, int], object], size: int, work: int) -> None:
    """Call run(start, stop) for ranges that together are 0 .. size - 1, in threads if the work is worth it.

    run: a kernel that releases the GIL, whose result does not depend on how 0 .. size - 1 is divided.
    work: the numbers to add up in all. It decides how many threads are used (see `_WORK_PER_THREAD`).
    """
    threads = min(_max_threads(), size, 1 + work // _WORK_PER_THREAD)
    if threads <= 1:
        run(0, size)
        return
    count = min(size, threads * _RANGES_PER_THREAD)
    bounds = [size * i // count for i in range(count + 1)]
    in_threads(lambda i: run(bounds[i], bounds[i + 1]), count, threads)


def in_threads(run: Callable[[int], object], count: int, threads: int | None = None) -> None:
    """Call run(0) .. run(count - 1), each once, in this thread and in idle threads of the pool.

    Returns when all calls have ended. An exception of any call is raised here. `threads` counts the calling
    thread; None means as many as this thread may use.

    The caller takes numbers as well, so the work is done even if no helper is free.
    """
    numbers = itertools.count()  # next() on it is atomic, so no number is taken twice
    held_run = [run]  # a list, so that it can be emptied below

    def run_numbers() -> None:
        """Take the next number and run it, until none is left."""
        while (number := next(numbers)) < count:
            held_run[0](number)

    num_helpers = min(threads or _max_threads(), count) - 1
    helpers = _kernel_threads.submit(run_numbers, num_helpers) if num_helpers > 0 else []
    try:
        run_numbers()
    finally:
        # Either all numbers are taken, or `run` has failed in this thread. In both cases a helper that has
        # not begun is not needed. The others are waited for, since they may still use the arrays of `run`.
        running = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(running)
        # A cancelled helper stays in the pool's queue for a while, and must not keep the tensors of `run`
        # alive.
        held_run.clear()
    for helper in running:
        helper.result()
