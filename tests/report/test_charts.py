"""Charts: scales, labels, legends and colours, and points that are left out."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from hopline.report.charts import MAX_HOVERS, PALETTE, PALETTE_STYLE, colour_of, format_short, line_chart, ticks


def drawing(figure: str) -> ElementTree.Element:
    """Parse a figure, which proves that it is well formed."""
    return ElementTree.fromstring(figure)


def titles(figure: str) -> list[str]:
    return [element.text or "" for element in drawing(figure).iter("title")]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.71, 0.73), (-5, 12), (3, 3), (0, 0), (1e-9, 2e-9), (9_999, 250_000), (-2, -2)],
)
def test_ticks_cover_the_range_with_few_even_steps(low: float, high: float):
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-12
    assert marks[-1] >= high - 1e-12
    assert 3 <= len(marks) <= 8
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.73125, "0.7312"), (9999, "9999"), (45_200, "45.2k"), (1.5e6, "1.5M"), (3e9, "3G")],
)
def test_labels_are_short_numbers(value: float, text: str):
    assert format_short(value) == text


def test_a_curve_falls_when_its_values_do():
    figure = line_chart("Loss", {"loss": [(1, 2.0), (2, 1.0), (3, 0.5)]})
    points = re.findall(r"([\d.]+),([\d.]+)", re.findall(r'points="([^"]+)"', figure)[0])
    xs = [float(x) for x, _ in points]
    ys = [float(y) for _, y in points]
    assert xs == sorted(xs)
    assert ys == sorted(ys), "down the page"
    assert titles(figure) == ["loss, epoch 1: 2", "loss, epoch 2: 1", "loss, epoch 3: 0.5"]


def test_the_legend_names_curves_unless_the_title_does():
    both = line_chart("Metrics", {"valid": [(1, 0.5), (2, 0.6)], "test": [(1, 0.4)], "empty": []})
    assert re.findall(r"</i>([^<]+)", both) == ["valid", "test"]
    assert re.findall(r"</i>([^<]+)", line_chart("Loss", {"loss": [(1, 0.5), (2, 0.4)]})) == []


def test_no_points_no_chart():
    assert line_chart("Loss", {"loss": []}) == ""


def test_names_are_escaped():
    figure = line_chart("<b>", {"a<script>": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]})
    assert "<script" not in figure
    assert "a<script>, epoch 1: 1" in titles(figure)


def test_long_runs_stay_small():
    many = [(float(epoch), 1.0 / epoch) for epoch in range(1, 5001)]
    assert len(titles(line_chart("Loss", {"loss": many}))) <= MAX_HOVERS


def test_a_chart_may_have_another_x_axis_and_start_at_zero():
    figure = line_chart("Bytes", {"bytes": [(1, 40.0), (9, 50.0)]}, over="step", always_shown=0.0, width=900)
    assert titles(figure) == ["bytes, step 1: 40", "bytes, step 9: 50"]
    texts = [element.text for element in drawing(figure).iter("text")]
    assert "0" in texts
    assert texts[-1] == "step"
    ends = [float(circle.attrib["cx"]) for circle in drawing(figure).iter("circle")]
    assert 800 < ends[1] < 900


def test_there_is_a_colour_for_every_number_on_both_pages():
    light, dark = PALETTE_STYLE.split("@media (prefers-color-scheme: dark)")
    for page in (light, dark):
        assert re.findall(r"--c(\d+):#[0-9a-f]{6};", page) == [str(number) for number in range(len(PALETTE))]
    assert len(set(PALETTE)) == len(PALETTE)
    assert colour_of(len(PALETTE)) == colour_of(0) != colour_of(1)
