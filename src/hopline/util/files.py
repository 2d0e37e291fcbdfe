"""Files that are written whole or not at all: after a kill or a full disk, the old file is still there.

A file is written under another name, flushed to the disk, and then renamed, which the file system does in
one step:

    weights.pt.PID.THREAD.unfinished   --write, fsync-->   --rename-->   weights.pt

The price is one wait for the disk per file. A process that is killed while it writes leaves the unfinished
file, which `remove_unfinished` deletes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"
"""Suffix of a file's name while it is written. A killed process may leave such a file."""


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Open a file that replaces `path` in one step at the end of the context.

    Readers see the old content or the new. A process that has the old file open continues to read it. If
    the body or the disk fails, the old file stays and the unfinished one is deleted.
    """
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
