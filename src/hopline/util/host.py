"""The host: its identity, the cores and memory of this process, its threads and forks, and its freed memory.

Freed memory is the part with state. A batch allocates tens of megabytes and frees them. By default glibc
returns such blocks to the system at once, and the next batch waits while the system clears new pages.
`keep_freed_memory_within` and `keep_freed_memory` tell glibc to keep the blocks. The price is memory that
other processes cannot use meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux shows the limits of a container."""


def num_cores(cgroup: Path = CGROUP) -> int:
    """The number of cores that this process may use, by its affinity and the CPU limit of its container."""
    allowed = len(allowed_cores()) or os.cpu_count() or 1
    return min(allowed, _cgroup_cores(cgroup) or allowed)


def allowed_cores() -> list[int]:
    """The cores that this process may run on, sorted. Empty if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


_worked_in: set[int] = set()
"""The process in which hopline has worked with several threads of torch. A forked child inherits the entry."""


def refuse_after_fork(num_threads: int) -> None:
    """Refuse work in a process that was forked after hopline had worked in its parent.

    Threads do not survive a fork. Torch would give its own some work in the child, and wait for them for ever.
    With one thread it gives them none: so do PyTorch's DataLoader workers.

    num_threads: Those of torch, `torch.get_num_threads()`.
    """
    if num_threads == 1:
        return
    if _worked_in and os.getpid() not in _worked_in:
        raise ValueError(
            "this process was forked after hopline had worked in its parent, and torch's threads do not survive a "
            "fork: start it by multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) in it first"
        )
    _worked_in.add(os.getpid())


class HostMemory(NamedTuple):
    """The memory of the host that this process may use, in bytes."""

    total: int
    """All memory: that of the machine, or the limit of the container if that is less."""
    available: int
    """The bytes that can still be allocated. File pages that the system can take back count as available."""
    is_container: bool
    """Whether `total` is the limit of a container."""


def host_memory(cgroup: Path = CGROUP, proc: Path = Path("/proc")) -> HostMemory:
    """The memory of the machine, and less where a container limits it.

    Control groups are nested, and every limit on the way from the process's group up to the root holds. Inside a
    container the path may be that of the machine, which the container cannot see. Then its own limit is at the root.
    """
    machine = psutil.virtual_memory()
    total = machine.total
    available = machine.available
    for folder in _memory_groups(cgroup, proc):
        limits = [_read_bytes(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((bytes_ for bytes_ in limits if bytes_ is not None), default=total)
        if limit >= machine.total:  # version 1 has no word for "no limit", but a huge number
            continue
        usage = _read_bytes(folder / "memory.current") or _read_bytes(folder / "memory.usage_in_bytes") or 0
        total = min(total, limit)
        available = min(available, max(0, limit - (usage - _inactive_file_bytes(folder))))
    return HostMemory(total, available, is_container=total < machine.total)


def _memory_groups(cgroup: Path, proc: Path) -> Iterator[Path]:
    """The folders of this process's control groups for memory, from its own up to the root; only those that exist."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # another system
        lines = []
    for line in lines:
        # "5:memory:/docker/ID" in version 1, which has a folder per controller, and "0::/ID" in version 2.
        _number, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroup / "memory" if controllers else cgroup
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            # ".." leads out of the process's own namespace.
            if ".." not in group.parts and (root / group).is_dir():
                yield root / group


def _read_bytes(file: Path) -> int | None:
    """The number in a file of a control group; None for "max", and if there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(folder: Path) -> int:
    """File pages of a control group that the system takes back before it kills a process."""
    try:
        values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # Version 1 has the number of the group alone, and the total with the groups below.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def process_bytes() -> int:
    """The resident memory of this process, without pages of files and shared memory."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def host_identity() -> str:
    """Return a text that is equal in two processes if they can share memory: on one machine, in one container.

    Two hosts may have the same name, so the boot id is part of the text. Containers on one machine share
    the boot id, but each has its own process namespace and its own /dev/shm, so the text names these too.
    """
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "/".join(parts)


THREADS = "OMP_NUM_THREADS"
"""The environment variable by which users and launchers limit the threads of a process."""


