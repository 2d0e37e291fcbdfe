"""Fields of settings are checked by their annotations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from hopline.util.config import Removed, check_fields, from_dict, override, settings


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    count: int = 1
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    widths: tuple[int, ...] = (1, 2)
    workers: int | Literal["auto"] = "auto"
    place: Path | None = None
    flag: bool = False
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    "fine",
    [{}, {"rate": 2}, {"workers": 3}, {"place": Path("x")}, {"widths": ()}, {"kind": "b"}, {"inner": Inner(size=2)}],
    ids=str,
)
def test_values_of_the_right_type_are_taken(fine: dict[str, Any]):
    assert Settings(**fine)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": "3"}, "count must be a whole number, not '3'"),
        ({"count": True}, "count must be a whole number"),
        ({"count": 1.5}, "count must be a whole number"),
        ({"rate": "x"}, "rate must be a number"),
        ({"kind": "c"}, "kind must be 'a' or 'b', not 'c'"),
        ({"widths": (1, "2")}, "widths must be a tuple of a whole number"),
        ({"widths": [1, 2]}, "widths must be a tuple"),
        ({"workers": "many"}, "workers must be a whole number or 'auto'"),
        ({"place": "x"}, "place must be Path or None"),
        ({"flag": 1}, "flag must be bool"),
        ({"inner": "cosine"}, r"inner must be a Inner\(\.\.\.\), not 'cosine'"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


@settings
class Later:
    """Settings of a class that once had a rate, 0.5 by default."""

    REMOVED: ClassVar = {"rate": Removed(0.5, "set count=2")}
    count: int = 1


def test_a_removed_setting_is_refused_with_what_to_do_instead():
    with pytest.raises(TypeError, match="Later: rate was removed: set count=2"):
        Later(rate=0.5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="rate was removed: set count=2"):
        override(Later(), ["rate=0.5"])
    with pytest.raises(ValueError, match="rate was removed: set count=2"):
        from_dict(Later, {"count": 3, "rate": 0.7})


def test_a_stored_run_that_had_a_removed_settings_default_is_read():
    assert from_dict(Later, {"count": 3, "rate": 0.5}) == Later(count=3)
