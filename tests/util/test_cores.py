"""How many cores there are: by affinity, and by a container's share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hopline.util.host import num_cores, queued_s


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen")
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
def test_the_smaller_of_affinity_and_share(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == cores


def test_here_there_is_at_least_one() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_how_long_a_thread_had_no_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began, before = time.perf_counter(), queued_s()
    assert 0 <= queued_s() - before <= time.perf_counter() - began
    told, open_file = tmp_path / "schedstat", os.open
    told.write_text("700000000 2500000000 31\n")
    monkeypatch.setattr(os, "open", lambda path, flags: open_file(told, flags))
    assert queued_s() == 2.5, "seconds, of the second number's nanoseconds"
    told.unlink()
    assert queued_s() == 0, "a system that does not say"
