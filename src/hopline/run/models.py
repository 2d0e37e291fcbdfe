"""Models by name, for the command line and the recipes. Library users build `GNN([...])` themselves."""

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
    """A "conv" that looks at no neighbour: a GNN of these is an MLP, the baseline that a graph has to beat."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        return self.lin(x[1] if isinstance(x, tuple) else x)


MakeConv = Callable[[ModelSpec, Dataset, int, int, bool], nn.Module]
"""(spec, data, in width, out width, whether it is the output layer) -> conv."""
HEADS = 4
"""Attention heads of a hidden layer, unless model.conv.heads= says another number."""
ALPHA = 0.1
"""Strength of the initial residual of gcnii and appnp, unless model.conv.alpha= says another one."""


def _make(
    kind: type[nn.Module],
    spec: ModelSpec,
    *sizes: Any,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    **defaults: Any,
) -> nn.Module:
    """A conv with the keyword arguments of `spec.conv`.

    sizes: the conv's first arguments, which the spec cannot name. fixed: arguments that no keyword of the spec changes;
    it may name those that are in `defaults` too.
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
    given = {name: _keyword(name, value, hints.get(name, Any)) for name, value in spec.conv.items()}
    try:
        return kind(*sizes, **(defaults | given | dict(fixed)))
    except Exception as error:
        typed = ", ".join(f"model.conv.{name}={value}" for name, value in given.items())
        raise ValueError(f"{kind.__name__} cannot be made with {typed or 'its defaults'}: {error}") from error


def _keyword(name: str, value: Any, hint: Any) -> Any:
    """A keyword argument, checked by the annotation in the conv's signature: `bias="flase"` would count as true."""
    if typing.get_origin(hint) is list and isinstance(value, str):
        return [value]  # model.conv.aggregators=mean: a list of one is typed without a comma
    key = f"model.conv.{name}"
    check_value(key, value, hint)
    if value == []:
        raise ValueError(f"{key} must name at least one")
    if name in ("dropout", "alpha") and not 0 <= value <= 1:
        raise ValueError(f"{key} must be between 0 and 1, not {value}")
    return value


