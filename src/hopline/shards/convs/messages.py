"""A conv's own `message`, `edge_update` and aggregation on a few edges, as often as they are needed.

Aggregations run as PyG wrote them, but what they reduce over the edges is recorded instead: sums, maxima and minima,
which can be put together from pieces. Afterwards they run once more, on the reductions of all edges. A softmax over a
node's edges becomes a weight e^(logit - m) with the largest logit so far, m, and a sum of these weights by which the
sums are divided in the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
import torch_geometric.utils as pyg_utils
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation

from hopline.shards.convs.edges import Chunk

Role = str
"""What an input is to an edge: "source", "destination", "edge" or "constant"."""
REDUCES = {"sum": "sum", "add": "sum", "mean": "sum", "max": "max", "min": "min"}
"""How PyG reduces -> what is put together from pieces."""
EPSILON = 1e-16
"""PyG adds it to the sum of a softmax."""


class CannotSplit(ValueError):
    """What a conv does over its edges cannot be put together from pieces."""


@dataclass(frozen=True, eq=False)
class ArgumentSource:
    """A tensor that an argument is taken from."""

    role: Role
    index: int
    """Its place among the inputs of that role."""


@dataclass(frozen=True, eq=False)
class Call:
    """A function of a conv, and where each of its arguments comes from."""

    function: str
    """"message", "edge_update", "aggregate" or "update"."""
    arguments: Mapping[str, Any]
    """By name: a `ArgumentSource`, another `Call`, or a value as it is."""
    special_args: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class DeferredEdgeUpdate:
    """What `edge_updater` was asked for, to be computed where its edges are."""

    kwargs: Mapping[str, Any]


@dataclass(eq=False)
class Inputs:
    """The tensors that messages are made of, each once."""

    source: list[Tensor] = field(default_factory=list)
    """[num_own, ...]: rows that other shards read too."""
    destination: list[Tensor] = field(default_factory=list)
    """[num_own, ...]: the destinations' rows."""
    edge: list[Tensor] = field(default_factory=list)
    """[num_edges, ...]"""
    constant: list[Tensor] = field(default_factory=list)
    """The same for every edge."""

    def add(self, role: Role, tensor: Tensor) -> ArgumentSource:
        tensors = getattr(self, role)
        for index, other in enumerate(tensors):
            if other is tensor:
                return ArgumentSource(role, index)
        tensors.append(tensor)
        return ArgumentSource(role, len(tensors) - 1)


def plan(
    conv: MessagePassing, function: str, kwargs: Mapping[str, Any], inputs: Inputs, num_edges: int, num_own: int
) -> Call:
    """How a function of the conv is called, given what `propagate` was; tensors are added to the inputs."""
    arguments: dict[str, Any] = {}
    special_args = []
    parameters = list(inspect.signature(getattr(conv, function)).parameters.items())
    takes_result = function in ("aggregate", "update")
    for name, parameter in parameters[1 if takes_result else 0 :]:
        if name in conv.special_args:
            special_args.append(name)
            continue
        suffix = name[-2:] if name[-2:] in ("_i", "_j") else ""
        base = name.removesuffix(suffix)
        if base not in kwargs:
            if parameter.default is inspect.Parameter.empty:
                raise CannotSplit(f"{function} asks for {name}, which propagate is not given")
            continue

        value = kwargs[base]
        if suffix and isinstance(value, tuple | list):
            value = value[1 if suffix == "_i" else 0]
        if isinstance(value, DeferredEdgeUpdate):
            value = plan(conv, "edge_update", value.kwargs, inputs, num_edges, num_own)
        elif isinstance(value, Tensor) and function != "update":
            if suffix and (value.size(0) != num_own or conv.node_dim % value.dim() != 0):
                raise CannotSplit(f"{name} has shape {list(value.shape)}, not one row for each of {num_own} nodes")
            value = inputs.add(_role(value, suffix, num_edges), value)
        arguments[name] = value
    return Call(function, arguments, tuple(special_args))


