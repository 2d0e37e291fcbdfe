"""What the documents show is true: their code runs, their links lead somewhere, the methods that they list exist.

A page for users is run as a reader would run it, from top to bottom, in an empty folder:

    ```python   all of them are one script
    ```sh       after the script; each line that begins with hopline, python or torchrun. Others are not run
    ```text     output, drawings, and commands that need another machine. Not run, as are fences of other languages
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import hopline as hl
from hopline.recipes import find_recipe
from hopline.util.config import override
from tests.support.runs import command
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

FOR_DEVELOPERS = ("design", "convs", "dependencies")
"""Pages about the code itself, or written by a command: they show fragments, which cannot run."""
NOT_YET = ("tables",)
"""The page of the readers of tables, which will be rewritten with them: its code cannot run as it stands."""
USER_PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if page.stem not in (*FOR_DEVELOPERS, *NOT_YET)]

PROGRAMS = ("hopline", "python", "torchrun")
"""What a line of a ```sh fence begins with if it is run."""


class Fence(NamedTuple):
    """A fenced block of a page."""

    language: str
    first_line: int
    """The number of its first line of code in the page, from 0."""
    code: list[str]


def fences_of(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, from top to bottom."""
    lines = page.read_text().splitlines()
    marks = [number for number, line in enumerate(lines) if line.lstrip().startswith("```")]
    for start, stop in zip(marks[::2], marks[1::2], strict=True):
        yield Fence(lines[start].strip().removeprefix("```"), start + 1, lines[start + 1 : stop])


def script_of(page: Path) -> str:
    """All Python of a page, each line under the number that it has in the page, so that tracebacks name it."""
    lines = [""] * len(page.read_text().splitlines())
    for fence in fences_of(page):
        if fence.language == "python":
            lines[fence.first_line : fence.first_line + len(fence.code)] = fence.code
    return "\n".join(lines)


def commands_of(page: Path, language: str = "sh") -> list[list[str]]:
    """The words of each command of a page, without comments. A backslash joins a line with the next."""
    commands = []
    for fence in fences_of(page):
        if fence.language == language:
            text = "\n".join(fence.code).replace("\\\n", " ")
            commands += [line for line in text.splitlines() if line.split(" ")[0] in PROGRAMS]
    return [shlex.split(line, comments=True) for line in commands]


def run_command(words: list[str], folder: Path) -> None:
    """Run one command in a folder. A file that is not there is that of the repository, as in `python examples/x.py`."""

    def find(file: re.Match[str]) -> str:
        is_in_repository = not (folder / file[0]).exists() and (ROOT / file[0]).is_file()
        return str(ROOT / file[0]) if is_in_repository else file[0]

    program, *arguments = words
    arguments = [re.sub(r"[\w./-]+\.py", find, word) for word in arguments]  # also within method=examples/x.py:Class
    if program == "hopline":
        status, out, err = command(*arguments)
    else:
        launcher = ("-m", "torch.distributed.run") if program == "torchrun" else ()
        status, out, err = run_python(*launcher, *arguments, cwd=folder)
    assert status == 0, f"{shlex.join(words)}\n{out}\n{err}"


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a page's Python as one script in a folder, then its commands; return the names that the script defined."""
    monkeypatch.setenv("HOPLINE_DATA", str(folder / "data-root"))  # empty: no page needs data that only some have
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    script = folder / f"{page.stem}_page.py"
    script.write_text(script_of(page))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names = runpy.run_path(str(script), run_name="__main__")
        for words in commands_of(page):
            run_command(words, folder)
    return names


@pytest.fixture(autouse=True)
def _pyg_as_in_a_new_process() -> Iterator[None]:
    """`import hopline.pyg` on a page does what it does the first time, and the next test finds PyG without it."""
    if "hopline.pyg" in sys.modules:
        sys.modules["hopline.pyg"].use()
    yield
    if "hopline.pyg" in sys.modules:
        sys.modules["hopline.pyg"].reset()


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not commands_of(page, language=""), "fence commands as ```sh, or as ```text if they cannot run here"
    run_page(page, tmp_path, monkeypatch)


def test_the_readme_example_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    readme = ROOT / "README.md"
    assert sum(1 for line in script_of(readme).splitlines() if line.strip()) <= 10
    defined = run_page(readme, tmp_path, monkeypatch)
    assert defined["run"].test > 0.5
    assert defined["scores"].shape == (defined["data"].num_nodes, defined["data"].num_classes)
    printed = capsys.readouterr().out
    assert f"test accuracy   {defined['run'].test:.4f}" in printed


def test_the_readme_is_short_and_its_commands_take_their_settings():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    commands = re.findall(r"^hopline train (\S+)(.*)$", text, flags=re.MULTILINE)
    assert commands
    for name, settings in commands:
        override(find_recipe(name)(), settings.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path):
    for target, _, title in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if title else []
        heads = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not title or title in heads, f"{target} has no section {title}"


def calls_in_tables(page: Path) -> Iterator[tuple[str, ast.Module]]:
    """(the code, its parsed form) of each inline code in a table cell that calls something of `hl`."""
    for line in page.read_text().splitlines():
        for code in re.findall(r"`([^`]*\bhl\.[\w.]+\([^`]*)`", line) if line.startswith("|") else []:
            try:
                yield code, ast.parse(code)
            except SyntaxError:
                pytest.fail(f"{page.name}: `{code}` in a table is no Python: write ... for what is left out")


def resolve(node: ast.expr) -> Any:
    """What an expression that begins with `hl` names; for the call of a class the class. None if that is not known."""
    if isinstance(node, ast.Name):
        return hl if node.id == "hl" else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    called = resolve(node.func) if isinstance(node, ast.Call) else None
    return called if isinstance(called, type) else None


