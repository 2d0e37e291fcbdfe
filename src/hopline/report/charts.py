"""`line_chart`: curves over epochs or steps as SVG text, with axes, a legend and values on hover.

It is for the HTML page of a run's report (`report/page.py`). That page needs no script and no other file. A value is
shown on hover by the `<title>` of its dot. Colours are CSS variables, `--c0`, `--c1`, ..., which `PALETTE` has.

    y of the SVG grows downwards       TOP +-----------------+
                                           |    the curves   |
                          HEIGHT - BOTTOM  +-----------------+
                                         LEFT          width - RIGHT
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

PALETTE = (
    ("#2563eb", "#6ea0ff"),
    ("#e8710a", "#ff9f43"),
    ("#12946b", "#3ecf9b"),
    ("#b83280", "#f277b8"),
    ("#7c5cd6", "#a78bfa"),
    ("#b58900", "#e0b93a"),
    ("#0891b2", "#38c6de"),
    ("#77808f", "#a3acba"),
    ("#4b4b06", "#929218"),
    ("#c876c1", "#ffbff8"),
    ("#831b11", "#d36757"),
    ("#035062", "#109bbc"),
    ("#7ba944", "#b9ea85"),
    ("#6f226b", "#bb6ab4"),
    ("#6397ee", "#c1d9ff"),
    ("#16b09b", "#50f5db"),
)
"""(on a light page, on a dark page): colours that can be told apart, furthest from one another first."""

PALETTE_STYLE = ":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}".format(
    light="".join(f"--c{i}:{light};" for i, (light, _) in enumerate(PALETTE)),
    dark="".join(f"--c{i}:{dark};" for i, (_, dark) in enumerate(PALETTE)),
)
"""The colours as CSS variables --c0, --c1, ..."""


def colour_of(number: int) -> str:
    """The colour of a curve or a stage, by its number. After the last colour come the first ones again."""
    return f"var(--c{number % len(PALETTE)})"


Points = Sequence[tuple[float, float]]
"""(epoch or step, value) of each point of a curve."""

# ---- size of a chart and of its margins, in units of the SVG. Chosen by eye.

WIDTH = 540
HEIGHT = 250
LEFT = 58
RIGHT = 14
TOP = 12
BOTTOM = 40

MAX_DOTS = 60
"""Most points of a curve with dots."""
MAX_HOVERS = 400
"""Most points of a curve that show their value on hover."""


def format_short(value: float) -> str:
    """Write a number in a few characters: 0.7312, 45.2k, 1.5M."""
    # Numbers of four digits are short enough as they are, so k begins at ten thousand.
    for least, factor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / factor:.5g}{letter}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers at equal steps that cover a range, about `count` of them.

    A step is 1, 2, 2.5 or 5 times a power of ten.
    """
    if high <= low:
        margin = abs(low) / 10 or 1.0
        low -= margin
        high += margin
    raw_step = (high - low) / count
    power = 10 ** math.floor(math.log10(raw_step))
    # Rounding may put `raw_step` slightly above a round step. The factor 0.999 takes that step all the same.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw_step * 0.999)
    # In the same way 1e-9, in steps, forgives rounding. A range that ends on a tick gets no further one.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def swatch(colour: int, name: str) -> str:
    """Write a name with its colour before it, as HTML. colour: its number, as in `--c0`."""
    return f'<span class="key"><i style="background:{colour_of(colour)}"></i>{escape(name)}</span>'


def _scale(value: float, low: float, high: float, start: float, stop: float) -> float:
    return start + (value - low) / (high - low) * (stop - start) if high > low else (start + stop) / 2


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    over: str = "epoch",
    always_shown: float | None = None,
    width: int = WIDTH,
) -> str:
    """Draw curves as an SVG figure. "" if no curve has a point.

    series: Points of each curve, by name.
    over: Title of the horizontal axis.
    always_shown: A value that the vertical axis includes in any case.
    width: Of the figure, in units of the SVG.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    epochs = [x for points in series.values() for x, _ in points]
    values = [y for points in series.values() for _, y in points]
    if always_shown is not None:
        values.append(always_shown)
    first = min(epochs)
    last = max(epochs)
    x_ticks = [first]
    if last > first:
        # Only whole epochs, or steps, get a label.
        x_ticks = [x for x in ticks(first, last, 6) if first <= x <= last and x == int(x)]
    y_ticks = ticks(min(values), max(values))

    def scale_x(x: float) -> float:
        return _scale(x, first, last, LEFT + 8, width - RIGHT - 8)

    def scale_y(y: float) -> float:
        return _scale(y, y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)

    floor = HEIGHT - BOTTOM
    parts = []
    for value in y_ticks:
        y = scale_y(value)
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_short(value)}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{scale_x(x):.1f}" y="{floor + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{over}</text>')
    for i, (name, points) in enumerate(series.items()):
        colour = colour_of(i)
        drawn = [(scale_x(x), scale_y(y)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline class="curve" style="stroke:{colour}" points="{line}"/>')
        # Up to MAX_DOTS points are drawn as dots. More dots would hide the curve, so those are transparent. They
        # only serve to be pointed at, and are larger for it.
        dot = f'r="3" style="fill:{colour}"' if len(points) <= MAX_DOTS else 'r="6" fill="transparent"'
        every = -(-len(points) // MAX_HOVERS)
        for (x, y), (epoch, value) in list(zip(drawn, points, strict=True))[::every]:
            hover = f"{escape(name)}, {over} {epoch:g}: {value:.6g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {dot}><title>{hover}</title></circle>')

    # A single curve that is named like the chart needs no legend.
    keys = "".join(swatch(i, name) for i, name in enumerate(series)) if list(series) != [title.lower()] else ""
    kind = "wide" if width > WIDTH else ""
    view = f'class="{kind}" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return (
        f"<figure><figcaption>{escape(title)}{keys}</figcaption>"
        f'<div class="scroll"><svg {view}>{"".join(parts)}</svg></div>'
        "</figure>"
    )
