"""Another `propagate` and `edge_updater` for PyG's convs, for as long as they run on a shard.

A conv's `forward` calls `self.propagate(edge_index, ...)` for everything that looks at edges. So it is
enough to set another `propagate` on the instance:

    forward of the conv (PyG's own)
      edge_updater(...)   returns its arguments unevaluated (`DeferredEdgeUpdate`)
      propagate(...)      "sequential": `sequential_aggregation.aggregate`, part by part
                          "stored", "one_shot": the conv's own code on all edges, once all rows are here
        update(...)       PyG's own

Attributes of an instance hide those of its class, so PyG's classes do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from hopline.shards.convs.edges import ConvEdges, gather_sources_together
from hopline.shards.convs.messages import CannotSplit, DeferredEdgeUpdate, Inputs, arguments_of, plan, run_call
from hopline.shards.convs.sequential_aggregation import aggregate, rows_per_edge
from hopline.shards.transports import FORWARD, Transport

FetchMode = Literal["sequential", "stored", "one_shot"]
"""The way a conv gets the source rows of other shards.

sequential: one shard at a time, fetched again in backward. stored: one shard at a time, rows and messages kept
for backward. one_shot: all shards in one all-to-all per layer and direction, rows and messages kept for
backward.
"""
HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)
"""Attributes of `MessagePassing` that hold hooks which PyG's `propagate` and `edge_updater` would call."""


@contextmanager
def patch_convs(
    module: nn.Module, edges: ConvEdges, transport: Transport, mode: FetchMode, depth: int, chunk_bytes: int
) -> Iterator[None]:
    """Make every conv in a module aggregate over the edges of a shard while the context lasts.

    Afterwards each conv has the attributes that it had, also after an error.

    Raises:
        CannotSplit: A conv has hooks on its messages, or sends them against the edges.
    """
    convs = [m for m in module.modules() if isinstance(m, MessagePassing)]
    # PyG itself sets `propagate` on some instances (`decomposed_layers`), so there may be one to restore.
    old_attributes = [{name: conv.__dict__.get(name) for name in ("propagate", "edge_updater")} for conv in convs]
    for conv in convs:
        _check_flow_and_hooks(conv)
        conv.__dict__["propagate"] = _make_propagate(conv, edges, transport, mode, depth, chunk_bytes)
        conv.__dict__["edge_updater"] = _defer_edge_update
    try:
        yield
    finally:
        for conv, attributes in zip(convs, old_attributes, strict=True):
            for name, value in attributes.items():
                conv.__dict__.pop(name, None)
                if value is not None:
                    conv.__dict__[name] = value


def _check_flow_and_hooks(conv: MessagePassing) -> None:
    """Refuse a conv that relies on code of PyG's `propagate` which does not run here."""
    if conv.flow != "source_to_target":
        raise CannotSplit("it sends messages from target to source: build it with the default flow")
    if conv.explain or any(getattr(conv, name) for name in HOOKS):
        raise CannotSplit("it has hooks on its messages, or explains them: remove them first")


def _defer_edge_update(edge_index: Any, size: Any = None, **kwargs: Any) -> DeferredEdgeUpdate:
    """`edge_updater` on a shard: `edge_update` runs later, for each chunk of edges."""
    return DeferredEdgeUpdate(kwargs)


def _make_propagate(
    conv: MessagePassing, edges: ConvEdges, transport: Transport, mode: FetchMode, depth: int, chunk_bytes: int
) -> Callable[..., Tensor]:
    """A function that does what `conv.propagate` does, over the edges of a shard."""

    def propagate(edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if mode == "sequential":
            out = aggregate(conv, kwargs, edges, transport, depth, chunk_bytes)
        else:
            rounds_ahead = None if mode == "one_shot" else depth
            out = _aggregate_at_once(conv, kwargs, edges, transport, rounds_ahead)
        return _update(conv, out, kwargs, edges)

    return propagate


def _aggregate_at_once(
    conv: MessagePassing, kwargs: Mapping[str, Any], edges: ConvEdges, transport: Transport, depth: int | None
) -> Tensor:
    """[num_dst, ...]: the conv's `message` and `aggregate` on all edges at once, recorded by autograd.

    depth: rounds of rows that are prefetched. None: all rows come in one all-to-all.
    """
    inputs = Inputs()  # `plan` enters the tensors
    message = plan(conv, "message", kwargs, inputs, edges.num_edges, edges.num_dst)
    aggregation = plan(conv, "aggregate", kwargs, inputs, edges.num_edges, edges.num_dst)
    chunk, order = edges.whole
    edge_inputs = rows_per_edge(
        {
            "source": gather_sources_together(inputs.source, transport, depth, FORWARD),
            "destination": inputs.destination,
            "edge": [t.index_select(0, order) for t in inputs.edge],
            "constant": inputs.constant,
        },
        chunk,
    )
    messages = run_call(conv, message, edge_inputs, chunk)
    arguments = arguments_of(aggregation, edge_inputs, chunk, lambda call: run_call(conv, call, edge_inputs, chunk))
    return conv.aggregate(messages, **arguments)


def _update(conv: MessagePassing, out: Tensor, kwargs: Mapping[str, Any], edges: ConvEdges) -> Tensor:
    """The result of the conv's `update` on the aggregated messages."""
    if type(conv).update is MessagePassing.update:  # it returns its input
        return out
    call = plan(conv, "update", kwargs, Inputs(), edges.num_edges, edges.num_dst)
    special_values = {"dim_size": edges.num_dst, "size_i": edges.num_dst, "ptr": None}
    if any(name not in special_values for name in call.special_args):
        raise CannotSplit("its update asks for the edges")
    return conv.update(out, **call.arguments, **{name: special_values[name] for name in call.special_args})
