"""What the documents show is true: the README's example runs, its links lead somewhere, its methods exist."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import hopline as hl
from hopline.recipes import find_recipe
from hopline.util.config import override
from tests.runs import small

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_readme_example_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 10
    script = tmp_path / "example.py"
    script.write_text(code)
    left = runpy.run_path(str(script))
    assert left["run"].test > 0.5
    assert left["scores"].shape == (left["data"].num_nodes, left["data"].num_classes)
    print_messages = capsys.readouterr().out
    assert f"test accuracy   {left['run'].test:.4f}" in print_messages


def test_the_snippets_of_the_page_of_own_loops_run_one_after_the_other(tmp_path: Path):
    small().save(tmp_path / "graph")
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_loops.md").read_text(), flags=re.DOTALL))
    script = tmp_path / "page.py"
    script.write_text(code.replace('hl.open("demo")', f"hl.open({str(tmp_path / 'graph')!r})"))
    left = runpy.run_path(str(script))
    assert left["exact"].shape == left["estimate"].shape == (80, 4)
    assert left["loss"].item() < 1.4


def test_the_readme_is_short_and_its_commands_take_their_settings():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
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


def test_the_readme_lists_the_methods_that_exist():
    section = (ROOT / "README.md").read_text().split("## Ways to train")[1].split("##")[0]
    listed = set(re.findall(r"^\| `hl\.(\w+)`", section, flags=re.MULTILINE))
    existing = {
        name for name in hl.__all__ if isinstance(m := getattr(hl, name), type) and issubclass(m, hl.extend.Method)
    }
    assert listed == existing - {"Method"}


def test_every_test_that_the_reliability_page_names_exists():
    section = (ROOT / "docs" / "reliability.md").read_text().split("## Defects of earlier systems")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!defect|---).*$", section, flags=re.MULTILINE)
    assert len(rows) >= 25
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
