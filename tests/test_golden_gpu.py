"""Captured steps, tables in each place and inference on a GPU against tests/records/gpu.json."""

from __future__ import annotations

import pytest
import torch

from tests.golden import (
    TOLERANCE,
    Record,
    case_names,
    command,
    compute,
    compute_draws,
    differences,
    distance,
    draw_names,
    gpu_key,
)
from tests.support.golden_cases import GPU_SAME_RUN, Result

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RECORD = Record.read("cuda")
ADVICE = f"if this is meant, `{command('cuda')} --because WHY` shows how far and changes the record"
_results: dict[str, Result] = {}
"""Results of the cases that were computed."""


def result_of(name: str) -> Result:
    """The result of a case, computed once."""
    if name not in _results:
        _results[name] = compute(name, "cuda")
    return _results[name]


def test_the_record_knows_this_gpu():
    if gpu_key() not in RECORD.runs:
        pytest.skip(f"the record does not know {gpu_key()}: add it by `{command('cuda')}`")
    recorded = {name for runs in RECORD.runs.values() for name in runs}
    assert recorded == set(case_names("cuda")), f"add or remove cases by `{command('cuda')}`"


@pytest.mark.parametrize("name", draw_names("cuda"))
def test_a_gpu_draws_what_a_cpu_draws(name: str):
    assert compute_draws(name, "cuda") == Record.read("cpu").draws[name], name


@pytest.mark.parametrize("name", case_names("cuda"))
def test_a_run_on_a_gpu_is_that_of_the_record(name: str):
    expected = RECORD.expected(name, gpu_key(), "cuda")
    if isinstance(expected, str):
        pytest.skip(expected)
    lines = differences(result_of(name), expected.result, expected.tolerance)
    assert not lines, "\n".join([f"{name} changed: {ADVICE}", *lines])


@pytest.mark.parametrize(
    "name", ["captured sage", "captured sage, resumed", "float32 captured sage", "bf16 captured sage"]
)
def test_steps_of_captured_cases_are_captured(name: str):
    # One for full batches, and one for the smaller last batch, from the second epoch of the run on.
    # Of other models the record says whether they can be captured, under `counts`.
    assert result_of(name)["counts"]["captured steps"] == 2


@pytest.mark.parametrize("name", GPU_SAME_RUN)
def test_asynchronous_evaluation_changes_nothing(name: str):
    # To rounding: the last step of an epoch may be captured in one of the runs and not in the other.
    one, other = (result | {"counts": {}} for result in (result_of(name), result_of(GPU_SAME_RUN[name])))
    assert distance(one, other) <= TOLERANCE
