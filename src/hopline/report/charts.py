"""Charts as SVG text: curves over epochs and stacked bars, with axes, a legend and values on hover."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from hopline.report.format import Unit

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 540, 250, 58, 14, 12, 40
MAX_BARS = 60
MAX_HOVERS = 400


def short(value: float) -> str:
    """Write a number in a few characters: 0.7312, 45.2k, 1.5M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.5g}{letter}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover a range, about as many as asked for."""
    if high <= low:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def swatch(colour: int, name: str) -> str:
    """Name something that a chart shows, with its colour before it."""
    return f'<span class="key"><i style="background:var(--c{colour})"></i>{escape(name)}</span>'


def _figure(title: str, names: Iterable[str], width: int, drawing: str) -> str:
    names = [] if list(names) == [title.lower()] else names
    kind = "wide" if width > WIDTH else ""
    keys = "".join(swatch(i, name) for i, name in enumerate(names))
    view = f'class="{kind}" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return (
        f"<figure><figcaption>{escape(title)}{keys}</figcaption>"
        f'<div class="scroll"><svg {view}>{drawing}</svg></div>'
        "</figure>"
    )


def _axes(x_labels: Points, x_text: Sequence[str], y_ticks: Sequence[float], width: int, over: str = "epoch") -> str:
    """Horizontal gridlines with numbers at the left, labels below; `x_labels` are places, already scaled."""
    floor = HEIGHT - BOTTOM
    parts = []
    for value in y_ticks:
        y = _scale(value, y_ticks[0], y_ticks[-1], floor, TOP)
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for (x, _), text in zip(x_labels, x_text, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{over}</text>')
    return "".join(parts)


def _scale(value: float, low: float, high: float, start: float, stop: float) -> float:
    return start + (value - low) / (high - low) * (stop - start) if high > low else (start + stop) / 2


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    over: str = "epoch",
    least: float | None = None,
    width: int = WIDTH,
) -> str:
    """Draw curves over epochs, or whatever `over` names, as an SVG figure, or nothing when no curve has a point.

    least: a value that the vertical axis shows in any case.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    epochs = [x for points in series.values() for x, _ in points]
    values = [y for points in series.values() for _, y in points]
    values += [] if least is None else [least]
    first, last, y_ticks = min(epochs), max(epochs), ticks(min(values), max(values))
    x_ticks = [x for x in ticks(first, last, 6) if first <= x <= last and x == int(x)] if last > first else [first]

    def place(x: float, y: float) -> tuple[float, float]:
        across = _scale(x, first, last, LEFT + 8, width - RIGHT - 8)
        return across, _scale(y, y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)

    parts = [_axes([place(x, 0) for x in x_ticks], [f"{x:g}" for x in x_ticks], y_ticks, width, over)]
    for i, (name, points) in enumerate(series.items()):
        colour = f"var(--c{i})"
        places = [place(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="curve" style="stroke:{colour}" points="{line}"/>')
        # Dots where they stand apart; where they are many, something unseen to point at.
        dot = f'r="3" style="fill:{colour}"' if len(points) <= MAX_BARS else 'r="6" fill="transparent"'
        for (x, y), (epoch, value) in list(zip(places, points, strict=True))[:: -(-len(points) // MAX_HOVERS)]:
            hover = f"{escape(name)}, {over} {epoch:g}: {value:.6g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {dot}><title>{hover}</title></circle>')
    return _figure(title, series, width, "".join(parts))


def bar_chart(title: str, names: Sequence[str], bars: Sequence[tuple[float, Mapping[str, float]]], unit: Unit) -> str:
    """Draw one stacked bar per epoch, or per few epochs where they are many, as an SVG figure.

    names: what bars are made of, from the bottom up; each has the colour of its position.
    bars: (epoch, seconds by name), drawn in `unit`.
    """
    if not names:
        return ""
    per_bar = -(-len(bars) // MAX_BARS)
    groups = [bars[at : at + per_bar] for at in range(0, len(bars), per_bar)]
    labels = [f"{g[0][0]:g}" if len(g) == 1 else f"{g[0][0]:g}–{g[-1][0]:g}" for g in groups]
    means = [{n: statistics.fmean(s.get(n, 0.0) for _, s in group) / unit.seconds for n in names} for group in groups]
    y_ticks = ticks(0, max(sum(stages.values()) for stages in means) or 1.0)
    width = 2 * WIDTH
    pitch = (width - LEFT - RIGHT) / len(groups)
    thick = min(pitch * 0.72, 64)
    centres = [(LEFT + pitch * (at + 0.5), 0.0) for at in range(len(groups))]
    every = -(-len(groups) * max(map(len, labels)) // 110)
    parts = [_axes(centres[::every], labels[::every], y_ticks, width)]
    for (centre, _), label, stages in zip(centres, labels, means, strict=True):
        below = 0.0
        for i, (name, value) in enumerate(stages.items()):
            bottom, top = (_scale(v, 0, y_ticks[-1], HEIGHT - BOTTOM, TOP) for v in (below, below + value))
            below += value
            box = f'x="{centre - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" height="{bottom - top:.1f}"'
            hover = escape(f"{name}, epoch {label}: {unit.write(value * unit.seconds)} {unit.name}")
            parts.append(f'<rect {box} style="fill:var(--c{i})"><title>{hover}</title></rect>')
    return _figure(f"{title}, in {unit.name}", names, width, "".join(parts))