def _role(value: Tensor, suffix: str, num_edges: int) -> Role:
    if suffix:
        return "destination" if suffix == "_i" else "source"
    has_row_per_edge = value.dim() > 0 and value.size(0) == num_edges
    return "edge" if has_row_per_edge else "constant"


@dataclass(frozen=True, eq=False)
class Reduction:
    """Rows, one per edge, that are reduced over each destination's edges."""

    rows: Tensor
    how: str
    """"sum", "max" or "min"."""


@dataclass(eq=False)
class ChunkReductions:
    """What a conv reduces over a few edges."""

    reductions: list[Reduction] = field(default_factory=list)
    reduce_order: list[int] = field(default_factory=list)
    softmax_weights: Tensor | None = None


MaxLogit = Callable[[Tensor], Tensor]


def replay(
    conv: MessagePassing,
    call: Call,
    edge_inputs: Mapping[Role, Sequence[Tensor]],
    chunk: Chunk,
    degrees: Tensor,
    max_logit: MaxLogit,
) -> ChunkReductions:
    """Run a conv on a chunk. given: rows by role, one per edge of the chunk; degrees: of its destinations."""
    chunk_reductions = ChunkReductions()
    reductions = chunk_reductions.reductions

    def softmax(src: Tensor, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0) -> Tensor:
        if chunk_reductions.softmax_weights is not None:
            raise CannotSplit("it takes more than one softmax over the edges")
        if dim % src.dim() != 0:
            raise CannotSplit("it takes a softmax over something else than the edges of a node")
        weights = (src - max_logit(src.detach()).index_select(0, chunk.dst)).exp()
        chunk_reductions.softmax_weights = weights
        return weights

    def reduce(x: Tensor, index: Any, ptr: Any, dim_size: int, dim: int = -2, reduce: str = "sum") -> Tensor:
        how = REDUCES.get(reduce)
        if how is None:
            raise CannotSplit(f"it reduces by {reduce!r}")
        same = [i for i, reduction in enumerate(reductions) if reduction.rows is x and reduction.how == how]
        if not same:
            reductions.append(Reduction(x, how))
        chunk_reductions.reduce_order.append(same[0] if same else len(reductions) - 1)
        return x.new_zeros(chunk.num_dst, *x.shape[1:])

    messages = run_call(conv, call, edge_inputs, chunk, softmax)
    _aggregate(conv, messages, chunk.dst, degrees, reduce, softmax)
    if not reductions:
        raise CannotSplit(f"{aggregation_name(conv)} needs all edges of a node at once")
    has_extremes = any(reduction.how != "sum" for reduction in reductions)
    if chunk_reductions.softmax_weights is not None and has_extremes:
        raise CannotSplit("it takes maxima or minima of messages weighted by a softmax")
    return chunk_reductions


def finish(
    conv: MessagePassing,
    reduce_order: Sequence[int],
    reduced: Sequence[Tensor],
    weight_sum: Tensor | None,
    degrees: Tensor,
) -> Tensor:
    """The aggregation's output, from the reductions over all edges. calls: as found by `replay`."""
    next_reduction = iter(reduce_order)

    def reduce(x: Tensor, index: Any, ptr: Any, dim_size: int, dim: int = -2, reduce: str = "sum") -> Tensor:
        out = reduced[next(next_reduction)]
        if weight_sum is not None:
            total = torch.where(weight_sum == 0, 1, weight_sum + EPSILON)
            out = out / unsqueeze_like(total, out)
        if reduce == "mean":
            out = out / unsqueeze_like(degrees.clamp(min=1).to(out.dtype), out)
        return out

    first_reduced = reduced[reduce_order[0]]
    no_messages = first_reduced.new_zeros(0, *first_reduced.shape[1:])
    no_index = torch.zeros(0, dtype=torch.int64, device=no_messages.device)
    return _aggregate(conv, no_messages, no_index, degrees, reduce, lambda src, *_, **__: src)


def unsqueeze_like(per_node: Tensor, rows: Tensor) -> Tensor:
    """With ones behind its own dimensions, as many as `rows` has."""
    return per_node.reshape(per_node.shape + (1,) * (rows.dim() - per_node.dim()))


