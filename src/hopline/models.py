"""Models by name, for the command line and the recipes. Library users build `GNN([...])` themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from hopline.data.dataset import Dataset
from hopline.nn.gnn import GNN
from hopline.spec import nearest
from hopline.validate import check_fields


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model by name."""

    name: str = "sage"
    """sage, gcn, gat, gatv2, gin, graphconv, pna, transformer, gcnii, mlp, or package.module:function of your own."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 3
    """Number of convs."""
    dropout: float = 0.5
    """Dropout after each hidden layer."""
    input_dropout: float = 0.0
    """Dropout on the input features."""
    norm: Literal["none", "batch", "layer"] = "none"
    """Normalisation after each hidden conv."""
    residual: bool = False
    """Add a layer's input to its output where the widths are equal."""
    jk: Literal["none", "cat", "max", "lstm", "last"] = "none"
    """Jumping knowledge."""
    aggr: Literal["mean", "max", "sum"] = "mean"
    """Aggregation of sage and graphconv."""
    heads: int = 4
    """Attention heads of gat, gatv2 and transformer; `hidden` is their total width."""
    alpha: float = 0.1
    """Strength of the initial residual of gcnii."""
    theta: float = 0.5
    """Strength of the identity mapping of gcnii."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden < 1 or self.layers < 1 or self.heads < 1:
            raise ValueError("model.hidden, model.layers and model.heads must be at least 1")
        for name in ("dropout", "input_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"model.{name} must be between 0 and 1, not {getattr(self, name)}")


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
        if last:
            return kind(width_in, width_out, heads=1)
        if width_out % spec.heads:
            raise ValueError(f"model.hidden={width_out} must be a multiple of model.heads={spec.heads}")
        return kind(width_in, width_out // spec.heads, heads=spec.heads)

    return make


def _gin(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    hidden = max(width_out, spec.hidden) if last else width_out
    return pyg.GINConv(nn.Sequential(nn.Linear(width_in, hidden), nn.ReLU(), nn.Linear(hidden, width_out)))


def _pna(spec: ModelSpec, data: Dataset, width_in: int, width_out: int, last: bool) -> nn.Module:
    degrees = torch.bincount(data.graph.in_degrees())
    return pyg.PNAConv(
        width_in,
        width_out,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=degrees,
    )


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
NAMES = (*CONVS, "gcnii")


def make_model(spec: ModelSpec, data: Dataset) -> nn.Module:
    """The model that a spec names, sized for a dataset."""
    if ":" in spec.name:
        return _own(spec, data)
    if not data.num_classes:
        raise ValueError(
            f"dataset {data.name!r} has no labels to train on: convert it with nodes=FILE that has a label column"
        )
    if spec.name == "gcnii":
        return _gcnii(spec, data)
    if spec.name not in CONVS:
        raise ValueError(
            f"there is no model {spec.name!r}.{nearest(spec.name, NAMES)} Choose one of {', '.join(NAMES)}"
        )
    jumping = spec.jk != "none"
    widths = [
        data.num_features,
        *[spec.hidden] * (spec.layers - 1),
        spec.hidden if jumping else data.num_outputs,
    ]
    convs = [
        CONVS[spec.name](spec, data, widths[l], widths[l + 1], l == spec.layers - 1 and not jumping)
        for l in range(spec.layers)
    ]
    if not jumping:
        return GNN(convs, **_options(spec))
    return GNN(convs, jk=spec.jk, head=_head(spec, data), **_options(spec))


def _options(spec: ModelSpec) -> dict[str, Any]:
    return {
        "norm": None if spec.norm == "none" else spec.norm,
        "dropout": spec.dropout,
        "input_dropout": spec.input_dropout,
        "residual": spec.residual,
    }


def _head(spec: ModelSpec, data: Dataset) -> nn.Linear:
    return nn.Linear(spec.hidden * (spec.layers if spec.jk == "cat" else 1), data.num_outputs)


def _gcnii(spec: ModelSpec, data: Dataset) -> GNN:
    convs = [
        pyg.GCN2Conv(spec.hidden, alpha=spec.alpha, theta=spec.theta, layer=l + 1, shared_weights=True)
        for l in range(spec.layers)
    ]
    encoder = nn.Linear(data.num_features, spec.hidden)
    jk = "last" if spec.jk == "none" else spec.jk
    return GNN(convs, jk=jk, encoder=encoder, head=_head(spec, data), **_options(spec))


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
