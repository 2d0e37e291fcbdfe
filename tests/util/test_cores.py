"""The number of cores: by affinity, and by a container's share."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hopline.util.host import host_identity, num_cores, queued_s, who_set_threads


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu.max": "nonsense"}, 16),
        ({"cpu.max": "100000 0"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_the_number_of_cores_is_the_smaller_of_affinity_and_share(
    files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == cores


def test_a_machine_has_at_least_one_core() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_queued_s_is_the_time_a_thread_waited_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began = time.perf_counter()
    before = queued_s()
    assert 0 <= queued_s() - before <= time.perf_counter() - began
    schedstat = tmp_path / "schedstat"
    open_file = os.open
    schedstat.write_text("700000000 2500000000 31\n")
    monkeypatch.setattr(os, "open", lambda path, flags: open_file(schedstat, flags))
    assert queued_s() == 2.5, "seconds, of the second number's nanoseconds"
    schedstat.unlink()
    assert queued_s() == 0, "a system that does not say"


@pytest.mark.parametrize(
    ("variables", "launcher_started_with", "expected"),
    [
        ({}, "", None),
        ({"OMP_NUM_THREADS": "1"}, "", "user"),  # no launcher
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, "PATH=/bin", "launcher"),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, "PATH=/bin\0OMP_NUM_THREADS=1", "user"),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "a"}, "PATH=/bin", "user"),
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "01"}, "PATH=/bin", "launcher"),
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "01"}, "OMP_NUM_THREADS=1\0PATH=/bin", "user"),
        ({"OMP_NUM_THREADS": "3", "RAY_JOB_ID": "01"}, "PATH=/bin", "user"),  # CPUs asked for per worker
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "01"}, None, "user"),  # a system that does not tell
    ],
    ids=str,
)
def test_threads_set_by_the_user_are_told_from_those_of_a_launcher(
    variables: dict[str, str],
    launcher_started_with: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # torchrun's process is the parent of this one; Ray sets the variable in the worker itself.
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in variables else os.getpid()
    if launcher_started_with is not None:
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "environ").write_text(launcher_started_with)
    assert who_set_threads(tmp_path) == expected


def test_the_host_of_a_process_is_the_same_in_another_one() -> None:
    command = [sys.executable, "-c", "from hopline.util.host import host_identity; print(host_identity())"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert process.stdout.strip() == host_identity()
    assert platform.node() in host_identity()
