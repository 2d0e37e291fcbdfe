"""Read settings from `key=value` and JSON, write them, check them, and describe them for help.

Settings are frozen dataclasses:

    "method.fanouts=10,10"   -- override -->      RunConfig(...)   -- to_dict -->    config.json of a run
    config.json of a run     -- from_dict -->     RunConfig(...)
    the class RunConfig      -- settings_of -->   the lines of `hopline train --keys`

All of it is driven by the type annotations of the fields, so a new setting is one field with a sentence
under it:

- A field whose annotation is a dataclass is a group: `model.hidden=64`.
- A union of dataclasses is a choice, made by *kind*, the class name in snake case: `method=full_batch`.
  JSON stores the kind as "kind".
- A base class with an attribute `OWN` in such a union admits classes of the user:
  `method=package.module:Class`.
- A text is read by the strictest alternative of a union that accepts it (`_precedence`).

Every refusal names the key as the user types it, and says what to type instead. These messages are what
users see, and tests match them. The module imports no torch, so that help and refusals come at once.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from hopline.util.own_code import name_of_class, own_settings

T = TypeVar("T")
_Reader = Callable[[Any, Any], Any]
"""read_as(value, member): a value as one alternative of a union. Raises `_Mismatch` if the value does not
fit it."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
"""The power of 1000 or 1024 that a prefix of a size stands for."""
_TRUE = ("true", "yes", "on", "1")
"""Texts that a setting of type bool reads as True, in lower case."""
_FALSE = ("false", "no", "off", "0")
"""Texts that a setting of type bool reads as False, in lower case."""
_NONE = ("none", "null")
"""Texts that a setting which may be None reads as None, in lower case."""
_BRACKETS = ("()", "[]")
"""Pairs of brackets that a list may be typed in: the first and the last character."""

Plain = int | float | bool | str | None
"""A value whose type the text alone decides: 8, 0.5, true, none, or any other text."""
Keywords = Mapping[str, Plain | list[Plain]]
"""A setting that is a mapping: keyword arguments of something else, typed one by one as
`model.conv.heads=8`."""


class _Mismatch(Exception):
    """A value is not of the annotated type. The exception's text is a hint for the message, or empty."""


def parse_size(text: str | int) -> int:
    """Return the number of bytes of a size such as "20GiB", ".1G", "3GB", "512" or 1024.

    G, Gi and GiB are binary (1024). GB alone is decimal (1000).
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmgt]?)(i?)(b?)\s*", str(text), re.IGNORECASE)
    refusal = f"Cannot read {text!r} as a size: write it as 20GiB, 0.5G, 3GB or plain bytes."
    if isinstance(text, bool) or match is None:
        raise ValueError(refusal)
    number, prefix, binary_mark, byte_mark = match.groups()
    if binary_mark and not prefix:  # "5iB"
        raise ValueError(refusal)
    is_decimal = prefix and byte_mark and not binary_mark
    base = 1000 if is_decimal else 1024
    return int(Decimal(number) * base ** _POWERS[prefix.lower()])


def format_size(num_bytes: float) -> str:
    """Format a number of bytes for people, in binary units: "1.5 GiB"."""
    value = float(num_bytes)
    unit = "B"
    for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
        # Compared after rounding, so that nothing prints as "1024 MiB". NaN stops at bytes.
        if not round(abs(value), 1) >= 1024:
            break
        value /= 1024
        unit = larger_unit
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


CHANGES_TRAINING = "(changes the training)"
"""Follows advice that changes what is learnt, and not only memory or time."""


def plural(number: int, noun: str) -> str:
    """The noun for that many of it: "batch" for 1, else "batches"."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith("tch") else f"{noun}s"


