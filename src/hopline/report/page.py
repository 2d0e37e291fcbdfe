"""The HTML page of a run, made from the files of its folder alone.

    config.json, metrics.jsonl  --read_run-->  RunFiles  --render-->  one HTML text

The page is one file without scripts: style, charts and tables are in it. It can be made at any time: of a
run that ended, failed, was killed or is under way. So a value
of a record may be missing or of another type (`is_number`, `numbers`). A section without values is left out.

Sections, from the top: header, tiles, notices, curves, time by part, pipeline, memory plan, memory budget,
counters, settings, facts and versions.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from hopline.report.charts import MAX_HOVERS, PALETTE_STYLE, WIDTH, Points, line_chart, swatch
from hopline.report.format import ABSENT, amount, duration, percent
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
  --good: #067647; --bad: #b42318; --mark: #e8710a;
}
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ef; --dim: #98a2b3; --line: #2c3442; --page: #12161d; --card: #1a202a;
  --good: #47cd89; --bad: #f97066; --mark: #ff9f43;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 48px; font-variant-numeric: tabular-nums; }
h1, h2, p { margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin-top: 32px; }
.dim { color: var(--dim); }
.status { font-size: 13px; margin-left: 10px; color: var(--dim); }
.status.ok { color: var(--good); }
.status.failed { color: var(--bad); }
.notice { border-left: 3px solid var(--mark); background: var(--card); padding: 8px 14px; margin: 12px 0; }
.notice.failed { border-color: var(--bad); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }
.grid > div { min-width: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tile b { display: block; font-size: 19px; }
.tile, figure, .table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile, figure { margin: 0; padding: 12px 16px; min-width: 0; }
.scroll, .table { overflow-x: auto; }
.key { color: var(--dim); white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin: 0 6px 0 14px; }
svg { display: block; width: 100%; min-width: 420px; height: auto; }
svg text { font-size: 11px; fill: var(--dim); }
.gridline { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 16px; border-top: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; }
td { overflow-wrap: anywhere; white-space: pre-wrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.sum { font-weight: 600; }
figure + .table, details { margin-top: 12px; }
summary { cursor: pointer; color: var(--dim); }
"""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Contents of a run folder. A record that a run did not write is {}."""

    name: str
    about: Record
    """config.json: settings, command, versions and machine."""
    start: Record
    elapsed_s: float
    """Seconds from the start of the run to its last record."""
    epochs: list[Record]
    """One record per epoch, in order."""
    evaluations: list[Record]
    """One record per evaluated epoch and split, in order."""
    budgets: list[Record]
    """Predicted and measured memory: one record per epoch that kept to a budget, in order."""
    plan: Record
    pipeline: Record
    """The bottleneck: an `Explanation` of the run, or of its last epoch."""
    history: Record
    """Staleness of the historical embeddings that training read."""
    end: Record
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


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run that ended, failed, was killed or is under way.

    Raises a ValueError if config.json is missing or damaged.
    """
    about = read_config(folder)
    lines = _read_lines(folder / "metrics.jsonl")
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
        start={key: value for key, value in last.get("start", {}).items() if key not in ("event", "elapsed_s")},
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
    try:
        return _render(run)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"metrics.jsonl or config.json of '{folder}' is damaged ({reason}): restore it.") from error


def _render(run: RunFiles) -> str:
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
        *map(_notice, _notices(run)),
        _curves(run),
        time_section(parts, run.end.get("stages") or [], is_async) if run.epochs else "",
        pipeline_section(run.pipeline, run.epochs),
        plan_section(run.plan),
        budget_section(run.budgets),
        _counters(run),
    ]
    machine = {"platform": run.about.get("platform"), "cores": run.about.get("cpu_count")}
    versions = [*flatten(_mapping(run.about.get("versions"))), *machine.items()]
    facts = [(key, amount(value) if is_number(value) else value) for key, value in flatten(run.start)]
    about = f"<h2>Data and model</h2>{table(KEY_AND_VALUE, facts)}" if facts else ""
    about += f"<h2>Versions and machine</h2>{table(KEY_AND_VALUE, versions)}"
    settings = settings_section(config, run.about["changed"])
    body.append(f'<div class="grid"><div>{settings}</div><div>{about}</div></div>')

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
    tiles: list[tuple[str, str]] = []  # (label, value)
    for split, metrics, note in _results(run):
        tiles += [(f"{split} {name}{note}", f"{value:.4f}") for name, value in metrics.items() if is_number(value)]
    for name, label in (("loss", "loss"), ("lr", "learning rate"), ("seeds_per_s", "seeds per second")):
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
    """Yield (split, metrics, note) of the best validation, so far in a run that has not ended, and of the test."""

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
        # A value that never changes is in the tiles instead.
        is_changing = any(len({value for _, value in points}) > 1 for points in series.values())
        if is_changing:
            drawn.append(line_chart(title, series))
    return f'<h2>Over epochs</h2><div class="grid">{"".join(drawn)}</div>' if drawn else ""


