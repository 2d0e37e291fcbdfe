"""Numbers as people read them: times with a unit, shares in percent, counts with thousands separators."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

ABSENT = "–"
"""Stands for a number that is not known."""


class Quantity(NamedTuple):
    """The unit of a column of times. One unit and one number of decimals make them comparable downwards."""

    name: str
    """The unit as it is written, such as "ms"."""
    seconds: float
    """Seconds of one unit."""
    decimals: int
    """Digits after the decimal point."""

    def write(self, seconds: float | None) -> str:
        """Write a time without its unit. "< 0.1" for a time that would be rounded to zero."""
        if seconds is None or not math.isfinite(seconds):
            return ABSENT
        if seconds == 0:
            return "0"
        text = f"{seconds / self.seconds:,.{self.decimals}f}"
        last_digit = 10**-self.decimals
        is_rounded_to_zero = 0 < seconds < last_digit * self.seconds / 2
        return f"< {last_digit:g}" if is_rounded_to_zero else text


MILLISECONDS = Quantity("ms", 1e-3, 1)
SECONDS = Quantity("s", 1.0, 2)
MANY_SECONDS = Quantity("s", 1.0, 1)


def unit_of(times: Iterable[float]) -> Quantity:
    """Choose a unit for a column of times in seconds, by the longest."""
    longest = max(times, default=0.0)
    if longest < 1:
        return MILLISECONDS
    return SECONDS if longest < 100 else MANY_SECONDS


def duration(seconds: float) -> str:
    """Write a time with a unit of its own: "38 µs", "305 ms", "6.12 s", "2 min 5 s", "3 h 20 min"."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if round(seconds * factor) < 1000:
            return f"{_digits(seconds * factor)} {unit}"
    if round(seconds, 1) < 60:
        return f"{_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def percent(share: float) -> str:
    """Write a share in percent: "36%", and below ten percent with a decimal: "3.6%"."""
    return f"{share:.0%}" if round(share, 3) >= 0.1 or share == 0 else f"{share:.1%}"


def amount(value: Any) -> str:
    """Write a number with thousands separators, and anything else as it is. "none" for None."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
