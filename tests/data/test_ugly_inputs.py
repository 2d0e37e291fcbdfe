"""Every row of the table in `ugly_inputs.py`: read rightly, or refused with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopline.util.log import logger
from tests.data.ugly_inputs import CASES, Case, outcome


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_ugly_input_is_read_rightly_or_refused_with_what_to_type(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger.name)
    verdict, words = outcome(case, tmp_path)
    assert verdict == ("refused" if case.refused else "right"), words
    assert "\n" not in words
    assert case.told in caplog.text


def test_every_ugly_input_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
