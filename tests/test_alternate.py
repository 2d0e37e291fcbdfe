"""Benchmarks of two commits in alternation: order, comparison, and clean-up after an early end."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "alternate.py"

BENCHMARK = """
import os, sys
from pathlib import Path
import version
with open(os.environ["RUNS"], "a") as file:
    print(version.NAME, Path.cwd(), file=file)
print(f"{'task':<10} {'ms':>8} {'M edges/s':>8}")
print(f"{'sample':<10} {version.TIME:8.2f} {2.5:8.1f}")
sys.exit(len(sys.argv) - 1)
"""


@pytest.fixture(scope="module")
def alternate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("alternate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["alternate"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def write_version(folder: Path, name: str, time_ms: float) -> None:
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "bench.py").write_text(BENCHMARK)
    (folder / "src" / "version.py").write_text(f"NAME, TIME = {name!r}, {time_ms}\n")


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: the second takes twice the time of the first."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    for name, time_ms in (("first", 4.0), ("second", 8.0)):
        write_version(folder, name, time_ms)
        git(folder, "add", ".")
        git(folder, "commit", "-m", f"the {name} one")
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script, with a folder for temporary files of its own."""
    (folder.parent / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(folder.parent / "temporary"), "RUNS": str(folder.parent / "runs")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], cwd=folder, env=environment, **pipes)


def assert_nothing_left(folder: Path) -> None:
    assert list((folder.parent / "temporary").iterdir()) == []


def test_two_commits_are_run_in_turn_and_compared(repository: Path):
    process = start(repository, "HEAD~1", "HEAD", "--times", "2", "--", "python", "bench.py")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "the first one" in output
    assert "the second one" in output
    (line,) = [line for line in output.splitlines() if line.startswith("sample: ms")]
    assert "4 [4 .. 4]" in line
    assert "8 [8 .. 8]" in line
    assert line.count("2.000") == 2
    assert line.endswith("*")
    assert "whole command, s" in output
    assert "1 numbers are the same" in output  # the edges a second
    runs = [line.split() for line in (repository.parent / "runs").read_text().splitlines()]
    assert [name for name, _ in runs] == ["first", "second", "second", "first", "first", "second"]
    assert str(repository) not in {folder for _, folder in runs}
    assert_nothing_left(repository)


def test_the_working_tree_is_taken_as_it_is_and_said_to_have_changes(repository: Path):
    write_version(repository, "third", 2.0)
    process = start(repository, "HEAD", ".", "--times", "1", "--", "python", "bench.py")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "the second one, and 1 files" in output
    assert "0.250" in output
    assert "* each median" in output


def test_folders_without_a_repository_serve_too(tmp_path: Path):
    write_version(tmp_path / "a", "a", 1.0)
    write_version(tmp_path / "b", "b", 3.0)
    process = start(tmp_path / "a", "../a", "../b", "--times", "1", "--", "python", "bench.py")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "old: the folder ../a, of no known commit" in output
    assert "3.000" in output


def test_a_command_that_fails_ends_with_what_it_said(repository: Path):
    process = start(repository, "HEAD~1", "HEAD", "--", "python", "bench.py", "fail")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "M edges/s" in errors
    assert "old (" in errors
    assert "bench.py fail ended with 1" in errors
    assert "new / old" not in output
    assert_nothing_left(repository)


def test_what_is_neither_a_commit_nor_a_folder_is_refused(repository: Path):
    process = start(repository, "HEAD", "nowhere", "--", "python", "bench.py")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nowhere is neither" in errors
    assert_nothing_left(repository)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_process_and_no_folder(repository: Path, number: signal.Signals):
    sleeping = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '100'])"
    sleeping += "; open(os.environ['RUNS'], 'w').write(f'{os.getpid()} {p.pid} '); p.wait()"
    process = start(repository, "HEAD~1", "HEAD", "--", "python", "-c", sleeping)
    runs = repository.parent / "runs"
    deadline = time.monotonic() + 30
    while not (runs.exists() and runs.read_text().endswith(" ")):
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 130
    for pid in runs.read_text().split():
        assert not is_alive(int(pid))
    assert_nothing_left(repository)


def is_alive(pid: int) -> bool:
    """One that ended and was not waited for by whoever adopted it counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("whole: 12.5 MB, 1,450 ms an epoch", {"whole, MB": 12.5, "MB, ms": 1450}),
        ('RESULT {"a": {"b": 2, "c": [3.5]}, "d": "text"}', {"a.b": 2, "a.c.0": 3.5}),
        ("| model | s | x |\n|---|---|---|\n| gcn | 1.5 s | 3 |", {"gcn: s": 1.5, "gcn: x": 3}),
        ("way     peak MB  s a step\nstored      1.5       2.5", {"stored: peak MB": 1.5, "stored: s a step": 2.5}),
        ("[  3.2 s] epoch: 5 ms", {}),
        ("epoch: 5 ms\nepoch: 6 ms", {"epoch, ms": 5, "epoch, ms #2": 6}),
        ("seconds: stages 12, epochs 30", {"seconds: stages": 12, "epochs": 30}),
        ("torch 2.8.0 on H200", {}),
    ],
    ids=["sentence", "json", "markdown", "columns", "log", "repeated", "list", "versions"],
)
def test_numbers_are_found_by_their_labels(alternate: ModuleType, text: str, expected: dict[str, float]):
    assert alternate.numbers_in(text) == expected