def nearest(name: str, options: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the option closest to a mistyped name, or "" when none is close."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""


def kind_of(cls: type) -> str:
    """Return the name by which a class is picked in settings: FullBatch is "full_batch"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def find_by_other_name(text: str, classes: Iterable[type]) -> tuple[type, Mapping[str, Any]] | None:
    """(class, its settings) that papers or other libraries call by this name; None if there is none.

    A settings class lists such names in its `KNOWN_AS`, by their letters alone.
    """
    letters = re.sub("[^a-z]", "", text.lower())
    return next(((cls, cls.KNOWN_AS[letters]) for cls in classes if letters in getattr(cls, "KNOWN_AS", ())), None)


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _kinds(annotation: Any) -> dict[str, type]:
    return {kind_of(member): member for member in _members(annotation) if _is_settings(member)}


def _admits_own_classes(member: Any) -> bool:
    """Whether one alternative of an annotation admits any class derived from it, the user's too.

    Such a class has an attribute `OWN`, the name by which messages call it.
    """
    return isinstance(member, type) and "OWN" in vars(member)


def _kind_in(cls: type, annotation: Any) -> str:
    return kind_of(cls) if cls in _kinds(annotation).values() else name_of_class(cls)


def _settable(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _item_types(annotation: Any, length: int) -> list[Any]:
    """The annotation of each item of a tuple or list. Raises `_Mismatch` if it must have another length."""
    args = typing.get_args(annotation)
    if not args:
        return [Any] * length
    is_any_length = typing.get_origin(annotation) is not tuple or (len(args) == 2 and args[1] is Ellipsis)
    if is_any_length:
        return [args[0]] * length
    if len(args) != length:
        raise _Mismatch
    return list(args)


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_sequence(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (tuple, list)


def _is_mapping(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (dict, Mapping)


def _describe(annotation: Any) -> str:
    """The values that an annotation admits, in words of the command line.

    `_describe_for_python` is for programs.
    """
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    words[type(None)] = "none"
    plural = {int: "integers", float: "numbers", str: "words"}
    parts = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            parts += [f"'{option}'" for option in typing.get_args(member)]
        elif _is_sequence(member):
            args = typing.get_args(member)
            has_fixed_length = len(args) > 1 and args[-1] is not Ellipsis
            count = f"{len(args)} " if has_fixed_length else ""
            item_type = args[0] if args else str
            parts.append(f"{count}{plural.get(item_type, 'values')} separated by commas")
        elif _is_mapping(member):
            parts.append("keyword arguments by name")
        elif _is_settings(member):
            parts.append(kind_of(member))
        elif _admits_own_classes(member):
            parts.append("package.module:Class or file.py:Class of your own")
        else:
            parts.append(words.get(member) or getattr(member, "__name__", str(member)))
    return " or ".join(parts)


def to_dict(obj: Any) -> dict[str, Any]:
    """Return a settings object, with the settings inside it, as a dictionary that JSON can hold."""
    return {name: _to_json(getattr(obj, name), hint) for name, hint in _settable(type(obj)).items()}


def _to_json(value: Any, annotation: Any) -> Any:
    """A value of a field as JSON holds it.

    The annotation decides whether a "kind" is needed to read it back.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        has_choice = len(_kinds(annotation)) > 1
        kind = {"kind": _kind_in(type(value), annotation)} if has_choice else {}
        return kind | to_dict(value)
    if isinstance(value, (tuple, list)):
        sequence = next(filter(_is_sequence, _members(annotation)), tuple)
        item_types = _item_types(sequence, len(value))
        return [_to_json(item, hint) for item, hint in zip(value, item_types, strict=True)]
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, Any) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return a settings object equal to the one that `to_dict` was given.

    Raises ValueError for unknown keys and wrong types.
    """
    return _from_dict(cls, data, "")


def _from_dict(cls: type[Any], data: Mapping[str, Any], prefix: str) -> Any:
    """`from_dict` for a class whose keys have a prefix, such as "model."."""
    hints = _settable(cls)
    for key in set(data) - set(hints):
        valid = ", ".join(prefix + name for name in hints)
        raise ValueError(f"Unknown key '{prefix}{key}'.{nearest(key, hints)} Valid keys here: {valid}.")
    values = {key: _from_json(value, hints[key], prefix + key) for key, value in data.items()}
    return _construct(cls, values, prefix)


def _construct(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    """An object of a class, whose `__post_init__` checks the values.

    Raises ValueError if a field has no value.
    """
    defaults = defaults_of(cls)
    for name in _settable(cls):
        if name not in values and name not in defaults:
            key = prefix + name
            raise ValueError(f"{kind_of(cls)} needs {key}: add {key}=VALUE.")
    return cls(**values)


def defaults_of(cls: type[Any]) -> dict[str, Any]:
    """The default of every field that has one."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


def _from_json(value: Any, annotation: Any, key: str) -> Any:
    """A value of config.json as the annotation admits it. Raises ValueError."""
    kinds = _kinds(annotation)
    if len(kinds) > 1 and isinstance(value, Mapping) and "kind" not in value:
        raise ValueError(f"{key} does not say its kind: add 'kind', one of {', '.join(kinds)}.")
    return _read(value, annotation, key, functools.partial(_json_as, key=key))


