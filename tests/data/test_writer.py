"""Writing a dataset folder: after a full disk or a kill there is the old folder or the new one."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hopline.data import store, synthetic, writer
from hopline.data.dataset import Dataset
from hopline.data.paths import backup_of
from hopline.data.registry import open_dataset
from hopline.data.writer import FolderWriter
from hopline.run.commands import convert
from hopline.run.settings import ConvertConfig
from tests.support.runs import assert_refused, command
from tests.support.warm import run_python


def hidden_names(folder: Path) -> list[str]:
    """Names of the hidden files next to a folder."""
    return [p.name for p in folder.parent.iterdir() if p.name.startswith(".")]


def test_a_full_disk_leaves_the_old_folder_and_says_so(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "data"
    tiny.save(target)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.ArrayWriter, "append", full)
    with pytest.raises(ValueError, match=r"disk is full: .*data, or") as caught:
        tiny.save(target)
    assert "\n" not in str(caught.value)
    assert hidden_names(target) == []
    assert store.verify(target)


def test_a_folder_that_may_not_be_written_is_named(
    tiny: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Cannot write .*inner"):
        tiny.save(tmp_path / "file" / "inner")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"Permission denied\): choose"):
        tiny.save(tmp_path / "new")


def test_only_datasets_and_empty_folders_are_replaced(tiny: Dataset, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    tiny.save(tmp_path / "mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"not a dataset: .*empty folder"):
        tiny.save(tmp_path / "thesis")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        tiny.save(tmp_path / "file")


def test_names_that_are_no_file_names_are_refused(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "d") as out, pytest.raises(ValueError, match="cannot name an array"):
        out.add("../x", torch.zeros(1))


KILLED = """
import os, sys
from hopline.data import writer
from hopline.data.store import open_folder

point, target = sys.argv[1:]
dataset = open_folder(target)
dataset.name = "new"
rename = writer.Path.rename

def rename_once(self, to):
    rename(self, to)
    os._exit(9)

def remove(path, **_):
    if path.name.endswith(".old"):
        os._exit(9)

def stop(*_):
    os._exit(9)

owner, name, replacement = {
    "write": (writer.ArrayWriter, "append", stop),
    "sync": (writer, "sync_folder", stop),
    "swap": (writer, "_swap", stop),
    "between": (writer.Path, "rename", rename_once),
    "after": (writer.shutil, "rmtree", remove),
}[point]
setattr(owner, name, replacement)
dataset.save(target)
"""


@pytest.mark.parametrize("point", ["write", "sync", "swap", "between", "after"])
def test_a_killed_writer_leaves_the_old_folder_or_the_new_one(point: str, tiny: Dataset, tmp_path: Path) -> None:
    target = tmp_path / "data"
    tiny.save(target)
    assert run_python("-c", KILLED, point, str(target)).returncode == 9
    store.verify(target)
    assert store.open_folder(target).name == ("new" if point == "after" else "tiny")
    assert hidden_names(target), "the killed writer should have left something to clean"
    tiny.save(target)
    assert hidden_names(target) == []
    assert store.verify(target)


def test_a_leftover_backup_is_removed_once_the_new_folder_is_there(tiny: Dataset, tmp_path: Path) -> None:
    target = tmp_path / "data"
    tiny.save(target)
    tiny.save(backup_of(target))
    tiny.name = "newer"
    tiny.save(target)
    assert not backup_of(target).exists()
    assert store.open_folder(target).name == "newer"


def test_the_folder_of_a_live_writer_is_left_alone(tiny: Dataset, tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "data") as first:
        tiny.save(tmp_path / "data")
        assert first.temporary.is_dir()
    assert not first.temporary.exists()


HOLD = """
import sys
from pathlib import Path
from hopline.data.writer import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_writes_is_refused_until_it_ends(tiny: Dataset, tmp_path: Path) -> None:
    target = tmp_path / "new" / "data"
    np.savez(tmp_path / "graph.npz", edge_index=[[0, 1], [1, 2]])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        reason = f"{target} is being written by process {other.pid} on"
        with pytest.raises(ValueError, match=reason):
            tiny.save(target)
        assert_refused(command("convert", tmp_path / "graph.npz", target), reason)
        assert_refused(command("partition", "demo", target, "shards=2"), reason)
        other.kill()  # it leaves its file, and not its lock
    assert hidden_names(target) == [".data.lock"]
    assert command("convert", tmp_path / "graph.npz", target).status == 0
    assert hidden_names(target) == []


def test_of_several_conversions_at_once_one_succeeds_and_the_others_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "graph.npz", edge_index=[[0, 1], [1, 2]])
    begin = threading.Barrier(4)
    outcomes: list[str] = []

    def convert_at_once() -> None:
        begin.wait()
        try:
            convert(str(tmp_path / "graph.npz"), tmp_path / "out", ConvertConfig())
            outcomes.append("done")
        except ValueError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=convert_at_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("done") == 1
    # Whoever comes late finds the dataset.
    assert all(re.search("done|is being written by|holds a dataset: choose another", text) for text in outcomes)
    assert store.verify(tmp_path / "out")


def test_processes_that_open_a_dataset_for_the_first_time_wait_for_the_one_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    opened: list[Dataset] = []
    write = synthetic.planted_partition

    def count(*arguments: Any, **options: Any) -> Dataset:
        made.append(options["folder"])
        return write(*arguments, **options)

    monkeypatch.setattr(synthetic, "planted_partition", count)

    def open_it() -> None:
        opened.append(open_dataset("products-shaped", data_root=tmp_path, scale=0.0001))

    threads = [threading.Thread(target=open_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(opened)) == (1, 3)


def test_a_refused_writer_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no file"):
        convert(str(tmp_path / "none.npz"), tmp_path / "a" / "b" / "out", ConvertConfig())
    assert list(tmp_path.iterdir()) == []
