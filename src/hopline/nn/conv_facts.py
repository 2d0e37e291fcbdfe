"""What hopline asks of a conv whenever it runs. It is found out once, and again when the conv has changed.

Whether a conv is fused, which of its products may be merged, in which way it is called: all this follows from its
type, settings and hooks. Training code may change these at any time, for example a callback between two steps. So
`facts_of` compares `_settings` at every call, and finds the facts anew where they differ. A change therefore holds from
the next call on. Facts are stored by object and with weak keys, so copies and pickles of a model have none.

What lies deeper than the modules right below a conv is not compared. Only a trial may depend on it, for example on a
norm within GINConv's MLP, and is not repeated if that changes.

A subclass of a fused conv may have changed the message, so all types here are exact.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import APPNP, GATConv, GATv2Conv, GCN2Conv, GCNConv, GINConv, GraphConv, Linear, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from hopline.nn.probe import PLAIN_TYPES, findings

Convention = Literal["fused", "block", "pair", "square"]
"""A way to call a conv; `conv_adapter` explains the four."""
Layout = Literal["block", "tree", "padded tree", "two tables"]
"""The kind of edges that a conv is given.

In a tree every possible draw has a slot, so every edge has a source of its own. In a padded tree, used on a GPU, there
is an edge out of every slot, empty ones included. Between two tables the destinations are not among the sources.
"""

REDUCE = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}
"""PyG's aggregation modules that are fused -> their name in the kernels."""
PLAIN = (SAGEConv, GINConv, GraphConv)
"""Convs that send rows (GraphConv: times an edge weight) and take a pair of source and destination rows."""
LINEARS: dict[type, tuple[str, ...]] = {
    SAGEConv: ("lin_l", "lin_r"),
    GraphConv: ("lin_rel", "lin_root"),
    GCNConv: ("lin",),
}
"""Convs with linear layers -> (layer of the reduced rows, layer of the own rows), or GCNConv's only layer."""
NORMALISED = (GCNConv, GCN2Conv, APPNP)
"""Convs that send rows times the symmetric degree norm, with self-loops."""
MAX_CHANNELS = 512
"""Most columns of an attention head that is fused. A program of the kernel holds all columns of one head."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Endings of the attributes that hold a module's hooks, those of PyG included (such as `_message_forward_hooks`)."""
DATA_ARGUMENTS = ("edge_weight", "edge_attr", "edge_type")
"""What a forward(data) may read of its data, besides x and edge_index."""
METHODS = ("forward", "propagate", "message", "aggregate", "update", "message_and_aggregate", "edge_update")
"""Methods of a conv that a user may replace in one object, as by `conv.message = ...`."""


@dataclass(frozen=True)
class CallingConvention:
    """The way in which one conv is called on blocks of one layout."""

    convention: Convention
    """The function that is called, and the form of its arguments."""
    without_loops: bool = False
    """Whether the adapter leaves out edges from a node to itself. For convs that drop or replace
    self-loops: in a tree a node and its copy in a child slot have different local ids, so the conv sees no
    loop."""
    with_edges: bool = False
    """Whether the adapter adds a destination with two edges before all others, and drops its output. For
    aggregations that fail on a block without edges. Quantiles also fail if the first node has no edges, and
    may fail on a block with a single edge."""
    by_order: bool = False
    """Whether the conv's output depends on the order of a node's in-edges."""
    has_cache: bool = False
    """Whether the conv was built with cached=True."""
    padded: bool = False
    """Whether the conv is given the edges out of a tree's empty slots. They lead to a row behind the
    destinations, whose output is dropped."""


@dataclass(frozen=True, eq=False)
class ConvFacts:
    """The facts about one conv with its present settings. Any thread may read them."""

    is_fused: bool
    """Whether `fused.run_fused` may run the conv."""
    is_fused_attention: bool
    """Whether `attention.attention` may run the conv, on a GPU."""
    reads_blocks: bool
    """Whether the conv's own `on_block(rows, block)` runs in place of `forward`."""
    reads_rows: bool
    """Whether the conv aggregates its input rows as they are, so that its kernel can read a table."""
    takes_x0: bool
    """Whether the conv takes the initial rows as an argument, as GCN2Conv does."""
    linears: tuple[str, ...] | None
    """Its `LINEARS`, if hopline may run them in its own order: two as one product, GCNConv's after the aggregation."""
    ways: dict[tuple[Layout, frozenset[str]], CallingConvention] = field(default_factory=dict)
    """How the conv is called, by layout and names of edge arrays: what trials have found so far."""


