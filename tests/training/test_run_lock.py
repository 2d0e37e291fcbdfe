"""A run folder has one writer, and a killed one leaves it free."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

import hopline as hl
from hopline.util import file_lock
from hopline.util.file_lock import FileLock
from tests.support.runs import fit, records, small
from tests.support.warm import Process, python

FILE = "run.lock"


def run_lock(folder: Path, wait_s: float = 0.0) -> FileLock:
    return FileLock(folder / FILE, folder, wait_s)


TRAIN = """
import sys, time
from pathlib import Path
from tests.support.runs import fit, small

go = Path(sys.argv[1])
data = small()
print("ready", flush=True)
(go.parent / f"ready-{sys.argv[2]}").touch()
while not go.exists():
    time.sleep(0.001)
fit(data, epochs=int(sys.argv[3]), out="run", resume=len(sys.argv) > 4)
"""


def wait_for(path: Path, process: Process) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    assert path.exists()


def start(folder: Path, name: str, epochs: int, *more: str) -> Process:
    (folder / "train.py").write_text(TRAIN)
    process = python("train.py", str(folder / "go"), name, str(epochs), *more, cwd=folder)
    wait_for(folder / f"ready-{name}", process)
    return process


@pytest.mark.parametrize("more", [(), ("resume",)])
def test_of_two_runs_that_start_at_once_one_is_refused(more: tuple[str, ...], tmp_path: Path):
    for attempt in range(2 if more else 4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        # Resumed ones wait a while for the folder: so long that the other one must not have ended by then.
        pair = [start(folder, name, 100_000 if more else 30, *more) for name in "ab"]
        (folder / "go").touch()
        try:
            if more:
                until = time.monotonic() + 60
                while all(one.poll() is None for one in pair) and time.monotonic() < until:
                    time.sleep(0.05)
                for one in pair:
                    one.send_signal(signal.SIGTERM)
            ended = [one.communicate(timeout=60) for one in pair]
        finally:
            for one in pair:
                one.kill()
        refused = [errors for _, errors in ended if "is being written by" in errors]
        # Without resume one may also come so late that the other has ended.
        late = [errors for _, errors in ended if "run already holds a run" in errors]
        assert len(refused) + len(late) == 1, ended
        epochs = [record["epoch"] for record in records(folder / "run", "epoch")]
        assert epochs == list(range(1, len(epochs) + 1))
        assert len(records(folder / "run", "start")) == 1


def test_a_run_that_is_going_on_cannot_be_resumed_and_a_killed_one_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.training.run_folder.HANDOVER_S", 0.2)
    (tmp_path / "go").touch()
    process = start(tmp_path, "a", 100_000)
    try:
        wait_for(tmp_path / "run" / "last.pt", process)
        message = rf"run is being written by process {process.pid} on .*: wait for its end, choose another"
        with pytest.raises(ValueError, match=message):
            fit(small(), out=tmp_path / "run", resume=True)
        with pytest.raises(ValueError, match=message):
            fit(small(), out=tmp_path / "run")
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert (tmp_path / "run" / FILE).exists()  # what a killed process leaves is no lock
    fit(small(), out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / FILE).exists()


def test_a_run_that_is_resumed_waits_for_the_one_before_it(tmp_path: Path):
    with run_lock(tmp_path / "run"):
        child = os.fork()
        if child == 0:  # its copy of the lock is gone: it waits for this process's
            status = 1
            try:
                with run_lock(tmp_path / "run", 30.0):
                    status = 0
            finally:
                os._exit(status)
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_another_run_removes_before_the_file_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    open_file = os.open
    paths = []

    def open_after_removal(path: Path, *args: int) -> int:
        paths.append(path)
        if len(paths) == 1:
            folder.rmdir()
        return open_file(path, *args)

    monkeypatch.setattr(file_lock.os, "open", open_after_removal)
    with run_lock(folder):
        assert paths == [folder / FILE] * 2
        assert (folder / FILE).exists()


def test_a_folder_that_another_run_removes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    make_folder = Path.mkdir
    paths = []

    def fail_once(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        paths.append(path)
        if len(paths) == 1:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make_folder(path, mode, parents=parents, exist_ok=exist_ok)

    monkeypatch.setattr(Path, "mkdir", fail_once)
    with run_lock(folder):
        assert paths[:2] == [folder, folder]
        assert (folder / FILE).exists()


def test_a_forked_process_that_outlives_a_killed_run_does_not_hold_it(tmp_path: Path):
    parent = os.fork()
    if parent == 0:
        with run_lock(tmp_path / "run"):
            if os.fork() == 0:
                (tmp_path / "child").write_text(str(os.getpid()))
                time.sleep(60)
            else:
                while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    os.waitpid(parent, 0)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)  # it is alive
        with run_lock(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_process_does_not_hold_a_folder_twice(tmp_path: Path):
    with run_lock(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()} on"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = run_lock(tmp_path)
    second = run_lock(tmp_path, 5.0)
    first.__enter__()
    real = fcntl.flock

    def late(file: int, how: int) -> None:
        """Between opening and locking, the holder removes the file."""
        monkeypatch.setattr(fcntl, "flock", real)
        first.__exit__()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with second, pytest.raises(ValueError, match="is being written"), run_lock(tmp_path):
        pass


def test_where_nothing_can_be_locked_the_run_trains_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unsupported(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert fit(small(), out=tmp_path / "run").epochs == 2
    assert r"run cannot be locked (No locks available)" in caplog.text
    assert not (tmp_path / "run" / FILE).exists()


def test_what_was_made_for_a_run_that_never_began_is_removed(tmp_path: Path):
    class Fails(hl.Callback):
        def on_fit_start(self, trainer: hl.Trainer) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(small(), out=tmp_path / "runs" / "one", callbacks=[Fails()])
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Cannot write .*file/run .*out="):
        fit(small(), out=tmp_path / "file" / "run")
