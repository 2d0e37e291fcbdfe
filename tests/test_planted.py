"""Every planted fault still matches its source, and the script tells caught, missed and broken apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planted import FAULTS, ROOT, Fault, Moved, Project, check, chosen, outcome, plant_all


def test_every_fault_can_be_planted():
    check(FAULTS, ROOT)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert all(fault.old != fault.new for fault in FAULTS)


FAULT = Fault(name="sum", area="a", file="src/made.py", old="a + b", new="a - b", tests=("tests/test_made.py",))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project of one function and one test."""
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "made.py").write_text("def add(a, b):\n    return a + b\n")
    test = "from made import add\n\n\ndef test_add():\n    assert add(2, 0) == 2\n    assert add(2, 2) == 4\n"
    (tmp_path / "tests" / "test_made.py").write_text(test)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return Project(tmp_path)


def test_a_fault_is_caught_missed_or_no_code(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    file = project.root / "src" / "made.py"
    text = file.read_text()
    before = file.stat().st_mtime_ns
    new = {"caught": "a - b", "MISSED": "b + a", "BROKEN": "a +"}
    verdicts = plant_all([replace(FAULT, name=name, new=text) for name, text in new.items()], [project])
    assert [verdict.status for verdict in verdicts] == ["caught", "MISSED", "BROKEN"]
    assert verdicts[0].first.endswith("test_made.py::test_add")
    assert "tests/test_made.py cannot be read" in verdicts[2].first
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fault", *new]
    assert (file.read_text(), file.stat().st_mtime_ns) == (text, before)


def test_a_fault_whose_text_was_moved_is_named(project: Project):
    check([FAULT], project.root)
    for changed in ({"old": "a * b"}, {"old": "a"}, {"file": "src/gone.py"}, {"tests": ("tests/gone.py",)}):
        with pytest.raises(Moved, match="'sum'"):
            check([replace(FAULT, **changed)], project.root)


def test_kernels_that_call_a_changed_file_are_compiled_anew_and_come_back(project: Project):
    source = project.root / "src"
    (source / "caller.py").write_text("from made import add\n")
    (source / "above.py").write_text("import caller\n")
    (source / "other.py").write_text("import os\n")
    cache = source / "__pycache__"
    cache.mkdir()
    for name in ("made.f-1", "caller.g-1", "above.h-1", "other.i-1"):
        (cache / f"{name}.py311.0.nbc").write_text(name)
    with project.planted(FAULT, 0):
        assert [path.name for path in cache.iterdir()] == ["other.i-1.py311.0.nbc"]
        (cache / "made.f-1.py311.0.nbc").write_text("of the fault")
        (cache / "made.f-1.py311.1.nbc").write_text("of the fault")
    contents = {path.name.partition("-")[0]: path.read_text() for path in cache.iterdir()}
    assert contents == {"made.f": "made.f-1", "caller.g": "caller.g-1", "above.h": "above.h-1", "other.i": "other.i-1"}


def test_faults_are_chosen_by_name_or_area_and_by_whether_they_need_a_gpu():
    faults = [FAULT, replace(FAULT, name="other", area="b"), replace(FAULT, name="on a GPU", gpu=True)]
    assert [fault.name for fault in chosen(faults, [], gpu=False)] == ["sum", "other"]
    assert [fault.name for fault in chosen(faults, ["su"], gpu=False)] == ["sum"]
    assert [fault.name for fault in chosen(faults, [], gpu=True)] == ["on a GPU"]


def test_what_was_skipped_or_is_no_code_has_caught_nothing():
    assert outcome(0, "3 skipped in 0.1s", 0.1).status == "SKIPPED"
    assert outcome(5, "no tests ran", 0.1).status == "BROKEN"
    assert outcome(1, "FAILED tests/a.py::test - NameError: name 'c' is not defined", 0.1).status == "BROKEN"
    assert outcome(1, "FAILED tests/a.py::test - numba.core.errors.TypingError: no", 0.1).status == "BROKEN"
    assert outcome(1, "ERROR tests/a.py::test - AssertionError: threads left behind", 0.1).status == "caught"