def _attention(kind: type[nn.Module]) -> MakeConv:
    def make(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
        if last:
            fixed = {"heads": spec.out_heads, "concat": False}
            return _make(kind, spec, width_in, width_out, heads=HEADS, fixed=fixed)
        heads = spec.conv.get("heads", HEADS)
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(f"model.conv.heads must be at least 1, not {heads}")
        if width_out % heads:
            raise ValueError(f"model.hidden={width_out} must be a multiple of model.conv.heads={heads}")
        return _make(kind, spec, width_in, width_out // heads, heads=HEADS, fixed={"concat": True})

    return make


def _gin(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    hidden = max(width_out, spec.hidden) if last else width_out
    return _make(pyg.GINConv, spec, nn.Sequential(nn.Linear(width_in, hidden), nn.ReLU(), nn.Linear(hidden, width_out)))


def _pna(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    return _make(
        pyg.PNAConv,
        spec,
        width_in,
        width_out,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        fixed={"deg": torch.bincount(data.graph.in_degrees())},
    )


CONVS: dict[str, MakeConv] = {
    "sage": lambda s, d, i, o, last: _make(pyg.SAGEConv, s, i, o, aggr="mean"),
    "gcn": lambda s, d, i, o, last: _make(pyg.GCNConv, s, i, o),
    "gat": _attention(pyg.GATConv),
    "gatv2": _attention(pyg.GATv2Conv),
    "gin": _gin,
    "graphconv": lambda s, d, i, o, last: _make(pyg.GraphConv, s, i, o, aggr="mean"),
    "pna": _pna,
    "transformer": _attention(pyg.TransformerConv),
    "mlp": lambda s, d, i, o, last: _make(Alone, s, i, o),
}


def make_model(spec: ModelSpec, data: Dataset) -> nn.Module:
    """The model that a spec names, sized for a dataset."""
    if ":" in spec.name:
        return _own(spec, data)
    if not data.num_classes:
        raise ValueError(
            f"dataset {data.name!r} has no labels to train on: convert it with nodes=FILE that has a label column "
            "(columns.label=NAME if it is called otherwise)"
        )
    if spec.name == "gcnii":
        return _gcnii(spec, data)
    if spec.name == "appnp":
        return _appnp(spec, data)
    headed = spec.jk != "none" or spec.linear
    widths = [
        spec.hidden if spec.linear else data.num_features,
        *[spec.hidden] * (spec.layers - 1),
        spec.hidden if headed else data.num_outputs,
    ]
    convs = [
        CONVS[spec.name](spec, data, widths[l], widths[l + 1], l == spec.layers - 1 and not headed)
        for l in range(spec.layers)
    ]
    if not headed:
        return GNN(convs, **_options(spec))
    jk = "last" if spec.jk == "none" else spec.jk
    encoder = _encoder(spec, data) if spec.linear else None
    return GNN(convs, jk=jk, jk_encoder=spec.linear, encoder=encoder, head=_head(spec, data), **_options(spec))


def _options(spec: ModelSpec) -> dict[str, Any]:
    return {
        "act": spec.act,
        "norm": None if spec.norm == "none" else spec.norm,
        "dropout": spec.dropout,
        "input_dropout": spec.input_dropout,
        "residual": spec.residual != "none",
        "residual_first": spec.residual == "before",
    }


def _encoder(spec: ModelSpec, data: Dataset) -> nn.Module:
    linear = nn.Linear(data.num_features, spec.hidden)
    if spec.norm == "none" or spec.jk in ("none", "last"):
        return linear
    return nn.Sequential(linear, make_norm(spec.norm, spec.hidden))  # its rows are put beside those of the layers


def _head(spec: ModelSpec, data: Dataset) -> nn.Linear:
    parts = spec.layers + (spec.linear and spec.name != "gcnii") if spec.jk == "cat" else 1
    return nn.Linear(spec.hidden * parts, data.num_outputs)


def _gcnii(spec: ModelSpec, data: Dataset) -> GNN:
    convs = [
        _make(pyg.GCN2Conv, spec, spec.hidden, alpha=ALPHA, theta=0.5, fixed={"layer": l + 1})
        for l in range(spec.layers)
    ]
    encoder = nn.Linear(data.num_features, spec.hidden)
    jk = "last" if spec.jk == "none" else spec.jk
    return GNN(convs, jk=jk, encoder=encoder, head=_head(spec, data), **_options(spec))


def _appnp(spec: ModelSpec, data: Dataset) -> GNN:
    """Two linear layers, then steps that only propagate and mix in what these gave."""
    # The GNN mixes in the encoder's rows, so that each conv has alpha=0: it sees only the rows of one step before.
    steps = [_make(pyg.APPNP, spec, 1, alpha=ALPHA, fixed={"alpha": 0.0}) for _ in range(spec.layers)]
    alpha = cast(float, spec.conv.get("alpha", ALPHA))
    if spec.jk != "none" or spec.norm != "none" or spec.residual != "none" or not alpha:
        raise ValueError(
            "appnp has no hidden layers: leave out model.jk, norm and residual, and set model.conv.alpha above 0"
        )
    encoder = nn.Sequential(
        nn.Linear(data.num_features, spec.hidden),
        nn.ReLU() if spec.act == "relu" else nn.ELU(),
        nn.Dropout(spec.dropout),
        nn.Linear(spec.hidden, data.num_outputs),
    )
    return GNN(steps, encoder=encoder, initial_residual=alpha, input_dropout=spec.input_dropout, act=None)


def _own(spec: ModelSpec, data: Dataset) -> nn.Module:
    """`package.module:function` or `file.py:function`, called as function(spec, data)."""
    function = import_own("model", spec.name)
    try:
        model = function(spec, data)
    except TypeError as error:
        raise ValueError(f"model={spec.name} cannot be called as function(spec, data): {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={spec.name} returned {type(model).__name__}: return a torch.nn.Module")
    return model
