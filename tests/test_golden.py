"""Every method on a CPU, and captured steps, tables in each place and inference on a GPU, against the golden records:
tests/records/cpu.json and gpu.json, written by `tests/golden.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.golden import (
    TOLERANCE,
    ComputedCases,
    Record,
    case_names,
    command,
    compute,
    compute_draws,
    cpu_key,
    differences,
    distance,
    draw_names,
    gpu_key,
    update,
)
from tests.support.golden_cases import GPU_SAME_RUN, NEARLY_SAME_RUN, RANK_CASES, SAME_RUN, Result
from tests.support.grids import GPU_ONLY

RECORDS = {device: Record.read(device) for device in ("cpu", "cuda")}
KEYS = {"cpu": cpu_key, "cuda": gpu_key}
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_ONLY)]
ON_GPU = pytest.mark.parametrize("device", DEVICES[1:])
_results: dict[tuple[str, str], Result] = {}
"""Results of the cases that were computed."""


def result_of(name: str, device: str = "cpu") -> Result:
    """The result of a case, computed once."""
    if (name, device) not in _results:
        _results[name, device] = compute(name, device)
    return _results[name, device]


def advice(device: str) -> str:
    return f"if this is meant, `{command(device)} --because WHY` shows how far and changes the record"


def cases(names: Callable[[str], list[str]]) -> list[Any]:
    """Each name on each of its devices."""
    on_gpu = [pytest.param(name, "cuda", marks=GPU_ONLY) for name in names("cuda")]
    return [*((name, "cpu") for name in names("cpu")), *on_gpu]


@pytest.mark.parametrize("device", DEVICES)
def test_the_record_knows_this_machine(device: str):
    record, key = RECORDS[device], KEYS[device]()
    if key not in record.runs:
        pytest.skip(f"the record does not know {key}, so it is compared to 1e-10: add it by `{command(device)}`")
    assert list(record.runs[key]) == [name for name in case_names(device) if name in record.runs[key]]


@pytest.mark.parametrize("device", DEVICES)
def test_the_record_holds_every_case_and_no_other(device: str):
    recorded = {name for runs in RECORDS[device].runs.values() for name in runs}
    assert recorded == set(case_names(device)), f"add or remove cases by `{command(device)}`"


def test_the_record_holds_every_draw():
    assert list(RECORDS["cpu"].draws) == draw_names("cpu")


@pytest.mark.parametrize(("name", "device"), cases(draw_names))
def test_draws_ids_and_orders_are_those_of_the_record(name: str, device: str):
    assert compute_draws(name, device) == RECORDS["cpu"].draws[name], f"{name} changed: {advice(device)}"


@pytest.mark.parametrize(("name", "device"), cases(case_names))
def test_a_run_is_that_of_the_record(name: str, device: str):
    expected = RECORDS[device].expected(name, KEYS[device](), device)
    if isinstance(expected, str):
        pytest.skip(expected)
    lines = differences(result_of(name, device), expected.result, expected.tolerance)
    assert not lines, "\n".join([f"{name} changed: {advice(device)}", *lines])


@ON_GPU
@pytest.mark.parametrize(
    "name", ["captured sage", "captured sage, resumed", "float32 captured sage", "bf16 captured sage"]
)
def test_steps_of_captured_cases_are_captured(name: str, device: str):
    # One for full batches, and one for the smaller last batch, from the second epoch of the run on.
    # Of other models the record says whether they can be captured, under `counts`.
    assert result_of(name, device)["counts"]["captured steps"] == 2


@ON_GPU
@pytest.mark.parametrize("name", GPU_SAME_RUN)
def test_asynchronous_evaluation_on_a_gpu_changes_nothing_but_rounding(name: str, device: str):
    # The last step of an epoch may be captured in one of the runs and not in the other.
    one, other = (result_of(n, device) | {"counts": {}} for n in (name, GPU_SAME_RUN[name]))
    assert distance(one, other) <= TOLERANCE


@pytest.mark.parametrize("name", SAME_RUN)
def test_asynchronous_evaluation_and_resuming_change_nothing(name: str):
    # A resumed run counts what it did itself.
    one, other = (result | {"counts": {}} for result in (result_of(name), result_of(SAME_RUN[name])))
    assert one == other


@pytest.mark.parametrize("name", NEARLY_SAME_RUN)
def test_trimming_and_the_way_of_aggregation_change_nothing_but_rounding(name: str):
    one, other = (result | {"counts": {}} for result in (result_of(name), result_of(NEARLY_SAME_RUN[name])))
    assert distance(one, other) <= TOLERANCE


# ---- the record itself


def _small_record() -> Record:
    """Two machines and one case of each kind."""
    runs = {"steps": [1.5], "counts": {"rows": 3}, "bits": ["aa"]}
    cases = {"sampled block sage": runs, "float32 sampled block sage": runs, "sampled block gat-dropout": runs}
    keys = ("this; torch 2.13.0+cpu; numba 1", "other; torch 2.13.0; numba 1")
    return Record(draws={"blocks": "aa"}, runs={key: deepcopy(cases) for key in keys})


def _make_result(steps: float = 1.5, rows: int = 3, bits: str = "aa") -> Result:
    """The result of a case with one step, as a record holds it."""
    return {"steps": [steps], "counts": {"rows": rows}, "bits": [bits]}


def test_a_known_machine_is_compared_to_the_bit_and_another_one_to_rounding():
    record = _small_record()
    this = "this; torch 2.13.0+cpu; numba 1"
    new_torch = "new; torch 2.14.0; numba 1"
    same_machine = record.expected("sampled block sage", this, "cpu")
    other_machine = record.expected("sampled block sage", new_torch, "cpu")
    assert not isinstance(same_machine, str)
    assert not isinstance(other_machine, str)
    nearby = _make_result(steps=1.5 + 1e-12, bits="bb")
    assert len(differences(nearby, same_machine.result, same_machine.tolerance)) == 2
    assert not differences(nearby, other_machine.result, other_machine.tolerance)
    assert differences(_make_result(rows=4), other_machine.result, other_machine.tolerance)
    assert differences(_make_result(steps=1.5 + 1e-8), other_machine.result, other_machine.tolerance)
    assert isinstance(record.expected("float32 sampled block sage", new_torch, "cpu"), str)
    assert isinstance(record.expected("sampled block gat-dropout", new_torch, "cpu"), str)
    assert not isinstance(record.expected("sampled block gat-dropout", "new; torch 2.13.0", "cpu"), str)


def test_a_case_that_does_not_reproduce_is_compared_within_a_tolerance():
    record = _small_record()
    this = "this; torch 2.13.0+cpu; numba 1"
    record.runs[this]["sampled block sage"]["apart"] = 1e-15
    expected = record.expected("sampled block sage", this, "cpu")
    assert not isinstance(expected, str)
    assert not differences(_make_result(steps=1.5 + 1e-14, bits="bb"), expected.result, expected.tolerance)


def test_numbers_change_only_for_a_reason_which_is_kept():
    record = _small_record()
    this, other = record.runs
    computed = ComputedCases(draws={"blocks": "aa"}, runs={"sampled block sage": _make_result(steps=1.75, bits="bb")})
    before = deepcopy(record)
    with pytest.raises(ValueError, match=r"changed by 2\.5e-01|changed by 1\.7e-01"):
        update(record, computed, this, "cpu", None)
    assert record == before
    update(record, computed, this, "cpu", "the test")
    assert record.runs[this]["sampled block sage"]["steps"] == [1.75]
    assert "sampled block sage" not in record.runs[other], "it has not computed the new number"
    assert record.changes[0]["because"] == "the test"
    assert record.changes[0]["cases"] == ["sampled block sage"]


def test_a_new_machine_must_agree_with_the_others():
    record = _small_record()
    computed = ComputedCases(runs={"sampled block sage": _make_result(steps=1.5 + 1e-6, bits="bb")})
    with pytest.raises(ValueError, match="changed by"):
        update(record, computed, "new; torch 2.13.0; numba 1", "cpu", None)
    computed.runs["sampled block sage"] = _make_result(steps=1.5 + 1e-13, bits="bb")
    update(record, computed, "new; torch 2.13.0; numba 1", "cpu", None)
    assert len(record.runs) == 3


def test_draws_that_change_need_a_reason_too():
    record = _small_record()
    with pytest.raises(ValueError, match="drawn otherwise: blocks"):
        update(record, ComputedCases(draws={"blocks": "bb"}), next(iter(record.runs)), "cpu", None)


def test_cases_of_two_ranks_are_among_the_rest():
    assert RANK_CASES.keys() <= set(case_names("cpu"))
