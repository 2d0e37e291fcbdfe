"""The host: cores that this process may use, how long a thread waited for one, and freed memory that is kept."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that the system lets this process run on, within the share that its container is given."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _quota(cgroup) or allowed)


def queued_s() -> float:
    """Seconds that this thread was ready to run and had no core, since it began; 0 where the system does not say."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 64).split()[1]) / 1e9
    finally:
        os.close(file)


def _quota(cgroup: Path) -> int | None:
    """Whole cores of a container's share, of version 2 (cpu.max) or 1 of control groups; None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return max(1, round(int(limit) / int(period))) if int(limit) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None


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
