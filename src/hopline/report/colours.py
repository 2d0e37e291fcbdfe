"""Colours of a page, as many as are asked for: no two alike, on a light page and on a dark one.

The first ones are chosen by hand. Each further one is the candidate that lies furthest from all colours before it, in
OKLab (https://bottosson.github.io/posts/oklab), where equal distances look equally different.
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
"""(on a light page, on a dark page)."""

# ---- candidates for the further ones, in OKLCH

LEVELS = ((0.40, 0.64), (0.54, 0.76), (0.68, 0.88))
"""Lightness on a light page and on a dark one: far enough from either's background."""
CHROMA = 0.14
MIN_HUES = 36
"""Hues at each lightness. With more colours to find there are as many as these."""

Lab = tuple[float, float, float]


class Pair(NamedTuple):
    """One colour, as it is on a light page and on a dark one."""

    light: str
    dark: str


def find_colours(count: int) -> list[Pair]:
    """Find so many colours, each as different from the others as can be."""
    colours = [Pair(*pair) for pair in CHOSEN[:count]]
    num_hues = max(MIN_HUES, count)
    candidates = [
        Pair(*(_oklch_to_hex(lightness, CHROMA, 2 * math.pi * step / num_hues) for lightness in level))
        for level in LEVELS
        for step in range(num_hues)
    ]
    # Of each candidate the distance to the nearest colour found so far.
    distances: list[float] = []
    for candidate in candidates:
        distances.append(min((distance(candidate, colour) for colour in colours), default=math.inf))
    while len(colours) < count:
        furthest = candidates[distances.index(max(distances))]
        colours.append(furthest)
        distances = [min(d, distance(c, furthest)) for d, c in zip(distances, candidates, strict=True)]
    return colours


def distance(a: Pair, b: Pair) -> float:
    """How different two colours look, on the page where they are more alike; 0.02 can just be told apart."""
    return min(math.dist(_hex_to_oklab(x), _hex_to_oklab(y)) for x, y in zip(a, b, strict=True))


def style(count: int) -> str:
    """Define the colours as CSS variables --c0, --c1, ..., for light and dark pages."""
    colours = find_colours(count)
    light = "".join(f"--c{i}:{colour.light};" for i, colour in enumerate(colours))
    dark = "".join(f"--c{i}:{colour.dark};" for i, colour in enumerate(colours))
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _oklch_to_hex(lightness: float, chroma: float, hue: float) -> str:
    """The colour, with less chroma where a screen cannot show it."""
    while True:
        rgb = _oklab_to_linear((lightness, chroma * math.cos(hue), chroma * math.sin(hue)))
        if all(0 <= value <= 1 for value in rgb):
            break
        chroma *= 0.95
    values = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in rgb)
    return "#" + "".join(f"{round(255 * value):02x}" for value in values)


def _oklab_to_linear(lab: Lab) -> tuple[float, float, float]:
    """OKLab to linear sRGB, by the matrices of its definition."""
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
