"""docs/convs.md from the records: for each section, cases by what became of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.conv_table.cases import ARGUMENTS, Case
from tests.conv_table.modes import MODES, Verdict
from tests.conv_table.record import SECTIONS, Record, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "convs.md"

HEAD = """\
# Convs, norms and models, by mode

hopline computes what plain PyG computes, or refuses with an error that says why. This page says which of the two, for
every class of `torch_geometric.nn.conv`, `.norm` and `.models` of PyG {torch_geometric} with torch {torch}.

A conv is run as two layers of `hl.nn.GNN` in float64, on a small graph with self-loops, duplicate edges, isolated
nodes, nodes without in-edges, a hub, and weights that are zero and negative; some batches have only nodes without
in-edges. `make convs` runs all of it and writes this page; `make test` runs a part and fails if a cell has changed.

| verdict | means |
|---|---|
| equal | loss, outputs and gradients of all parameters, summed over batches, are those of plain PyG on all edges |
| refused | an error names the class and says what to do instead |
| needs | PyG needs something that hopline does not hand to a conv, or that the graph or the machine has not |
| differs | is not equal if trained on batches, in PyG neither; hopline says so when the run begins |

Reasons are hopline's own words, shortened and numbered below each table; the class of the row is "it".

| column | is |
|---|---|
| block | `Sampled(layout="block")` at full fan-out |
| tree | `Sampled(layout="tree")`, the default on a GPU, with fan-outs as large as the largest degree |
| historical | `Historical(compensate=True)` with exact tables |
| sweep | `FullBatch(aggregation="sweep")`, with and without `trim=True` |
| sequential | `FullBatch(aggregation="sequential")` |
| one-shot | `FullBatch(aggregation="one_shot")` |
| trimmed | `FullBatch(aggregation="sequential", trim=True)` |
| inference | `hl.infer.exact`: all nodes, in one and in many chunks, a few nodes, one without in-edges |

Batch norms, also those inside of convs, take their statistics from the rows of a batch, in hopline as in PyG. In block,
tree and historical they were compared by their running statistics.

