"""What a run trains, on what and where: as its report shows it, config.json keeps it and a checkpoint compares it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hopline.data.dataset import Dataset
from hopline.data.fingerprint import contents_of
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
    method: dict[str, Any] = {"kind": kind_of(type(trainer.method))}
    try:
        method |= to_dict(trainer.method)
    except (TypeError, ValueError):  # a user's own method need not be a dataclass
        method["repr"] = repr(trainer.method)
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
    }


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Data, method, settings and model of a run in plain values."""
    asked = trainer.asked  # not as a plan has it: what is learnt does not depend on that
    method = {"kind": type(asked).__name__}
    try:
        method |= to_dict(asked)
    except (TypeError, ValueError):  # a user's own method need not be a dataclass
        method["repr"] = repr(asked)
    return {
        "data": trainer.data.name,
        "method": method,
        "train": to_dict(trainer.settings),
        "model": repr(trainer.model),
    }


def stored_settings(trainer: Trainer) -> dict[str, Any]:
    """What config.json keeps: all settings, and which of them were changed from their defaults."""
    if trainer.config is not None:
        return {"config": to_dict(trainer.config), "changed": changed_keys(trainer.config)}
    settings = settings_of(trainer)
    changed = ["data", "model", *(f"train.{key}" for key in changed_keys(trainer.settings))]
    if not isinstance(trainer.asked, Sampled) or "repr" in settings["method"]:
        changed.append("method.kind")
    of_method = ["repr"] if "repr" in settings["method"] else changed_keys(trainer.asked)
    return {"config": settings, "changed": [*changed, *(f"method.{key}" for key in of_method)]}


def fingerprints(model: nn.Module, data: Dataset) -> tuple[dict[str, str], str]:
    """(of the dataset, of the model), before training, in which a module may count something."""
    contents = {"cut": data.shard.cut} if isinstance(data, ShardedData) else contents_of(data)
    return contents, structure_of(model)