def literals_of(values: dict[str, ast.expr]) -> dict[str, Any]:
    """The values that are written out, by name."""
    literals = {}
    for name, value in values.items():
        with suppress(ValueError):
            literals[name] = ast.literal_eval(value)
    return {name: value for name, value in literals.items() if value is not ...}


def check_call(call: ast.Call) -> None:
    """The function or class exists and takes these arguments. Settings are made of the values that are written out."""
    called = resolve(call.func)
    if called is None:
        return
    positional = [value for value in call.args if ast.unparse(value) != "..."]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    is_of_object = inspect.isfunction(called) and isinstance(resolve(call.func.value), type)  # type: ignore[attr-defined]
    inspect.signature(called).bind_partial(*([None] if is_of_object else []), *positional, **keywords)
    if is_dataclass(called) and all(field.kw_only for field in fields(called)):
        called(**literals_of(keywords))  # type: ignore[operator]


def check_calls(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            check_call(node)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.stem)
def test_calls_in_tables_name_what_exists(page: Path):
    for code, tree in calls_in_tables(page):
        try:
            check_calls(tree)
        except (AttributeError, TypeError, ValueError) as error:
            pytest.fail(f"{page.name}: `{code}` in a table: {error}")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("hl.FulBatch()", AttributeError),
        ("hl.FullBatch(...).lodaer(data)", AttributeError),
        ("hl.FullBatch(...).loader(data, modl=model)", TypeError),
        ("hl.Sampled(fanouts)", TypeError),
        ("hl.Sampled(fanout=...)", TypeError),
        ("hl.FullBatch(num_shards=0)", ValueError),
    ],
)
def test_a_call_that_would_fail_is_noticed(code: str, error: type[Exception]):
    with pytest.raises(error):
        check_calls(ast.parse(code))


def test_the_readme_lists_the_methods_that_exist():
    section = (ROOT / "README.md").read_text().split("## Ways to train")[1].split("##")[0]
    listed = set(re.findall(r"^\| `hl\.(\w+)`", section, flags=re.MULTILINE))
    existing = {
        name for name in hl.__all__ if isinstance(m := getattr(hl, name), type) and issubclass(m, hl.extend.Method)
    }
    assert listed == existing - {"Method"}


def test_every_test_that_the_page_of_defects_names_exists():
    page = (ROOT / "docs" / "measurements" / "defects.md").read_text()
    rows = re.findall(r"^\| (?!defect|promise|---).*$", page, flags=re.MULTILINE)
    assert len(rows) >= 35
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split("|")[-2])
        assert named, f"names no test: {row}"
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            assert name in functions, f"there is no {file}::{name}"
            assert name.startswith("test_")


def test_the_changelog_speaks_of_this_version_or_of_what_is_unreleased():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{hl.__version__}]" in text or "[Unreleased]" in text


def test_the_version_is_stated_once_and_the_same():
    assert f'version = "{hl.__version__}"' in (ROOT / "pyproject.toml").read_text()


# ---- names of ours in backticks: files, members of classes, public names

SOURCE = ROOT / "src" / "hopline"
OURS = {path.name for path in (*SOURCE.iterdir(), *ROOT.iterdir()) if path.is_dir()}
"""Folders with which a path of ours begins, from the source or from the root."""


def members_of_classes() -> dict[str, set[str]]:
    """Class -> names of its fields, methods and attributes, those of base classes included."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                ours = members.setdefault(node.name, set())
                bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.FunctionDef):
                        ours.add(inner.name)
                    elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        ours.add(inner.attr)
                    elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        ours.add(inner.id)
    for _ in range(4):  # levels of inheritance
        for name, names in bases.items():
            members[name] |= {member for base in names for member in members.get(base, set())}
    return members


def is_name_of_ours(text: str, members: dict[str, set[str]]) -> bool:
    """Whether a word in backticks is a path or a dotted name that exists, or is none of ours."""
    word = text.split("(")[0].rstrip("/")
    first = re.split(r"[./]", word)[0]
    if "/" in word:
        if first not in OURS or "NAME" in word:
            return True
        # A file, or a function of one: training/trainer.step
        paths = (word, f"{word}.py", f"{word.rpartition('.')[0]}.py")
        return any((root / path).exists() for root in (SOURCE, ROOT) for path in paths)
    if first == "hl":
        try:
            return resolve(ast.parse(word, mode="eval").body) is not None
        except AttributeError:
            return False
    return first not in members or all(part in members[first] for part in word.split(".")[1:2])


@pytest.mark.parametrize("page", [page for page in PAGES if "measurements" not in page.parts], ids=lambda p: p.stem)
def test_names_in_backticks_exist(page: Path):
    members = members_of_classes()
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    words = {word for word in re.findall(r"`([A-Za-z_][\w./]*[\w/](?:\([^`]*\))?)`", prose) if re.search(r"[./]", word)}
    assert [word for word in sorted(words) if not is_name_of_ours(word, members)] == []


def test_a_name_that_does_not_exist_is_noticed():
    members = members_of_classes()
    for word in ("Block.layer_hooks", "training/trainer.step", "tests/test_layers.py", "hl.nn.GNN", "torch.nn"):
        assert is_name_of_ours(word, members), word
    for word in ("Block.between", "training/loop.py", "hl.nn.Gnn"):
        assert not is_name_of_ours(word, members), word


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in ("CHANGELOG", "convs")], ids=lambda p: p.stem
)
def test_lines_are_wrapped(page: Path):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "#"))]
    assert long == []
