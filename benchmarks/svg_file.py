"""A chart of the report's kind as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hopline.report.charts import PALETTE, line_chart


def svg_file(series: Mapping[str, Sequence[tuple[float, float]]], over: str, always_shown: float | None = None) -> str:
    """Curves with their names at the right.

    over: title of the horizontal axis.
    always_shown: a value that the vertical axis includes in any case.
    """
    chart = line_chart("", series, over=over, always_shown=always_shown)
    drawing = chart[chart.index("<svg ") + 5 : chart.index("</svg>")]
    colours = [light for light, _ in PALETTE[: len(series)]]
    variables = "".join(f"--c{i}:{colour};" for i, colour in enumerate(colours))
    style = f"svg{{{variables}font:11px sans-serif;background:#fff}}.gridline{{stroke:#ddd}}.curve{{fill:none}}"
    key = "".join(
        f'<text x="520" y="{20 + 14 * i}" text-anchor="end" fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(zip(series, colours, strict=True))
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" {drawing}<style>{style}</style>{key}</svg>\n'
