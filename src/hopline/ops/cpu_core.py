"""What the Numba kernels share: the generator, prefetch, and threads over ranges.

Numba does not see a change in this file from the cache of another one: `make clean` after editing it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
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
        read, all_levels, data_cache = (ir.Constant(ir.IntType(32), v) for v in (0, 3, 1))
        builder.call(function, [address, read, all_levels, data_cache])
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


def serial_here() -> None:
    """Kernels called from this thread run in it alone: it is one of several that work side by side."""
    _local.serial = True


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="hopline-ops")
        return _pool


def over_ranges(run: Callable[[int, int], object], size: int, work: int) -> None:
    """Call run(start, stop) over 0 .. size, in as many threads as torch may use once `work` pays for them."""
    allowed = 1 if getattr(_local, "serial", False) else torch.get_num_threads()
    threads = min(allowed, size, 1 + work // (1 << 16))
    if threads <= 1:
        run(0, size)
        return
    bounds = [size * t // threads for t in range(threads + 1)]
    pending = [_threads().submit(run, a, b) for a, b in itertools.pairwise(bounds[1:])]
    run(0, bounds[1])
    for future in pending:
        future.result()
