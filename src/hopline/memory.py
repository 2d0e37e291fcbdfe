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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def reuse_freed_memory() -> bool:
    """Keep freed memory for the next batch instead of giving it back; True where the C library can (glibc).

    A batch's rows are tens of megabytes. By default glibc returns such blocks to the system at once, and the next batch
    pays for the system clearing every page of new ones, which takes longer than filling them. Settings made in the
    environment (MALLOC_...) are left alone.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_REUSED_BYTES)) and bool(trimmed)
