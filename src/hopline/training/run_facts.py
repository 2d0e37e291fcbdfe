"""What a run trains, on what and where: as its report shows it, config.json keeps it and a checkpoint compares it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hopline.data.dataset import Dataset
from hopline.data.fingerprint import contents_of
from hopline.distributed.gradients import CombinedBy, Gradients
from hopline.methods.sampled.settings import Sampled
from hopline.nn.structure import structure_of
from hopline.report.settings import changed_keys
from hopline.shards.data import ShardedData
from hopline.util.config import kind_of, to_dict

if TYPE_CHECKING:
    from hopline.training.trainer import Trainer


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """The sizes of dataset and model, the method as a plan has it, device and ranks, in plain values."""
    data, model = trainer.data, trainer.model
    method: dict[str, Any] = {"kind": kind_of(type(trainer.method))} | _described(trainer.method)
    own = {} if type(trainer.gradients) is Gradients else {"gradients": gradients_of(trainer)}
    device = str(trainer.device)
    if trainer.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(trainer.device)})"
    convs = getattr(model, "convs", None)  # of hl.nn.GNN and of PyG's models
    return {
        "dataset": data.name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "num_features": data.num_features,
        "num_classes": data.num_classes,
        "num_seeds": trainer.num_seeds,
        "model": type(model).__name__,
        "layers": [type(conv).__name__ for conv in convs] if isinstance(convs, nn.ModuleList) else [],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "method": method,
        "device": device,
        "num_ranks": trainer.world.size,
        **own,
    }


def name_of(gradients: Gradients) -> str:
    """What a user calls the way in which gradients are combined."""
    if isinstance(gradients, CombinedBy):
        return getattr(gradients.function, "__qualname__", type(gradients.function).__name__)
    return "sum" if type(gradients) is Gradients else type(gradients).__name__


def gradients_of(trainer: Trainer) -> dict[str, Any]:
    """How gradients are combined, by name, with its settings."""
    gradients = trainer.gradients
    has_settings = type(gradients) not in (Gradients, CombinedBy)
    return {"kind": name_of(gradients)} | (_described(gradients) if has_settings else {})


def _described(given: Any) -> dict[str, Any]:
    """The settings of a method, or of gradients; a user's own need not be dataclasses, and then say it themselves."""
    try:
        return to_dict(given)
    except (TypeError, ValueError):
        # Python's own text has the place in memory, by which a resumed run would seem to be another one.
        says_nothing = type(given).__repr__ is object.__repr__
        return {"repr": f"{type(given).__qualname__}()" if says_nothing else repr(given)}


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Data, method, settings and model of a run in plain values."""
    asked = trainer.asked  # not as a plan has it: what is learnt does not depend on that
    return {
        "data": trainer.data.name,
        "method": {"kind": type(asked).__name__} | _described(asked),
        "train": to_dict(trainer.settings),
        "gradients": gradients_of(trainer),
        "model": repr(trainer.model),
    }


def stored_settings(trainer: Trainer) -> dict[str, Any]:
    """What config.json keeps: all settings, and which of them were changed from their defaults."""
    settings = settings_of(trainer)
    own = {} if type(trainer.gradients) is Gradients else {"gradients": settings["gradients"]}
    changed = [f"gradients.{key}" for key in own.get("gradients", {})]
    if trainer.config is not None:
        return {"config": to_dict(trainer.config) | own, "changed": [*changed_keys(trainer.config), *changed]}
    changed += ["data", "model", *(f"train.{key}" for key in changed_keys(trainer.settings))]
    if not isinstance(trainer.asked, Sampled) or "repr" in settings["method"]:
        changed.append("method.kind")
    of_method = ["repr"] if "repr" in settings["method"] else changed_keys(trainer.asked)
    return {"config": settings, "changed": [*changed, *(f"method.{key}" for key in of_method)]}


def fingerprints(model: nn.Module, data: Dataset) -> tuple[dict[str, str], str]:
    """(of the dataset, of the model), before training, in which a module may count something."""
    contents = {"cut": data.shard.cut} if isinstance(data, ShardedData) else contents_of(data)
    return contents, structure_of(model)