def facts_of(conv: nn.Module) -> ConvFacts:
    """The facts about a conv as it is now."""
    settings = _settings(conv)
    facts = findings.get(conv, "facts", settings)
    if facts is None:
        facts = ConvFacts(
            is_fused=is_fused(conv),
            is_fused_attention=is_fused_attention(conv),
            reads_blocks=callable(getattr(conv, "on_block", None)) and not has_hooks(conv),
            reads_rows=reads_rows(conv),
            takes_x0=takes_x0(conv),
            linears=_free_linears(conv),
        )
        findings.put(conv, "facts", settings, facts)
    return facts


def _settings(conv: nn.Module) -> list[Any]:
    """What the facts about a conv follow from: its type, names and plain values of its attributes, how many hooks it
    has, and the modules right below it. `training` is left out, since no fact depends on it.

    One flat loop, because every layer of every step runs it.
    """
    attributes = vars(conv)
    settings: list[Any] = [type(conv), *attributes]
    for name, value in attributes.items():
        kind = type(value)
        if kind is OrderedDict:  # of hooks
            settings.append(len(value))
        elif kind in PLAIN_TYPES and name != "training":
            settings.append(value)
    for name, child in conv._modules.items():
        settings += (name, type(child))
        if child is not None:
            settings += (len(child._forward_hooks), len(child._forward_pre_hooks), "forward" in vars(child))
            settings += (len(child._backward_hooks), len(child._backward_pre_hooks))
            settings.append(child._parameters.get("bias") is None)
    return settings


def is_fused(conv: Any) -> bool:
    """Whether `fused.run_fused` may run the conv."""
    if type(conv) not in (*PLAIN, *NORMALISED):
        return False
    # With K > 1 APPNP takes several hops in one layer, and its dropout is on the edge weights.
    if isinstance(conv, APPNP) and (conv.K != 1 or conv.dropout):
        return False
    reductions = REDUCE if type(conv) in PLAIN else (SumAggregation,)
    return not is_changed(conv) and type(conv.aggr_module) in reductions and conv.flow == "source_to_target"


def is_fused_attention(conv: Any) -> bool:
    """Whether `attention.attention` may run the conv."""
    if type(conv) not in (GATConv, GATv2Conv):
        return False
    if conv.edge_dim is not None or conv.out_channels > MAX_CHANNELS or conv.flow != "source_to_target":
        return False
    return not is_changed(conv) and type(conv.aggr_module) is SumAggregation


def is_changed(conv: Any) -> bool:
    """Whether PyG's own code must run, since a user looks into the conv or has replaced a method of this one object."""
    return conv.explain or has_hooks(conv) or not vars(conv).keys().isdisjoint(METHODS)


def has_hooks(module: Any) -> bool:
    """Whether a module has hooks of torch or PyG. They see what its own `forward` computes, so that must run."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith(HOOKS))


def reads_rows(conv: Any) -> bool:
    """Whether the conv aggregates its input rows as they are, so that its kernel can read a table."""
    return type(conv) in PLAIN and not getattr(conv, "project", False) and is_fused(conv)


def is_linear(module: Any) -> bool:
    """Whether `fused.project` may run the module. Exact types only, with widths known and `forward` not patched."""
    return type(module) in (nn.Linear, Linear) and "forward" not in vars(module) and not is_lazy(module.weight)


def _free_linears(conv: Any) -> tuple[str, ...] | None:
    """`ConvFacts.linears`.

    None with a projection before the aggregation, no root weight, a layer that is not a plain Linear or has hooks, or
    a bias that would have to be added before the aggregation.
    """
    names = LINEARS.get(type(conv))
    if names is None or getattr(conv, "project", False) or not getattr(conv, "root_weight", True):
        return None
    linears = [getattr(conv, name) for name in names]
    are_plain = all(is_linear(linear) and not has_hooks(linear) for linear in linears)
    return names if are_plain and linears[-1].bias is None else None


def takes_x0(conv: nn.Module) -> bool:
    """Whether the conv takes the initial rows as an argument, as GCN2Conv does."""
    return "x_0" in arguments_of(type(conv))


@functools.cache
def arguments_of(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the arguments of a class's `forward`. A forward(data) may read all edge arrays of its data."""
    names = list(inspect.signature(kind.forward).parameters)
    return frozenset([*names, *DATA_ARGUMENTS] if names[1:] == ["data"] else names)
