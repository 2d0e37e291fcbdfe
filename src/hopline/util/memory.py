"""Memory of batches is used again by the next ones."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

LARGEST_REUSED_BYTES = 1 << 30
"""Blocks up to this size are kept by the process when they are freed."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory at the top of the heap that is kept: as much as the C library can be told."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@functools.cache
def reuse_freed_memory() -> bool:
    """Keep freed memory for the next batch instead of giving it back; True where the C library can (glibc).

    A batch's rows are tens of megabytes. By default glibc returns such blocks to the system at once, and the next batch
    pays for the system clearing every page of new ones, which takes longer than filling them. Settings made in the
    environment (MALLOC_...) are left alone. One arena serves all threads: an arena of a thread's own holds no block
    over 64 MB, and what the training thread frees would not serve another.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: KEPT_BYTES, _M_MMAP_THRESHOLD: LARGEST_REUSED_BYTES}
    taken = [mallopt(name, value) for name, value in settings.items()]
    return all(taken)
