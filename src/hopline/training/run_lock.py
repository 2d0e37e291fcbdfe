"""A run folder has one writer at a time: a lock of the operating system, which ends with the process that holds it.

Two runs in one folder would mix their records and replace each other's checkpoints. The lock is on a file in the
folder, `run.lock`, that says who holds it. A killed process leaves the file but not the lock, so a run that was killed
is resumed without a word about it. Processes that the holder starts do not have the lock, whether forked or spawned:
one that outlives a killed trainer does not keep its run from being resumed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Self

from hopline.util.log import logger

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

FILE = "run.lock"
HANDOVER_S = 5.0
"""How long a run that is to be resumed waits for the one before it: ranks that a launcher ends may take seconds."""

_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()
"""Locks of this process, each from `__enter__` to `__exit__`. Owned by this module: a forked child closes them."""


class RunLock:
    """A context that holds a run folder, which it makes if need be, and removes again where it stayed empty.

    wait_s: for how long another run may go on holding it before this one is refused.
    """

    def __init__(self, folder: Path, wait_s: float = 0.0) -> None:
        self.folder = folder
        self.wait_s = wait_s
        self._file: int | None = None
        self._new_folders: list[Path] = []

    def __enter__(self) -> Self:
        self._new_folders = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        deadline = time.monotonic() + self.wait_s
        try:
            while not self._try_lock():
                if time.monotonic() >= deadline:
                    raise ValueError(self._refusal())
                time.sleep(0.1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(
                f"Cannot write the run folder '{self.folder}' ({reason}): choose another with out=FOLDER."
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            # Removed while it is held: whoever has it open sees afterwards that it is not the file of that name.
            (self.folder / FILE).unlink(missing_ok=True)
            self.close()
        with contextlib.suppress(OSError):  # not empty
            for path in self._new_folders:
                path.rmdir()

    def close(self) -> None:
        """Close the file: the lock is gone if this is the process that took it."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        _held_locks.discard(self)

    def _try_lock(self) -> bool:
        """Whether the lock is ours now."""
        self.folder.mkdir(parents=True, exist_ok=True)  # a run that failed at once has removed what it had made
        if fcntl is None:
            return True
        path = self.folder / FILE
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file_at(path, file):  # its holder has removed it in the meantime
                os.close(file)
                return False
        except OSError as error:
            os.close(file)
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if is_held:
                return False
            logger.warning(
                f"{self.folder} cannot be locked ({error.strerror}): see to it that no other run has this folder"
            )
            path.unlink(missing_ok=True)
            return True

        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        _held_locks.add(self)
        return True

    def _refusal(self) -> str:
        path = self.folder / FILE
        holder = ""
        with contextlib.suppress(OSError):  # its holder may have removed it by now
            holder = path.read_text(errors="replace")[:200].strip()
        remark = f" ({holder})" if holder else ""
        return (
            f"{self.folder} is being written by another run{remark}: wait for its end, choose another folder with "
            f"out=, or, if that host is gone, remove {path}"
        )


def _is_file_at(path: Path, file: int) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """A forked process shares the open file, and with it the lock: closed here, it is the parent's alone."""
    for lock in list(_held_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
