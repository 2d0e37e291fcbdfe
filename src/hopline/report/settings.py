"""Which settings of a run differ from their defaults.

`changed_keys` finds their keys when the run begins, and config.json stores the keys. The report page of the
run (`report.page`) reads that file, and `split_settings` sorts its settings into changed ones and others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hopline.util.config import defaults_of, to_dict


class Settings(NamedTuple):
    """The settings of a run by key, such as "method.fanouts"."""

    changed: dict[str, Any]
    """Settings that differ from their defaults. It holds all settings if config.json does not say which ones
    differ."""
    others: dict[str, Any]
    """Settings with their default values."""


def changed_keys(settings: Any) -> list[str]:
    """Keys of a settings object whose values are not the defaults. "method.fanouts" is in a nested object.

    A nested object of another class than the default, such as `method=Historical()`, has the changed key
    "method.kind". Its fields are compared with the defaults of its own class.
    """
    defaults = defaults_of(type(settings))
    changed: list[str] = []
    for name, stored in to_dict(settings).items():
        value = getattr(settings, name)
        if name not in defaults:  # a field without a default, as a user's own method may have
            changed.append(name)
            continue
        default = defaults[name]
        # Keyword arguments of a conv, whose default is a mapping too. `flatten` makes each a key of its own.
        if isinstance(value, Mapping):
            # In a user's own method, the default may be None.
            default_items = default if isinstance(default, Mapping) else {}
            for key, item in value.items():
                if key not in default_items or item != default_items[key]:
                    changed.append(f"{name}.{key}")
            continue
        is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if not is_nested:
            if value != default:
                changed.append(name)
            continue
        # `to_dict` stores a kind where the field's annotation leaves a choice of classes.
        if "kind" in stored and type(value) is not type(default):
            changed.append(f"{name}.kind")
        changed += [f"{name}.{key}" for key in changed_keys(value)]
    return changed


def split_settings(config: Mapping[str, Any], changed: Iterable[str] | None) -> Settings:
    """Split the settings of a run into changed ones and others.

    config: Settings as config.json has them.
    changed: Keys of the changed ones. None: the run did not store them.
    """
    settings = dict(flatten(config))
    if changed is None:
        return Settings(settings, {})
    keys = set(changed)
    return Settings(
        changed={key: value for key, value in settings.items() if key in keys},
        others={key: value for key, value in settings.items() if key not in keys},
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("method.fanouts", value) for {"method": {"fanouts": value}}.

    An empty mapping is a value. It has no keys, so it would be left out otherwise.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
