"""Identity 8: a run killed and resumed equals one never interrupted: losses, metrics and weights, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.warm import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children start by fork")
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("sage", 4),
        pytest.param("gat", 3, marks=pytest.mark.extended),
        pytest.param("sage", 20, marks=pytest.mark.extended),
        pytest.param("historical", 10, marks=pytest.mark.extended),
        pytest.param("ranks", 10, marks=pytest.mark.extended),
    ],
)
def test_killed_at_random_moments(kind: str, kills: int, tmp_path: Path) -> None:
    done = run_python("-W", "ignore", "-m", "tests.killed", str(tmp_path), kind, str(kills))
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["kills"] >= kills
    assert answer["losses"] == 5
