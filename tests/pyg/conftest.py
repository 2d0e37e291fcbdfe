"""PyG with hopline's operators, in every test here, and PyG as it was after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hopline.pyg

hopline.pyg.reset()  # the import alone would change PyG for the tests of other folders


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    hopline.pyg.use()
    yield
    hopline.pyg.reset()
