"""Settings of a model that is built by name: plain data, so that reading them needs no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from hopline.util.config import Keywords, check_fields, nearest, settings

NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "graphconv", "pna", "transformer", "mlp", "gcnii", "appnp")
"""The names of models that `hopline.run.models.make_model` builds."""


@settings
class ModelSpec:
    """The settings of a model that `make_model`, or a function of the user, builds."""

    name: str = "sage"
    """Name of the model, such as sage, gcn, gat, gin, pna, gcnii, appnp or mlp. Your own function is
    package.module:function or file.py:function."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 3
    """Number of convs, or of propagation steps for appnp."""
    dropout: float = 0.5
    """Dropout probability after each hidden layer, or before the second linear layer of appnp."""
    input_dropout: float = 0.0
    """Dropout probability of the input features."""
    act: Literal["relu", "elu"] = "relu"
    """Activation after each hidden layer."""
    norm: Literal["none", "batch", "layer"] = "none"
    """Normalisation after each hidden conv."""
    residual: Literal["none", "after", "before"] = "none"
    """Residual connections between layers of equal width, added after or before the activation."""
    linear: bool = False
    """Linear layers before the convs and after them. Jumping knowledge then includes the output of the
    first one."""
    jk: Literal["none", "cat", "max", "lstm", "last"] = "none"
    """Jumping knowledge: how the outputs of all layers are joined."""
    out_heads: int = 1
    """Number of attention heads of the output layer, whose outputs are averaged."""
    conv: Keywords = field(default_factory=dict, hash=False)
    """Keyword arguments of PyG's conv, such as model.conv.aggr=max for SAGEConv. For GATConv,
    model.conv.heads=8 splits `hidden` among the heads."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name not in NAMES and ":" not in self.name:
            raise ValueError(
                f"there is no model {self.name!r}.{nearest(self.name, NAMES)} Choose one of {', '.join(NAMES)}"
            )
        for name in ("hidden", "layers", "out_heads"):
            number = getattr(self, name)
            if number < 1:
                raise ValueError(f"model.{name} must be at least 1, not {number}")
        for name in ("dropout", "input_dropout"):
            probability = getattr(self, name)
            if not 0 <= probability <= 1:
                raise ValueError(f"model.{name} must be between 0 and 1, not {probability}")