def _json_as(value: Any, member: Any, key: str) -> Any:
    """Return a JSON value as one alternative of an annotation. Raises `_Mismatch` if it does not fit."""
    if _is_settings(member) and isinstance(value, Mapping):
        # In a class with a field `kind`, "kind" is that field and does not pick the class.
        names_kind = "kind" in value and "kind" not in _settable(member)
        if not names_kind:
            return _from_dict(member, value, f"{key}.")
        if value["kind"] != kind_of(member):
            raise _Mismatch(nearest(str(value["kind"]), [kind_of(member)]))
        return _from_dict(member, _without_kind(value), f"{key}.")
    if _admits_own_classes(member) and isinstance(value, Mapping) and ":" in str(value["kind"]):
        cls = own_settings(key, str(value["kind"]), member)
        return _from_dict(cls, _without_kind(value), f"{key}.")
    if typing.get_origin(member) is Literal:
        if any(value == option and type(value) is type(option) for option in typing.get_args(member)):
            return value
        raise _Mismatch(nearest(str(value), map(str, typing.get_args(member))))
    if _is_sequence(member) and isinstance(value, (list, tuple)):
        return _items(value, member, functools.partial(_json_as, key=key))
    if _is_mapping(member) and isinstance(value, Mapping):
        _, item_type = typing.get_args(member) or (str, Any)
        read_as = functools.partial(_json_as, key=key)
        return {name: _read_first(item, item_type, read_as) for name, item in value.items()}
    if (member, type(value)) in ((Path, str), (float, int)):
        return member(value)
    if member is Any or type(value) is member:
        return value
    raise _Mismatch


def _without_kind(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != "kind"}


def _read(value: Any, annotation: Any, key: str, read_as: _Reader) -> Any:
    """Return a value as the annotation admits it.

    Raises ValueError, which says what the annotation admits.
    """
    try:
        return _read_first(value, annotation, read_as)
    except _Mismatch as mismatch:
        hint = str(mismatch)
    kinds = _kinds(annotation)
    if len(kinds) == 1:
        (only_class,) = kinds.values()
        inner_keys = [f"{key}.{name}" for name in _settable(only_class)]
        hint = f" Its own settings are {', '.join(inner_keys)}."
    meant = find_by_other_name(str(value), kinds.values())
    if meant is not None:
        cls, values = meant
        hint = f" {value} is {' '.join([f'{key}={kind_of(cls)}', *(f'{key}.{n}={v}' for n, v in values.items())])}."
    raise ValueError(f"{key}={value} is not valid: expected {_describe(annotation)}.{hint}")


def _read_first(value: Any, annotation: Any, read_as: _Reader) -> Any:
    """Return a value as the first alternative that accepts it, strict ones first. Raises `_Mismatch`."""
    hint = ""
    for member in sorted(_members(annotation), key=_precedence):
        try:
            return read_as(value, member)
        except _Mismatch as mismatch:
            hint = hint or str(mismatch)
    raise _Mismatch(hint)


def _items(values: Sequence[Any], annotation: Any, read_as: _Reader) -> Any:
    """Return values as the tuple or list that the annotation admits. Raises `_Mismatch`."""
    item_types = _item_types(annotation, len(values))
    make_sequence = typing.get_origin(annotation) or annotation
    pairs = zip(values, item_types, strict=True)
    return make_sequence(_read_first(item, hint, read_as) for item, hint in pairs)


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """One `key=value`, seen from one level of nested settings."""

    key: str
    """The whole key as typed, for messages: "model.conv.heads"."""
    path: tuple[str, ...]
    """Names from this level down: ("conv", "heads") at the level of `model`."""
    text: str

    @property
    def is_whole(self) -> bool:
        return len(self.path) == 1

    def inside(self) -> _Assignment:
        """The assignment seen from one level further down."""
        return dataclasses.replace(self, path=self.path[1:])

    def to_inner(self, name: str) -> _Assignment:
        """The assignment to a field inside, if this one is to the whole: `model.name=gcn` for `model=gcn`."""
        return dataclasses.replace(self, path=(*self.path, name)) if self.is_whole else self


