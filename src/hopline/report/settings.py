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
    defaults = defaults_of(type(settings))
    changed: list[str] = []
    for name, stored in to_dict(settings).items():
        value = getattr(settings, name)
        if name not in defaults:  # of a user's own method: it has to be given
            changed.append(name)
            continue
        default = defaults[name]
        if isinstance(value, Mapping):  # keyword arguments of a conv: flattened, each is a key of its own
            changed += [f"{name}.{key}" for key in value if key not in default or value[key] != default[key]]
            continue
        is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if not is_nested:
            if value != default:
                changed.append(name)
            continue
        if "kind" in stored and type(value) is not type(default):
            changed.append(f"{name}.kind")
        changed += [f"{name}.{key}" for key in changed_keys(value)]
    return changed


def split_settings(config: Mapping[str, Any], changed: Iterable[str] | None) -> Settings:
    """Tell the settings that were changed from the others. changed: None of a run that did not store them."""
    settings = dict(flatten(config))
    if changed is None:
        return Settings(settings, {})
    keys = set(changed)
    return Settings(
        changed={key: value for key, value in settings.items() if key in keys},
        others={key: value for key, value in settings.items() if key not in keys},
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("method.fanouts", value) for {"method": {"fanouts": value}}."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
