"""The table of convs, norms and models: complete, as docs/convs.md shows it, and true.

Here every row is run in one mode, another from row to row, so that the options of a class are spread over the modes.
`make convs` runs all cells, `pytest -m gpu` all of them on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch_geometric
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline.data.dataset import Dataset
from tests.conv_table import page
from tests.conv_table.cases import CONVS, Case, conv
from tests.conv_table.modes import MODES, Expected, Verdict, judge
from tests.conv_table.record import SECTIONS, Record, read
from tests.support.grids import GPU_ONLY

CLASSES = {
    "convs": pyg.conv.__all__,
    "norms": pyg.norm.__all__,
    "models": [name for name in pyg.models.__all__ if inspect.isclass(getattr(pyg.models, name))],
}


def recorded() -> Record:
    found = read("cpu")
    assert found is not None, "there is no record: run make convs"
    return found


ROWS = [
    pytest.param(section, i, id=case.name)
    for section, cases in SECTIONS.items()
    for i, case in enumerate(cases)
    if case.exists
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_class_of_the_installed_pyg_has_a_row(section: str):
    kinds = {case.kind for case in SECTIONS[section]}
    missing = [name for name in CLASSES[section] if name not in kinds]
    assert not missing, f"no case of {', '.join(missing)}: write one in tests/conv_table, and run make convs"


@pytest.mark.parametrize("section", SECTIONS)
def test_no_two_rows_have_the_same_name(section: str):
    names = [case.name for case in SECTIONS[section]]
    assert sorted(names) == sorted(set(names))


def test_the_record_has_all_rows_and_the_page_shows_it():
    record = recorded()
    for section, cases in SECTIONS.items():
        rows = set(record.sections[section])
        assert {case.name for case in cases if case.exists} <= rows <= {case.name for case in cases}, "run make convs"
    assert page.PAGE.read_text() == page.render(record, read("cuda")), "docs/convs.md is stale: run make convs"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_recorded_cell_is_wrong(device: str):
    record = read(device)
    assert record is None or not record.faults()


@pytest.mark.parametrize(("section", "i"), ROWS)
def test_cells_are_as_the_page_says(section: str, i: int):
    compare(SECTIONS[section][i], [list(MODES)[i % len(MODES)]], "cpu", recorded(), section)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU_ONLY)])
@pytest.mark.parametrize(("section", "i"), ROWS)
def test_all_cells_on_a_gpu(section: str, i: int, device: str):
    compare(SECTIONS[section][i], list(MODES), device, read(device), section)


def compare(case: Case, modes: list[str], device: str, record: Record | None, section: str) -> None:
    """Run cells. None may be wrong, and with the recorded version of PyG each must be what was recorded."""
    expected = Expected(case)
    verdicts = {mode: judge(case, mode, device, expected) for mode in modes}
    faults = [f"{mode}: {verdict.word}: {verdict.why}" for mode, verdict in verdicts.items() if verdict.is_fault]
    assert not faults, f"{case.name} on {device}: " + "; ".join(faults)
    if record is None or record.versions["torch_geometric"] != torch_geometric.__version__:
        return
    row = record.row(section, case)
    assert row is not None, f"{case.name} is not recorded: run make convs"
    changed = [
        f"{mode}: {verdict.word}, not {row[mode].word}"
        for mode, verdict in verdicts.items()
        if verdict.word != row[mode].word
    ]
    assert not changed, f"{case.name} on {device}: {'; '.join(changed)}. If that is meant, run make convs"


# ---- the judge itself


RIGHT = conv("SAGEConv")


def plain_but(change: Callable[[Tensor], Tensor]) -> Case:
    """A case that is right, with other numbers from PyG."""

    def plain(model: nn.Module, data: Dataset) -> Tensor:
        assert RIGHT.plain is not None
        return change(RIGHT.plain(model, data))

    return replace(RIGHT, plain=plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_difference_of_a_millionth_is_wrong(mode: str):
    case = plain_but(lambda out: out * (1 + 1e-6))
    verdict = judge(case, mode)
    assert verdict.word == "wrong"
    assert "off by" in verdict.why


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "inference"])
def test_a_wrong_gradient_with_right_outputs_is_wrong(mode: str):
    case = plain_but(lambda out: out.detach() + (out - out.detach()) * (1 + 1e-6))
    verdict = judge(case, mode)
    assert verdict.word == "wrong"
    assert "gradient" in verdict.why


def test_what_plain_pyg_cannot_run_is_no_case():
    case = conv("SAGEConv", lambda a, b: pyg.SAGEConv(a + 1, b))
    with pytest.raises(RuntimeError, match="shapes"):
        judge(case, "block")


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_traceback_is_an_error_also_if_it_is_a_value_error_of_another_library(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> None:
        raise error("something that was not meant for the person who reads it")

    monkeypatch.setitem(MODES, "failing", fails)
    verdict = judge(RIGHT, "failing")
    assert verdict.word == "error"
    assert "not meant" in verdict.why


def test_an_error_with_a_sentence_of_hopline_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODES, "refused", lambda *_: hl.FullBatch(num_shards=0))
    assert judge(RIGHT, "refused") == Verdict("refused", "num_shards must be at least 1, not 0")


def test_a_module_that_runs_without_what_pyg_needs_is_wrong():
    case = replace(RIGHT, plain=None, needs="something else")
    assert judge(case, "block") == Verdict("wrong", "it ran, though PyG needs something else")
    assert all(case.needs or case.plain is not None for case in CONVS)