def override(obj: T, assignments: Sequence[str]) -> T:
    """Return settings with `key=value` texts applied: `override(run, ["method.fanouts=10,10"])`.

    Of two texts with one key the later wins. Raises ValueError.
    """
    items = []
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip()
        value = value.strip() or value  # a space or a tab alone is a value: columns.delimiter
        if not equals or not key:
            example = next(iter(_settable(type(obj))))
            raise ValueError(f"Cannot read '{text}': write key=value, such as {example}=VALUE.")
        items.append(_Assignment(key=key, path=tuple(key.split(".")), text=value))
    return _apply(type(obj), base=obj, items=items, prefix="", root=obj)


def _apply(cls: type[Any], base: Any, items: Sequence[_Assignment], prefix: str, root: Any) -> Any:
    """Return settings of a class with all assignments of one level applied.

    They are applied at once, so that checks over several fields see them together.

    base: the settings to change; None for a new object of `cls`. prefix: of the level, such as "model.".
    root: the outermost settings, whose keys are searched for suggestions.
    """
    hints = _settable(cls)
    groups: dict[str, list[_Assignment]] = {}
    for item in items:
        name = item.path[0]
        if name not in hints:
            raise _unknown_key(item.key, prefix, hints, root)
        groups.setdefault(name, []).append(item)

    current = defaults_of(cls) if base is None else {name: getattr(base, name) for name in hints}
    values = {}
    for name, group in groups.items():
        values[name] = _field_value(hints[name], current.get(name), group, prefix + name, root)
    return _construct(cls, values, prefix) if base is None else dataclasses.replace(base, **values)


def _field_value(annotation: Any, current: Any, group: Sequence[_Assignment], key: str, root: Any) -> Any:
    """The new value of one field: by the last assignment to the whole, then by those to fields inside it."""
    if _is_mapping(annotation):
        return _keywords(current, group, key)
    kinds = list(_kinds(annotation).values())
    is_listed = type(current) in kinds
    admits_own = any(map(_admits_own_classes, _members(annotation)))
    is_own = not is_listed and admits_own and current is not None
    # The class whose fields are assigned. Where the current value is None, it is the first dataclass of the
    # union.
    cls = type(current) if is_listed or is_own else next(iter(kinds), None)

    short = _short_field(annotation)
    if short is not None:
        # `model=gcn` becomes `model.name=gcn`. It stays where it was typed, so that the later of the two
        # wins. `model=none` still means the whole, if the field may be None.
        none_words = _NONE if type(None) in _members(annotation) else ()
        group = [item if item.text.lower() in none_words else item.to_inner(short) for item in group]
    whole = [item.text for item in group if item.is_whole]
    inner = [item.inside() for item in group if not item.is_whole]
    if inner and cls is None:
        raise _unknown_key(inner[0].key, prefix="", valid={}, root=root)

    if whole:
        value = _read(whole[-1], annotation, key, _text_as)
        # `_text_as` returns a class for the name of a kind. Any other value is final.
        picked = value if isinstance(value, type) else None
        if picked is None and not inner:
            return value
        if picked is None and value is not None:
            raise ValueError(f"{key}={whole[-1]} leaves no place for {inner[0].key}: write one of the two.")
        # `method=sampled` starts from the defaults of the class, even where the current value is of that
        # class. So does a group that is set to none while fields inside it are assigned too.
        cls = picked or cls
        current = None
    assert cls is not None  # without a class, `inner` is empty and `whole` has returned its value
    return _apply(cls, base=current, items=inner, prefix=f"{key}.", root=root)


def _short_field(annotation: Any) -> str | None:
    """The field that an assignment to the whole means, or None: `model=gcn` is `model.name=gcn`.

    A settings class names the field in `SHORT`. By default it is `name`, if the class has one.
    """
    kinds = list(_kinds(annotation).values())
    if len(kinds) != 1:
        return None
    field = getattr(kinds[0], "SHORT", "name")
    return field if field in _settable(kinds[0]) else None


def _keywords(current: Mapping[str, Any] | None, group: Sequence[_Assignment], key: str) -> dict[str, Any]:
    """A setting that is a mapping, with assignments to single names applied. `key=none` empties it."""
    values = dict(current or {})
    for item in group:
        if len(item.path) == 2:
            values[item.path[1]] = _plain_value(item.text)
        elif item.is_whole and item.text.lower() in _NONE:
            values = {}
        else:
            raise ValueError(
                f"Cannot read '{item.key}={item.text}': write {key}.NAME=VALUE, or {key}=none for no NAME."
            )
    return values


