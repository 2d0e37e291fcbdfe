"""Build models by name, for the command line and the recipes. Library users build `GNN([...])` themselves.

`make_model` builds a `GNN` from a `ModelSpec`. Most models are a list of PyG's convs, one per layer
(`CONVS`):

    input -> [linear] -> conv -> ... -> conv -> [jumping knowledge -> linear] -> scores

The parts in brackets come with model.linear=true or model.jk=. GCNII and APPNP always have linear layers. A
name with a colon is a function of the user.

Keyword arguments of a conv (model.conv.heads=8) are checked against the signature of PyG's class, so that a
misspelt one is refused with the names that exist.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from hopline.data.dataset import Dataset
from hopline.nn.gnn import GNN
from hopline.nn.norms import make_norm
from hopline.run.model_settings import ModelSpec
from hopline.util.config import check_value, nearest
from hopline.util.own_code import import_own


class Alone(nn.Module):
    """A "conv" that reads no neighbour. A GNN of these is an MLP, the baseline without a graph."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        return self.lin(x[1] if isinstance(x, tuple) else x)


MakeConv = Callable[[ModelSpec, Dataset, int, int, bool], nn.Module]
"""make(spec, data, width_in, width_out, is_output): a conv that maps rows of width_in to rows of width_out.

is_output: whether the conv's output is the scores.
"""
HEADS = 4
"""Attention heads of a hidden layer, unless model.conv.heads= is set."""
ALPHA = 0.1
"""Share of the initial residual in gcnii and appnp, unless model.conv.alpha= is set."""


def _make_conv(
    kind: type[nn.Module],
    spec: ModelSpec,
    *sizes: Any,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    **defaults: Any,
) -> nn.Module:
    """A conv with the keyword arguments of `spec.conv`, which override `defaults`.

    sizes: the conv's first positional arguments. The spec cannot name them.
    fixed: arguments that override the spec. Naming one in the spec is an error, unless it is in `defaults`
        too: then the caller uses the spec's value elsewhere, such as `heads` in the hidden layers.

    Raises:
        ValueError: The conv has no such keyword, or a value does not fit.
    """
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
    valid = [p.name for p in parameters[len(sizes) :] if p.name in defaults or p.name not in fixed]
    for name in spec.conv:
        if name not in valid:
            raise ValueError(
                f"Unknown key 'model.conv.{name}'.{nearest(name, valid)} "
                f"{kind.__name__} takes {', '.join(valid) or 'no keywords'}."
            )
    hints = typing.get_type_hints(kind.__init__)
    keywords = {name: _check_keyword(name, value, hints.get(name, Any)) for name, value in spec.conv.items()}
    try:
        return kind(*sizes, **(defaults | keywords | dict(fixed)))
    except Exception as error:
        typed = ", ".join(f"model.conv.{name}={value}" for name, value in keywords.items())
        raise ValueError(f"{kind.__name__} cannot be made with {typed or 'its defaults'}: {error}") from error


def _check_keyword(name: str, value: Any, hint: Any) -> Any:
    """A keyword argument after a check against its annotation in the conv's signature.

    PyG does not check: `bias="flase"` would count as true.
    """
    if typing.get_origin(hint) is list and isinstance(value, str):
        return [value]  # a list of one item is typed without a comma: model.conv.aggregators=mean
    key = f"model.conv.{name}"
    check_value(key, value, hint)
    if value == []:
        raise ValueError(f"{key} must name at least one")
    if name in ("dropout", "alpha") and not 0 <= value <= 1:
        raise ValueError(f"{key} must be between 0 and 1, not {value}")
    return value


def _plain_conv(kind: type[nn.Module], **defaults: Any) -> MakeConv:
    """A function that makes convs of a class whose constructor takes (width_in, width_out)."""

    def make(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, is_output: bool) -> nn.Module:
        return _make_conv(kind, spec, width_in, width_out, **defaults)

    return make


