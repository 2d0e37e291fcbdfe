"""Models by name, for the command line and the recipes. Library users build `GNN([...])` themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from hopline.data.dataset import Dataset
from hopline.nn.gnn import GNN
from hopline.nn.norms import make_norm
from hopline.run.model_settings import ModelSpec


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


def _attention(kind: Callable[..., nn.Module]) -> MakeConv:
    def make(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
        dropout = spec.attention_dropout
        if last:
            return kind(width_in, width_out, heads=spec.out_heads, concat=False, dropout=dropout)
        if width_out % spec.heads:
            raise ValueError(f"model.hidden={width_out} must be a multiple of model.heads={spec.heads}")
        return kind(width_in, width_out // spec.heads, heads=spec.heads, dropout=dropout)

    return make


def _gin(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    hidden = max(width_out, spec.hidden) if last else width_out
    return pyg.GINConv(nn.Sequential(nn.Linear(width_in, hidden), nn.ReLU(), nn.Linear(hidden, width_out)))


def _pna(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    degrees = torch.bincount(data.graph.in_degrees())
    return pyg.PNAConv(width_in, width_out, list(spec.aggregators), list(spec.scalers), deg=degrees)


CONVS: dict[str, MakeConv] = {
    "sage": lambda s, d, i, o, last: pyg.SAGEConv(i, o, aggr=s.aggr),
    "gcn": lambda s, d, i, o, last: pyg.GCNConv(i, o),
    "gat": _attention(pyg.GATConv),
    "gatv2": _attention(pyg.GATv2Conv),
    "gin": _gin,
    "graphconv": lambda s, d, i, o, last: pyg.GraphConv(i, o, aggr=s.aggr),
    "pna": _pna,
    "transformer": _attention(pyg.TransformerConv),
    "mlp": lambda s, d, i, o, last: Alone(i, o),
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
        "residual": spec.residual,
        "residual_first": spec.residual_first,
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
        pyg.GCN2Conv(spec.hidden, spec.alpha, spec.theta, layer=l + 1, shared_weights=spec.shared_weights)
        for l in range(spec.layers)
    ]
    encoder = nn.Linear(data.num_features, spec.hidden)
    jk = "last" if spec.jk == "none" else spec.jk
    return GNN(convs, jk=jk, encoder=encoder, head=_head(spec, data), **_options(spec))


def _appnp(spec: ModelSpec, data: Dataset) -> GNN:
    """Two linear layers, then steps that only propagate and mix in what these gave."""
    if spec.jk != "none" or spec.norm != "none" or spec.residual or not spec.alpha:
        raise ValueError("appnp has no hidden layers: leave out model.jk, norm and residual, and set alpha above 0")
    encoder = nn.Sequential(
        nn.Linear(data.num_features, spec.hidden),
        nn.ReLU() if spec.act == "relu" else nn.ELU(),
        nn.Dropout(spec.dropout),
        nn.Linear(spec.hidden, data.num_outputs),
    )
    steps = [pyg.APPNP(K=1, alpha=0.0) for _ in range(spec.layers)]  # the GNN mixes in the encoder's rows
    return GNN(steps, encoder=encoder, initial_residual=spec.alpha, input_dropout=spec.input_dropout, act=None)


def _own(spec: ModelSpec, data: Dataset) -> nn.Module:
    """`package.module:function`, called as function(spec, data)."""
    module_name, _, function_name = spec.name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model={spec.name} cannot be imported ({error}): write package.module:function") from error
    try:
        model = function(spec, data)
    except TypeError as error:
        raise ValueError(f"model={spec.name} cannot be called as function(spec, data): {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={spec.name} returned {type(model).__name__}: return a torch.nn.Module")
    return model