"""

TITLES = {
    "convs": ("Convs", "conv"),
    "norms": ("Norms and jumping knowledge", "norm"),
    "models": ("Models", "model"),
}


def render(cpu: Record, gpu: Record | None) -> str:
    text = HEAD.format(**cpu.versions) + _gpu_paragraph(cpu, gpu)
    for section in SECTIONS:
        text += _render_section(section, cpu)
    return text


def _gpu_paragraph(cpu: Record, gpu: Record | None) -> str:
    if gpu is None:
        return "The tables are those of the CPU; `pytest -m gpu tests/conv_table` compares a GPU with them.\n"
    rows = [
        f"| {_title(case)} | {mode} | {verdict.word} | {there.word}: {_escaped(there.why)} |"
        for section, cases in SECTIONS.items()
        for case in cases
        for mode, verdict in (cpu.row(section, case) or {}).items()
        if (there := (gpu.row(section, case) or {}).get(mode)) is not None and there.word != verdict.word
    ]
    ran = f"an {gpu.versions['device']} with torch {gpu.versions['torch']} and PyG {gpu.versions['torch_geometric']}"
    if not rows:
        return f"The tables are those of the CPU. On {ran} every cell is the same.\n"
    table = "\n".join(["| case | mode | CPU | GPU |", "|---|---|---|---|", *rows])
    return f"The tables are those of the CPU. On {ran} they are the same but for:\n\n{table}\n"


def _render_section(section: str, record: Record) -> str:
    title, noun = TITLES[section]
    groups: dict[str, list[tuple[Case, Row]]] = {"wrong": [], "equal": [], "some": [], "refused": [], "needs": []}
    for case in sorted(SECTIONS[section], key=lambda case: (case.kind.lower(), SECTIONS[section].index(case))):
        row = record.row(section, case)
        if row is not None:
            groups[_group(row)].append((case, row))
    text = f"\n## {title}\n"
    if groups["wrong"]:
        text += "\n### Wrong\n\n" + _table_by_mode(noun, groups["wrong"])
    text += "\n### Equal in every mode\n\n" + _table_of_equal(noun, groups["equal"])
    if groups["some"]:
        text += "\n### Equal in some modes\n\n" + _table_by_mode(noun, groups["some"])
    if groups["refused"]:
        text += "\n### Refused in every mode\n\n" + _table_of_refused(noun, groups["refused"])
    if groups["needs"]:
        text += "\n### In need of something else\n\n" + _table_of_needs(noun, groups["needs"])
    return text


def _group(row: Row) -> str:
    words = {verdict.word for verdict in row.values()}
    if any(verdict.is_fault for verdict in row.values()):
        return "wrong"
    return next(iter(words)) if len(words) == 1 and words <= {"equal", "refused", "needs"} else "some"


def _table_of_equal(noun: str, rows: list[tuple[Case, Row]]) -> str:
    """A line per class, with all that it was built with."""
    by_kind: dict[str, list[Case]] = {}
    for case, _ in rows:
        by_kind.setdefault(case.kind, []).append(case)
    lines = [f"| {kind} | {'; '.join(map(_built_with, cases))} |" for kind, cases in by_kind.items()]
    return "\n".join([f"| {noun} | built with |", "|---|---|", *lines]) + "\n"


def _table_by_mode(noun: str, rows: list[tuple[Case, Row]]) -> str:
    """A column per mode; reasons are numbered below."""
    reasons: dict[str, int] = {}
    lines = []
    for case, row in rows:
        cells = [_cell(row[mode], reasons) for mode in MODES]
        lines.append(f"| {_title(case)} | {' | '.join(cells)} |")
    head = f"| {noun} | {' | '.join(MODES)} |"
    return "\n".join([head, "|---" * (1 + len(MODES)) + "|", *lines, "", *_notes(reasons)]) + "\n"


def _cell(verdict: Verdict, reasons: dict[str, int]) -> str:
    if verdict.word == "equal":
        return "equal"
    number = reasons.setdefault(_escaped(verdict.why), len(reasons) + 1)
    return f"{verdict.word} [{number}]"


def _table_of_refused(noun: str, rows: list[tuple[Case, Row]]) -> str:
    """A line per case; reasons, of which modes may have different ones, are numbered below."""
    reasons: dict[str, int] = {}
    lines = []
    for case, row in rows:
        cells = dict.fromkeys(_cell(verdict, reasons) for verdict in row.values())
        lines.append(f"| {_title(case)} | {', '.join(cell.removeprefix('refused ') for cell in cells)} |")
    return "\n".join([f"| {noun} | why |", "|---|---|", *lines, "", *_notes(reasons)]) + "\n"


def _table_of_needs(noun: str, rows: list[tuple[Case, Row]]) -> str:
    lines = [f"| {_title(case)} | {_escaped(row['block'].why)} |" for case, row in rows]
    return "\n".join([f"| {noun} | needs |", "|---|---|", *lines]) + "\n"


def _notes(reasons: dict[str, int]) -> list[str]:
    return [f"{number}. {reason}" for reason, number in reasons.items()]


def _title(case: Case) -> str:
    """The class and what it was built with, as one line."""
    built = _built_with(case)
    return case.kind if built == "defaults" else f"{case.kind}: {built}"


def _built_with(case: Case) -> str:
    takes = [f"with {_listed(ARGUMENTS[name] for name in case.uses)}"] if case.uses else []
    ignores = [ARGUMENTS[name] for name in case.edge if name not in case.uses]
    without = [f"on a graph that has {_listed(ignores)}"] if ignores else []
    built = [f"`{case.options}`" if re.match(r"\w+=", case.options) else case.options] if case.options else []
    return _escaped(" ".join([*built, *takes, *without]) or "defaults")


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
