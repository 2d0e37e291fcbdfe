"""Files that are written whole or not at all: after a kill or a full disk, the old file is still there.

A file is written under another name, flushed to the disk, and then renamed, which the file system does in
one step:

    weights.pt.PID.THREAD.unfinished   --write, fsync-->   --rename-->   weights.pt

The price is one wait for the disk per file. A process that is killed while it writes leaves the unfinished
file, which `remove_unfinished` deletes.

Files that are mapped and written in place have their space reserved first (`reserve`, `new_mapped_file`). Else
a write to a page for which a full disk has no space would end the process by SIGBUS, without a message.

`CheckedFile` also writes a checksum beside the file, for files whose own format other programs must read:

    weights.pt.sha256   SHA-256 of the content that `weights.pt` has, and of the one that it had or is about to have
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from hopline.util.config import format_size

UNFINISHED = ".unfinished"
"""Suffix of a file's name while it is written. A killed process may leave such a file."""


def check_file(path: Path) -> None:
    """Refuse a path that is no regular file. Opening a named pipe would wait for its other end for ever."""
    if path.is_file():
        return
    if not path.exists():
        raise ValueError(f"There is no file {path}: check the path.")
    what = "a folder" if path.is_dir() else "a pipe or a device"
    raise ValueError(f"{path} is {what}: give a file.")


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Open a file that replaces `path` in one step at the end of the context.

    Readers see the old content or the new. A process that has the old file open continues to read it. If
    the body or the disk fails, the old file stays and the unfinished one is deleted.

    A symbolic link is followed. What is no file, such as /dev/stdout, is written directly.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    # The process and the thread are part of the name, so that two writers of one path do not write into one
    # file.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            # Before the rename: else a power failure could leave the new name with no content.
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class CheckedFile:
    """A file with a checksum beside it. One object writes it, from one thread; any number may read it.

    The checksum is on the disk before the file is replaced, in a list with those of the earlier content. So a
    kill between the two leaves a file that matches one of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checksum_path = path.with_name(f"{path.name}.sha256")
        self._current: list[str] | None = None
        """Checksums that the file may have now. None before the first write: those that are listed."""

    @contextmanager
    def replacing(self) -> Generator[IO[bytes]]:
        """As `replacing`, for the file and its checksum. What is yielded can only be written, from start to end."""
        if self._current is None:
            self._current = self._listed() or []
        with replacing(self.path) as file:
            hashing = _HashingFile(file)
            yield hashing  # type: ignore[misc]
            checksum = hashing.sha256.hexdigest()
            with replacing(self.checksum_path) as list_file:
                list_file.write("".join(f"{known}\n" for known in (*self._current, checksum)).encode())
            self._current.append(checksum)  # stays listed if the disk fails before the file is replaced
        self._current = [checksum]

    @property
    def has_checksum(self) -> bool:
        """Whether a checksum lies beside the file."""
        return self.checksum_path.exists()

    def read(self) -> bytes:
        """The content of the file, compared with its checksum if there is one.

        Raises:
            OSError: The file cannot be read.
            ValueError: The content does not match the checksum. The message is a clause.
        """
        content = self.path.read_bytes()
        listed = self._listed()
        if listed is not None and hashlib.sha256(content).hexdigest() not in listed:
            raise ValueError(f"{self.checksum_path.name} has another checksum")
        return content

    def _listed(self) -> list[str] | None:
        """The checksums beside the file; None if there are none."""
        try:
            return self.checksum_path.read_text(errors="replace").split()
        except FileNotFoundError:
            return None


class _HashingFile:
    """Passes what is written on to a file, and computes its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, as after a rename."""
    if os.name != "posix":  # other systems cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Delete the unfinished files of a folder, which killed processes have left.

    Called while nobody writes into the folder: files that are being written would be deleted too.
    """
    for path in folder.glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)


def reserve(file: int, num_bytes: int) -> None:
    """Reserve `num_bytes` of zeros, at least one, for an empty file. Raises an OSError if there is less space.

    file: descriptor of the file, on a disk or in memory.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, max(1, num_bytes))
        return
    zeros = bytes(1 << 20)
    with open(file, "wb", closefd=False) as out:
        for start in range(0, max(1, num_bytes), len(zeros)):
            out.write(zeros[: max(1, num_bytes) - start])


def new_mapped_file(path: Path, num_bytes: int) -> None:
    """Create a file of zeros to map, with its space reserved. A file of that name is emptied first.

    Raises a ValueError if there is not enough space.
    """
    try:
        with path.open("wb") as file:
            try:
                reserve(file.fileno(), num_bytes)
            except OSError:
                path.unlink()  # some file systems leave it with all the space that there was
                raise
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror or error}): free some space for its {format_size(num_bytes)}, "
            "or choose a folder on another disk"
        ) from error
