"""Project files for contributors run what `make` and `.ci/run` run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_pre_commit_runs_the_tools_of_make_check():
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    of_make = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()[1:]]
    of_hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert of_hooks == of_make


def test_the_workflow_runs_what_decides_whether_a_change_lands():
    assert "run: bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make check", "make test"]


def test_templates_ask_for_the_command_the_versions_and_the_golden_record():
    folder = ROOT / ".github"
    for template in (folder / "ISSUE_TEMPLATE" / "bug.yml", folder / "pull_request_template.md"):
        text = template.read_text().lower()
        for expected in ("command", "hopline doctor", "python -m tests.golden --compare"):
            assert expected in text, f"{template.name} does not ask for {expected!r}"
