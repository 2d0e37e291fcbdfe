"""Any number of colours that can be told apart, on a light page and on a dark one.

The first ones, `CHOSEN`, are chosen by hand. Each further one is the candidate whose nearest colour is
furthest away: a greedy choice, which costs (number of colours) x (number of candidates) distances.
Distances are in OKLab (https://bottosson.github.io/posts/oklab), where equal distances look equally
different.
"""

import math
from typing import NamedTuple

CHOSEN = (
    ("#2563eb", "#6ea0ff"),
    ("#e8710a", "#ff9f43"),
    ("#12946b", "#3ecf9b"),
    ("#b83280", "#f277b8"),
    ("#7c5cd6", "#a78bfa"),
    ("#b58900", "#e0b93a"),
    ("#0891b2", "#38c6de"),
    ("#77808f", "#a3acba"),
)
"""(on a light page, on a dark page) of the first colours, as #rrggbb."""

# ---- candidates for further colours, in OKLCH: lightness, chroma (distance from grey) and hue (an angle)

LEVELS = ((0.40, 0.64), (0.54, 0.76), (0.68, 0.88))
"""(on a light page, on a dark page): lightness of candidates, far enough from the page's background."""
CHROMA = 0.14
"""Chroma of candidates, if a screen can show it. A rule of thumb."""
MIN_HUES = 36
"""Least number of hues at each lightness. With more colours to find, there is one hue per colour."""

Lab = tuple[float, float, float]
"""(lightness, a, b) of a colour in OKLab."""


class Pair(NamedTuple):
    """One colour in its two forms, as #rrggbb."""

    light: str
    """The colour on a light page."""
    dark: str
    """The colour on a dark page."""


def find_colours(count: int) -> list[Pair]:
    """Find `count` colours, each as different from those before it as a candidate can be."""
    colours = [Pair(*pair) for pair in CHOSEN[:count]]
    num_hues = max(MIN_HUES, count)
    candidates: list[Pair] = []
    for lightness_on_light, lightness_on_dark in LEVELS:
        for step in range(num_hues):
            hue = 2 * math.pi * step / num_hues
            light = _oklch_to_hex(lightness_on_light, CHROMA, hue)
            dark = _oklch_to_hex(lightness_on_dark, CHROMA, hue)
            candidates.append(Pair(light=light, dark=dark))
    # For each candidate: the distance to the nearest colour so far.
    distances: list[float] = []
    for candidate in candidates:
        distances.append(min((distance(candidate, colour) for colour in colours), default=math.inf))
    while len(colours) < count:
        furthest = candidates[distances.index(max(distances))]
        colours.append(furthest)
        distances = [min(d, distance(c, furthest)) for d, c in zip(distances, candidates, strict=True)]
    return colours


def distance(a: Pair, b: Pair) -> float:
    """How different two colours look, on the page where they are more alike.

    0.02 can just be told apart.
    """
    return min(math.dist(_hex_to_oklab(x), _hex_to_oklab(y)) for x, y in zip(a, b, strict=True))


def style(count: int) -> str:
    """Define the colours as CSS variables --c0, --c1, ..., for light and dark pages."""
    colours = find_colours(count)
    light = "".join(f"--c{i}:{colour.light};" for i, colour in enumerate(colours))
    dark = "".join(f"--c{i}:{colour.dark};" for i, colour in enumerate(colours))
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _oklch_to_hex(lightness: float, chroma: float, hue: float) -> str:
    """A colour as #rrggbb. Its chroma is reduced until a screen can show it."""
    while True:
        rgb = _oklab_to_linear((lightness, chroma * math.cos(hue), chroma * math.sin(hue)))
        if all(0 <= value <= 1 for value in rgb):
            break
        chroma *= 0.95
    # From linear light to the numbers of sRGB: its transfer function.
    values = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in rgb)
    return "#" + "".join(f"{round(255 * value):02x}" for value in values)


def _oklab_to_linear(lab: Lab) -> tuple[float, float, float]:
    """Linear (red, green, blue) of a colour, by the matrices that define OKLab."""
    lightness, a, b = lab
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )


def _hex_to_oklab(colour: str) -> Lab:
    """The colour #rrggbb in OKLab: the inverse of the two functions above."""
    values = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]  # of "#rrggbb"
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    l = math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b)
    m = math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b)
    s = math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )
