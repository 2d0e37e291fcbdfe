"""One copy of a dataset for all ranks of a host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hopline.data.dataset import Dataset
from hopline.data.store import open_folder
from hopline.distributed.handles import _map, _new_file
from hopline.distributed.world import World
from hopline.util.spec import format_size

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
    with contextlib.ExitStack() as cleaning:
        problem: Exception | None = None
        try:
            if world.local_rank == 0:
                _save(dataset, name, cleaning)
        except Exception as error:
            problem = error
        _agree(problem, world, "save the shared dataset")
        opened = dataset
        try:
            if world.local_size > 1:
                opened = _open(name)
        except Exception as error:
            problem = error
        _agree(problem, world, "open the shared dataset")
    world.barrier()  # from here on no rank can find the files
    assert opened is not None
    return opened


def shared_zeros(shape: Sequence[int], dtype: torch.dtype, world: World) -> Tensor:
    """Zeros in one memory for all ranks of a host, which goes with the last of them: every rank must call this."""
    if not world.any(world.local_size > 1):
        return torch.zeros(shape, dtype=dtype)
    firsts = world.sum([(world.node + 1) * (world.local_rank == 0 and r == world.rank) for r in range(world.size)])
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    file: int | str = ""
    problem: Exception | None = None
    try:
        if world.local_rank == 0:
            file = _new_file(num_bytes)
    except OSError as error:
        problem = ValueError(
            f"a table of {format_size(num_bytes)} does not fit into shared memory ({error.strerror}): store less by "
            "method.storage=bf16, or keep tables in files by method.folder="
        )
    _agree(problem, world, "make shared tables")
    own = f"/proc/{os.getpid()}/fd/{file}" if isinstance(file, int) else file
    paths = {int(node) - 1: world.broadcast_object(own, rank) for rank, node in enumerate(firsts) if node}
    opened: Tensor | None = None
    try:
        handle = os.open(paths[world.node], os.O_RDWR)
        opened = _map(handle, 0, dtype, tuple(shape), writable=True)
        os.close(handle)
    except OSError as error:
        problem = error
    _agree(problem, world, "open shared tables")
    if isinstance(file, int):
        os.close(file)  # those who have mapped it keep it
    assert opened is not None
    return opened


def _agree(problem: Exception | None, world: World, verb: str) -> None:
    """Go on only if all ranks can, so that none waits for one that gave up."""
    failed = world.any(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"another rank could not {verb}: see its message")


def _save(dataset: Dataset | None, name: str, cleaning: contextlib.ExitStack) -> None:
    if dataset is None:
        raise ValueError("share() needs the dataset in the first rank of every host")
    remove_left_behind()
    needed = int(dataset.num_bytes * 1.05) + (1 << 20)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    folder = (SHARED_MEMORY if roomy else Path(tempfile.gettempdir())) / name
    folder.mkdir(mode=0o700)
    cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
    cleaning.enter_context(_locked(folder))
    # The current split need not be one of the published ones, nor the first of them.
    several = (dataset.splits, *dataset.alternatives) if dataset.alternatives else ()
    replace(dataset, alternatives=several).save(folder / "data")


def _open(name: str) -> Dataset:
    folders = [base / name / "data" for base in _bases()]
    opened = open_folder(next((folder for folder in folders if folder.is_dir()), folders[-1]))
    return replace(opened, alternatives=opened.alternatives[1:], folder=None)  # which will be gone


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a lock that the system takes back when this process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_left_behind() -> None:
    """Delete what ranks left that were killed between making the folder and deleting it."""
    for folder in (f for base in _bases() for f in base.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _bases() -> list[Path]:
    return [SHARED_MEMORY, Path(tempfile.gettempdir())]
