"""What the Numba kernels share: the generator, prefetch, and threads over ranges.

Numba does not see a change in this file from the cache of another one: `make clean` after editing it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hopline.ops import random

GOLDEN = np.uint64(random.GOLDEN)
_MIX_1, _MIX_2 = np.uint64(random.MIX_1), np.uint64(random.MIX_2)
_U27, _U30, _U31, _U32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)

kernel = numba.njit(nogil=True, cache=True, error_model="numpy")
"""How every kernel is compiled: without the GIL, kept on disk, no checks for division by zero."""
inlined = numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")


@intrinsic
def _prefetch(typingctx, array, index):
    """Ask for the cache line of array[index]; any index is safe, nothing is read."""
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
        # Into the second-level cache: the few slots of the first for lines under way are left to the loads.
        read, second_level, data_cache = (ir.Constant(ir.IntType(32), v) for v in (0, 2, 1))
        builder.call(function, [address, read, second_level, data_cache])
        return context.get_dummy_value()

    return signature, codegen


prefetch: Any = _prefetch  # Numba supplies the first argument, which type checkers cannot know


@inlined
def mix(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> _U30)) * _MIX_1
    z = (z ^ (z >> _U27)) * _MIX_2
    return z ^ (z >> _U31)


@inlined
def bounded(raw, limit):
    """A 64-bit draw scaled to 0 .. limit - 1; limit below 2**31."""
    n = np.uint64(limit)
    return np.int64(((raw >> _U32) * n + (((raw & _LOW_HALF) * n) >> _U32)) >> _U32)


_local = threading.local()
"""`threads`: how many a kernel called from this thread may use, set by `serial_here` and within `own_threads`."""
_WORK_PER_THREAD = 1 << 18
"""Numbers to add up for which waking another thread pays."""
_RANGES_PER_THREAD = 4
"""Ranges are handed out one by one, so that a thread that lost its core to other work does not hold up the rest."""


def serial_here() -> None:
    """All that this thread calls runs in it alone: it is one of several that work side by side."""
    _local.threads = 1
    torch.get_num_threads()  # the first call in a thread sets its number, so it must not come after
    torch.set_num_threads(1)  # of this thread only


@contextlib.contextmanager
def own_threads(threads: int) -> Generator[None, None, None]:
    """Within, kernels called from this thread use `threads` threads of ours, and torch's own ops run in this one alone.

    torch's threads wait for each other at the end of every op, by spinning at first. Beside threads that prepare
    batches that costs more than it gains, where the long ops are ours.
    """
    before, torch_threads = getattr(_local, "threads", None), torch.get_num_threads()
    _local.threads = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        _local.threads = before


def start_threads(count: int, name: str, begin: Callable[[], object] = serial_here) -> ThreadPoolExecutor:
    """Threads that have all begun, each by calling `begin`.

    torch gives the number of threads that was set last, by whichever thread, to every thread that asks later. So ours
    set theirs before this returns, and the caller's is set again.
    """
    torch_threads = torch.get_num_threads()
    begun = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin)
    for _ in range(count):
        pool.submit(begun.wait)
    begun.wait()
    torch.set_num_threads(torch_threads)
    return pool


class _KernelThreads:
    """The threads that help with kernels. `_kernel_threads` is the one object of the process, since cores are its own.

    This module owns it. They start with the first kernel that needs them, and wait for work until the process ends.
    Any thread may ask for them.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0
        self._lock = threading.Lock()

    def at_least(self, count: int) -> ThreadPoolExecutor:
        """`count` of them or more."""
        with self._lock:
            if self._pool is None or self._size < count:
                if self._pool is not None:
                    self._pool.shutdown(wait=False)  # what it was given is still done
                self._pool, self._size = start_threads(count, "hopline-ops"), count
            return self._pool


_kernel_threads = _KernelThreads()


def _allowed() -> int:
    """Threads that a kernel called from here may use."""
    return getattr(_local, "threads", None) or torch.get_num_threads()


def over_ranges(run: Callable[[int, int], object], size: int, work: int) -> None:
    """Call run(start, stop) over 0 .. size, in as many threads as may be used once `work` pays for them."""
    threads = min(_allowed(), size, 1 + work // _WORK_PER_THREAD)
    if threads <= 1:
        run(0, size)
        return
    count = min(size, threads * _RANGES_PER_THREAD)
    bounds = [size * i // count for i in range(count + 1)]
    in_threads(lambda i: run(bounds[i], bounds[i + 1]), count, threads)


def in_threads(run: Callable[[int], object], count: int, threads: int | None = None) -> None:
    """Call run(0) .. run(count - 1), each once, in this thread and others that have nothing else to do."""
    numbers = itertools.count()  # next() on it is atomic
    work = [run]

    def take() -> None:
        while (number := next(numbers)) < count:
            work[0](number)

    num_helpers = min(threads or _allowed(), count) - 1
    pool = _kernel_threads.at_least(num_helpers) if num_helpers > 0 else None
    helpers = [] if pool is None else [pool.submit(take) for _ in range(num_helpers)]
    try:
        take()
    finally:
        waiting = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(waiting)
        work.clear()  # a helper that never began is in the pool's queue for a while, and must not hold on to tensors
    for helper in waiting:
        helper.result()
