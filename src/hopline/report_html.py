"""The page of a run: read its files, draw its curves, and lay them out without any outside help."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hopline.report_parts import Record, budget_section, is_number, numbers, pipeline_section, plan_section, table
from hopline.report_svg import Points, bar_chart, line_chart, short
from hopline.spec import format_size

STYLE = """
:root {
  --ink: #1c2430; --dim: #667085; --line: #e4e7ec; --page: #f6f7f9; --card: #fff;
  --good: #067647; --bad: #b42318;
  --c0: #2563eb; --c1: #e8710a; --c2: #12946b; --c3: #b83280;
  --c4: #7c5cd6; --c5: #b58900; --c6: #0891b2; --c7: #77808f;
}
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ef; --dim: #98a2b3; --line: #2c3442; --page: #12161d; --card: #1a202a;
  --good: #47cd89; --bad: #f97066;
  --c0: #6ea0ff; --c1: #ff9f43; --c2: #3ecf9b; --c3: #f277b8;
  --c4: #a78bfa; --c5: #e0b93a; --c6: #38c6de; --c7: #a3acba;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 32px 0 10px; }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.dim { color: var(--dim); }
.status { font-size: 12px; font-weight: 600; letter-spacing: 0; padding: 2px 10px; margin-left: 10px;
  border-radius: 99px; border: 1px solid; vertical-align: 4px; color: var(--dim); }
.status.ok { color: var(--good); }
.status.failed { color: var(--bad); }
.notice { border-left: 3px solid var(--c1); background: var(--card); padding: 8px 14px; margin: 14px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 12px; }
.tiles { margin-top: 20px; }
.tile, figure, .table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 21px; line-height: 1.3; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }
figure { margin: 0; padding: 12px 16px 8px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
.key { font-weight: 400; color: var(--dim); margin-left: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--dim); }
.gridline { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 16px; border-top: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; font-size: 12.5px; }
td { overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
figure + .table { margin-top: 12px; }
"""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What the files of a run folder say."""

    name: str
    about: Record
    epochs: list[Record]
    evaluations: list[Record]
    budgets: list[Record]
    """Of each epoch that kept to a budget."""
    plan: Record
    """What it was promised to take."""
    pipeline: Record
    """Why epochs took as long as they did."""
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
        epochs=epochs,
        evaluations=[evaluations[key] for key in sorted(evaluations)],
        budgets=budgets,
        plan=last.get("plan", {}),
        pipeline=last.get("explain", last.get("pipeline", {})),
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
    body = [
        _header(run),
        _tiles(run),
        *map(_notice, _notices(run)),
        _curves(run),
        plan_section(run.plan),
        budget_section(run.budgets),
        _stages(run),
        pipeline_section(run.pipeline),
        _counters(run),
    ]
    settings = _flat(run.about["config"])
    facts = {"platform": run.about.get("platform"), "cpu_count": run.about.get("cpu_count")}
    versions = [*_flat(run.about.get("versions") or {}), *facts.items()]
    tables = (("Settings", "key", settings), ("Versions and machine", "what", versions))
    sides = [f"<div><h2>{title}</h2>{table((head, 'value'), rows)}</div>" for title, head, rows in tables]
    body.append(f'<div class="grid">{"".join(sides)}</div>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · hopline</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(filter(None, body))}\n</main></body></html>\n"
    )


def _header(run: RunFiles) -> str:
    status = str(run.close.get("status") or "not finished")
    shown = {"ok": "finished"}.get(status, status)
    when = [str(run.about.get("started") or "").replace("T", " ")]
    if run.end.get("reason"):
        when.append(f"ended: {run.end['reason']}")
    kind = {"ok": "ok", "not finished": ""}.get(status, "failed")
    command = " ".join(map(str, run.about.get("command") or []))
    return (
        f'<h1>{escape(run.name)}<span class="status {kind}">{escape(shown)}</span></h1>'
        f'<div class="dim">{escape(" · ".join(when))}</div><code>{escape(command)}</code>'
    )


def _tiles(run: RunFiles) -> str:
    seconds = [r["seconds"] for r in run.epochs if is_number(r.get("seconds"))]
    tiles: list[tuple[str, str]] = []
    for split, metrics, note in _results(run):
        tiles += [(f"{split} {name}{note}", short(value)) for name, value in metrics.items() if is_number(value)]
    tiles.append(("epochs", str(len(run.epochs))))
    if seconds:
        tiles.append(("median seconds per epoch", short(statistics.median(seconds))))
    if run.epochs and run.epochs[-1].get("slowest_stage"):
        tiles.append(("slowest stage, last epoch", str(run.epochs[-1]["slowest_stage"])))
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
        top = max(scored, key=lambda r: _first(r["metrics"]), default=None)
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
        yield "Only one epoch was completed: curves are single points, and stage times have no mean."
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
    charts = [line_chart("Loss", {"loss": _series(run.epochs, "loss")}), line_chart("Metrics", metrics)]
    charts.append(line_chart("Learning rate", {"learning rate": _series(run.epochs, "lr")}))
    charts.append(line_chart("Seeds per second", {"seeds per second": _series(run.epochs, "seeds_per_s")}))
    drawn = "".join(filter(None, charts))
    return f'<h2>Over epochs</h2><div class="grid">{drawn}</div>' if drawn else ""


def _series(records: Iterable[Record], name: str) -> Points:
    return [(r["epoch"], r[name]) for r in records if is_number(r.get(name))]


def _stages(run: RunFiles) -> str:
    bars = [(r["epoch"], numbers(r.get("stages"))) for r in run.epochs]
    rows = [_stage_row(stage) for stage in run.end.get("stages") or _stage_statistics([s for _, s in bars])]
    if not rows:
        return ""
    heads = ("stage", "calls", "first epoch (s)", "mean of later epochs (s)", "± std (s)")
    note = '<p class="dim">Stages overlap in a pipeline, so they may add up to more than the epoch.</p>'
    chart = bar_chart("Seconds by stage", bars)
    return f"<h2>Stage times</h2>{note}{chart}{table(heads, rows, numbers_from=1)}"


def _stage_row(stage: Record) -> tuple[str, ...]:
    keys = ("calls", "first_epoch_s", "mean_s", "std_s")
    return (str(stage.get("name")), *(short(stage[k]) if is_number(stage.get(k)) else "–" for k in keys))


def _stage_statistics(epochs: Sequence[Mapping[str, float]]) -> list[Record]:
    """The same statistics as a finished run logs, from its epochs so far."""
    found = []
    for name in dict.fromkeys(name for stages in epochs for name in stages):
        first, *later = [stages.get(name, 0.0) for stages in epochs]
        mean_s = statistics.fmean(later) if later else None
        std_s = statistics.stdev(later) if len(later) > 1 else None
        found.append({"name": name, "first_epoch_s": first, "mean_s": mean_s, "std_s": std_s})
    return found


def _counters(run: RunFiles) -> str:
    last = numbers(run.epochs[-1].get("counters")) if run.epochs else {}
    totals = numbers(run.close.get("counters"))
    if not totals:
        for record in run.epochs:
            for name, amount in numbers(record.get("counters")).items():
                totals[name] = totals.get(name, 0) + amount
    names = sorted({*totals, *last})
    rows = [(name, *(_amount(name, values.get(name)) for values in (totals, last))) for name in names]
    return f"<h2>Counters</h2>{table(('counter', 'total', 'last epoch'), rows, numbers_from=1)}" if rows else ""


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return format_size(value) if "bytes" in name else f"{value:,.6g}" if value % 1 else f"{value:,.0f}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else value