def _plain_value(text: str) -> Any:
    """The value of a text without an annotation. A text with a comma, or in brackets, is a list."""
    if "," in text or _is_bracketed(text):
        return [_plain_value(part) for part in _split(text)]
    # Not by `_text_as(text, int)`, which accepts 1.0 too. Here 1.0 must stay a float.
    if re.fullmatch("[+-]?[0-9]+", text):
        return int(text)
    return _read_first(text, float | bool | str | None, _text_as)


def _split(text: str) -> list[str]:
    """The items of a list such as 10,5 or [10, 5] or ('a', 'b')."""
    inner = text[1:-1] if _is_bracketed(text) else text
    if not inner.strip():
        return []
    return [part.strip().strip("'\"") for part in inner.removesuffix(",").split(",")]


def _is_bracketed(text: str) -> bool:
    return text[:1] + text[-1:] in _BRACKETS


def _precedence(member: Any) -> int:
    """The rank of an alternative of a union: strict types are tried first, since every text is also a str.

    Settings classes, and whatever else is not listed, rank with bool.
    """
    if typing.get_origin(member) is Literal:
        return 1
    if _is_sequence(member):
        return 5
    return {type(None): 0, int: 2, float: 3, bool: 4, Path: 6, str: 7}.get(member, 4)


def _text_as(text: str, member: Any) -> Any:
    """Return a text as one alternative of an annotation. Raises `_Mismatch` if it does not fit.

    For a settings class, the text is its kind and the result is the class itself: its fields are assigned
    later.
    """
    if typing.get_origin(member) is Literal:
        options = {str(option): option for option in typing.get_args(member)}
        if text in options:
            return options[text]
        raise _Mismatch(nearest(text, options))
    if _is_sequence(member):
        return _items(_split(text), member, _text_as)
    if member is type(None) and text.lower() in _NONE:
        return None
    if _is_settings(member):
        if text == kind_of(member):
            return member
        raise _Mismatch(nearest(text, [kind_of(member)]))
    if _admits_own_classes(member) and ":" in text:
        return own_settings(kind_of(member), text, member)
    if member is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if member in (int, float):
        return _number(text, member)
    if member in (str, Any):
        return text
    if member is Path and text:
        return Path(text)
    raise _Mismatch


def _number(text: str, member: type[int] | type[float]) -> float:
    """Return a text as a number. Raises `_Mismatch` for NaN, and for a fraction where an int is expected.

    An int may be typed as 1e6 or 1_000_000.
    """
    try:
        number = int(text) if member is int and re.fullmatch(r"[+-]?[0-9_]+", text) else float(text)
    except ValueError:
        raise _Mismatch from None
    is_fraction = isinstance(number, float) and not number.is_integer()
    if math.isnan(number) or (member is int and is_fraction):
        raise _Mismatch
    return member(number)


def _unknown_key(key: str, prefix: str, valid: Mapping[str, Any], root: Any) -> ValueError:
    """An error for a key that does not exist at its level, with the best suggestion among all keys.

    prefix: of the level, such as "model.". valid: annotations of the level's fields by name. root: the
    outermost settings.
    """
    level_keys = [prefix + name for name in valid]
    group_of_key = {setting.key: setting.group for setting in _walk(type(root))}
    same_ending = [option for option in group_of_key if option.rpartition(".")[2] == key]
    if key in group_of_key:
        hint = f" It is a setting of {group_of_key[key]}."
    elif same_ending:
        hint = f" Did you mean '{same_ending[0]}'?"
    else:
        hint = nearest(key, [*level_keys, *group_of_key])
    # Such as model.heads, which GATConv has and the model has not.
    for keywords in (name for name, annotation in valid.items() if _is_mapping(annotation)):
        name = key.removeprefix(prefix)
        hint += f" As a keyword argument of PyG's {keywords} it is {prefix}{keywords}.{name}."
    valid_keys = f" Valid keys here: {', '.join(level_keys)}." if level_keys else ""
    return ValueError(f"Unknown key '{key}'.{hint}{valid_keys}")


class Setting(typing.NamedTuple):
    """One key of a settings class, as help shows it."""

    key: str
    """The dotted key as typed: "model.hidden"."""
    group: str
    """The title under which help lists the setting.

    A plain setting has the class that declares it ("train"), a nested one its field or kind ("model",
    "method=sampled").
    """
    expected: str
    """The values that the setting admits, in words."""
    default: str | None
    """The default as typed; None if the setting is required."""
    sentence: str
    """The string literal under the field, on one line; empty if there is none."""


