"""Which settings of a run differ from their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hopline.budget.settings import Budget
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Auto, Sampled
from hopline.run.settings import RunConfig, renewed
from hopline.training.settings import TrainSettings
from hopline.util.config import kind_of, removed_settings, to_dict

METHODS = (Sampled, Historical, FullBatch, Auto)
GIVEN = object()
"""The default of a setting that has none: keyword arguments of a conv are there because somebody gave them."""


class Settings(NamedTuple):
    """The settings of a run by key, such as "method.fanouts"."""

    changed: dict[str, Any]
    """Those that differ from their defaults; all of them where defaults are not known."""
    others: dict[str, Any]


def split_settings(config: Mapping[str, Any]) -> Settings:
    """Tell the settings that were changed from the others.

    config: what config.json holds, of a `hopline train` run (a `RunConfig`) or of a `Trainer` in Python (data, method,
    train, model). With a key that neither has, such as one of a later version, all settings count as changed.
    """
    of_trainer = isinstance(config.get("train"), Mapping)
    config = {**config, "train": renewed(config["train"])} if of_trainer else renewed(config)
    settings = dict(flatten(config))
    defaults = dict(flatten(_trainer_defaults(config) if of_trainer else _run_defaults(config)))
    defaults |= {key: GIVEN for key in settings if key.startswith("model.conv.")}
    if not settings.keys() <= defaults.keys():
        return Settings(settings, {})
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    return Settings(changed, {key: value for key, value in settings.items() if key not in changed})


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("method.fanouts", value) for {"method": {"fanouts": value}}."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _run_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = _all_of(RunConfig())
    defaults["method"] = {**_method_defaults(config.get("method")), "kind": kind_of(Sampled)}
    if isinstance(config.get("budget"), Mapping):
        defaults["budget"] = _all_of(Budget())
    return defaults


def _trainer_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    method = {**_method_defaults(config.get("method")), "kind": Sampled.__name__}
    # Which data and which model has no default.
    return {"data": None, "method": method, "train": _all_of(TrainSettings()), "model": None}


def _all_of(settings: Any) -> dict[str, Any]:
    """Settings with those that earlier versions had, whose runs are reported too."""
    found = {name: removed.default for name, removed in removed_settings(type(settings)).items()} | to_dict(settings)
    inner = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return found | {name: _all_of(value) for name, value in inner.items() if dataclasses.is_dataclass(value)}


def _method_defaults(given: Any) -> dict[str, Any]:
    """The defaults of the method's own settings; of a method of the user's, nothing has one."""
    if not isinstance(given, Mapping):
        return {}
    for method in METHODS:
        if given.get("kind") in (kind_of(method), method.__name__):
            return _all_of(method())
    return dict.fromkeys(given)
