"""Tables, which all sections of the page are made of, and the sections on memory: its plan, and what was measured."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hopline.report.charts import MAX_HOVERS, WIDTH, line_chart
from hopline.report.format import ABSENT
from hopline.util.spec import format_size

Record = dict[str, Any]
MANY_ROWS = 12
"""Epochs beyond which a table by epoch is folded away."""
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def numbers(values: Any) -> dict[str, float]:
    return {k: v for k, v in values.items() if is_number(v)} if isinstance(values, dict) else {}


class Html(str):
    """Text of a cell that is HTML already."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numbers_from: int = 99,
    *,
    sums: Iterable[Sequence[Any]] = (),
    kind: str = "",
) -> str:
    """Write a table. numbers_from: the first column of numbers. sums: rows below the others, set apart."""

    def row(tag: str, cells: Sequence[Any], of_kind: str = "") -> str:
        marks = [' class="number"' if at >= numbers_from else "" for at in range(len(cells))]
        texts = [cell if isinstance(cell, Html) else escape(_text(cell)) for cell in cells]
        return f"<tr{of_kind}>{''.join(f'<{tag}{m}>{t}</{tag}>' for m, t in zip(marks, texts, strict=True))}</tr>"

    lines = [row("th", heads), *(row("td", cells) for cells in rows)]
    lines += [row("td", cells, ' class="sum"') for cells in sums]
    return f'<div class="table {kind}"><table>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    """A value as it is typed in key=value: none, true, or 10,10."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def folded(title: str, content: str) -> str:
    """Hide something behind its title, which opens it on a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def thinned(values: Sequence[float], most: int) -> tuple[list[float], int]:
    """(at most so many values, each the largest of its stretch; how many values a stretch has)."""
    per_point = max(1, -(-len(values) // most))
    return [max(values[at : at + per_point]) for at in range(0, len(values), per_point)], per_point


def budget_section(records: Sequence[Record]) -> str:
    """Predicted and measured bytes by epoch, and by step before and after splitting; nothing without a budget."""
    if not records:
        return ""
    heads = ("epoch", "steps", "limit", "predicted", "measured", "split", "micro-batches", "resampled", "cut")
    rows = [
        (
            f"{record['epoch']:g}",
            _count(record, "num_steps"),
            *(_size(record, name) for name in ("limit_bytes", "promised_bytes", "peak_bytes")),
            *(_count(record, name) for name in ("split", "pieces", "resampled", "cut", "over", "oom")),
        )
        for record in records
    ]
    note = (
        '<p class="dim">The largest step of each epoch: the limit that the budget leaves for it, its predicted and '
        "its measured peak. Then how many batches were split, into how many micro-batches, how many were resampled or "
        "had edges cut, and how many steps went over the limit or ran out of memory and were run again.</p>"
    )
    by_epoch = table((*heads, "over", "out of memory"), rows, numbers_from=1)
    if len(rows) > MANY_ROWS:
        by_epoch = folded(f"By epoch ({len(rows)} rows)", by_epoch)
    return f"<h2>Memory budget</h2>{note}{_bytes_chart(records)}{by_epoch}"


def plan_section(record: Record) -> str:
    """What a plan says that a run keeps at each place, and the peak that it predicts; nothing without one."""
    items, totals = record.get("items") or [], record.get("totals") or []
    if not totals:
        return ""
    rows = []
    for total in totals:
        kept = [item for item in items if item.get("place") == total.get("place")]
        rows += [(total["place"], item["name"], _size(item, "num_bytes")) for item in kept]
        step = total["promised_bytes"] - sum(item["num_bytes"] for item in kept)
        rows += [(total["place"], "a step", format_size(step))] if step > 0 else []
        rows.append((total["place"], "predicted peak", _size(total, "promised_bytes")))
        rows.append((total["place"], "budget", _size(total, "budget_bytes")))
    return f"<h2>Memory plan</h2>{table(('place', 'what', 'bytes'), rows, numbers_from=2)}"


def _size(record: Record, name: str) -> str:
    return format_size(record[name]) if is_number(record.get(name)) else ABSENT


def _count(record: Record, name: str) -> str:
    return f"{record[name]:,}" if is_number(record.get(name)) else ABSENT


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
