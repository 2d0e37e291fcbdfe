"""One copy of a dataset for all ranks of a host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from hopline.data.dataset import Dataset
from hopline.data.store import open_folder
from hopline.distributed.shared_memory import agree
from hopline.distributed.world import World

SHARED_MEMORY = Path("/dev/shm")
"""A folder that is kept in memory, where there is one."""
PREFIX = "hopline-shared-"
YOUNG_S = 10.0
"""A folder so young may belong to a rank that has not locked it yet."""


def share(dataset: Dataset | None, world: World) -> Dataset:
    """One copy, for all ranks of a host, of a dataset that was made in memory: every rank must call this.

    Only the dataset of local rank 0 is looked at, so the other ranks may give None where there are several to a host.
    A dataset opened from a folder is shared as it is, since all ranks map the same files. Nothing is left on the disk:
    the files are deleted as soon as all ranks have mapped them.
    """
    if not world.any(world.local_size > 1):
        if dataset is None:
            raise ValueError("share() needs the dataset in the first rank of every host")
        return dataset
    name = f"{PREFIX}{world.broadcast_object(uuid.uuid4().hex)}-{world.node}"
    with contextlib.ExitStack() as cleanup:
        problem: Exception | None = None
        try:
            if world.local_rank == 0:
                _save(dataset, name, cleanup)
        except Exception as error:
            problem = error
        agree(problem, world, "save the shared dataset")

        opened = dataset
        try:
            if world.local_size > 1:
                opened = _open(name)
        except Exception as error:
            problem = error
        agree(problem, world, "open the shared dataset")
    world.barrier()  # from here on no rank can find the files
    assert opened is not None
    return opened


def _save(dataset: Dataset | None, name: str, cleanup: contextlib.ExitStack) -> None:
    if dataset is None:
        raise ValueError("share() needs the dataset in the first rank of every host")
    remove_left_behind()
    needed_bytes = int(dataset.num_bytes * 1.05) + (1 << 20)
    fits_in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed_bytes
    parent = SHARED_MEMORY if fits_in_memory else Path(tempfile.gettempdir())
    folder = parent / name
    folder.mkdir(mode=0o700)
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    cleanup.enter_context(_hold_lock(folder))

    # The current split need not be one of the published ones, nor the first of them.
    current_first = (dataset.splits, *dataset.alternatives) if dataset.alternatives else ()
    replace(dataset, alternatives=current_first).save(folder / "data")


def _open(name: str) -> Dataset:
    folders = [parent / name / "data" for parent in _parents()]
    folder = next((folder for folder in folders if folder.is_dir()), folders[-1])
    opened = open_folder(folder)
    return replace(opened, alternatives=opened.alternatives[1:], folder=None)  # which will be gone


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Generator[None]:
    """Hold a lock that the system takes back when this process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_left_behind() -> None:
    """Delete what ranks left that were killed between making the folder and deleting it."""
    folders = [folder for parent in _parents() for folder in parent.glob(f"{PREFIX}*")]
    for folder in folders:
        with contextlib.suppress(OSError):
            is_own = folder.stat().st_uid == os.getuid()
            if not is_own or time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _parents() -> list[Path]:
    return [SHARED_MEMORY, Path(tempfile.gettempdir())]
