"""Identity 8: a run killed and resumed equals one never interrupted: losses, metrics and weights, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children start by fork")
@pytest.mark.parametrize(
    ("kind", "kills", "signal"),
    [
        ("sage", 4, "SIGKILL"),
        ("sage", 4, "SIGHUP"),
        pytest.param("gat", 3, "SIGKILL", marks=pytest.mark.extended),
        pytest.param("historical", 10, "SIGKILL", marks=pytest.mark.extended),
        *(
            pytest.param(kind, 30, signal, marks=pytest.mark.extended)
            for kind in ("sage", "ranks")
            for signal in ("SIGKILL", "SIGINT", "SIGTERM", "SIGHUP")
        ),
    ],
)
def test_killed_at_random_moments(kind: str, kills: int, signal: str, tmp_path: Path) -> None:
    command = ["-W", "ignore", "-m", "tests.support.killed", str(tmp_path), kind, str(kills), signal]
    done = run_python(*command, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["kills"] >= kills
    assert answer["losses"] == 5
