"""Colours of charts: as many as needed, distinct from one another and from the page."""

import itertools
import re

import pytest

from hopline.report.colours import CHOSEN, distance, find_colours, style

CARDS = {"light": "#ffffff", "dark": "#1a202a"}
"""What charts are drawn on."""


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG."""

    def luminance(colour: str) -> float:
        values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("count", "min_distance"), [(2, 0.3), (8, 0.08), (12, 0.07), (24, 0.07), (60, 0.02)])
def test_all_are_different_on_a_light_and_on_a_dark_page(count: int, min_distance: float):
    """0.02 is what can just be told apart."""
    colours = find_colours(count)
    assert len(colours) == count
    assert min(distance(a, b) for a, b in itertools.combinations(colours, 2)) >= min_distance
    assert [tuple(colour) for colour in colours[:8]] == list(CHOSEN[:count])


def test_all_stand_out_from_the_page():
    for colour in find_colours(24):
        assert contrast(colour.light, CARDS["light"]) >= 2.5
        assert contrast(colour.dark, CARDS["dark"]) >= 3


def test_distance_is_that_of_the_page_on_which_two_are_more_alike():
    black = "#000000"
    white = "#ffffff"
    assert distance((black, black), (white, white)) == pytest.approx(1, abs=1e-3)  # type: ignore[arg-type]
    assert distance((black, black), (white, black)) == 0  # type: ignore[arg-type]


def test_each_page_has_every_variable():
    light, dark = style(11).split("@media (prefers-color-scheme: dark)")
    for part in (light, dark):
        assert re.findall(r"--c(\d+):#[0-9a-f]{6};", part) == [str(i) for i in range(11)]
