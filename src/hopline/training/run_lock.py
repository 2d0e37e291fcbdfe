"""The lock of a run folder, so that only one run writes into it at a time.

Two runs in one folder would mix their records and replace each other's checkpoints. The lock is an `flock`
of the operating system on the file `run.lock` in the folder, whose text says who holds it. The system
releases the lock when the process ends. So a killed run leaves the file but not the lock, and can be
resumed at once.

Processes that the holder starts do not have the lock, whether forked or spawned. One that outlives a killed
trainer does not keep the run from being resumed.
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
"""Name of the lock in a run folder."""
HANDOVER_S = 5.0
"""Seconds that a resumed run waits for the earlier run to end and release the lock. Ranks may need seconds
to end after their launcher was stopped. A rule of thumb."""
MAX_OPENS = 10
"""Most attempts to open the file of the lock while another run removes the folder. A rule of thumb."""

_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()
"""Locks that this process holds, each from `__enter__` to `__exit__`. A forked child closes its copies.

The references are weak, so the set keeps no lock alive that its owner has dropped.
"""


class RunLock:
    """A context that holds the lock of a run folder.

    It creates the folder and its parents if they do not exist. At the end it removes those of them that did
    not exist before and are empty.

    wait_s: seconds to wait for another run that holds the lock, before a ValueError is raised.
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
            # The file is removed before the lock is released. In the other order, another run could take the
            # lock in between, and this one would remove the file of a held lock.
            # Another run may still have opened the file before its removal. It then gets the lock of a file
            # that no path leads to. `_try_lock` notices this and gives the lock back.
            (self.folder / FILE).unlink(missing_ok=True)
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

    def _try_lock(self) -> bool:
        """Try to take the lock, without waiting. Returns whether this process has it now.

        Where the system or the file system has no locks, it returns True without one.
        """
        if fcntl is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            return True
        path = self.folder / FILE
        file = self._open_file(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder may have removed the file after it was opened here. Then the lock protects nothing.
            if not _is_file_at(path, file):
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
            # `__exit__` removes only the file of a lock that is held. This one would stay, and with it a
            # folder that is else empty.
            path.unlink(missing_ok=True)
            return True

        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        _held_locks.add(self)
        return True

    def _open_file(self, path: Path) -> int:
        """Open the file of the lock, and create it and its folder if they do not exist.

        At its end another run removes a folder that it made and left empty. If it does so between the two
        calls below, the second one fails, and both are tried again.
        """
        num_failures = 0
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            # FileExistsError: the folder existed when `mkdir` tried to make it, and was gone when `mkdir` then
            # checked that it is a folder.
            except (FileNotFoundError, FileExistsError):
                num_failures += 1
                if num_failures == MAX_OPENS:
                    raise

    def _refusal(self) -> str:
        """The message for a folder that another run holds.

        On a network file system, the server may keep the lock of a host that crashed. So the message also says
        which file to remove.
        """
        path = self.folder / FILE
        holder = ""
        # The holder may have removed the file by now.
        with contextlib.suppress(OSError):
            holder = path.read_text(errors="replace")[:200].strip()
        remark = f" ({holder})" if holder else ""
        return (
            f"{self.folder} is being written by another run{remark}: wait for its end, choose another folder with "
            f"out=, or, if that host is gone, remove {path}"
        )


def _is_file_at(path: Path, file: int) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """Close the locks in a forked child, which shares the open files.

    Then the parent alone holds the locks.
    """
    for lock in list(_held_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
