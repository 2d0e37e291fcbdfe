"""The page of a run: read its files, draw its curves, and lay them out without any outside help."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hopline.report import colours as report_colours
from hopline.report.charts import Points, line_chart
from hopline.report.facts import facts_section, settings_section
from hopline.report.format import ABSENT, amount, duration
from hopline.report.parts import Record, budget_section, is_number, numbers, plan_section, table
from hopline.report.settings import flatten
from hopline.report.times import pipeline_section, stages_of, time_by_part, time_section
from hopline.util.spec import format_size

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
.tile, figure, .table, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
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
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--dim); }
.three svg text { font-size: 15px; }
.gridline { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.table { overflow-x: auto; }
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
    """What the files of a run folder say."""

    name: str
    about: Record
    start: Record
    """Dataset, model and method; old runs have no such record."""
    elapsed_s: float
    """The stamp of the last record."""
    epochs: list[Record]
    evaluations: list[Record]
    budgets: list[Record]
    """Of each epoch that kept to a budget."""
    plan: Record
    """What it was promised to take."""
    pipeline: Record
    """Why epochs took as long as they did."""
    history: Record
    """How old the rows were that historical training read."""
    end: Record
    close: Record
    num_unreadable: int


def read_records(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl, without the lines that cannot be read."""
    return _read_lines(path)[0]


def _read_lines(path: Path) -> tuple[list[Record], int]:
    records, num_unreadable = [], 0
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            num_unreadable += 1
    return records, num_unreadable


def read_run(folder: Path) -> RunFiles:
    """Read a run folder, of a run that ended, failed, was killed or is still under way."""
    path = folder / "config.json"
    try:
        about = json.loads(path.read_text("utf-8"))
        name = str(about["config"].get("name") or folder.resolve().name)
    except FileNotFoundError:
        raise ValueError(f"'{path}' is missing: give the folder of a run, as `hopline train out=` names it.") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"'{path}' is damaged: restore it, or run again with another out=FOLDER.") from None
    records, num_unreadable = _read_lines(folder / "metrics.jsonl")
    epochs, budgets = _by_epoch(records, "epoch"), _by_epoch(records, "budget")
    evaluations = {
        (r["epoch"], str(r.get("split"))): r
        for r in records
        if r.get("event") == "evaluate" and is_number(r.get("epoch")) and isinstance(r.get("metrics"), dict)
    }
    last = {r.get("event"): r for r in records}
    return RunFiles(
        name=name,
        about=about,
        start=last.get("start", {}),
        elapsed_s=max((r["elapsed_s"] for r in records if is_number(r.get("elapsed_s"))), default=0.0),
        epochs=epochs,
        evaluations=[evaluations[key] for key in sorted(evaluations)],
        budgets=budgets,
        plan=last.get("plan", {}),
        pipeline=last.get("explain", last.get("pipeline", {})),
        history=last.get("history", {}),
        end=last.get("end", {}),
        close=last.get("close", {}),
        num_unreadable=num_unreadable,
    )


def _by_epoch(records: Iterable[Record], event: str) -> list[Record]:
    """A resumed run repeats epochs; what it logged last holds."""
    found = {r["epoch"]: r for r in records if r.get("event") == event and is_number(r.get("epoch"))}
    return [found[epoch] for epoch in sorted(found)]


def render(folder: Path) -> str:
    """Return the page of the run in a folder."""
    run = read_run(folder)
    config = run.about["config"]
    is_async = "async" in (config.get("evaluate"), _mapping(config.get("train")).get("evaluate"))
    waited_for = [r for r in run.evaluations if not is_async or r.get("split") != "valid"]
    parts = time_by_part(run.elapsed_s, run.epochs, waited_for)
    body = [
        _header(run),
        _tiles(run, sum(parts.values())),
        facts_section(run.start, config, [lr for _, lr in _series(run.epochs, "lr")]),
        *map(_notice, _notices(run)),
        _curves(run),
        time_section(parts, _evaluation_stages(run), is_async) if run.epochs else "",
        pipeline_section(run.pipeline, run.epochs),
        plan_section(run.plan),
        budget_section(run.budgets),
        _counters(run),
    ]
    facts = {"platform": run.about.get("platform"), "cores": run.about.get("cpu_count")}
    versions = [*flatten(_mapping(run.about.get("versions"))), *facts.items()]
    machine = f"<h2>Versions and machine</h2>{table(('what', 'value'), versions, kind='keys')}"
    body.append(f'<div class="grid"><div>{settings_section(config)}</div><div>{machine}</div></div>')
    num_stages = len({name for epoch in run.epochs for name in stages_of(epoch)})
    num_metrics = len({(r.get("split"), name) for r in run.evaluations for name in r["metrics"]})
    style = STYLE + report_colours.style(max(len(report_colours.CHOSEN), num_stages, num_metrics))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · hopline</title><style>{style}</style></head>\n"
        f"<body><main>\n{chr(10).join(filter(None, body))}\n</main></body></html>\n"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _header(run: RunFiles) -> str:
    status = str(run.close.get("status") or "not finished")
    state, _, problem = status.partition(": ")
    kind = {"ok": "ok", "not finished": ""}.get(state, "failed")
    when = [str(run.about.get("started") or "").replace("T", " ")]
    if run.end.get("reason") and kind != "failed":
        when.append(f"ended: {run.end['reason']}")
    command = " ".join(map(str, run.about.get("command") or []))
    shown = "finished" if state == "ok" else state
    return (
        f'<h1>{escape(run.name)}<span class="status {kind}">{escape(shown)}</span></h1>'
        f'<div class="dim">{escape(" · ".join(when))}</div><code>{escape(command)}</code>'
        + (f'<p class="notice failed">{escape(problem)}</p>' if problem else "")
    )


