"""Sections of the page of a run that stand alone: what a budget promised and what was measured, and the pipeline."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hopline.report_svg import MAX_HOVERS, WIDTH, line_chart
from hopline.spec import format_size

Record = dict[str, Any]
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def numbers(values: Any) -> dict[str, float]:
    return {k: v for k, v in values.items() if is_number(v)} if isinstance(values, dict) else {}


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers_from: int = 99) -> str:
    def row(tag: str, cells: Sequence[Any]) -> str:
        marks = [' class="number"' if at >= numbers_from else "" for at in range(len(cells))]
        texts = ["none" if cell is None else escape(str(cell)) for cell in cells]
        return "<tr>" + "".join(f"<{tag}{m}>{t}</{tag}>" for m, t in zip(marks, texts, strict=True)) + "</tr>"

    lines = [row("th", heads), *(row("td", cells) for cells in rows)]
    return f'<div class="table"><table>{"".join(lines)}</table></div>'


def thinned(values: Sequence[float], most: int) -> tuple[list[float], int]:
    """(at most so many values, each the largest of its stretch; how many values a stretch has)."""
    per_point = max(1, -(-len(values) // most))
    return [max(values[at : at + per_point]) for at in range(0, len(values), per_point)], per_point


def budget_section(records: Sequence[Record]) -> str:
    """Promised and measured bytes by epoch, and by step before and after splitting; nothing without a budget."""
    if not records:
        return ""
    heads = ("epoch", "steps", "left for a step", "promised", "measured", "split", "pieces", "drawn anew", "cut")
    rows = [
        (
            f"{record['epoch']:g}",
            *(_count(record, "num_steps"),),
            *(_size(record, name) for name in ("limit_bytes", "promised_bytes", "peak_bytes")),
            *(_count(record, name) for name in ("split", "pieces", "resampled", "cut")),
            *(_count(record, name) for name in ("over", "oom")),
        )
        for record in records
    ]
    note = (
        '<p class="dim">What the largest step of an epoch was promised to take and what was measured, beside the bytes '
        "that the budget leaves for a step. “Over” counts steps beyond them, “ran out” those whose memory ran out and "
        "that went on in smaller pieces.</p>"
    )
    chart = _bytes_chart(records)
    return f"<h2>Memory budget</h2>{note}{chart}{table((*heads, 'over', 'ran out'), rows, numbers_from=1)}"


def plan_section(record: Record) -> str:
    """What a plan says that a run keeps at each place, and the sum that it promises; nothing without one."""
    items, totals = record.get("items") or [], record.get("totals") or []
    if not totals:
        return ""
    rows = []
    for total in totals:
        kept = [item for item in items if item.get("place") == total.get("place")]
        rows += [(total["place"], item["name"], _size(item, "num_bytes")) for item in kept]
        step = total["promised_bytes"] - sum(item["num_bytes"] for item in kept)
        rows += [(total["place"], "a step", format_size(step))] if step > 0 else []
        rows.append((total["place"], "promised in all", _size(total, "promised_bytes")))
        rows.append((total["place"], "budget", _size(total, "budget_bytes")))
    return f"<h2>Memory plan</h2>{table(('place', 'what', 'bytes'), rows, numbers_from=2)}"


def _size(record: Record, name: str) -> str:
    return format_size(record[name]) if is_number(record.get(name)) else "–"


def _count(record: Record, name: str) -> str:
    return f"{record[name]:,}" if is_number(record.get(name)) else "–"


def _bytes_chart(records: Sequence[Record]) -> str:
    """Bytes of every step before and after splitting, under the line of the budget."""
    found: dict[str, list[tuple[float, float]]] = {"before splitting": [], "after splitting": [], "limit": []}
    step = 0
    for record in records:
        points = max(1, int(record.get("steps_per_point") or 1))
        for name, key in (("before splitting", "before"), ("after splitting", "after")):
            values = record.get(key) or []
            found[name] += [(step + i * points + 1, v) for i, v in enumerate(values) if is_number(v)]
        num_steps = int(record.get("num_steps") or 0)
        if num_steps and is_number(record.get("limit_bytes")):
            found["limit"] += [(step + 1, record["limit_bytes"]), (step + num_steps, record["limit_bytes"])]
        step += num_steps
    largest = max((v for points in found.values() for _, v in points), default=0)
    unit, size = next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])
    series = {name: _fewer([(x, v / size) for x, v in points]) for name, points in found.items()}
    return line_chart(f"Bytes per step, in {unit}", series, over="step", least=0.0, width=2 * WIDTH)


def _fewer(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many points as a chart shows; the largest of those that lie together stays."""
    _, per_point = thinned([v for _, v in points], MAX_HOVERS)
    stretches = (points[at : at + per_point] for at in range(0, len(points), per_point))
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]


def pipeline_section(record: Record) -> str:
    """Stages of a batch as shares of the serial work, what overlap can gain and does, and what to change."""
    shares, stages = numbers(record.get("shares")), numbers(record.get("stages"))
    if not shares:
        return ""
    rows = [(name, f"{stages.get(name, 0.0):.4g}", f"{share:.1%}") for name, share in shares.items()]
    parts = [
        ("all stages, one after the other", f"{record['serial_s']:.4g}", "100%"),
        ("least with overlap (bound)", f"{record['serial_s'] * record['bound']:.4g}", f"{record['bound']:.1%}"),
        ("measured", f"{record['seconds']:.4g}", f"{record['achieved']:.1%}"),
    ]
    said = f'<p class="notice">{escape(str(record.get("sentence") or ""))}</p>'
    note = (
        '<p class="dim">Seconds of each stage alone. The bound is 1/N + (N−1)/N · the largest share, for '
        f"N = {record['num_batches']:,} batches: one goes through all stages, and from then on one leaves each time "
        f"that the slowest takes, where {_threads(record.get('workers'))}. Training waited for batches "
        f"{record['waited']:.1%} of the time.</p>"
    )
    return f"<h2>Pipeline</h2>{said}{note}{table(('stage', 'seconds', 'share'), [*rows, *parts], numbers_from=1)}"


def _threads(workers: Any) -> str:
    if not workers:
        return "preparing and training could run side by side (here they do not)"
    return f"{workers} thread{'s' * (workers > 1)} prepare batches and one trains"
