"""Settings of a model that is built by name: plain data, so that reading them needs no torch."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

from hopline.util.config import Keywords, RemovedSetting, check_fields, nearest, settings

NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "graphconv", "pna", "transformer", "mlp", "gcnii", "appnp")
"""Models that `hopline.run.models.make_model` builds by name."""


@settings
class ModelSpec:
    """A model by name."""

    REMOVED: ClassVar = {
        "residual_first": RemovedSetting(False, "set model.residual=before"),
        "aggr": RemovedSetting("mean", "set model.conv.aggr="),
        "heads": RemovedSetting(4, "set model.conv.heads="),
        "attention_dropout": RemovedSetting(0.0, "set model.conv.dropout="),
        "alpha": RemovedSetting(0.1, "set model.conv.alpha="),
        "theta": RemovedSetting(0.5, "set model.conv.theta="),
        "shared_weights": RemovedSetting(True, "set model.conv.shared_weights="),
        "aggregators": RemovedSetting(["mean", "min", "max", "std"], "set model.conv.aggregators="),
        "scalers": RemovedSetting(["identity", "amplification", "attenuation"], "set model.conv.scalers="),
    }
    name: str = "sage"
    """A model's name, such as sage, gcn, gat, gin, pna, gcnii, appnp or mlp; or of your own,
    package.module:function or file.py:function."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 3
    """Number of convs; of appnp, steps of propagation."""
    dropout: float = 0.5
    """Dropout after each hidden layer; of appnp, before the second linear layer."""
    input_dropout: float = 0.0
    """Dropout on the input features."""
    act: Literal["relu", "elu"] = "relu"
    """Activation after each hidden layer."""
    norm: Literal["none", "batch", "layer"] = "none"
    """Normalisation after each hidden conv."""
    residual: Literal["none", "after", "before"] = "none"
    """Add a layer's input to its output where the widths are equal: after or before the activation."""
    linear: bool = False
    """A linear layer before the convs and one after them; jumping knowledge then begins with the first one's rows."""
    jk: Literal["none", "cat", "max", "lstm", "last"] = "none"
    """Jumping knowledge."""
    out_heads: int = 1
    """Attention heads of the output layer, which are averaged."""
    conv: Keywords = field(default_factory=dict, hash=False)
    """Keyword arguments of PyG's conv, such as model.conv.aggr=max of SAGEConv, or model.conv.heads=8 and
    model.conv.dropout=0.6 of GATConv, whose heads share `hidden`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name not in NAMES and ":" not in self.name:
            raise ValueError(
                f"there is no model {self.name!r}.{nearest(self.name, NAMES)} Choose one of {', '.join(NAMES)}"
            )
        for name in ("hidden", "layers", "out_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("dropout", "input_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"model.{name} must be between 0 and 1, not {getattr(self, name)}")
