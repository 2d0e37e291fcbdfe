"""A finished run that the tests of this folder read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopline.run import train as run
from hopline.run.settings import RunConfig
from tests.support.runs import quick


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A quick run on a small graph in a folder."""
    return quick(tmp_path)


@pytest.fixture
def run_folder(config: RunConfig) -> Path:
    """The folder of a finished run."""
    folder = run.train(config).folder
    assert folder is not None
    return folder