def who_set_threads(proc: Path = Path("/proc")) -> Literal["user", "launcher"] | None:
    """Return who has set OMP_NUM_THREADS for this process; None if it is not set.

    torchrun, `accelerate launch` and Ray's workers set it to 1 if the user has not. Then it says nothing
    about the cores of this process. A number other than 1 is the user's: Ray takes it from the CPUs that
    the user asks for.

    Launcher and user are told apart by the environment that the launcher's process was started with, which
    Linux shows: the variable is in it if the user has set it. The process of torchrun is the parent. Ray's
    is this process, which sets the variable after its start.

    proc: the folder of process information, for tests.
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
    """Return the seconds that this thread was ready to run and had no core, since its start.

    0 if the system does not tell.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        # Three numbers: time on a core in ns, time in the queue in ns, number of time slices.
        return int(os.read(file, 64).split()[1]) / 1e9
    finally:
        os.close(file)


def _cgroup_cores(cgroup: Path) -> int | None:
    """The CPU limit of a container in whole cores, at least 1; None without a limit.

    Linux lets the container run for `quota` microseconds of core time in every `period`. Control groups of
    version 2 have both numbers in cpu.max, those of version 1 a file for each.
    """
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
    except (ValueError, ZeroDivisionError):  # no limit is "max" in version 2 and -1 in version 1
        return None


MAX_KEPT_BLOCK_BYTES = 1 << 30
"""Size of the largest block, in bytes, that stays in the process when it is freed."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory at the top of the heap that is kept, in bytes. It is the largest int, the most that glibc
accepts."""
GLIBC_LARGEST_BYTES = 32 << 20
"""glibc's own limit, in bytes, for blocks that stay in the process (DEFAULT_MMAP_THRESHOLD_MAX).

glibc raises its limit up to this number as larger blocks are freed.
"""

# ---- numbers of glibc's settings in malloc.h, for `mallopt`

_M_TRIM_THRESHOLD = -1
"""The setting for free memory at the top of the heap: more than these bytes go back to the system."""
_M_MMAP_THRESHOLD = -3
"""The setting for large blocks: from this size in bytes, a block is mapped by itself and unmapped when it
is freed."""
_M_ARENA_MAX = -8
"""The setting for the largest number of heaps that the threads of a process use."""


class _Heap:
    """glibc's settings for freed memory. They belong to the whole process, so this module owns one object.

    glibc's settings cannot be read back, so the object counts its users instead. The last user to leave
    sets the values that glibc itself reaches after large blocks were freed, and returns free memory to the
    system. A user by `keep_freed_memory` never leaves. Any thread may call: trainers may fit in several
    threads at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0

    def enter(self) -> bool:
        """Keep freed memory from now on.

        Returns False if glibc is absent, or if the user has configured it.
        """
        library = _glibc()
        if library is None:
            return False
        with self._lock:
            self._num_users += 1
            _set_thresholds(library, max_block_bytes=MAX_KEPT_BLOCK_BYTES, max_free_bytes=KEPT_BYTES)
        return True

    def leave(self) -> None:
        """End one `enter` that returned True."""
        library = _glibc()  # None if MALLOC_... was set meanwhile
        with self._lock:
            self._num_users -= 1
            if library is not None and self._num_users == 0:
                _set_thresholds(
                    library,
                    max_block_bytes=GLIBC_LARGEST_BYTES,
                    max_free_bytes=2 * GLIBC_LARGEST_BYTES,  # glibc's own rule: twice the largest block that stays
                )
                library.malloc_trim(0)


_heap = _Heap()


@contextlib.contextmanager
def keep_freed_memory_within() -> Iterator[None]:
    """Keep freed memory in the process for the next batch, while the context lasts.

    A batch's rows are tens of megabytes, and glibc returns such blocks to the system at once. The next
    batch then waits for the system to clear every page of new blocks, which takes longer than filling them.

    Nothing changes if the user has configured malloc by environment variables (MALLOC_...), or with another
    C library.
    """
    entered = _heap.enter()
    try:
        yield
    finally:
        if entered:
            _heap.leave()


def keep_freed_memory() -> bool:
    """Keep freed memory in the process for the next batch, as long as the process lives.

    In a training loop of your own, call this once at the beginning: loaders change no setting of the
    process. `Trainer.fit` keeps freed memory by itself until it ends.

    All threads share one heap afterwards, because a heap of a single thread holds no block over 64 MB.
    glibc cannot undo that, so `Trainer.fit` does not do it.

    Returns:
        True if glibc was told so. False with another C library, or if the user has set MALLOC_...
        variables.
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
    """The C library if it is glibc and no environment variable MALLOC_... configures it; else None."""
    user_has_set = any(name.startswith("MALLOC_") for name in os.environ)
    if not sys.platform.startswith("linux") or user_has_set:
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.mallopt, library.malloc_trim  # raises AttributeError where one is missing
    except (OSError, AttributeError):  # another C library
        return None
    return library
