"""Every input of `ugly_inputs.py` is read rightly, or refused with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopline.util.log import logger
from tests.data.ugly_inputs import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_ugly_input_is_read_rightly_or_refused_with_what_to_type(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger.name)
    if case.refused:
        with pytest.raises((ValueError, IndexError)) as refused:
            case.read(tmp_path)
        sentence = str(refused.value).replace(f"{tmp_path}/", "")
        assert case.refused in sentence
        assert "\n" not in sentence
    else:
        assert case.read(tmp_path) == case.right
    assert case.told in caplog.text
