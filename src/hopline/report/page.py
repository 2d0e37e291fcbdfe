"""The HTML page of a run, made from the files of its folder alone.

    config.json, metrics.jsonl  --read_run-->  RunFiles  --render-->  one HTML text

The page is one file without scripts: style, charts and tables are in it. It can be made at any time: of a
run that ended, failed, was killed or is under way. So a value
of a record may be missing or of another type (`is_number`, `numbers`). A section without values is left out.

Sections, from the top: header, tiles, facts, notices, curves, time by part, pipeline, memory plan, memory
budget, counters, settings, versions.
"""

import bisect
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from hopline.report.charts import MAX_HOVERS, PALETTE_STYLE, WIDTH, Points, line_chart, swatch
from hopline.report.format import ABSENT, amount, duration, percent, unit_of
from hopline.report.settings import flatten, read_config
from hopline.util.config import format_size, plural
from hopline.util.files import check_file

T = TypeVar("T")
Record = dict[str, Any]
"""One line of metrics.jsonl. "event" says what it is about: "epoch", "evaluate", "budget", ..."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2430; --dim: #667085; --line: #e4e7ec; --page: #f6f7f9; --card: #fff;
  --good: #067647; --bad: #b42318; --mark: #e8710a; --shade: #1c243038;
}
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ef; --dim: #98a2b3; --line: #2c3442; --page: #12161d; --card: #1a202a;
  --good: #47cd89; --bad: #f97066; --mark: #ff9f43; --shade: #e6e9ef38;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 32px 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 0 0 10px; }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.dim { color: var(--dim); }
.status { font-size: 12px; font-weight: 600; letter-spacing: 0; padding: 2px 10px; margin-left: 10px;
  border-radius: 99px; border: 1px solid; vertical-align: 4px; color: var(--dim); }
.status.ok { color: var(--good); }
.status.failed { color: var(--bad); }
.notice { border-left: 3px solid var(--mark); background: var(--card); padding: 8px 14px; margin: 0 0 12px; }
.notice { overflow-wrap: anywhere; }
.notice.failed { border-color: var(--bad); }
code + .notice { margin-top: 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(128px, 100%), 1fr)); gap: 12px; }
.tiles { margin: 20px 0 12px; }
.tile, figure, .card { background: var(--card); }
.tile, figure, .table, .card { border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 19px; line-height: 1.3; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }
.grid.three { grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); }
.grid > div { min-width: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr)); gap: 12px; }
.facts { margin-bottom: 12px; }
.card { padding: 12px 16px; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 2px 16px; margin: 0; }
dt { color: var(--dim); }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
figure { margin: 0; padding: 12px 16px 8px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 6px; }
.key { font-weight: 400; white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
figcaption .key { color: var(--dim); margin-left: 14px; }
/* A shadow at an edge behind which there is more: the first two layers scroll along and cover it at the ends. */
.scroll, .table { overflow-x: auto; background:
  linear-gradient(to right, var(--card) 50%, transparent) local left / 48px 100%,
  linear-gradient(to left, var(--card) 50%, transparent) local right / 48px 100%,
  linear-gradient(to right, var(--shade), transparent) left / 18px 100%,
  linear-gradient(to left, var(--shade), transparent) right / 18px 100%, var(--card);
  background-repeat: no-repeat; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--dim); }
.three svg text { font-size: 15px; }
.gridline { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 16px; border-top: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; font-size: 12.5px; }
td { overflow-wrap: anywhere; white-space: pre-wrap; }
tr:first-child > * { border-top: 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
.keys td:first-child { white-space: nowrap; }
tr.sum > * { font-weight: 600; }
:not(.sum) + tr.sum > * { border-top: 2px solid var(--line); }
.bars td:last-child { width: 45%; vertical-align: middle; }
.bars i { display: block; height: 10px; border-radius: 3px; background: var(--c0); }
figure + .table, figure + details, .table + details { margin-top: 12px; }
summary { cursor: pointer; color: var(--dim); padding: 4px 0; }
details .table { margin-top: 6px; }
@media (max-width: 640px) {
  main { padding: 20px 12px 32px; }
  th, td { padding: 6px 10px; }
  svg text { font-size: 15px; }
  svg.wide { width: 820px; }
  th.number { white-space: normal; }
  .bars td:last-child, .bars th:last-child { display: none; }
}
"""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Contents of a run folder. A record that a run did not write is {}."""

    name: str
    about: Record
    """config.json: settings, command, versions and machine."""
    start: Record
    """Dataset, model and method."""
    elapsed_s: float
    """Seconds from the start of the run to its last record."""
    epochs: list[Record]
    """One record per epoch, in order."""
    evaluations: list[Record]
    """One record per evaluated epoch and split, in order."""
    budgets: list[Record]
    """Predicted and measured memory: one record per epoch that kept to a budget, in order."""
    plan: Record
    """The memory plan, made before the run."""
    pipeline: Record
    """The bottleneck: an `Explanation` of the run, or of its last epoch."""
    history: Record
    """Staleness of the historical embeddings that training read."""
    end: Record
    """Results of a run that ended."""
    close: Record
    """Status and counters, written last."""
    num_unreadable: int
    """Lines of metrics.jsonl that are no records."""


def read_records(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl, without lines that cannot be read.

    [] if there is no such file.
    """
    return [record for record in _read_lines(path) if record is not None]


