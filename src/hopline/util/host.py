"""The host: its identity, cores that this process may use, who set its threads, and freed memory that is kept."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> int:
    """Cores that the system lets this process run on, within the share that its container is given."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return min(allowed, _cgroup_cores(cgroup) or allowed)


def host_identity() -> str:
    """Text that is equal in two processes if they can share memory: on one machine, and in one container of it.

    Hosts may have the same name, and containers of one machine share its boot id, so both are part of it. The number
    space of processes and the folder of shared memory are a container's own.
    """
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "/".join(parts)


THREADS = "OMP_NUM_THREADS"
"""The variable by which users, and launchers, limit the threads of a process."""


def who_set_threads(proc: Path = Path("/proc")) -> Literal["user", "launcher"] | None:
    """Who has set OMP_NUM_THREADS for this process; None where it is not set.

    torchrun and `accelerate launch` set it to 1 where the user has not, and so does Ray in its workers. Then it says
    nothing about the cores of this process. Linux keeps the environment that a process was started with, which tells
    them from the user: torchrun's own process was started without the variable, and so was a worker of Ray, which sets
    it later. Another number than 1 is the user's: Ray takes it from the CPUs that were asked for per worker.
    """
    if THREADS not in os.environ:
        return None
    if os.environ[THREADS] != "1":
        return "user"
    launcher_process = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher_process = os.getppid()
    elif "RAY_JOB_ID" in os.environ:
        launcher_process = os.getpid()
    if launcher_process is None:
        return "user"
    try:
        initial_environment = (proc / str(launcher_process) / "environ").read_bytes().split(b"\0")
    except OSError:  # another system, or a process of somebody else
        return "user"
    had_variable = any(entry.startswith(f"{THREADS}=".encode()) for entry in initial_environment)
    return "user" if had_variable else "launcher"


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


def _cgroup_cores(cgroup: Path) -> int | None:
    """Whole cores of a container's share, of version 2 (cpu.max) or 1 of control groups; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return max(1, round(int(quota) / int(period))) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None


MAX_KEPT_BLOCK_BYTES = 1 << 30
"""Blocks up to this size stay in the process when they are freed."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory at the top of the heap that is kept: the most that glibc can be told, in bytes."""
GLIBC_LARGEST_BYTES = 32 << 20
"""glibc's own limit for blocks that stay in the process, once larger ones were freed (DEFAULT_MMAP_THRESHOLD_MAX)."""
_M_TRIM_THRESHOLD = -1
"""glibc's number of a setting in `mallopt`: the free memory at the top of the heap that is kept, in bytes."""
_M_MMAP_THRESHOLD = -3
"""glibc's number of a setting in `mallopt`: the size of blocks, in bytes, from which each is a mapping of its own."""
_M_ARENA_MAX = -8
"""glibc's number of a setting in `mallopt`: the most heaps that the threads of a process have."""


class _Heap:
    """glibc's settings for freed memory. Like the heap itself they are of the whole process, so there is one object.

    This module owns it. Settings cannot be read back, so it counts who asks for them, under a lock: trainers may fit in
    several threads. After the last one it sets what glibc uses itself once large blocks were freed, and gives back
    what is free. Who asks by `keep_freed_memory` is never the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0

    def enter(self) -> bool:
        """Keep freed memory from now on. False where that cannot be set, or where the user has set it."""
        library = _glibc()
        if library is None:
            return False
        with self._lock:
            self._num_users += 1
            _set_thresholds(library, max_block_bytes=MAX_KEPT_BLOCK_BYTES, max_free_bytes=KEPT_BYTES)
        return True

    def leave(self) -> None:
        """End what one `enter` that returned True has begun."""
        library = _glibc()
        with self._lock:
            self._num_users -= 1
            if library is not None and self._num_users == 0:
                # glibc's own rule: twice the largest block that stays.
                _set_thresholds(library, max_block_bytes=GLIBC_LARGEST_BYTES, max_free_bytes=2 * GLIBC_LARGEST_BYTES)
                library.malloc_trim(0)


_heap = _Heap()


@contextlib.contextmanager
def keep_freed_memory_within() -> Iterator[None]:
    """A context in which freed memory is kept for the next batch, instead of going back to the system.

    A batch's rows are tens of megabytes. glibc returns such blocks to the system at once. The next batch then waits for
    the system to clear every page of new ones, which takes longer than filling them. Settings made in the environment
    (MALLOC_...) are left alone, and so are other C libraries.
    """
    entered = _heap.enter()
    try:
        yield
    finally:
        if entered:
            _heap.leave()


def keep_freed_memory() -> bool:
    """Keep freed memory for the next batch, for as long as the process lives. True where the C library is told so.

    `Trainer.fit` does so by itself until it ends. In a training loop of your own, call this once at its beginning:
    loaders change no setting of the process. It also makes all threads share one heap: those that a thread has of its
    own hold no block over 64 MB. glibc cannot undo that, so `Trainer.fit` leaves it alone.
    """
    library = _glibc()
    if library is None:
        return False
    shares_one_heap = bool(library.mallopt(_M_ARENA_MAX, 1))
    return shares_one_heap and _heap.enter()


def _set_thresholds(library: ctypes.CDLL, *, max_block_bytes: int, max_free_bytes: int) -> None:
    library.mallopt(_M_TRIM_THRESHOLD, max_free_bytes)
    library.mallopt(_M_MMAP_THRESHOLD, max_block_bytes)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the user has set nothing for its heap."""
    user_has_set = any(name.startswith("MALLOC_") for name in os.environ)
    if not sys.platform.startswith("linux") or user_has_set:
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.mallopt, library.malloc_trim  # raises AttributeError where one is missing
    except (OSError, AttributeError):  # another C library
        return None
    return library
