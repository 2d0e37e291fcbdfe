"""Fields of settings are checked by their annotations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from hopline.util.config import (
    Keywords,
    check_fields,
    from_dict,
    override,
    settings,
    settings_of,
    to_dict,
)


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
        ({"place": "x"}, "place must be Path"),
        ({"flag": 1}, "flag must be bool"),
        ({"inner": "cosine"}, r"inner must be a Inner\(\.\.\.\), not 'cosine'"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


@settings
class SettingsWithPaths:
    """Settings that name files."""

    place: Path | None = None
    weights: Literal["best", "last"] | Path = "best"
    name: str | Path = "x"

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_path_may_be_given_as_text_in_every_settings_class():
    ours = SettingsWithPaths(place="a/b", weights="w.pt", name="y")  # type: ignore[arg-type]
    assert ours == SettingsWithPaths(place=Path("a/b"), weights=Path("w.pt"), name="y")
    assert SettingsWithPaths(weights="last").weights == "last"
    assert replace(ours, place="c").place == Path("c")  # type: ignore[arg-type]
    for wrong in (3, ""):
        with pytest.raises(ValueError, match="place must be Path"):
            SettingsWithPaths(place=wrong)  # type: ignore[arg-type]


@settings
class Conv:
    """Settings with a mapping."""

    name: str = "gat"
    """Which conv."""
    options: Keywords = field(default_factory=dict, hash=False)
    """Its keyword arguments."""

    def __post_init__(self) -> None:
        check_fields(self)


@settings
class Model:
    """Settings with a mapping inside another setting."""

    conv: Conv = Conv()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("-3", -3), ("0.6", 0.6), ("1.0", 1.0), ("1e-3", 1e-3), ("true", True), ("off", False),
        ("none", None), ("max", "max"), ("mean,max", ["mean", "max"]), ("mean,", ["mean"]),
        ("[1, 0.5,none]", [1, 0.5, None]),
        ("('a', 'b')", ["a", "b"]), ("[]", []), ("nan", "nan"), ("", ""),
    ],
)  # fmt: skip
def test_keywords_are_typed_one_by_one_and_their_text_says_their_type(text: str, value: Any):
    ours = override(Model(), [f"conv.options.key={text}"]).conv.options["key"]
    assert (ours, type(ours)) == (value, type(value))


def test_keywords_are_added_to_those_of_a_recipe_and_replaced_one_by_one():
    recipe = Model(conv=Conv(options={"heads": 8, "bias": False}))
    assert override(recipe, ["conv.options.heads=2", "conv.options.dropout=0.5"]).conv.options == {
        "heads": 2,
        "bias": False,
        "dropout": 0.5,
    }
    assert recipe.conv.options == {"heads": 8, "bias": False}
    assert override(recipe, ["conv.options=none"]) == Model()
    assert override(recipe, ["conv.options=none", "conv.options.heads=1"]).conv.options == {"heads": 1}
    assert hash(recipe) == hash(Model())


@pytest.mark.parametrize("text", ["conv.options=heads", "conv.options.heads.first=8"])
def test_a_mapping_is_not_typed_as_a_whole(text: str):
    with pytest.raises(ValueError, match=r"conv\.options\.NAME=VALUE, or conv\.options=none"):
        override(Model(), [text])


def test_keywords_come_back_from_json():
    model = Model(conv=Conv(options={"heads": 8, "dropout": 1.0, "aggr": ["mean", "max"], "bias": False, "dim": None}))
    assert from_dict(Model, json.loads(json.dumps(to_dict(model)))) == model
    for wrong in ({"heads": {"a": 1}}, [1], 3, {"aggr": [[1]]}):
        with pytest.raises(ValueError, match=r"conv\.options=.* is not valid"):
            from_dict(Model, {"conv": {"options": wrong}})


def test_help_shows_a_mapping_on_one_line_or_one_line_for_each_value_of_a_recipe():
    lines = [setting for setting in settings_of(Model) if "options" in setting.key]
    assert [(one.key, one.default, one.sentence) for one in lines] == [
        ("conv.options", "none", "Its keyword arguments.")
    ]
    recipe = Model(conv=Conv(options={"heads": 8, "aggr": ["mean", "max"]}))
    lines = [setting for setting in settings_of(Model, recipe) if "options" in setting.key]
    assert [(one.key, one.default) for one in lines] == [("conv.options.heads", "8"), ("conv.options.aggr", "mean,max")]
