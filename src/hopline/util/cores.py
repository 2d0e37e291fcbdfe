"""How many cores this process may use, and how long a thread waited for one."""

from __future__ import annotations

import os
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