def aggregation_name(conv: MessagePassing) -> str:
    has_own_aggregate = type(conv).aggregate is not MessagePassing.aggregate or conv.aggr_module is None
    return f"the aggregate of {type(conv).__name__}" if has_own_aggregate else type(conv.aggr_module).__name__


def arguments_of(
    call: Call, edge_inputs: Mapping[Role, Sequence[Tensor]], chunk: Chunk, run_inner: Callable[[Call], Any]
) -> dict[str, Any]:
    """A call's arguments on a chunk. inner: runs a call that an argument is the result of."""
    src = chunk.src
    dst = chunk.dst
    special_values = {
        "edge_index": torch.stack([src, dst]) if "edge_index" in call.special_args else None,
        "edge_index_i": dst,
        "edge_index_j": src,
        "index": dst,
        "ptr": None,
        "adj_t": None,
        "size_i": chunk.num_dst,
        "dim_size": chunk.num_dst,
    }
    arguments: dict[str, Any] = {}
    for name in call.special_args:
        if name not in special_values:
            raise CannotSplit(f"{call.function} asks for {name}, the number of all sources")
        arguments[name] = special_values[name]
    for name, value in call.arguments.items():
        if isinstance(value, ArgumentSource):
            value = edge_inputs[value.role][value.index]
        arguments[name] = run_inner(value) if isinstance(value, Call) else value
    return arguments


def run_call(
    conv: MessagePassing,
    call: Call,
    edge_inputs: Mapping[Role, Sequence[Tensor]],
    chunk: Chunk,
    softmax: Callable[..., Tensor] = pyg_utils.softmax,
) -> Any:
    """A function of the conv on a chunk's edges."""

    def run_inner(inner: Call) -> Any:
        return run_call(conv, inner, edge_inputs, chunk, softmax)

    function = _with_globals(getattr(conv, call.function), softmax=softmax)
    return function(**arguments_of(call, edge_inputs, chunk, run_inner))


def _aggregate(
    conv: MessagePassing,
    messages: Tensor,
    index: Tensor,
    degrees: Tensor,
    reduce: Callable[..., Tensor],
    softmax: Callable[..., Tensor],
) -> Tensor:
    """The conv's aggregation, with other functions in place of those that look at the edges."""
    if type(conv).aggregate is not MessagePassing.aggregate or conv.aggr_module is None:
        raise CannotSplit(f"{aggregation_name(conv)} needs all edges of a node at once")

    def degree(index: Tensor, num_nodes: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return degrees.to(dtype or torch.float32)

    with _replace_functions(conv.aggr_module, reduce, softmax=softmax, degree=degree):
        return conv.aggr_module(messages, index, ptr=None, dim_size=degrees.numel(), dim=conv.node_dim)


@contextmanager
def _replace_functions(module: Aggregation, reduce: Callable[..., Tensor], **functions: Any) -> Generator[None]:
    """Within, a module's aggregations call these functions; nothing is left behind on it."""
    aggregations = [m for m in module.modules() if isinstance(m, Aggregation)]
    for aggregation in aggregations:
        is_multi = isinstance(aggregation, MultiAggregation)
        forward = MethodType(_run_each_alone, aggregation) if is_multi else aggregation.forward
        aggregation.__dict__.update(reduce=reduce, forward=_with_globals(forward, **functions))
    try:
        yield
    finally:
        for aggregation in aggregations:
            del aggregation.__dict__["reduce"], aggregation.__dict__["forward"]


def _run_each_alone(
    self: MultiAggregation, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """Several aggregations without PyG's fused one, which does not call `reduce`."""
    return self.combine([aggregation(x, index, ptr, dim_size, dim) for aggregation in self.aggrs])


def _with_globals(method: Any, **functions: Any) -> Any:
    """The method, calling these instead of PyG's functions of the same names. PyG itself is not touched."""
    function = method.__func__
    replacements = {
        name: replacement
        for name, replacement in functions.items()
        if function.__globals__.get(name) is getattr(pyg_utils, name)
    }
    if not replacements.keys() & set(function.__code__.co_names):
        return method
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copied, method.__self__)
