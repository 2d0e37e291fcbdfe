"""Settings of a model that is built by name: plain data, so that reading them needs no torch."""

from __future__ import annotations

from typing import Literal

from hopline.util.config import check_fields, nearest, settings

NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "graphconv", "pna", "transformer", "mlp", "gcnii", "appnp")
"""Models that `hopline.run.models.make_model` builds by name."""
AGGREGATORS = ("mean", "sum", "min", "max", "std", "var")
SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


@settings
class ModelSpec:
    """A model by name."""

    name: str = "sage"
    """A model's name, such as sage, gcn, gat, gin, pna, gcnii, appnp or mlp, or package.module:function of your own."""
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
    residual: bool = False
    """Add a layer's input to its output where the widths are equal."""
    residual_first: bool = False
    """Add it before the activation, not after it."""
    linear: bool = False
    """A linear layer before the convs and one after them; jumping knowledge then begins with the first one's rows."""
    jk: Literal["none", "cat", "max", "lstm", "last"] = "none"
    """Jumping knowledge."""
    aggr: Literal["mean", "max", "sum"] = "mean"
    """Aggregation of sage and graphconv."""
    heads: int = 4
    """Attention heads of gat, gatv2 and transformer; `hidden` is their total width."""
    out_heads: int = 1
    """Attention heads of the output layer, which are averaged."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    alpha: float = 0.1
    """Strength of the initial residual of gcnii and appnp."""
    theta: float = 0.5
    """Strength of the identity mapping of gcnii."""
    shared_weights: bool = True
    """Whether gcnii has one weight for a node's neighbours and its initial row, or two."""
    aggregators: tuple[str, ...] = ("mean", "min", "max", "std")
    """Aggregators of pna."""
    scalers: tuple[str, ...] = ("identity", "amplification", "attenuation")
    """Degree scalers of pna."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name not in NAMES and ":" not in self.name:
            raise ValueError(
                f"there is no model {self.name!r}.{nearest(self.name, NAMES)} Choose one of {', '.join(NAMES)}"
            )
        for name in ("hidden", "layers", "heads", "out_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("dropout", "input_dropout", "attention_dropout", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"model.{name} must be between 0 and 1, not {getattr(self, name)}")
        for name, known in (("aggregators", AGGREGATORS), ("scalers", SCALERS)):
            given = getattr(self, name)
            if not given or not set(given) <= set(known):
                raise ValueError(f"model.{name} must be some of {', '.join(known)}, not {', '.join(given) or 'none'}")