def _read_lines(path: Path) -> list[Record | None]:
    """The record of each line. None for a line that is none, such as half a line of a run that was killed."""
    if not path.exists():
        return []
    check_file(path)
    records: list[Record | None] = []
    text = path.read_text("utf-8", errors="replace").removesuffix("\n")
    # Not by `splitlines`, which also splits at characters that JSON has inside a text.
    for line in text.split("\n") if text else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        records.append(record if _is_record(record) else None)
    return records


def _is_record(value: Any) -> bool:
    """Whether a value is a dict in which the fields that all readers compare have their types."""
    if not isinstance(value, dict):
        return False
    words = [value.get("event"), value.get("split") if value.get("event") == "evaluate" else None]
    amounts = [value[name] for name in ("epoch", "elapsed_s") if value.get(name) is not None]
    return all(word is None or isinstance(word, str) for word in words) and all(map(is_number, amounts))


def read_run(folder: Path, max_lines: int | None = None) -> RunFiles:
    """Read the folder of a run that ended, failed, was killed or is under way.

    max_lines: read as many lines of metrics.jsonl at most. Raises a ValueError if config.json is missing or damaged.
    """
    about = read_config(folder)
    lines = _read_lines(folder / "metrics.jsonl")[:max_lines]
    name = str(about["config"].get("name") or folder.resolve().name)
    records = [record for record in lines if record is not None]
    # By epoch and split: a resumed run may evaluate an epoch again, and the last record counts.
    evaluations: dict[tuple[float, str], Record] = {}
    for record in records:
        has_metrics = is_number(record.get("epoch")) and isinstance(record.get("metrics"), dict)
        if record.get("event") == "evaluate" and has_metrics:
            evaluations[record["epoch"], str(record.get("split"))] = record
    last = {record.get("event"): record for record in records}  # the last record of each event
    return RunFiles(
        name=name,
        about=about,
        start=last.get("start", {}),
        elapsed_s=max((r["elapsed_s"] for r in records if is_number(r.get("elapsed_s"))), default=0.0),
        epochs=_last_by_epoch(records, "epoch"),
        evaluations=[evaluations[key] for key in sorted(evaluations)],
        budgets=_last_by_epoch(records, "budget"),
        plan=last.get("plan", {}),
        # "explain" is about the run, and written at its end. "pipeline" is about one epoch.
        pipeline=last.get("explain", last.get("pipeline", {})),
        history=last.get("history", {}),
        end=last.get("end", {}),
        close=last.get("close", {}),
        num_unreadable=len(lines) - len(records),
    )


def _last_by_epoch(records: Iterable[Record], event: str) -> list[Record]:
    """The last record of an event for each epoch, in order. A resumed run may log an epoch again."""
    last = {r["epoch"]: r for r in records if r.get("event") == event and is_number(r.get("epoch"))}
    return [last[epoch] for epoch in sorted(last)]


