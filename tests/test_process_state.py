"""Importing, building loaders and training leave the process as it was, also after an error or Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process_state import NAMES, STEPS


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each step of a program has changed in its process."""
    folder = tmp_path_factory.mktemp("state")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"FORCE_COLOR": "1"}  # progress as on a terminal, whose display is shared by the process
    command = [sys.executable, "-m", "tests.support.process_state", str(folder)]
    root = Path(__file__).resolve().parents[1]
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "changes.json").read_text())


@pytest.mark.parametrize("step", STEPS[:-1])
def test_the_process_is_as_before(changes: dict[str, list[str]], step: str):
    assert changes[step] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities and malloc settings are Linux's")
def test_every_kind_of_change_is_detected(changes: dict[str, list[str]]):
    assert sorted(changes[STEPS[-1]]) == sorted(NAMES)
