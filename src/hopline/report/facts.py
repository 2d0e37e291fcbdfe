"""Sections of the page of a run that say what was trained on what, and how: facts and settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PurePath
from typing import Any

from hopline.report.format import amount
from hopline.report.parts import Record, folded, table
from hopline.report.settings import split_settings

SIZES = {
    "num_nodes": "nodes",
    "num_edges": "edges",
    "num_features": "features",
    "num_classes": "classes",
    "num_seeds": "training seeds",
}
"""Sizes of the dataset in the record of a run's start, with what they are called on the page."""
MAIN_SETTINGS = {
    "sampled": {"fanouts": "fan-outs", "batch_size": "batch size"},
    "historical": {"num_parts": "parts", "parts_per_batch": "parts per batch"},
    "full_batch": {"num_shards": "shards"},
}
"""What a reader asks first of each method's settings."""


def facts_section(start: Record, config: Mapping[str, Any], learning_rates: Sequence[float]) -> str:
    """Dataset, model and training in three cards.

    start: the record of the run's start. Old runs have none: then the settings tell what they can.
    learning_rates: of all epochs. Where they are all the same, this is the place that shows it.
    """
    facts = start or _facts_of_settings(config)
    dataset = {"name": facts.get("dataset")} | {label: facts.get(key) for key, label in SIZES.items()}
    layers = Counter(map(str, facts.get("layers") or []))
    model = {
        "name": facts.get("model"),
        "layers": ", ".join(f"{count} × {name}" for name, count in layers.items()) or None,
        "parameters": facts.get("num_parameters"),
    }
    training = _method_facts(facts.get("method"))
    if len(set(learning_rates)) == 1:
        training["learning rate"] = f"{learning_rates[0]:g}"
    training |= {"device": facts.get("device"), "ranks": facts.get("num_ranks")}
    cards = _card("Dataset", dataset) + _card("Model", model) + _card("Training", training)
    return f'<div class="facts">{cards}</div>' if cards else ""


def _card(title: str, facts: Mapping[str, Any]) -> str:
    terms = [f"<dt>{name}</dt><dd>{escape(amount(value))}</dd>" for name, value in facts.items() if value is not None]
    return f'<div class="card"><h3>{title}</h3><dl>{"".join(terms)}</dl></div>' if terms else ""


def _method_facts(method: Any) -> dict[str, Any]:
    if not isinstance(method, Mapping):
        return {}
    kind = str(method.get("kind"))
    facts: dict[str, Any] = {"method": kind}
    # A Trainer in Python wrote FullBatch where `hopline train` wrote full_batch.
    by_class = {name.replace("_", ""): labels for name, labels in MAIN_SETTINGS.items()}
    for key, label in by_class.get(kind.replace("_", "").lower(), {}).items():
        value = method.get(key)
        facts[label] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return facts


def _facts_of_settings(config: Mapping[str, Any]) -> Record:
    train = config.get("train")
    model = config.get("model")
    if isinstance(model, Mapping):
        name = model.get("name")
    else:  # the repr of a module
        name = str(model).partition("(")[0] if model else None
    return {
        "dataset": PurePath(str(config["data"])).name if config.get("data") else None,
        "model": name,
        "method": config.get("method"),
        "device": (train if isinstance(train, Mapping) else config).get("device"),
    }


def settings_section(config: Mapping[str, Any]) -> str:
    """The settings that differ from their defaults, and the others folded away."""
    changed, others = split_settings(config)

    def rows(settings: Mapping[str, Any]) -> str:
        return table(("key", "value"), settings.items(), kind="keys")

    if not others:
        return f"<h2>Settings</h2>{rows(changed)}"
    shown = rows(changed) if changed else '<p class="dim">All settings have their default values.</p>'
    return (
        f"<h2>Changed settings</h2>{shown}{folded(f'{len(others)} settings with their default values', rows(others))}"
    )
