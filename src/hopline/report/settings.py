"""Which settings of a run differ from their defaults: found when the run begins, and stored in its config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hopline.util.config import defaults_of, to_dict


class Settings(NamedTuple):
    """The settings of a run by key, such as "method.fanouts"."""

    changed: dict[str, Any]
    """Those that differ from their defaults; all of them where defaults are not known."""
    others: dict[str, Any]


def changed_keys(settings: Any) -> list[str]:
    """Dotted keys of a settings object whose values are not the defaults, those of nested objects included.

    A nested object of another class than the default's, such as `method=Historical()`, has its "kind" changed, and is
    compared with the defaults of its own class.
    """
    defaults, found = defaults_of(type(settings)), []
    for name, stored in to_dict(settings).items():
        value = getattr(settings, name)
        if name not in defaults:  # of a user's own method: it has to be given
            found.append(name)
            continue
        usual = defaults[name]
        if isinstance(value, Mapping):  # keyword arguments of a conv: flattened, each is a key of its own
            found += [f"{name}.{key}" for key in value if key not in usual or value[key] != usual[key]]
            continue
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            found += [name] if value != usual else []
            continue
        if "kind" in stored and type(value) is not type(usual):
            found.append(f"{name}.kind")
        found += [f"{name}.{key}" for key in changed_keys(value)]
    return found


def split_settings(config: Mapping[str, Any], changed: Iterable[str] | None) -> Settings:
    """Tell the settings that were changed from the others. changed: None of a run that did not store them."""
    settings = dict(flatten(config))
    if changed is None:
        return Settings(settings, {})
    keys = set(changed)
    return Settings(
        {key: value for key, value in settings.items() if key in keys},
        {key: value for key, value in settings.items() if key not in keys},
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("method.fanouts", value) for {"method": {"fanouts": value}}."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
