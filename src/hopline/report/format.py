"""Numbers as people read them: times with a unit, shares in percent, counts with thousands separators."""

from typing import Any

ABSENT = "–"
"""Stands for a number that is not known."""


def duration(seconds: float) -> str:
    """Write a time with a unit of its own: "38 µs", "305 ms", "6.12 s", "2 min 5 s", "3 h 20 min"."""
    if not seconds:
        return "0 s"
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