def _tiles(run: RunFiles, total_s: float) -> str:
    tiles: list[tuple[str, str]] = []
    for split, metrics, note in _results(run):
        tiles += [(f"{split} {name}{note}", f"{value:.4f}") for name, value in metrics.items() if is_number(value)]
    for name, label in (("loss", "loss"), ("seeds_per_s", "seeds per second")):
        values = {value for _, value in _series(run.epochs, name)}
        if len(values) == 1:  # no curve shows it
            tiles.append((label, amount(*values)))
    tiles.append(("epochs", f"{len(run.epochs):,}"))
    if total_s > 0:
        tiles.append(("total time", duration(total_s)))
    seconds = [value for _, value in _series(run.epochs, "seconds")]
    if len(seconds) > 1:
        tiles.append(("median time per epoch", duration(statistics.median(seconds))))
    if run.pipeline.get("bottleneck"):
        tiles.append(("bottleneck", str(run.pipeline["bottleneck"])))
    if is_number(run.end.get("peak_rss_bytes")):
        tiles.append(("peak host memory", format_size(run.end["peak_rss_bytes"])))
    cells = [f'<div class="tile"><b>{escape(v)}</b><span class="dim">{escape(k)}</span></div>' for k, v in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _results(run: RunFiles) -> Iterable[tuple[str, Record, str]]:
    """The best validation and the test metrics, from the end of the run or from what was evaluated so far."""
    best = run.end.get("best_epoch")
    valid = run.end.get("valid")
    if not isinstance(valid, dict):
        scored = [r for r in run.evaluations if r.get("split") == "valid" and is_number(_first(r["metrics"]))]
        top = max(scored, key=lambda r: _first(r["metrics"]) * (-1 if r.get("best_is") == "min" else 1), default=None)
        valid, best = (top["metrics"], top["epoch"]) if top else (None, None)
    if valid:
        yield "best valid", valid, f" (epoch {best})" if best is not None else ""
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
    # A chart of what never changes says nothing: tiles and facts have the value.
    drawn = [
        line_chart(title, series)
        for title, series in charts.items()
        if any(len({value for _, value in points}) > 1 for points in series.values())
    ]
    columns = "grid three" if len(drawn) == 3 else "grid"
    return f'<h2>Over epochs</h2><div class="{columns}">{"".join(drawn)}</div>' if drawn else ""


def _series(records: Iterable[Record], name: str) -> Points:
    return [(r["epoch"], r[name]) for r in records if is_number(r.get(name))]


def _evaluation_stages(run: RunFiles) -> list[Record]:
    """Statistics of the stages that are in no epoch's time; of evaluation as a whole `time_by_part` has the time."""
    in_epochs = {"evaluate", *(name for r in run.epochs for name in (*numbers(r.get("stages")), *stages_of(r)))}
    return [s for s in run.end.get("stages") or [] if isinstance(s, dict) and s.get("name") not in in_epochs]


def _counters(run: RunFiles) -> str:
    last = numbers(run.epochs[-1].get("counters")) if run.epochs else {}
    totals = numbers(run.close.get("counters"))
    if not totals:
        for record in run.epochs:
            for name, amount in numbers(record.get("counters")).items():
                totals[name] = totals.get(name, 0) + amount
    # Numbers in a name in their order: to_2 before to_16.
    names = sorted({*totals, *last}, key=lambda name: [f"{part:>9}" for part in re.split(r"(\d+)", name)])
    rows = [(name, *(_amount(name, values.get(name)) for values in (totals, last))) for name in names]
    return f"<h2>Counters</h2>{table(('counter', 'total', 'last epoch'), rows, numbers_from=1)}" if rows else ""


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    return format_size(value) if "bytes" in name else amount(int(value) if value % 1 == 0 else value)
