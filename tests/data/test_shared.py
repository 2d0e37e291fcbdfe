"""One copy of a dataset per host. `distributed/test_world.py` checks that ranks really share it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
import torch

from hopline.data import host_copy as sharing
from hopline.distributed import shared_memory
from hopline.distributed.world import World
from tests.support.launched import same_dataset, tiny


def test_with_one_rank_the_dataset_is_not_copied():
    dataset = tiny()
    assert sharing.share(dataset, World.alone()) is dataset
    with pytest.raises(ValueError, match="first rank of every host"):
        sharing.share(None, World.alone())


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders = [tmp_path / "memory", tmp_path / "disk"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(sharing, "SHARED_MEMORY", folders[0])
    monkeypatch.setattr("tempfile.tempdir", str(folders[1]))
    return folders


def two_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> World:
    """The first of two ranks of one host. The other agrees with everything that ranks decide together."""
    world = World.alone()
    monkeypatch.setattr(world, "local_size", 2)
    return world


def test_memory_for_all_ranks_of_a_host_has_no_name(bases: list[Path], monkeypatch: pytest.MonkeyPatch):
    array = shared_memory.shared_zeros((3, 4), torch.float32, two_ranks_of_a_host(monkeypatch))
    assert torch.equal(array, torch.zeros(3, 4))
    array[1] = 7
    assert not [*bases[0].iterdir(), *bases[1].iterdir()]

    def full(num_bytes: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "new_file", full)
    with pytest.raises(ValueError, match=r"48 B .*shared memory \(No space"):
        shared_memory.shared_zeros((3, 4), torch.float32, two_ranks_of_a_host(monkeypatch))


@pytest.mark.parametrize("free_bytes", [0, 1 << 40])
def test_memory_is_preferred_where_there_is_room(bases: list[Path], monkeypatch: pytest.MonkeyPatch, free_bytes: int):
    class Usage:
        free = free_bytes

    used: list[Path] = []
    original = sharing.open_folder
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    monkeypatch.setattr(sharing, "open_folder", lambda path: (used.append(path), original(path))[1])
    dataset = tiny()
    shared = sharing.share(dataset, two_ranks_of_a_host(monkeypatch))
    assert same_dataset(shared, dataset)
    assert shared is not dataset
    assert shared.folder is None  # nobody may keep anything there
    assert used[0].is_relative_to(bases[0 if free_bytes else 1])
    assert not [*bases[0].iterdir(), *bases[1].iterdir()]


def test_what_a_killed_rank_left_is_removed(bases: list[Path]):
    old, young, locked = (bases[0] / f"{sharing.PREFIX}{name}" for name in ("old", "young", "held"))
    other = bases[1] / "somebody-elses"
    for folder in (old, young, locked, other):
        folder.mkdir()
        (folder / "x.npy").write_bytes(b"1")
        if folder != young:
            os.utime(folder, (time.time() - 60, time.time() - 60))
    handle = os.open(locked, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        sharing.remove_left_behind()
    finally:
        os.close(handle)
    assert [f.exists() for f in (old, young, locked, other)] == [False, True, True, True]
