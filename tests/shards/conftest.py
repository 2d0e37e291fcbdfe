"""Shards in a folder, which the tests of this folder open and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopline.core.partition import make_partition
from hopline.shards.write import cut
from tests.shards.test_write import rich


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of `rich()`."""
    data = rich()
    cut(data, make_partition(data.graph, 3, "random"), tmp_path / "shards")
    return tmp_path / "shards"