def _attention_conv(kind: type[nn.Module]) -> MakeConv:
    """A function that makes attention convs.

    In a hidden layer, the heads share the width: their outputs are concatenated. In the output layer, which
    has `spec.out_heads` heads, the outputs are averaged.
    """

    def make(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, is_output: bool) -> nn.Module:
        if is_output:
            fixed = {"heads": spec.out_heads, "concat": False}
            return _make_conv(kind, spec, width_in, width_out, heads=HEADS, fixed=fixed)
        heads = spec.conv.get("heads", HEADS)
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(f"model.conv.heads must be at least 1, not {heads}")
        if width_out % heads:
            raise ValueError(f"model.hidden={width_out} must be a multiple of model.conv.heads={heads}")
        return _make_conv(kind, spec, width_in, width_out // heads, heads=HEADS, fixed={"concat": True})

    return make


def _make_gin(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, is_output: bool) -> nn.Module:
    # In the output layer, width_out is the number of outputs. The MLP is not narrower than other layers.
    hidden = max(width_out, spec.hidden) if is_output else width_out
    mlp = nn.Sequential(nn.Linear(width_in, hidden), nn.ReLU(), nn.Linear(hidden, width_out))
    return _make_conv(pyg.GINConv, spec, mlp)


def _make_pna(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, is_output: bool) -> nn.Module:
    """A PNA conv, whose scalers need the histogram of in-degrees."""
    return _make_conv(
        pyg.PNAConv,
        spec,
        width_in,
        width_out,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        fixed={"deg": torch.bincount(data.graph.in_degrees())},
    )


CONVS: dict[str, MakeConv] = {
    "sage": _plain_conv(pyg.SAGEConv, aggr="mean"),
    "gcn": _plain_conv(pyg.GCNConv),
    "gat": _attention_conv(pyg.GATConv),
    "gatv2": _attention_conv(pyg.GATv2Conv),
    "gin": _make_gin,
    "graphconv": _plain_conv(pyg.GraphConv, aggr="mean"),
    "pna": _make_pna,
    "transformer": _attention_conv(pyg.TransformerConv),
    "mlp": _plain_conv(Alone),
}


def make_model(spec: ModelSpec, data: Dataset) -> nn.Module:
    """Build the model that a spec names, for the features and classes of a dataset.

    Raises:
        ValueError: The dataset has no labels, a setting does not fit the model, or the user's function
        fails.
    """
    if ":" in spec.name:
        return _make_own(spec, data)
    if not data.num_classes:
        raise ValueError(
            f"dataset {data.name!r} has no labels to train on: convert it with nodes=FILE that has a label column "
            "(columns.label=NAME if it is called otherwise)"
        )
    if spec.name == "gcnii":
        return _make_gcnii(spec, data)
    if spec.name == "appnp":
        return _make_appnp(spec, data)

    has_head = spec.jk != "none" or spec.linear
    widths = [
        spec.hidden if spec.linear else data.num_features,
        *[spec.hidden] * (spec.layers - 1),
        spec.hidden if has_head else data.num_outputs,
    ]
    make_conv = CONVS[spec.name]
    convs = []
    for l in range(spec.layers):
        is_output = l == spec.layers - 1 and not has_head
        convs.append(make_conv(spec, data, widths[l], widths[l + 1], is_output))
    if not has_head:
        return GNN(convs, **_layer_options(spec))
    jk = "last" if spec.jk == "none" else spec.jk
    encoder = _make_encoder(spec, data) if spec.linear else None
    head = _make_head(spec, data)
    return GNN(convs, jk=jk, jk_encoder=spec.linear, encoder=encoder, head=head, **_layer_options(spec))


def _layer_options(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of `GNN` that concern every layer."""
    return {
        "act": spec.act,
        "norm": None if spec.norm == "none" else spec.norm,
        "dropout": spec.dropout,
        "input_dropout": spec.input_dropout,
        "residual": spec.residual != "none",
        "residual_first": spec.residual == "before",
    }


def _make_encoder(spec: ModelSpec, data: Dataset) -> nn.Module:
    linear = nn.Linear(data.num_features, spec.hidden)
    if spec.norm == "none" or spec.jk in ("none", "last"):
        return linear
    # Jumping knowledge joins the encoder's output with those of the layers, which are normalised.
    return nn.Sequential(linear, make_norm(spec.norm, spec.hidden))


def _make_head(spec: ModelSpec, data: Dataset) -> nn.Linear:
    """The linear layer after the convs. With jk=cat, it reads the outputs of all layers side by side."""
    num_inputs = 1
    if spec.jk == "cat":
        # GCNII's encoder is no input of jumping knowledge.
        joins_encoder = spec.linear and spec.name != "gcnii"
        num_inputs = spec.layers + 1 if joins_encoder else spec.layers
    return nn.Linear(spec.hidden * num_inputs, data.num_outputs)


def _make_gcnii(spec: ModelSpec, data: Dataset) -> GNN:
    """GCNII: a linear layer, convs of one width with an initial residual, a linear layer."""
    # Layers are counted from 1. Their weights count less the deeper they are, by log(theta / layer + 1).
    convs = [
        _make_conv(pyg.GCN2Conv, spec, spec.hidden, alpha=ALPHA, theta=0.5, fixed={"layer": l + 1})
        for l in range(spec.layers)
    ]
    encoder = nn.Linear(data.num_features, spec.hidden)
    jk = "last" if spec.jk == "none" else spec.jk
    return GNN(convs, jk=jk, encoder=encoder, head=_make_head(spec, data), **_layer_options(spec))


def _make_appnp(spec: ModelSpec, data: Dataset) -> GNN:
    """APPNP: two linear layers, then steps without weights that propagate their output.

    A step computes h' = (1 - alpha) * propagate(h) + alpha * h0, where h0 is the output of the linear
    layers.
    """
    # A conv is PyG's APPNP with a single propagation (the 1). It would mix in its own input, which is h, not
    # h0. So it has alpha=0, and the GNN mixes in h0.
    steps = [_make_conv(pyg.APPNP, spec, 1, alpha=ALPHA, fixed={"alpha": 0.0}) for _ in range(spec.layers)]
    alpha = cast(float, spec.conv.get("alpha", ALPHA))
    needs_hidden_layers = spec.jk != "none" or spec.norm != "none" or spec.residual != "none"
    if needs_hidden_layers or not alpha:
        raise ValueError(
            "appnp has no hidden layers: leave out model.jk, model.norm and model.residual, and set "
            "model.conv.alpha above 0"
        )
    encoder = nn.Sequential(
        nn.Linear(data.num_features, spec.hidden),
        nn.ReLU() if spec.act == "relu" else nn.ELU(),
        nn.Dropout(spec.dropout),
        nn.Linear(spec.hidden, data.num_outputs),
    )
    return GNN(steps, encoder=encoder, initial_residual=alpha, input_dropout=spec.input_dropout, act=None)


def _make_own(spec: ModelSpec, data: Dataset) -> nn.Module:
    """The model that a function of the user returns. It is called as function(spec, data)."""
    function = import_own("model", spec.name)
    try:
        model = function(spec, data)
    except TypeError as error:
        raise ValueError(f"model={spec.name} cannot be called as function(spec, data): {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={spec.name} returned {type(model).__name__}: return a torch.nn.Module")
    return model
