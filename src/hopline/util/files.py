"""Files that are whole or not there: what a kill or a full disk interrupts leaves the old one."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"
"""How the name of a file ends while it is written; a killed process may leave one."""


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file to write in, which takes the place of `path` in one step once it is on the disk.

    Readers see the old content or the new, and who has the old file open reads on undisturbed. Where writing fails the
    old file stays and no other is left.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until renamed files are on the disk under their new names."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed while they wrote have left in a folder."""
    for path in folder.glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)
