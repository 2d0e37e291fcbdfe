"""One benchmark on two commits in turn: both commits, medians, spreads and ratios.

    python benchmarks/alternate.py OLD NEW --times 5 -- python benchmarks/loader_cpu.py
    python benchmarks/alternate.py HEAD~1 . --times 3 --show seconds -- python benchmarks/train_cpu.py

OLD and NEW are commits, or folders with a copy of the project; `.` is the working tree as it is, committed or not. Both
are put into a temporary folder. The command runs in each of them, with its `src` in front of PYTHONPATH: once to warm
up (Numba compiles its kernels), which does not count, and then in turn, the order swapped in every round, so that a
machine that becomes slower meets both. `python` is the one that runs this script; give data by absolute paths.

What is compared is the time of the whole command and every number that it prints under the same label each time: cells
of tables, `label: number unit` in text, and what follows RESULT, a JSON object of numbers, on a line of its own. Lines
that begin with a time in brackets are a log and are left out, and so are numbers that are the same in all runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEFT_OUT = (".git", ".venv*", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "runs", "build", "dist")
"""What a copy of a folder does without. Compiled kernels are among it: both sides begin without any."""
WALL = "whole command, s"

Numbers = dict[str, float]


# ---- the numbers that a benchmark prints

NUMBER = r"[+-]?\d+(?:[,_]\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?"
CELL = re.compile(rf"({NUMBER})\s?(?:%|x|[a-zA-Zµ/]{{1,10}})?$")
"""A cell of a table that is a number, perhaps with a unit."""
LOG = re.compile(rf"\[\s*{NUMBER}\s*s\]")
RULE = re.compile(r"[-=|: ]*")
"""A line of a table that has no cells, or an empty one."""
SHIFT = 1
"""Columns by which a number may end beside its heading: a heading may be wider than its column."""


def numbers_in(output: str) -> Numbers:
    """By label, the numbers in what a benchmark printed; the second under one label is `label #2`."""
    found: Numbers = {}
    seen: Counter[str] = Counter()
    head = ""
    for line in output.splitlines():
        if LOG.match(line.lstrip()) or RULE.fullmatch(line):
            continue
        if line.startswith("RESULT "):
            pairs = list(_flat("", json.loads(line.removeprefix("RESULT "))))
        elif line.startswith("|"):
            pairs = list(_in_bars(line, head))
        else:
            pairs = list(_in_columns(line, head) or _in_text(line))
        if not pairs:
            head = line
        for label, value in pairs:
            seen[label] += 1
            found[label if seen[label] == 1 else f"{label} #{seen[label]}"] = value
    return found


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a JSON value, by the path to each."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _flat(f"{prefix}.{number}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)


def _in_bars(line: str, head: str) -> Iterator[tuple[str, float]]:
    """Numbers in a row of a Markdown table, by the cells before the first of them and by their headings."""
    cells, headings = ([text.strip() for text in row.strip().strip("|").split("|")] for row in (line, head))
    row = " ".join(itertools.takewhile(lambda text: not CELL.match(text), cells))
    for number, text in enumerate(cells):
        match = CELL.match(text)
        if match and row:
            yield f"{row}: {headings[number] if len(headings) == len(cells) else number + 1}", _value(match[1])


def _in_columns(line: str, head: str) -> list[tuple[str, float]]:
    """Numbers in a row of an aligned table: cells are two blanks apart, and begin with a label."""
    cells = [(match[0], match.end()) for match in re.finditer(r"\S+(?: \S+)*", line)]
    is_number = [CELL.match(text) for text, _ in cells]
    if not any(is_number) or is_number[0]:
        return []
    first = next(number for number, match in enumerate(is_number) if match)
    row, found = " ".join(text for text, _ in cells[:first]), []
    for number, (match, (_, end)) in enumerate(zip(is_number, cells, strict=True)):
        if match:
            heading = _heading(head, cells[number - 1][1], end) or f"number {number - first + 1}"
            found.append((f"{row}: {heading}", _value(match[1])))
    return found


def _heading(head: str, before: int, end: int) -> str:
    """The words of a heading that end where a number ends; before: where the cell to its left does."""
    words = [(match[0], match.start(), match.end()) for match in re.finditer(r"\S+", head)]
    taken: list[str] = []
    next_start = None
    for word, start, stop in reversed(words):
        is_last = not taken and abs(stop - end) <= SHIFT
        is_more = bool(taken) and start < end and next_start == stop + 1 and stop > before + SHIFT
        if is_last or is_more:
            taken.insert(0, word)
            next_start = start
    return " ".join(taken)


def _in_text(line: str) -> Iterator[tuple[str, float]]:
    """Numbers in a sentence, each by the words before it and the word after it."""
    # A number inside a word, such as a name or a version, is none.
    matches = list(re.finditer(rf"(?<![\w.]){NUMBER}(?![\w.])", line))
    for number, match in enumerate(matches):
        before = line[: match.start()] if number == 0 else line[matches[number - 1].end() : match.start()]
        after = re.match(r"\s?([a-zA-Zµ%/]+)", line[match.end() :])
        label = before.strip(" ,;:([")
        if label:
            yield f"{label}, {after[1]}" if after else label, _value(match[0])


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


# ---- the two sides


@dataclass
class Side:
    """One of the two versions."""

    name: str
    """old or new."""
    said: str
    """What it is: a commit and its title, or a folder."""
    folder: Path
    runs: list[Numbers] = field(default_factory=list)


class Failed(Exception):
    """A run that ended badly, or a side that cannot be made."""


def side_of(name: str, given: str, folder: Path) -> Side:
    """A commit or a folder, copied."""
    if Path(given).is_dir():
        shutil.copytree(given, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        return Side(name, _describe_folder(Path(given)), folder)
    commit = _git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}").strip()
    if not commit:
        raise Failed(f"{given} is neither a commit nor a folder: give HEAD~1, a hash, or a folder with the project")
    folder.mkdir(parents=True)
    top = _git("rev-parse", "--show-toplevel").strip()
    archive = subprocess.run(["git", "-C", top, "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return Side(name, _git("log", "-1", "--format=%h %s", commit).strip(), folder)


def _describe_folder(folder: Path) -> str:
    """The commit that is checked out there, and whether there is more than that; else the folder's name."""
    top = _git("-C", str(folder), "rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != folder.resolve():
        return f"the folder {folder}, of no known commit"
    commit = _git("-C", str(folder), "log", "-1", "--format=%h %s").strip()
    changed = _git("-C", str(folder), "status", "--porcelain").splitlines()
    return f"{commit}, and {len(changed)} files that are changed or not committed" if changed else commit


def _git(*arguments: str) -> str:
    """What git says; nothing where it is not installed, or there is no repository."""
    try:
        return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    except FileNotFoundError:
        return ""


def run(side: Side, command: Sequence[str]) -> Numbers:
    """Run the command in a side's folder; returns what it printed, and the time that it took."""
    paths = [str(side.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        # A session of its own, so that all that it starts can be ended together.
        process = subprocess.Popen(
            command, cwd=side.folder, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            process.wait()
        finally:
            _end(process)
        seconds = time.perf_counter() - started
        output.seek(0)
        errors.seek(0)
        print_messages = output.read()
        if process.returncode:
            said = f"{print_messages}{errors.read()}".rstrip()
            raise Failed(f"{said}\n{side.name} ({side.said}): {shlex.join(command)} ended with {process.returncode}")
    return {WALL: seconds, **numbers_in(print_messages)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all that is left of a run, what it started included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runnable(command: Sequence[str]) -> list[str]:
    """The command as it can be started in another folder."""
    program = command[0]
    if program in ("python", "python3"):
        program = sys.executable
    elif os.sep in program:
        program = os.path.abspath(program)
    return [program, *command[1:]]


# ---- the table


def compare(old: Sequence[Numbers], new: Sequence[Numbers], show: Sequence[str] = ()) -> list[str]:
    """The table of what is in all runs; show: only labels that contain one of these, and the whole command's time."""
    runs = [*old, *new]
    labels = [label for label in old[0] if all(label in numbers for numbers in runs)]
    same = [label for label in labels if len({numbers[label] for numbers in runs}) == 1]
    shown = [label for label in labels if label not in same and (not show or _is_asked_for(label, show))]
    rows = [("quantity", "old, median [least .. most]", "new, median [least .. most]", "new / old", "by round", "")]
    for label in shown:
        before, after = ([numbers[label] for numbers in side] for side in (old, new))
        rounds = [b / a for a, b in zip(before, after, strict=True) if a]
        medians = statistics.median(before), statistics.median(after)
        ratio = f"{medians[1] / medians[0]:.3f}" if medians[0] else "-"
        by_round = f"{statistics.median(rounds):.3f}" if rounds else "-"
        rows.append((label, _spread(before), _spread(after), ratio, by_round, _marker(before, after)))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("* each median lies outside the spread of the other side")
    changing = len({label for numbers in runs for label in numbers}) - len(labels)
    lines.append(f"{len(same)} numbers are the same in all runs, {changing} are not in all of them: left out")
    return lines


def _is_asked_for(label: str, show: Sequence[str]) -> bool:
    return label == WALL or any(text in label for text in show)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} [{min(values):.4g} .. {max(values):.4g}]"


def _marker(before: Sequence[float], after: Sequence[float]) -> str:
    """A star where the two differ by more than either does by itself."""
    apart = not min(before) <= statistics.median(after) <= max(before)
    return "*" if apart and not min(after) <= statistics.median(before) <= max(after) else ""


def alternate(sides: tuple[Side, Side], command: Sequence[str], times: int) -> None:
    """Run the command in both, in turn; the numbers are in the sides."""
    for number in range(times + 1):
        for side in sides if number % 2 == 0 else reversed(sides):
            numbers = run(side, command)
            what = "warm-up" if number == 0 else f"round {number} of {times}"
            print(f"{what}, {side.name}: {numbers[WALL]:.2f} s", file=sys.stderr, flush=True)
            if number:
                side.runs.append(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a benchmark on two commits in turn.")
    parser.add_argument("old", help="a commit, or a folder with the project")
    parser.add_argument("new", help="the same; . is the working tree as it is")
    parser.add_argument("--times", type=int, default=5, help="rounds that count, after one to warm up")
    parser.add_argument("--show", nargs="+", default=[], metavar="TEXT", help="only numbers with this in their label")
    # Cut off by hand: what follows -- is another program's, and its options are not ours.
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    args, command = parser.parse_args(given[:at]), given[at + 1 :]
    if not command:
        parser.error("say what to run after --: -- python benchmarks/loader_cpu.py")
    if args.times < 1:
        parser.error("--times must be at least 1")
    # Both end it so that nothing is left behind; a shell ignores Ctrl-C for what it runs in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="hopline-alternate-") as folder:
        try:
            sides = tuple(side_of(name, getattr(args, name), Path(folder) / name) for name in ("old", "new"))
            alternate((sides[0], sides[1]), runnable(command), args.times)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    for side in sides:
        print(f"{side.name}: {side.said}")
    print(f"{shlex.join(command)}\n{args.times} rounds in turn, after one to warm up\n")
    print("\n".join(compare(sides[0].runs, sides[1].runs, args.show)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
