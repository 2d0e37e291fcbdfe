"""`FileLock`: one process, and one thread of it, writes a folder at a time.

Two runs in one folder would mix their records and replace each other's checkpoints, and two conversions each
other's arrays. The lock is an `flock` of the operating system, on a file whose text says who holds it. The
system releases it when the process ends. So a killed process leaves the file but not the lock.

Processes that the holder starts do not have the lock, whether forked or spawned. One that outlives a killed
holder keeps nobody from taking it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
import weakref
from pathlib import Path
from typing import Self

from hopline.util.log import logger

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

MAX_OPENS = 10
"""Most attempts to open the file of the lock while another process removes its folder."""

_held_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
"""Locks that this process holds, each from `__enter__` to `__exit__`. A forked child closes its copies."""


class FileLock:
    """A context that holds a lock.

    It creates the folder of its file if it does not exist. At the end it removes the folders that it created and
    that are empty. Where the system or the file system has no locks, it says so and holds none.

    path: the file. folder: the folder that the lock protects, for messages. wait_s: seconds to wait for another
    holder, before a ValueError is raised. advice: what else the user can do then.
    """

    def __init__(self, path: Path, folder: Path, wait_s: float = 0.0, advice: str = "choose another folder") -> None:
        self.path = path
        self.folder = folder
        self.wait_s = wait_s
        self.advice = advice
        self._file: int | None = None
        self._new_folders: list[Path] = []

    def __enter__(self) -> Self:
        self._new_folders = [path for path in self.path.parents if not path.exists()]
        deadline = time.monotonic() + self.wait_s
        is_waiting = False
        while not self._locks():
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{self.folder} is being written by {self._holder()}: wait for its end, {self.advice}, or, if that "
                    f"host is gone, remove {self.path}"
                )
            if not is_waiting:
                logger.info(f"waiting for {self._holder()}, which writes {self.folder}")
            is_waiting = True
            time.sleep(0.1)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            # The file is removed before the lock is released. In the other order, another process could take the
            # lock in between, and this one would remove the file of a held lock.
            # Another process may still have opened the file before its removal. It then gets the lock of a file
            # that no path leads to. `_try_lock` notices this and gives the lock back.
            self.path.unlink(missing_ok=True)
            self.close()
        # A folder that is not empty stays, and so do its parents.
        with contextlib.suppress(OSError):
            for path in self._new_folders:
                path.rmdir()

    def close(self) -> None:
        """Close the file. In the process that took the lock, this releases it.

        In a forked child it closes only the child's copy, and the parent still holds the lock.
        """
        if self._file is not None:
            os.close(self._file)
        self._file = None
        _held_locks.discard(self)

    def _locks(self) -> bool:
        """`_try_lock`, with a ValueError where the system refuses to write."""
        try:
            return self._try_lock()
        except OSError as error:
            blocking = next((path for path in self.path.parents if path.is_file()), None)
            reason = f"{blocking} is a file" if blocking else error.strerror or type(error).__name__
            raise ValueError(f"Cannot write {self.folder} ({reason}): {self.advice}") from error

    def _try_lock(self) -> bool:
        """Try to take the lock, without waiting. Returns whether the caller may go on."""
        if fcntl is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return True
        file = self._open_file()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder may have removed the file after it was opened here. Then the lock protects nothing.
            if not _is_file_at(self.path, file):
                os.close(file)
                return False
        except OSError as error:
            os.close(file)
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if is_held:
                return False
            logger.warning(
                f"{self.folder} cannot be locked ({error.strerror}): see to it that no other process writes it"
            )
            # `__exit__` removes only the file of a lock that is held.
            self.path.unlink(missing_ok=True)
            return True

        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}\n".encode())
        self._file = file
        _held_locks.add(self)
        return True

    def _open_file(self) -> int:
        """Open the file of the lock, and create it and its folder if they do not exist.

        At its end another process removes a folder that it made and left empty. If it does so between the two
        calls below, the second one fails, and both are tried again.
        """
        num_failures = 0
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            # FileExistsError: the folder existed when `mkdir` tried to make it, and was gone when `mkdir` then
            # checked that it is a folder.
            except (FileNotFoundError, FileExistsError):
                num_failures += 1
                if num_failures == MAX_OPENS:
                    raise

    def _holder(self) -> str:
        """Who holds the lock, by the text of its file, which the holder may have removed by now."""
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace")[:200].strip() or "another process"
        return "another process"


def _is_file_at(path: Path, file: int) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """Close the locks in a forked child, which shares the open files. Then the parent alone holds them."""
    for lock in list(_held_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
