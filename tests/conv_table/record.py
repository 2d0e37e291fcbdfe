"""Verdicts of all cells of a device, written to a file that the page is made from and the tests compare with."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_geometric

from tests.conv_table.cases import CONVS, Case
from tests.conv_table.models import MODELS, NORMS
from tests.conv_table.modes import MODES, Expected, Verdict, judge
from tests.conv_table.own import OWN_CONVS, OWN_MODULES

SECTIONS: dict[str, list[Case]] = {"convs": CONVS, "norms": NORMS, "models": MODELS}
FOLDER = Path(__file__).resolve().parents[1] / "records"

ALL = "all"
"""In a file: the verdict of all modes."""

Row = dict[str, Verdict]
"""By mode."""


@dataclass(frozen=True)
class Record:
    """All verdicts of one device."""

    versions: dict[str, str]
    sections: dict[str, dict[str, Row]]
    """By section, then by the case's name."""

    def row(self, section: str, case: Case) -> Row | None:
        return self.sections.get(section, {}).get(case.name)

    def faults(self) -> list[str]:
        """The cells that nobody may see."""
        return [
            f"{name}, {mode}: {verdict.word}: {verdict.why}"
            for rows in self.sections.values()
            for name, row in rows.items()
            for mode, verdict in row.items()
            if verdict.is_fault
        ]


def path_of(device: str) -> Path:
    return FOLDER / f"convs_{'cpu' if device == 'cpu' else 'gpu'}.json"


def read(device: str) -> Record | None:
    """What was recorded for a device, if anything was."""
    path = path_of(device)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    sections = {
        section: {name: _expanded(row) for name, row in rows.items()} for section, rows in found["sections"].items()
    }
    return Record(found["versions"], sections)


def _expanded(row: dict[str, list[str]]) -> Row:
    return {mode: Verdict(*row.get(mode, row.get(ALL, []))) for mode in MODES}  # type: ignore[arg-type]


def write(record: Record, device: str) -> None:
    """One line per case, so that a changed verdict is a changed line; reasons without what makes them long."""
    lines = ['{"versions": ' + json.dumps(record.versions) + ',\n "sections": {']
    for s, (section, rows) in enumerate(record.sections.items()):
        lines.append(f'{"," if s else ""}"{section}": {{')
        for r, (name, row) in enumerate(rows.items()):
            cells = {mode: [verdict.word, _short(name, verdict)] for mode, verdict in row.items()}
            if all(cell == cells["block"] for cell in cells.values()):
                cells = {ALL: cells["block"]}
            lines.append(f"{',' if r else ''}{json.dumps(name)}: {json.dumps(cells)}")
        lines.append("}")
    path_of(device).write_text("\n".join([*lines, "}}"]) + "\n")


def _short(name: str, verdict: Verdict) -> str:
    """A refusal without what differs from class to class: their names, the list of others, an error inside."""
    if verdict.word not in ("refused", "differs"):
        return verdict.why
    text = re.split(r"[;.] ([Cc]onvs|Use convs) such as", verdict.why)[0]
    text = re.sub(r" \(\w+Error: .*\)", "", text)
    text = re.sub(r" with aggregation=\w+", "", text)
    text = re.sub(r": (the aggregate of )?\w+ needs all edges", ": its aggregation needs all edges", text)
    kind = name.split("(")[0]
    names = [kind, *(own.__name__ for own in (*OWN_CONVS, *OWN_MODULES))]
    text = re.sub(rf"\b({'|'.join(map(re.escape, names))})\b(?!\()", "it", text)
    return text.removeprefix("it ").rstrip(".")


def run(device: str, jobs: int = 1, only: str = "") -> Record:
    """Judge every cell, or those of one class. Prints a line per case."""
    wanted = [
        (section, i)
        for section, cases in SECTIONS.items()
        for i, case in enumerate(cases)
        if case.exists and only in ("", case.kind)
    ]
    if not wanted:
        raise SystemExit(f"there is no class {only}: give a name such as GCNConv")
    sections: dict[str, dict[str, Row]] = {section: {} for section in SECTIONS}
    for number, ((section, i), row) in enumerate(zip(wanted, _rows(wanted, device, jobs), strict=True), start=1):
        case = SECTIONS[section][i]
        sections[section][case.name] = row
        words = " ".join(f"{mode}={verdict.word}" for mode, verdict in row.items())
        print(f"[{number}/{len(wanted)}] {case.name}: {words}", file=sys.stderr, flush=True)
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    versions = {"torch": torch.__version__.split("+")[0], "torch_geometric": torch_geometric.__version__}
    return Record({**versions, "device": name}, sections)


def _rows(wanted: list[tuple[str, int]], device: str, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (judge_case(*place, device) for place in wanted)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judge_case, *zip(*wanted, strict=True), [device] * len(wanted))


def judge_case(section: str, i: int, device: str) -> Row:
    """A row of the table; by its place, since cases do not travel between processes."""
    torch.set_num_threads(1)
    case = SECTIONS[section][i]
    expected = Expected(case)
    return {mode: judge(case, mode, device, expected) for mode in MODES}