def _series(records: Iterable[Record], name: str) -> Points:
    """(epoch, value) of all records that have a number under `name`."""
    return [(r["epoch"], r[name]) for r in records if is_number(r.get(name))]


def _counters(run: RunFiles) -> str:
    last = numbers(run.epochs[-1].get("counters")) if run.epochs else {}
    totals = numbers(run.close.get("counters"))
    if not totals:  # the run has not closed its report
        for epoch in run.epochs:
            for name, count in numbers(epoch.get("counters")).items():
                totals[name] = totals.get(name, 0) + count
    # Numbers in names are ordered by value, to_2 before to_16: parts are padded to equal length.
    names = sorted({*totals, *last}, key=lambda name: [f"{part:>9}" for part in re.split(r"(\d+)", name)])
    rows = [(name, _write(name, totals.get(name)), _write(name, last.get(name))) for name in names]
    return f"<h2>Counters</h2>{table(('counter', 'total', 'last epoch'), rows, numbers_from=1)}" if rows else ""


def _write(name: str, value: Any) -> str:
    """A number for people: with a unit if its name says that it counts bytes."""
    if not is_number(value):
        return ABSENT
    if "bytes" in name:
        return format_size(value)
    return amount(int(value) if value % 1 == 0 else value)


MANY_ROWS = 12
"""Rows. A longer table by epoch is folded."""
KEY_AND_VALUE = ("key", "value")


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
) -> str:
    """Write a table as HTML. Cells are escaped, unless they are `Html`.

    heads: Texts of the first row.
    rows: Cells of each row.
    numbers_from: The first column of numbers, which are aligned to the right. The default is beyond any
        table.
    sums: Rows below the others, set apart.
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
    return f'<div class="table"><table>{"".join(lines)}</table></div>'


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
    """Predicted and measured memory, as a chart by step and a table by epoch. "" without a budget."""
    if not records:
        return ""
    columns = (  # (head, key in the record)
        ("steps", "num_steps"),
        ("limit", "limit_bytes"),
        ("predicted", "promised_bytes"),
        ("measured", "peak_bytes"),
        ("split", "split"),
        ("micro-batches", "pieces"),
        ("resampled", "resampled"),
        ("cut", "cut"),
        ("over", "over"),
        ("out of memory", "oom"),
    )
    heads = ["epoch", *(head for head, _ in columns)]
    rows = [(f"{record['epoch']:g}", *(_write(key, record.get(key)) for _, key in columns)) for record in records]
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
    """The memory plan: resident items, a step, and the predicted peak at each place. "" without a plan."""
    totals = record.get("totals") or []
    if not totals:
        return ""
    rows = []
    for total in totals:
        place = total["place"]
        resident = [item for item in record.get("items") or [] if item.get("place") == place]
        rows += [(place, item["name"], _write("num_bytes", item.get("num_bytes"))) for item in resident]
        step_bytes = total["promised_bytes"] - sum(item["num_bytes"] for item in resident)
        if step_bytes > 0:
            rows.append((place, "a step", format_size(step_bytes)))
        rows.append((place, "predicted peak", _write("promised_bytes", total.get("promised_bytes"))))
        rows.append((place, "budget", _write("budget_bytes", total.get("budget_bytes"))))
    return f"<h2>Memory plan</h2>{table(('place', 'what', 'bytes'), rows, numbers_from=2)}"


def _bytes_chart(records: Sequence[Record]) -> str:
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

    series: dict[str, Points] = {}
    for name, points in curves.items():
        # Of consecutive points the largest stays, so that peaks stay visible.
        visible, _ = thin_out(points, MAX_HOVERS, key=lambda point: point[1])
        series[name] = [(step, num_bytes / 2**20) for step, num_bytes in visible]
    return line_chart("Bytes per step, in MiB", series, over="step", always_shown=0.0, width=2 * WIDTH)


def settings_section(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Tables of the changed settings, whose keys are given, and, folded, of the others."""
    settings = dict(flatten(config))
    changed = {key: value for key, value in settings.items() if key in keys}
    others = {key: value for key, value in settings.items() if key not in keys}

    def rows(settings: Mapping[str, Any]) -> str:
        return table(KEY_AND_VALUE, settings.items())

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