def settings_of(cls: type, values: Any = None, own: Mapping[str, type] = MappingProxyType({})) -> list[Setting]:
    """Return every setting of a class as help shows it, group by group: the class's own settings first.

    values: an object of the class, whose values are shown in place of the defaults. own: settings classes
    of the user, each by the assignment that picks it ("method=package.module:Class").
    """
    all_settings = list(_walk(cls, values=values))
    for title, own_class in own.items():
        field = title.partition("=")[0]
        all_settings += _walk(own_class, f"{field}.", title)
    # The class itself comes first in its __mro__, then its bases, then nested groups as they are declared.
    titles = [_title(owner) for owner in cls.__mro__]
    titles += [setting.group for setting in all_settings]
    # `index` finds the first of equal titles.
    return sorted(all_settings, key=lambda setting: titles.index(setting.group))


def _walk(
    cls: type, prefix: str = "", group: str = "", values: Any = None, short: str | None = None
) -> Iterator[Setting]:
    """The settings of a class, then those of the settings classes inside it.

    prefix: of the keys, such as "model.". group: the title of all settings; empty: by the class that
    declares each.
    values: as in `settings_of`. short: the field that is shown as the whole (`model=sage`, not
    `model.name=sage`).
    """
    sentences = _sentences(cls)
    defaults = defaults_of(cls)
    if isinstance(values, cls):
        defaults |= {name: getattr(values, name) for name in _settable(cls)}
    nested: list[Iterator[Setting]] = []
    for name, hint in _settable(cls).items():
        key = prefix.removesuffix(".") if name == short else prefix + name
        default = _format_value(defaults[name]) if name in defaults else None
        title = group or _title(_owner(cls, name))
        sentence = sentences.get(name, "")

        kinds = _kinds(hint)
        # A group that can neither be None nor of another class gets no line of its own. Its short field
        # stands for the whole, and a group without a short field cannot be assigned as a whole.
        is_fixed_group = len(kinds) == 1 and default is not None and type(None) not in _members(hint)
        for kind, kind_class in kinds.items():
            nested_title = f"{key}={kind}" if len(kinds) > 1 else key
            nested_short = _short_field(hint) if is_fixed_group else None
            nested.append(_walk(kind_class, f"{key}.", nested_title, defaults.get(name), nested_short))

        if _is_mapping(hint) and defaults.get(name):
            for keyword, value in defaults[name].items():
                yield Setting(
                    key=f"{key}.{keyword}",
                    group=title,
                    expected="any",
                    default=_format_value(value),
                    sentence=sentence,
                )
        elif not is_fixed_group:
            yield Setting(key=key, group=title, expected=_describe(hint), default=default, sentence=sentence)
    for settings_of_kind in nested:
        yield from settings_of_kind


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))


def _title(cls: type) -> str:
    return re.sub("_(settings|config|options)$", "", kind_of(cls))


def _format_value(value: Any) -> str:
    """A value as a user would type it."""
    if dataclasses.is_dataclass(value):
        return getattr(value, "name", None) or kind_of(type(value))
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or '""'
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or '""'


def _sentences(cls: type) -> dict[str, str]:
    """The string literal under each field of a class and its bases, by field name.

    Python does not keep these literals, so they are read from the source.
    """
    sentences: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):  # the last is `object`
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):  # no source, as at a prompt
            continue
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for statement, below in itertools.pairwise(body):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                sentences[statement.target.id] = " ".join(str(below.value.value).split())
    return sentences


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Decorate a settings class: a frozen dataclass with keyword arguments only.

    Its constructor answers a misspelt keyword with the nearest name. Where a field is a path, or a group with a
    short form (schedule="cosine"), it takes text too.
    """
    settings_class = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    construct = settings_class.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *positional: Any, **values: Any) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.init]
        if positional:
            raise TypeError(
                f"{settings_class.__name__} takes its settings by name, such as {names[0]}={positional[0]!r}"
            )
        check_names(settings_class.__name__, values, names)
        construct(self, **{name: _from_text(value, settings_class, name) for name, value in values.items()})

    settings_class.__init__ = __init__
    return settings_class


def _from_text(value: Any, cls: type, name: str) -> Any:
    """The value of a field. Text becomes what the field's annotation admits: a path, or a group by its short form."""
    if not isinstance(value, str):
        return value
    hint = _hints(cls)[name]
    if not value or _fits(value, hint):
        return value
    if any(typing.get_origin(member) is tuple and typing.get_args(member)[0] is str for member in _members(hint)):
        return (value,)  # one name in place of several
    if _short_field(hint) is not None:
        return _field_value(hint, None, [_Assignment(key=name, path=(name,), text=value)], name, root=None)
    return Path(value) if _fits(Path(value), hint) else value


