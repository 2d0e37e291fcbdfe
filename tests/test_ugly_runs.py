"""Every row of the table of ugly settings and environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import assert_refused
from tests.support.ugly_runs import CASES, Case, outcome, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ugly")
    prepare(path)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_command_is_right_or_refused_in_one_sentence_and_leaves_nothing(case: Case, folder: Path):
    before = sorted(path.name for path in folder.iterdir())
    ours = outcome(case, folder)
    if not case.words:
        assert ours.status == 0, ours.err
        return
    assert_refused(ours, case.words)
    assert sorted(path.name for path in folder.iterdir()) == before
