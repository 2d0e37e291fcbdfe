"""`FolderWriter`: writes a dataset folder. A killed writer leaves the old dataset or the new one, whole.

    .NAME.tmp-HOST-PID-RANDOM    arrays and the manifest are written here, and brought to the disk
    NAME -> .NAME.old            the old folder, if there is one, becomes the backup (first rename)
    .NAME.tmp-... -> NAME        the new folder takes its name (second rename)
    .NAME.old                    is deleted

A writer that is killed before the second rename leaves the old dataset, under its name or as a backup,
which readers find (`paths.existing`). The next writer of the same folder puts a backup back and deletes
temporary folders of dead processes. The cost is disk space for both datasets until the end.

One writer at a time: it holds the lock of the file .NAME.lock (`locked`), which the system releases when its
process ends.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor

from hopline.data import manifest as manifests
from hopline.data.arrays import ArrayWriter, checksum_text, dtype_name, file_bytes
from hopline.data.manifest import ArrayEntry, Manifest
from hopline.data.paths import MANIFEST, backup_of
from hopline.util.file_lock import FileLock
from hopline.util.files import sync_folder

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = re.sub(r"[^A-Za-z0-9]", "_", platform.node()) or "host"
"""This host in the names of temporary folders: a process id says nothing about processes of other hosts."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an `OSError` while `folder` is written into a `ValueError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            text = f"The disk is full: free some space for {folder}, or write to a folder on another disk."
        else:
            reason = (error.strerror or str(error)).lower()
            text = f"Cannot write {folder} ({reason}): choose a folder that you may write to."
        raise ValueError(text) from error


_held: set[tuple[Path, int]] = set()
"""(file, thread) of each lock that this process holds: a thread that has the lock may take it again."""


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a dataset folder, so that no other process or thread writes it.

    wait: Wait while another one writes it. Else it is refused.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    path = folder.parent / f".{folder.name}.lock"
    key = (path, threading.get_ident())
    if key in _held:
        yield
        return
    with FileLock(path, folder, wait_s=math.inf if wait else 0.0):
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)


class FolderWriter:
    """Writes a dataset folder: arrays go into a temporary folder, and `commit` puts it in place.

    A context manager. Leaving it without `commit` deletes the temporary folder and keeps the target.

    Raises:
        ValueError: The target is neither a dataset nor an empty folder, or another process is writing it, or the
            system refuses to write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(Path(folder).expanduser()))
        name = f".{self.folder.name}.tmp-{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.temporary = self.folder.parent / name
        self._arrays: dict[str, ArrayWriter] = {}
        self._lock = ExitStack()

    def __enter__(self) -> FolderWriter:
        check_target(self.folder)
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            with writing(self.folder):
                _remove_stale(self.folder)
                self.temporary.mkdir()
            self._lock = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for array in self._arrays.values():
            array.abandon()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._lock.close()

    def array(self, name: str, dtype: torch.dtype, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Start an array. `append` adds its rows, each of shape [*row_shape]."""
        if not manifests.is_name(name):
            raise ValueError(f"{name!r} cannot name an array: use letters, digits, '_', '-' and '.' only.")
        with writing(self.folder):
            self._arrays[name] = ArrayWriter(self.temporary / f"{name}.npy", dtype, row_shape)
        return self._arrays[name]

    def append(self, name: str, rows: Tensor) -> None:
        """Append rows [n, *row_shape] to an array that `array` started."""
        with writing(self.folder):
            self._arrays[name].append(rows)

    def add(self, name: str, rows: Tensor) -> None:
        """Write an array as a whole."""
        self.array(name, rows.dtype, tuple(rows.shape[1:]))
        self.append(name, rows)

    def scratch(self) -> Path:
        """A folder for intermediate files. `commit` deletes it."""
        with writing(self.folder):
            path = self.temporary / "scratch"
            path.mkdir(exist_ok=True)
        return path

    def commit(self, **fields: Any) -> None:
        """Write the manifest, then put the new folder in place of the old one.

        fields: All fields of `Manifest` but `arrays`.
        """
        with writing(self.folder):
            shutil.rmtree(self.temporary / "scratch", ignore_errors=True)
            for array in self._arrays.values():
                array.close()
            entries = {name: _manifest_entry(array) for name, array in self._arrays.items()}
            manifest = Manifest(arrays=entries, **fields)
            with (self.temporary / MANIFEST).open("w") as file:
                file.write(manifests.to_json(manifest))
                file.flush()
                os.fsync(file.fileno())
            # All files must be on the disk before the folder gets its name. Else a power cut could leave a
            # folder of that name which is not whole.
            sync_folder(self.temporary)
            _swap(self.temporary, self.folder)


def _manifest_entry(array: ArrayWriter) -> ArrayEntry:
    return ArrayEntry(
        file=array.path.name,
        dtype=dtype_name(array.dtype),
        shape=array.shape,
        num_bytes=file_bytes(array.dtype, array.shape),
        checksum=checksum_text(array.crc),
    )


def check_target(folder: Path) -> None:
    """Refuse to replace anything but a dataset or an empty folder."""
    if folder.is_dir():
        if (folder / MANIFEST).is_file() or not any(folder.iterdir()):
            return
        raise ValueError(f"{folder} exists and is not a dataset: choose a new or an empty folder.")
    if folder.exists():
        raise ValueError(f"{folder} is a file: choose a folder to write the dataset to.")


def _swap(new: Path, target: Path) -> None:
    """Put the folder `new` in place of `target`, by two renames."""
    backup = backup_of(target)
    if target.exists():
        target.rename(backup)
    new.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(backup, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Delete what killed writers of this folder left, and put a backup back in its place.

    A backup without its folder is left by a `_swap` that was killed between the two renames.
    """
    backup = backup_of(folder)
    if backup.is_dir():
        if folder.exists():
            shutil.rmtree(backup, ignore_errors=True)
        else:
            backup.rename(folder)
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.tmp-{_HOST}-([0-9]+)-[0-9a-f]+")
    for path in folder.parent.iterdir():
        match = pattern.fullmatch(path.name)
        # A live process may still be writing. The pattern has this host's name: other hosts' processes
        # cannot be asked.
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
