"""Settings hold what they say they hold: for library users, whom no command line checks."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from hopline.util.spec import Removed, nearest, parse_size, removed_settings

T = TypeVar("T")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a class of settings: a frozen dataclass with keyword arguments, which answers a misspelt one with the name
    that was probably meant."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    construct = made.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *positional: Any, **given: Any) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.init]
        if positional:
            raise TypeError(f"{made.__name__} takes its settings by name, such as {names[0]}={positional[0]!r}")
        check_names(made.__name__, given, names, removed_settings(made))
        construct(self, **given)

    made.__init__ = __init__
    return made


def check_names(
    owner: str, given: Iterable[str], valid: Collection[str], removed: Mapping[str, Removed] = MappingProxyType({})
) -> None:
    """Refuse a keyword argument that the owner does not have."""
    for name in given:
        if name in removed:
            raise TypeError(f"{owner}: {removed[name].refusal(name)}")
        if name not in valid:
            hint = nearest(name, valid) or f" It has {', '.join(valid)}."
            raise TypeError(f"{owner} has no setting '{name}'.{hint}")


def check_fields(of: Any) -> None:
    """Refuse a field whose value is not of its annotated type; called from `__post_init__`."""
    hints = _hints(type(of))
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if not _fits(value, hints[field.name]):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} must be a finite number, not {value}")
            raise ValueError(f"{field.name} must be {_describe(hints[field.name])}, not {value!r}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if hint is type(None):
        return value is None
    if hint is float:
        # Neither infinity nor NaN: JSON, in which a run keeps its settings, has no word for them.
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe, arguments))
    if origin is tuple:
        return f"a tuple of {_describe(arguments[0])}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"a {hint.__name__}(...)"
    return {int: "a whole number", float: "a number", type(None): "None"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def checked_bytes(chunk_bytes: int | str | None) -> int | None:
    """The bytes that a chunk of exact inference may take, as a number; None where nothing was said."""
    limit_bytes = None if chunk_bytes is None else parse_size(chunk_bytes)
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
    return limit_bytes


def check_fanouts(fanouts: Sequence[int], replace: bool = False) -> None:
    """Refuse fan-outs that name no layer, or that no sampler can draw."""
    if isinstance(fanouts, int) or not fanouts:
        raise ValueError("fanouts must name one number per layer, for example fanouts=(15, 10, 5)")
    for fanout in fanouts:
        if not isinstance(fanout, int) or fanout < -1 or fanout == 0:
            raise ValueError(f"a fan-out is a positive number or -1 for all neighbours, not {fanout}")
        if fanout == -1 and replace:
            raise ValueError("fan-out -1 takes all neighbours, which replace=True cannot: give a positive fan-out")