def render(folder: Path) -> str:
    """Return the page of the run in a folder.

    Raises a ValueError if config.json is missing or damaged, or if a record of metrics.jsonl lacks something.
    """
    run = read_run(folder)

    def is_damaged(num_lines: int) -> bool:
        try:
            _render(read_run(folder, num_lines))
        except Exception:
            return True
        return False

    try:
        return _render(run)
    except Exception as error:
        path = folder / "metrics.jsonl"
        line = bisect.bisect_left(range(len(_read_lines(path))), True, key=is_damaged)
        where = f"'{path}', line {line}" if line else f"'{folder / 'config.json'}'"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} is damaged ({reason}): restore the file, or remove the line.") from error


def _render(run: RunFiles) -> str:
    """The page of a run."""
    config = run.about["config"]
    # A Trainer in Python stores its settings under "train". `hopline train` stores them without that key.
    evaluate = config.get("evaluate") or _mapping(config.get("train")).get("evaluate")
    is_async = evaluate == "async"
    # Asynchronous evaluation validates while training continues. Training waits for the other splits.
    waited_for = [r for r in run.evaluations if not is_async or r.get("split") != "valid"]
    parts = time_by_part(run.elapsed_s, run.epochs, waited_for)
    body = [
        _header(run),
        _tiles(run, sum(parts.values())),
        facts_section(run.start, [lr for _, lr in _series(run.epochs, "lr")]),
        *map(_notice, _notices(run)),
        _curves(run),
        time_section(parts, _evaluation_stages(run), is_async) if run.epochs else "",
        pipeline_section(run.pipeline, run.epochs),
        plan_section(run.plan),
        budget_section(run.budgets),
        _counters(run),
    ]
    machine = {"platform": run.about.get("platform"), "cores": run.about.get("cpu_count")}
    versions = [*flatten(_mapping(run.about.get("versions"))), *machine.items()]
    versions_section = f"<h2>Versions and machine</h2>{table(('what', 'value'), versions, kind='keys')}"
    settings = settings_section(config, run.about["changed"])
    body.append(f'<div class="grid"><div>{settings}</div><div>{versions_section}</div></div>')

    content = "\n".join(section for section in body if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · hopline</title><style>{STYLE}{PALETTE_STYLE}</style></head>\n"
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _header(run: RunFiles) -> str:
    """Name, status, start, command and, if the run failed, its error."""
    status = str(run.close.get("status") or "not finished")
    state, _, problem = status.partition(": ")
    css_class = {"ok": "ok", "not finished": ""}.get(state, "failed")
    state_text = "finished" if state == "ok" else state
    times = [str(run.about.get("started") or "").replace("T", " ")]
    if run.end.get("reason") and css_class != "failed":
        times.append(f"ended: {run.end['reason']}")
    command = " ".join(map(str, run.about.get("command") or []))
    problem_notice = f'<p class="notice failed">{escape(problem)}</p>' if problem else ""
    return (
        f'<h1>{escape(run.name)}<span class="status {css_class}">{escape(state_text)}</span></h1>'
        f'<div class="dim">{escape(" · ".join(times))}</div><code>{escape(command)}</code>{problem_notice}'
    )


def _tiles(run: RunFiles, total_s: float) -> str:
    """The main numbers of a run, one per tile. total_s: seconds of the whole run."""
    tiles: list[tuple[str, str]] = []  # (label, value)
    for split, metrics, note in _results(run):
        tiles += [(f"{split} {name}{note}", f"{value:.4f}") for name, value in metrics.items() if is_number(value)]
    for name, label in (("loss", "loss"), ("seeds_per_s", "seeds per second")):
        values = {value for _, value in _series(run.epochs, name)}
        if len(values) == 1:  # no chart shows a value that never changes
            tiles.append((label, amount(*values)))
    tiles.append((plural(len(run.epochs), "epoch"), f"{len(run.epochs):,}"))
    if total_s > 0:
        tiles.append(("total time", duration(total_s)))
    seconds = [value for _, value in _series(run.epochs, "seconds")]
    if len(seconds) > 1:
        tiles.append(("median time per epoch", duration(statistics.median(seconds))))
    if run.pipeline.get("bottleneck"):
        tiles.append(("bottleneck", str(run.pipeline["bottleneck"])))
    if is_number(run.end.get("peak_rss_bytes")):
        tiles.append(("peak host memory", format_size(run.end["peak_rss_bytes"])))
    cells = ""
    for label, value in tiles:
        cells += f'<div class="tile"><b>{escape(value)}</b><span class="dim">{escape(label)}</span></div>'
    return f'<div class="tiles">{cells}</div>'


def _results(run: RunFiles) -> Iterable[tuple[str, Record, str]]:
    """Yield (split, metrics, note) of the best validation and of the test.

    They come from the record of the run's end. Without it the best evaluation so far is taken, by its first
    metric.
    """

    def score(evaluation: Record) -> float:
        value = _first(evaluation["metrics"])
        return -value if evaluation.get("best_is") == "min" else value

    best_epoch = run.end.get("best_epoch")
    valid = run.end.get("valid")
    if not isinstance(valid, dict):  # the run has not ended
        scored = [r for r in run.evaluations if r.get("split") == "valid" and is_number(_first(r["metrics"]))]
        best = max(scored, key=score, default=None)
        valid = best["metrics"] if best else None
        best_epoch = best["epoch"] if best else None
    if valid:
        yield "best valid", valid, f" (epoch {best_epoch})" if best_epoch is not None else ""
    if isinstance(run.end.get("test"), dict):
        yield "test", run.end["test"], ""


def _first(values: Mapping[str, Any]) -> Any:
    return next(iter(values.values()), None)


def _notices(run: RunFiles) -> Iterable[str]:
    """Yield what a reader should know about a run that is not as usual."""
    if not run.close:
        yield "This run has not closed its report: it is still under way, or it was killed."
    if run.num_unreadable:
        yield f"{run.num_unreadable} line(s) of metrics.jsonl could not be read and are left out."
    if not run.epochs:
        yield "No epoch has been completed, so there are no curves."
    if len(run.epochs) == 1:
        yield "Only one epoch was completed, so there are no curves."
    if run.history.get("sentence"):
        yield f"{run.history['sentence']}: {run.history.get('advice', '')}"
    if run.close.get("num_dropped_spans"):
        yield f"trace.json leaves out {run.close['num_dropped_spans']:,} spans beyond its limit."


def _notice(text: str) -> str:
    return f'<p class="notice">{escape(text)}</p>'


def _curves(run: RunFiles) -> str:
    """Charts of loss, metrics, learning rate and speed over epochs."""
    metrics: dict[str, list[tuple[float, float]]] = {}
    for record in run.evaluations:
        for name, value in record["metrics"].items():
            if is_number(value):
                metrics.setdefault(f"{record.get('split')} {name}", []).append((record["epoch"], value))
    charts = {
        "Loss": {"loss": _series(run.epochs, "loss")},
        "Metrics": metrics,
        "Learning rate": {"learning rate": _series(run.epochs, "lr")},
        "Seeds per second": {"seeds per second": _series(run.epochs, "seeds_per_s")},
    }
    drawn: list[str] = []
    for title, series in charts.items():
        # A value that never changes is in the tiles or facts instead.
        is_changing = any(len({value for _, value in points}) > 1 for points in series.values())
        if is_changing:
            drawn.append(line_chart(title, series))
    columns = "grid three" if len(drawn) == 3 else "grid"
    return f'<h2>Over epochs</h2><div class="{columns}">{"".join(drawn)}</div>' if drawn else ""


def _series(records: Iterable[Record], name: str) -> Points:
    """(epoch, value) of all records that have a number under `name`."""
    return [(r["epoch"], r[name]) for r in records if is_number(r.get(name))]


def _evaluation_stages(run: RunFiles) -> list[Record]:
    """Statistics of stages that no epoch has: those of evaluation.

    "evaluate" itself is in `time_by_part`.
    """
    in_epochs = {"evaluate"}
    for epoch in run.epochs:
        in_epochs.update(numbers(epoch.get("stages")), numbers(epoch.get("work")))
    return [s for s in run.end.get("stages") or [] if isinstance(s, dict) and s.get("name") not in in_epochs]


def _counters(run: RunFiles) -> str:
    """A table of all counters: their totals, and their values in the last epoch."""
    last = numbers(run.epochs[-1].get("counters")) if run.epochs else {}
    totals = numbers(run.close.get("counters"))
    if not totals:  # the run has not closed its report
        for epoch in run.epochs:
            for name, count in numbers(epoch.get("counters")).items():
                totals[name] = totals.get(name, 0) + count
    # Numbers in names are ordered by value, to_2 before to_16: parts are padded to equal length.
    names = sorted({*totals, *last}, key=lambda name: [f"{part:>9}" for part in re.split(r"(\d+)", name)])
    rows = [(name, _write_counter(name, totals.get(name)), _write_counter(name, last.get(name))) for name in names]
    return f"<h2>Counters</h2>{table(('counter', 'total', 'last epoch'), rows, numbers_from=1)}" if rows else ""


def _write_counter(name: str, value: float | None) -> str:
    """A counter for people: with a unit if its name says that it counts bytes."""
    if value is None:
        return ABSENT
    if "bytes" in name:
        return format_size(value)
    return amount(int(value) if value % 1 == 0 else value)


MANY_ROWS = 12
"""Rows. A longer table by epoch is folded."""
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
"""(name, bytes) of the units of memory in charts, the largest first."""


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number. JSON's true and false are none, nor what float64 cannot hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def numbers(values: Any) -> dict[str, float]:
    """The finite numbers of a dict. {} if the value is no dict."""
    return {k: v for k, v in values.items() if is_number(v)} if isinstance(values, dict) else {}


class Html(str):
    """Text of a table cell that is HTML already, and is not escaped."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numbers_from: int = 99,
    *,
    sums: Iterable[Sequence[Any]] = (),
    kind: str = "",
) -> str:
    """Write a table as HTML. Cells are escaped, unless they are `Html`.

    heads: Texts of the first row.
    rows: Cells of each row.
    numbers_from: The first column of numbers, which are aligned to the right. The default is beyond any
        table.
    sums: Rows below the others, set apart.
    kind: CSS class of the table: "keys", "bars" or "".
    """

    def write_row(tag: str, cells: Sequence[Any], row_class: str = "") -> str:
        html = ""
        for column, cell in enumerate(cells):
            cell_class = ' class="number"' if column >= numbers_from else ""
            text = cell if isinstance(cell, Html) else escape(_text(cell))
            html += f"<{tag}{cell_class}>{text}</{tag}>"
        return f"<tr{row_class}>{html}</tr>"

    lines = [write_row("th", heads), *(write_row("td", cells) for cells in rows)]
    lines += [write_row("td", cells, ' class="sum"') for cells in sums]
    return f'<div class="table {kind}"><table>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    """A value as it is typed in key=value: none, true or 10,10."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    is_word = value is None or isinstance(value, bool)
    return str(value).lower() if is_word else str(value)


def fold(title: str, content: str) -> str:
    """Fold HTML behind its title, which opens it on a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def thin_out(values: Sequence[T], max_values: int, key: Callable[[T], float] | None = None) -> tuple[list[T], int]:
    """(at most `max_values` values, number of values behind each). Each is the largest of consecutive ones."""
    per_value = max(1, -(-len(values) // max_values))
    stretches = (values[start : start + per_value] for start in range(0, len(values), per_value))
    return [max(stretch, key=key) for stretch in stretches], per_value  # type: ignore[type-var]


def budget_section(records: Sequence[Record]) -> str:
    """Predicted and measured memory, as a chart by step and a table by epoch. "" without a budget.

    records: `RunFiles.budgets`.
    """
    if not records:
        return ""
    columns = (  # (head, key in the record, how to write it)
        ("steps", "num_steps", _count),
        ("limit", "limit_bytes", _size),
        ("predicted", "promised_bytes", _size),
        ("measured", "peak_bytes", _size),
        ("split", "split", _count),
        ("micro-batches", "pieces", _count),
        ("resampled", "resampled", _count),
        ("cut", "cut", _count),
        ("over", "over", _count),
        ("out of memory", "oom", _count),
    )
    heads = ["epoch", *(head for head, _, _ in columns)]
    rows = [(f"{record['epoch']:g}", *(write(record.get(key)) for _, key, write in columns)) for record in records]
    note = (
        '<p class="dim">The largest step of each epoch: the limit that the budget leaves for it, its predicted and '
        "its measured peak. Then how many batches were split, into how many micro-batches, how many were resampled or "
        "had edges cut, and how many steps went over the limit or ran out of memory and were run again.</p>"
    )
    by_epoch = table(heads, rows, numbers_from=1)
    if len(rows) > MANY_ROWS:
        by_epoch = fold(f"By epoch ({len(rows)} rows)", by_epoch)
    return f"<h2>Memory budget</h2>{note}{_bytes_chart(records)}{by_epoch}"


def plan_section(record: Record) -> str:
    """The memory plan: resident items, a step, and the predicted peak at each place. "" without a plan.

    record: `RunFiles.plan`.
    """
    totals = record.get("totals") or []
    if not totals:
        return ""
    rows = []
    for total in totals:
        place = total["place"]
        resident = [item for item in record.get("items") or [] if item.get("place") == place]
        rows += [(place, item["name"], _size(item.get("num_bytes"))) for item in resident]
        step_bytes = total["promised_bytes"] - sum(item["num_bytes"] for item in resident)
        if step_bytes > 0:
            rows.append((place, "a step", format_size(step_bytes)))
        rows.append((place, "predicted peak", _size(total.get("promised_bytes"))))
        rows.append((place, "budget", _size(total.get("budget_bytes"))))
    return f"<h2>Memory plan</h2>{table(('place', 'what', 'bytes'), rows, numbers_from=2)}"


def _size(num_bytes: Any) -> str:
    return format_size(num_bytes) if is_number(num_bytes) else ABSENT


def _count(number: Any) -> str:
    return f"{number:,}" if is_number(number) else ABSENT


def _bytes_chart(records: Sequence[Record]) -> str:
    """A chart of the bytes of every step, before and after splitting, and of the limit."""
    curves: dict[str, list[tuple[float, float]]] = {"before splitting": [], "after splitting": [], "limit": []}
    steps_before = 0  # of the epochs before
    for record in records:
        steps_per_point = max(1, int(record.get("steps_per_point") or 1))
        for name, key in (("before splitting", "before"), ("after splitting", "after")):
            for i, num_bytes in enumerate(record.get(key) or []):
                if is_number(num_bytes):
                    curves[name].append((steps_before + i * steps_per_point + 1, num_bytes))
        num_steps = int(record.get("num_steps") or 0)
        limit_bytes = record.get("limit_bytes")
        if num_steps and limit_bytes is not None and is_number(limit_bytes):
            curves["limit"].append((steps_before + 1, limit_bytes))
            curves["limit"].append((steps_before + num_steps, limit_bytes))
        steps_before += num_steps

    largest = max((num_bytes for points in curves.values() for _, num_bytes in points), default=0)
    unit, unit_bytes = next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])
    series: dict[str, Points] = {}
    for name, points in curves.items():
        # Of consecutive points the largest stays, so that peaks stay visible.
        visible, _ = thin_out(points, MAX_HOVERS, key=lambda point: point[1])
        series[name] = [(step, num_bytes / unit_bytes) for step, num_bytes in visible]
    return line_chart(f"Bytes per step, in {unit}", series, over="step", always_shown=0.0, width=2 * WIDTH)


SIZES = {
    "num_nodes": "nodes",
    "num_edges": "edges",
    "num_features": "features",
    "num_classes": "classes",
    "num_seeds": "training seeds",
}
"""Sizes of the dataset: keys in the record of a run's start, and names on the page."""
METHOD_SETTINGS = {
    "kind": "method",
    "fanouts": "fan-outs",
    "batch_size": "batch size",
    "num_parts": "parts",
    "parts_per_batch": "parts per batch",
    "num_shards": "shards",
}
"""The settings of a method that are among the facts: keys, and names on the page."""


def facts_section(facts: Record, learning_rates: Sequence[float]) -> str:
    """Dataset, model and training in three cards.

    facts: The record of the run's start.
    learning_rates: Those of all epochs. They are shown if they are all the same, since no chart shows them
        then.
    """
    dataset = {"name": facts.get("dataset")} | {label: facts.get(key) for key, label in SIZES.items()}
    layers = Counter(map(str, facts.get("layers") or []))
    model = {
        "name": facts.get("model"),
        "layers": ", ".join(f"{count} × {name}" for name, count in layers.items()) or None,
        "parameters": facts.get("num_parameters"),
    }
    method = _mapping(facts.get("method"))
    training: dict[str, Any] = {}
    for key, label in METHOD_SETTINGS.items():
        value = method.get(key)
        training[label] = ", ".join(map(str, value)) if isinstance(value, list) else value
    if len(set(learning_rates)) == 1:
        training["learning rate"] = f"{learning_rates[0]:g}"
    training |= {"device": facts.get("device"), "ranks": facts.get("num_ranks")}
    cards = _card("Dataset", dataset) + _card("Model", model) + _card("Training", training)
    return f'<div class="facts">{cards}</div>' if cards else ""


def _card(title: str, facts: Mapping[str, Any]) -> str:
    terms = [f"<dt>{name}</dt><dd>{escape(amount(value))}</dd>" for name, value in facts.items() if value is not None]
    return f'<div class="card"><h3>{title}</h3><dl>{"".join(terms)}</dl></div>' if terms else ""


def settings_section(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Tables of the changed settings, whose keys are given, and, folded, of the others."""
    settings = dict(flatten(config))
    changed = {key: value for key, value in settings.items() if key in keys}
    others = {key: value for key, value in settings.items() if key not in keys}

    def rows(settings: Mapping[str, Any]) -> str:
        return table(("key", "value"), settings.items(), kind="keys")

    if not others:
        return f"<h2>Settings</h2>{rows(changed)}"
    changed_rows = rows(changed) if changed else '<p class="dim">All settings have their default values.</p>'
    folded = fold(f"{len(others)} settings with their default values", rows(others))
    return f"<h2>Changed settings</h2>{changed_rows}{folded}"


def time_by_part(elapsed_s: float, epochs: Sequence[Record], evaluations: Sequence[Record]) -> dict[str, float]:
    """Seconds of each part of the run. Their sum is the total.

    elapsed_s: Seconds from the start of the run to its last record.
    epochs: Records of all epochs.
    evaluations: Records of the evaluations that training waited for.
    """
    stages = [numbers(record.get("stages")) for record in epochs]
    # A checkpoint within an epoch ("checkpoint") is part of the epoch's seconds. One after its evaluation
    # ("evaluate.checkpoint") is not.
    checkpoint_in_epochs_s = sum(seconds.get("checkpoint", 0.0) for seconds in stages)
    checkpoint_after_s = sum(seconds.get("evaluate.checkpoint", 0.0) for seconds in stages)
    parts = {
        "training": _sum(epochs, "seconds") - checkpoint_in_epochs_s,
        "evaluation": _sum(evaluations, "seconds"),
        "checkpoints": checkpoint_in_epochs_s + checkpoint_after_s,
    }
    # Not below 0: after a run was killed within an epoch and resumed, the seconds of that epoch include
    # time that `elapsed_s` does not.
    parts["everything else"] = max(0.0, elapsed_s - sum(parts.values()))
    return parts


def _sum(records: Sequence[Record], key: str) -> float:
    return sum(record[key] for record in records if is_number(record.get(key)))


def time_section(parts: Mapping[str, float], evaluation_stages: Sequence[Record], is_async: bool) -> str:
    """Time by part as a table with bars.

    parts: Seconds of each part.
    evaluation_stages: Statistics of the stages of evaluation, which overlap.
    is_async: Whether validation ran concurrently with training.
    """
    total_s = sum(parts.values())
    unit = unit_of([total_s])
    rows = []
    for name, seconds in parts.items():
        share = seconds / total_s
        rows.append((name, unit.write(seconds), percent(share), Html(f'<i style="width:{share:.1%}"></i>')))
    total = ("total", unit.write(total_s), "100%", Html(""))
    note = "From the start of training: opening the dataset came before."
    if is_async:
        note += " Validation ran at the same time as training, and is in none of the parts."
    heads = ("part", f"time ({unit.name})", "share", "")
    by_part = table(heads, rows, numbers_from=1, sums=[total], kind="bars")
    return f'<h2>Time by part</h2><p class="dim">{note}</p>{by_part}{_evaluation_table(evaluation_stages)}'


def _evaluation_table(stages: Sequence[Record]) -> str:
    """Times of the stages of evaluation in a folded table. "" if none was timed."""
    columns = ("first_epoch_s", "mean_s")
    times = [stage[column] for stage in stages for column in columns if is_number(stage.get(column))]
    if not times:
        return ""
    unit = unit_of(times)
    rows = [(str(stage.get("name")), *(unit.write(stage.get(column)) for column in columns)) for stage in stages]
    heads = ("stage", f"first epoch ({unit.name})", f"later epochs, mean ({unit.name})")
    return fold("Stages of evaluation", table(heads, rows, numbers_from=1))


def pipeline_section(pipeline: Record, epochs: Sequence[Record]) -> str:
    """The bottleneck and what to change, the stages by epoch, and the gain of their overlap.

    pipeline: `RunFiles.pipeline`.
    epochs: Records of all epochs.
    """
    shares = numbers(pipeline.get("shares"))
    work = [numbers(epoch.get("work")) for epoch in epochs]
    timed = dict.fromkeys(name for stages in work for name in stages)
    # Shares are in the order in which a batch goes through the stages. Stages without a share follow.
    names = [name for name in shares if name in timed] + [name for name in timed if name not in shares]
    if not names:
        return ""
    unit = unit_of([statistics.median(sum(stages.values()) for stages in work)])
    sentence = pipeline.get("sentence")
    notice = _notice(str(sentence)) if sentence else ""
    chart = ""
    if len(epochs) > 1:  # one epoch needs no chart besides the table
        of_stages = [(name, [stages.get(name, 0.0) for stages in work]) for name in names]
        curves = dict([*of_stages, ("all stages", [sum(stages.values()) for stages in work])])
        series = {
            name: [(epoch["epoch"], seconds / unit.seconds) for epoch, seconds in zip(epochs, times, strict=True)]
            for name, times in curves.items()
        }
        chart = line_chart(f"Work by stage, in {unit.name}", series, always_shown=0.0, width=2 * WIDTH)

    heads = ("stage", f"first epoch ({unit.name})", f"later epochs, mean ({unit.name})", "± std", "share of the work")
    rows = []
    for i, name in enumerate(names):
        first, *later = [stages.get(name, 0.0) for stages in work]
        mean = statistics.fmean(later) if later else None
        deviation = statistics.stdev(later) if len(later) > 1 else None
        # The tile names the same stage, from the same record.
        mark = ' <span class="dim">bottleneck</span>' if name == pipeline.get("bottleneck") else ""
        times = map(unit.write, (first, mean, deviation))
        rows.append((Html(swatch(i, name) + mark), *times, percent(shares[name]) if name in shares else ""))

    note = "Work of each stage per epoch, without waiting."
    sums = []
    if shares:
        workers = pipeline.get("workers")
        if workers:
            note += f" Prefetch by {workers} {plural(workers, 'thread')}: stages overlap."
        else:
            note += " No prefetch: the thread that trains also prepares the batches."
        num_batches = pipeline["num_batches"]
        note += f" {num_batches:,} {plural(num_batches, 'batch')} per epoch."
        serial_s = pipeline["serial_s"]
        bound = pipeline["bound"]
        for name, time_s, share in (
            ("all stages, one after the other", serial_s, 1.0),
            ("least with perfect overlap", serial_s * bound, bound),
            ("measured epoch", pipeline["seconds"], pipeline["achieved"]),
        ):
            sums.append((name, "", unit.write(time_s), "", percent(share)))
    by_stage = table(heads, rows, numbers_from=1, sums=sums)
    return f'<h2>Pipeline</h2>{notice}<p class="dim">{note}</p>{chart}{by_stage}'