def time_section(parts: Mapping[str, float], stages: Sequence[Record], is_async: bool) -> str:
    """Time by part, and, folded, the times of all stages.

    parts: Seconds of each part.
    stages: Statistics of the stages of a run that ended, which overlap.
    is_async: Whether validation ran concurrently with training.
    """
    total_s = sum(parts.values())
    rows = [(name, duration(seconds), percent(seconds / total_s)) for name, seconds in parts.items()]
    note = "From the start of training: opening the dataset came before."
    if is_async:
        note += " Validation ran at the same time as training, and is in none of the parts."
    by_part = table(("part", "time", "share"), rows, numbers_from=1, sums=[("total", duration(total_s), "100%")])
    timers = ""
    if stages:
        columns = ("first_epoch_s", "mean_s", "std_s")
        times = [(stage["name"], stage["calls"], *(_time(stage.get(column)) for column in columns)) for stage in stages]
        timers = fold("Times of all stages, which overlap", table(("stage", "calls", *STAGE_TIMES), times, 1))
    return f'<h2>Time by part</h2><p class="dim">{note}</p>{by_part}{timers}'


STAGE_TIMES = ("first epoch", "later epochs, mean", "± std")


def _time(seconds: Any) -> str:
    return duration(seconds) if is_number(seconds) else ABSENT


def pipeline_section(pipeline: Record, epochs: Sequence[Record]) -> str:
    """The bottleneck and what to change, the stages by epoch, and the gain of their overlap."""
    shares = numbers(pipeline.get("shares"))
    work = [numbers(epoch.get("work")) for epoch in epochs]
    timed = dict.fromkeys(name for stages in work for name in stages)
    # Shares are in the order in which a batch goes through the stages. Stages without a share follow.
    names = [name for name in shares if name in timed] + [name for name in timed if name not in shares]
    if not names:
        return ""
    sentence = pipeline.get("sentence")
    notice = _notice(str(sentence)) if sentence else ""
    chart = ""
    if len(epochs) > 1:  # one epoch needs no chart besides the table
        of_stages = [(name, [stages.get(name, 0.0) for stages in work]) for name in names]
        curves = dict([*of_stages, ("all stages", [sum(stages.values()) for stages in work])])
        series = {
            name: [(epoch["epoch"], seconds) for epoch, seconds in zip(epochs, times, strict=True)]
            for name, times in curves.items()
        }
        chart = line_chart("Work by stage, in s", series, always_shown=0.0, width=2 * WIDTH)

    rows = []
    for i, name in enumerate(names):
        first, *later = [stages.get(name, 0.0) for stages in work]
        mean = statistics.fmean(later) if later else None
        deviation = statistics.stdev(later) if len(later) > 1 else None
        # The tile names the same stage, from the same record.
        mark = ' <span class="dim">bottleneck</span>' if name == pipeline.get("bottleneck") else ""
        times = map(_time, (first, mean, deviation))
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
            sums.append((name, "", duration(time_s), "", percent(share)))
    by_stage = table(("stage", *STAGE_TIMES, "share of the work"), rows, numbers_from=1, sums=sums)
    return f'<h2>Pipeline</h2>{notice}<p class="dim">{note}</p>{chart}{by_stage}'