def check_names(
    owner: str,
    names: Iterable[str],
    valid: Collection[str],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError for a keyword argument that the owner does not have.

    owner: the name of the class or function, for the message. names: keywords that the caller passed.
    valid: keywords that exist. instead: what to give for keywords of other libraries.
    """
    for name in names:
        if name in instead:
            raise TypeError(f"{owner} has no setting '{name}': give {instead[name]}")
        if name not in valid:
            hint = nearest(name, valid) or f" It has {', '.join(valid)}."
            raise TypeError(f"{owner} has no setting '{name}'.{hint}")


def check_fields(obj: Any) -> None:
    """Raise ValueError for a field whose value is not of its annotated type.

    Called from `__post_init__`.
    """
    hints = _hints(type(obj))
    for field in dataclasses.fields(obj):
        value = getattr(obj, field.name)
        check_value(field.name, value, hints[field.name])


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError for a value that is not of the annotated type, or for an infinite or NaN number."""
    if _fits(value, hint):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value}")
    raise ValueError(f"{name} must be {_describe_for_python(hint)}, not {value!r}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class as types. Cached, since `check_fields` runs whenever settings are made."""
    return typing.get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value in Python is of an annotated type.

    All items of a tuple or list are compared with its first item type, and its length is not checked.
    Annotations that are not understood admit everything.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin in (tuple, list):
        return isinstance(value, origin) and all(_fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and _fits(item, arguments[1]) for name, item in value.items()
        )
    if hint is type(None):
        return value is None
    if hint is float:
        # Neither infinity nor NaN: a run stores its settings as JSON, which has no word for them.
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _describe_for_python(hint: Any) -> str:
    """The values that an annotation admits, in words of a Python program."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe_for_python, arguments))
    if origin in (tuple, list):
        return f"a {origin.__name__} of {_describe_for_python(arguments[0])}"
    if hint == Keywords:
        return "a dict of numbers, texts, True, False, None or lists of these by name"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"a {hint.__name__}(...)"
    words = {int: "a whole number", float: "a number", type(None): "None"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def parse_chunk_bytes(chunk_bytes: int | str | None) -> int | None:
    """Return the limit of a chunk of exact inference in bytes; None if it is not set."""
    limit_bytes = None if chunk_bytes is None else parse_size(chunk_bytes)
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
    return limit_bytes


def check_fanouts(fanouts: Sequence[int], replace: bool = False) -> None:
    """Raise ValueError for fan-outs that name no layer, or that no sampler can draw."""
    if isinstance(fanouts, int | str) or not fanouts:
        raise ValueError(f"fanouts must name one number per layer, such as fanouts=(15, 10, 5), not {fanouts!r}")
    for fanout in fanouts:
        if not isinstance(fanout, int) or fanout < -1 or fanout == 0:
            raise ValueError(f"a fan-out is a positive number or -1 for all neighbours, not {fanout}")
        if fanout == -1 and replace:
            raise ValueError("fan-out -1 takes all neighbours, which replace=True cannot: give a positive fan-out")


def check_law(law: str, weight: str | None, replace: bool = False, every: int = 1) -> None:
    """Raise ValueError for settings of draws that do not go together. every: the setting `law_every`."""
    if law not in ("uniform", "labor"):
        raise ValueError(f"law must be 'uniform' or 'labor', not {law!r}")
    if law == "labor" and weight is not None:
        raise ValueError(f"law=labor draws by the sources alone: leave out weight={weight}, or set law=uniform")
    if replace and (law == "labor" or weight is not None):
        name = "law=labor" if weight is None else f"weight={weight}"
        raise ValueError(f"{name} draws without replacement: leave out replace")
    if every < 1 or (every > 1 and law != "labor"):
        raise ValueError(f"law_every must be at least 1, and more than 1 goes with law=labor alone, not {every}")
