"""`share`: one copy of a dataset for all ranks of a host.

A dataset that was made in memory would be in memory once per rank. Local rank 0 saves it to a folder in
`/dev/shm`, and all ranks of the host map its files. Then the folder is deleted: the mapped pages live as
long as a rank uses them.

    local rank 0     lock, save --+                            +-- delete
    every rank                    +-- wait -- map -- wait -----+-- return

A rank that is killed half-way leaves its folder behind. A later `share` of the same user removes it, which
is safe because a live rank holds a lock on its folder.
"""

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
"""A file system in memory. Not every system has it."""
PREFIX = "hopline-shared-"
YOUNG_S = 10.0
"""Age in seconds up to which a folder may belong to a rank that has not locked it yet."""


def share(dataset: Dataset | None, world: World) -> Dataset:
    """One copy of a dataset for all ranks of a host. Collective.

    dataset: The dataset of local rank 0 is shared. Other ranks may pass None.

    A rank that is alone on its host gets its own dataset back. All others get one without a folder, because
    the files are deleted as soon as all ranks have mapped them.
    """
    if not world.any(world.local_size > 1):
        if dataset is None:
            raise ValueError("share() needs the dataset in the first rank of every host, and got None: open it there")
        return dataset
    name = f"{PREFIX}{world.broadcast_object(uuid.uuid4().hex)}-{world.node}"
    with contextlib.ExitStack() as cleanup:
        # An error is raised by `agree`, on every rank: no rank may wait for one that has failed.
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
    world.barrier()  # after it, the files of every host are deleted
    assert opened is not None
    return opened


def _save(dataset: Dataset | None, name: str, cleanup: contextlib.ExitStack) -> None:
    """Save a dataset to a new folder of this name, and lock the folder. `cleanup` unlocks and deletes it."""
    if dataset is None:
        raise ValueError("share() needs the dataset in the first rank of every host, and got None: open it there")
    remove_left_behind()
    # 5% and 1 MiB more than the arrays. A rule of thumb.
    needed_bytes = int(dataset.num_bytes * 1.05) + (1 << 20)
    fits_in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed_bytes
    parent = SHARED_MEMORY if fits_in_memory else Path(tempfile.gettempdir())
    folder = parent / name
    folder.mkdir(mode=0o700)
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    cleanup.enter_context(_hold_lock(folder))

    # A folder with alternative splits opens with the first of them. The current split may be another one, or
    # none of them. So it is saved in front of them, and `_open` takes it off again.
    current_first = (dataset.splits, *dataset.alternatives) if dataset.alternatives else ()
    replace(dataset, alternatives=current_first).save(folder / "data")


def _open(name: str) -> Dataset:
    folders = [parent / name / "data" for parent in _parents()]
    folder = next((folder for folder in folders if folder.is_dir()), folders[-1])
    opened = open_folder(folder)
    # Without its folder, which is about to be deleted.
    return replace(opened, alternatives=opened.alternatives[1:], folder=None)


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Generator[None]:
    """Hold a lock on a folder, which the system releases when this process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_left_behind() -> None:
    """Delete the shared folders of ranks that were killed before they could.

    Only folders of the same user are deleted, and only if no process holds their lock.
    """
    folders = [folder for parent in _parents() for folder in parent.glob(f"{PREFIX}*")]
    for folder in folders:
        # Another process may delete the folder meanwhile. A lock that is held raises an OSError too.
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
    """The folders in which shared folders are made: in memory if it is large enough, else on the disk."""
    return [SHARED_MEMORY, Path(tempfile.gettempdir())]
