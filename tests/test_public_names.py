"""Every public name has a docstring with its arguments and an example, and every example runs as it stands."""

from __future__ import annotations

import doctest
import inspect
import re
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hopline as hl

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")])

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

METRICS = ("accuracy", "micro_f1", "mode_of", "mrr", "roc_auc")
"""Public functions of `hl.metrics`, a module that has no `__all__`."""

EXEMPT = {
    "hl.extend.keep_freed_memory": "it changes the process for as long as it lives",
    "hl.extend.BatchUnit": "in the example of `hl.extend.Method`",
    "hl.extend.Job": "made by the Trainer; in the example of `hl.extend.Method`",
    "hl.extend.Unit": "in the example of `hl.extend.Method`, whose units are `BatchUnit`",
    "hl.extend.Work": "in the example of `hl.extend.Method`",
    "hl.extend.Boundaries": "in the example of `hl.extend.Layers`",
    "hl.extend.Guard": "made by the Trainer; in the example of `hl.extend.Plan`",
    "hl.extend.Item": "a record; in the example of `hl.extend.Plan`",
    "hl.extend.Outline": "made by the Trainer; in the example of `hl.extend.Plan`",
    "hl.extend.MeasuredUnit": "in the example of `hl.extend.Plan`",
    "hl.extend.LayerPlan": "in the example of `hl.extend.Layers`",
    "hl.extend.Piece": "a record; in the example of `hl.extend.Layers`",
    "hl.extend.EpochEnd": "a record; in the example of `hl.Callback`",
    "hl.extend.Evaluation": "a record; in the example of `hl.Callback`",
    "hl.extend.StepEnd": "a record; in the example of `hl.Callback`",
    "hl.interop.Adj": "a record; in the example of `hl.interop.Sample`",
    "hl.interop.FRAMEWORKS": "a dict, which cannot have a docstring; `hl.interop.to` names its keys",
}
"""Names without an example, and why."""

SAME_ARGUMENTS = {"hl.infer.exact_rows": "hl.infer.exact"}
"""Functions whose docstring refers to another one for the arguments."""


def public_names() -> dict[str, Any]:
    """Every public name as a user types it, with what it stands for. Modules stand for their own names."""
    listed = {
        "hl": hl.__all__,
        "hl.extend": hl.extend.__all__,
        "hl.infer": hl.infer.__all__,
        "hl.interop": hl.interop.__all__,
        "hl.metrics": METRICS,
        "hl.nn": hl.nn.__all__,
        "hl.shards": hl.shards.__all__,
    }
    values: dict[str, Any] = {}
    for place, names in listed.items():
        module = hl if place == "hl" else getattr(hl, place.removeprefix("hl."))
        values |= {f"{place}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if not isinstance(value, ModuleType)}


NAMES = public_names()


def docstring(name: str) -> str:
    return inspect.cleandoc(NAMES[name].__doc__ or "")


def examples_of(name: str) -> doctest.DocTest:
    """The doctest lines of a name. As everywhere in the docs, `hl` and `torch` are imported already."""
    return doctest.DocTestParser().get_doctest(docstring(name), {"hl": hl, "torch": torch}, name, None, 0)


def has_args(name: str) -> bool:
    return "\nArgs:\n" in docstring(name)


def listed_arguments(name: str) -> list[str]:
    """The names under `Args:`."""
    section = docstring(name).partition("\nArgs:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+): ", section, flags=re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXEMPT])
def test_the_example_of_a_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    example = examples_of(name)
    assert example.examples, f"{name} has no example: add doctest lines to its docstring, or name it in EXEMPT"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOPLINE_DATA", str(tmp_path / "data"))
    print_messages: list[str] = []

    failures = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=print_messages.append).failed

    assert not failures, "".join(print_messages)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hl.interop.FRAMEWORKS"])
def test_a_public_name_has_a_docstring(name: str):
    text = docstring(name)

    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name.rpartition('.')[2]}("), f"{name} has only the signature that a dataclass writes"


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isroutine(NAMES[name]) or has_args(name)])
def test_args_lists_the_arguments_that_there_are(name: str):
    arguments = list(inspect.signature(NAMES[name]).parameters)
    if name in SAME_ARGUMENTS:
        assert arguments == list(inspect.signature(NAMES[SAME_ARGUMENTS[name]]).parameters)
    elif len(arguments) > 1 or has_args(name):
        assert listed_arguments(name) == arguments


def test_exempt_names_exist_and_have_no_example():
    assert [name for name in EXEMPT if name not in NAMES] == []
    assert [name for name in EXEMPT if examples_of(name).examples] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_pages_and_examples_use_exist(page: Path):
    missing = []
    for used in sorted(set(re.findall(r"\bhl((?:\.[A-Za-z_]\w*)+)(?![\w*])", page.read_text()))):
        try:
            attrgetter(used[1:])(hl)
        except AttributeError as error:
            missing.append(f"hl{used}: {error}")

    assert not missing, "\n".join(missing)
