"""The settings of a run in its config.json, and which of them differ from their defaults.

`changed_keys` finds their keys when the run begins, and config.json stores the keys. The report page of the
run (`report.page`) reads that file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hopline.util.config import defaults_of, to_dict
from hopline.util.files import check_file

FORMAT = 3


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a run's config.json, as `report.writer.describe` made it.

    Raises:
        ValueError: The folder is no run folder, or the file is damaged or of another format.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.json. Check the path.")
    check_file(path)
    try:
        stored = json.loads(path.read_text("utf-8"))
        number = stored["format"]
        if not isinstance(stored["config"], dict) or not isinstance(stored["changed"], list):
            raise TypeError("it holds no settings")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or train again") from error
    if number != FORMAT:
        raise ValueError(f"{path} has format {number}, this version of hopline reads {FORMAT}: train again")
    return stored


def changed_keys(settings: Any) -> list[str]:
    """Keys of a settings object whose values are not the defaults. "method.fanouts" is in a nested object.

    A nested object of another class than the default, such as `method=Historical()`, has the changed key
    "method.kind". Its fields are compared with the defaults of its own class.
    """
    defaults = defaults_of(type(settings))
    changed: list[str] = []
    for name, stored in to_dict(settings).items():
        value = getattr(settings, name)
        default = defaults.get(name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # `to_dict` stores a kind where the field's annotation leaves a choice of classes.
            if "kind" in stored and type(value) is not type(default):
                changed.append(f"{name}.kind")
            changed += [f"{name}.{key}" for key in changed_keys(value)]
        elif isinstance(value, Mapping):  # such as keyword arguments of a conv: `flatten` makes each a key of its own
            usual = default if isinstance(default, Mapping) else {}
            changed += [f"{name}.{key}" for key, item in value.items() if key not in usual or item != usual[key]]
        elif name not in defaults or value != default:  # a user's own method may have a field without a default
            # An object that is no settings is stored by its class.
            changed += [f"{name}.{key}" for key in stored] if isinstance(stored, Mapping) else [name]
    return changed


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("method.fanouts", value) for {"method": {"fanouts": value}}.

    An empty mapping is a value. It has no keys, so it would be left out otherwise.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
