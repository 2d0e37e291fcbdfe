"""What a run trains, on what and where, as its report shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
