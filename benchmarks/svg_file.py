"""A chart of the report's kind as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hopline.report_svg import line_chart

COLOURS = ("#3b6fb6", "#d1662e", "#3f9a5f", "#8d5bb0", "#b8912b", "#c2487d", "#4aa3a8", "#6b6b6b")


def svg_file(series: Mapping[str, Sequence[tuple[float, float]]], over: str, least: float | None = None) -> str:
    """Curves with their names beside them; `over` names what is across."""
    chart = line_chart("", series, over=over, least=least)
    drawing = chart[chart.index("<svg ") + 5 : chart.index("</svg>")]
    colours = "".join(f"--c{i}:{colour};" for i, colour in enumerate(COLOURS))
    style = f"svg{{{colours}font:11px sans-serif;background:#fff}}.gridline{{stroke:#ddd}}.curve{{fill:none}}"
    key = "".join(
        f'<text x="520" y="{20 + 14 * i}" text-anchor="end" fill="{COLOURS[i % len(COLOURS)]}">{name}</text>'
        for i, name in enumerate(series)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" {drawing}<style>{style}</style>{key}</svg>\n'
