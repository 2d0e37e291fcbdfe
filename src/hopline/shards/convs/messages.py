"""A conv's own `message`, `edge_update` and aggregation, run on one chunk of its edges at a time.

PyG's `propagate` calls `message` and `aggregate` once, for all edges, and then `update`. Here `message` and
`aggregate` run in three steps, and `update` is left to the caller:

    plan      finds which tensor each argument of `message` comes from        once per `propagate`
    replay    runs `message` on the edges of a chunk, and returns the rows    per chunk, in forward
              that the aggregation reduces over them                          and in backward
    finish    computes the aggregation's output, from the reductions over     once per `propagate`
              all edges

In `replay` and in `finish` the aggregation is PyG's code, with another `reduce`. In `replay`, `reduce`
notes down its rows and returns zeros. In `finish`, the n-th call of `reduce` returns what was accumulated
from the rows of the n-th call in `replay`. So var, for example, notes down x and x * x, and `finish` computes
mean(x * x) - mean(x)^2 by PyG's own formula. This works for sums, means, maxima and minima, which the module
`accumulate` combines chunk by chunk. Others raise `CannotSplit`.

A softmax over the edges of a node divides by a sum over all of them, which one chunk does not know. In
`replay` it returns the weight exp(logit - m), not divided. m is the largest logit of the node's edges so
far (`MaxLogit`), which keeps exp from overflowing. `finish` divides the sums of weighted messages by
the sum of the weights. That is the same if messages are linear in the weights. The probe in
`runner.find_rule` refuses convs where they are not.
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
"""The relation of an input to an edge: "source", "destination", "edge" or "constant"."""
REDUCES = {"sum": "sum", "add": "sum", "mean": "sum", "max": "max", "min": "min"}
"""By PyG's name of a reduction: the one that is accumulated. `finish` divides a mean by the degree."""
EPSILON = 1e-16
"""PyG's `softmax` adds this number to its denominator."""


class CannotSplit(ValueError):
    """A conv does something over its edges that cannot be accumulated chunk by chunk."""


@dataclass(frozen=True, eq=False)
class ArgumentSource:
    """The input tensor that an argument of a conv's function is read from."""

    role: Role
    """The list of `Inputs` that holds the tensor."""
    index: int


@dataclass(frozen=True, eq=False)
class Call:
    """A function of a conv, and where each of its arguments comes from."""

    function: str
    """"message", "edge_update", "aggregate" or "update"."""
    arguments: Mapping[str, Any]
    """By argument name: an `ArgumentSource`, another `Call` whose result it is, or the value itself."""
    special_args: tuple[str, ...]
    """Names of arguments that PyG derives from the edges: "index", "ptr", "dim_size", ..."""


@dataclass(frozen=True, eq=False)
class DeferredEdgeUpdate:
    """The arguments of a call of `edge_updater`. `edge_update` runs later, on the edges of each chunk."""

    kwargs: Mapping[str, Any]


@dataclass(eq=False)
class Inputs:
    """The tensors from which messages are computed, by role. A tensor is listed once per role."""

    source: list[Tensor] = field(default_factory=list)
    """[num_own, ...] each: a row per own node of this shard. Edges that begin at the node read it, also
    those of other shards, which fetch it."""
    destination: list[Tensor] = field(default_factory=list)
    """[num_own, ...] each: a row per own node of this shard. Edges that end at the node read it."""
    edge: list[Tensor] = field(default_factory=list)
    """[num_edges, ...] each."""
    constant: list[Tensor] = field(default_factory=list)
    """Any shape: tensors that every edge reads whole."""

    def add(self, role: Role, tensor: Tensor) -> ArgumentSource:
        """Enter a tensor in the list of its role, unless it is listed already."""
        tensors = getattr(self, role)
        for index, other in enumerate(tensors):
            if other is tensor:
                return ArgumentSource(role, index)
        tensors.append(tensor)
        return ArgumentSource(role, len(tensors) - 1)


def plan(
    conv: MessagePassing, function: str, kwargs: Mapping[str, Any], inputs: Inputs, num_edges: int, num_own: int
) -> Call:
    """Find out how a function of the conv is called, and enter its tensors in `inputs`.

    As in PyG, an argument `x_j` is `kwargs["x"]` at the sources, `x_i` at the destinations, and any other
    name is taken as it is.

    function: "message"; "aggregate" where it runs on all edges at once (`FetchMode` "stored" and "one_shot");
        "update", which runs after the aggregation. "edge_update" is planned within these.
    kwargs: the arguments of `propagate`, or of `edge_updater` for "edge_update".
    num_own: the number of the shard's own nodes.

    Raises:
        CannotSplit: `propagate` does not get an argument, or rows of nodes are not [num_own, ...].
    """
    arguments: dict[str, Any] = {}
    special_args = []
    parameters = list(inspect.signature(getattr(conv, function)).parameters.items())
    # The first argument of these two is the result of the step before.
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
        # `update` runs once and not per edge: it gets its tensors whole, so they are no inputs of messages.
        elif isinstance(value, Tensor) and function != "update":
            # Nodes must be along dimension 0. PyG may count `node_dim` from the end: -2 is dimension 0 of
            # [num_own, width].
            if suffix and (value.size(0) != num_own or conv.node_dim % value.dim() != 0):
                raise CannotSplit(f"{name} has shape {list(value.shape)}, not one row for each of {num_own} nodes")
            value = inputs.add(_role(value, suffix, num_edges), value)
        arguments[name] = value
    return Call(function, arguments, tuple(special_args))


def _role(value: Tensor, suffix: str, num_edges: int) -> Role:
    """The role of a tensor: by the suffix of its argument, or by its size if there is none."""
    if suffix:
        return "destination" if suffix == "_i" else "source"
    has_row_per_edge = value.dim() > 0 and value.size(0) == num_edges
    return "edge" if has_row_per_edge else "constant"


@dataclass(frozen=True, eq=False)
class Reduction:
    """Rows, one per edge of a chunk, that an aggregation reduces over each destination's edges."""

    rows: Tensor
    """[n, ...] for the n edges of the chunk."""
    how: str
    """"sum", "max" or "min"."""


@dataclass(eq=False)
class ChunkReductions:
    """The reductions of a conv on one chunk of edges."""

    reductions: list[Reduction] = field(default_factory=list)
    """The reductions, each once, even if the aggregation asks for it several times."""
    reduce_order: list[int] = field(default_factory=list)
    """The index in `reductions` of the first, second, ... call of `reduce`."""
    softmax_weights: Tensor | None = None
    """[n, ...]: exp(logit - m) of the conv's softmax over edges; None if it has none."""


MaxLogit = Callable[[Tensor], Tensor]
"""Function of a chunk's logits [n, ...] -> the m of its destinations, [chunk.num_dst, ...].

`replay` subtracts m from the logits. In forward, m is the largest logit of this chunk and all chunks before
it, and the function rescales earlier sums to it. In backward, m is the largest logit of all edges.
"""


def replay(
    conv: MessagePassing,
    call: Call,
    edge_inputs: Mapping[Role, Sequence[Tensor]],
    chunk: Chunk,
    degrees: Tensor,
    max_logit: MaxLogit,
) -> ChunkReductions:
    """Run a conv's `message` on a chunk, and note down what its aggregation reduces.

    edge_inputs: by role, rows [n, ...] of the chunk's n edges, and the constants.
    degrees: [chunk.num_dst] int64, over all edges and not only this chunk's.

    Raises:
        CannotSplit: The reductions cannot be accumulated chunk by chunk.
    """
    chunk_reductions = ChunkReductions()
    reductions = chunk_reductions.reductions

    def softmax(src: Tensor, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0) -> Tensor:
        """PyG's `softmax`, without the division."""
        if chunk_reductions.softmax_weights is not None:
            raise CannotSplit("it takes more than one softmax over the edges")
        if dim % src.dim() != 0:
            raise CannotSplit("it takes a softmax over something else than the edges of a node")
        # No gradient goes through m: the quotient in `finish` does not depend on it. PyG detaches it too.
        weights = (src - max_logit(src.detach()).index_select(0, chunk.dst)).exp()
        chunk_reductions.softmax_weights = weights
        return weights

    def reduce(x: Tensor, index: Any, ptr: Any, dim_size: int, dim: int = -2, reduce: str = "sum") -> Tensor:
        """`Aggregation.reduce`: notes down its rows, and returns zeros of the right shape."""
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
    """[num_dst, ...]: the aggregation's output, from the reductions over all edges. Differentiable.

    reduce_order: as in `ChunkReductions`.
    reduced: by reduction, [num_dst, ...].
    weight_sum: [num_dst, ...], the sum of the softmax weights; None without a softmax.
    degrees: [num_dst] int64.
    """
    next_reduction = iter(reduce_order)

    def reduce(x: Tensor, index: Any, ptr: Any, dim_size: int, dim: int = -2, reduce: str = "sum") -> Tensor:
        """`Aggregation.reduce`: returns the accumulated result of this call."""
        out = reduced[next(next_reduction)]
        if weight_sum is not None:
            # Every reduction is divided. That is right for rows that hold the weight once, as a factor. It is
            # wrong for others, such as x * x of var. The probe in `runner.find_rule` refuses such convs.
            #
            # A node without edges has no weights, and must not divide by 0. `EPSILON` does not prevent that
            # in half precision, where it is 0.
            total = torch.where(weight_sum == 0, 1, weight_sum + EPSILON)
            out = out / unsqueeze_like(total, out)
        if reduce == "mean":
            out = out / unsqueeze_like(degrees.clamp(min=1).to(out.dtype), out)
        return out

    # The aggregation needs some messages as its input. They have no rows, since it gets its results from
    # `reduce`. So its softmax has no rows either, and may return them as they are.
    first_reduced = reduced[reduce_order[0]]
    no_messages = first_reduced.new_zeros(0, *first_reduced.shape[1:])
    no_index = torch.zeros(0, dtype=torch.int64, device=no_messages.device)
    return _aggregate(conv, no_messages, no_index, degrees, reduce, lambda src, *_, **__: src)


def unsqueeze_like(per_node: Tensor, rows: Tensor) -> Tensor:
    return per_node.reshape(per_node.shape + (1,) * (rows.dim() - per_node.dim()))


def aggregation_name(conv: MessagePassing) -> str:
    has_own_aggregate = type(conv).aggregate is not MessagePassing.aggregate or conv.aggr_module is None
    return f"the aggregate of {type(conv).__name__}" if has_own_aggregate else type(conv.aggr_module).__name__


def arguments_of(
    call: Call, edge_inputs: Mapping[Role, Sequence[Tensor]], chunk: Chunk, run_inner: Callable[[Call], Any]
) -> dict[str, Any]:
    """A call's arguments on a chunk, by name.

    edge_inputs: by role, rows [n, ...] of the chunk's n edges, and the constants.
    run_inner: runs a call that an argument is the result of.
    """
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
        if name not in special_values:  # PyG's other two, `size` and `size_j`
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
    """Run a function of the conv on a chunk's edges. `message` returns [n, ...], a row per edge.

    edge_inputs: by role, rows [n, ...] of the chunk's n edges, and the constants.
    softmax: called wherever the function calls PyG's `softmax`. By default it is PyG's own, for a chunk that
        holds all edges.
    """

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
    """The conv's aggregation, with other functions in place of those that look at the edges.

    degrees: [dim_size] int64, returned in place of PyG's `degree`, which would count the edges of the chunk
    only.

    Raises:
        CannotSplit: The conv has an `aggregate` method of its own, or no aggregation.
    """
    if type(conv).aggregate is not MessagePassing.aggregate or conv.aggr_module is None:
        raise CannotSplit(f"{aggregation_name(conv)} needs all edges of a node at once")

    def degree(index: Tensor, num_nodes: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return degrees.to(dtype or torch.float32)

    with _replace_functions(conv.aggr_module, reduce, softmax=softmax, degree=degree):
        return conv.aggr_module(messages, index, ptr=None, dim_size=degrees.numel(), dim=conv.node_dim)


@contextmanager
def _replace_functions(module: Aggregation, reduce: Callable[..., Tensor], **functions: Any) -> Generator[None]:
    """Make all aggregations in a module call other functions while the context lasts.

    They are set as attributes of the instances, and deleted afterwards. PyG's classes do not change.
    """
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
    """`MultiAggregation.forward` without PyG's fused aggregation, which does not call `reduce`."""
    return self.combine([aggregation(x, index, ptr, dim_size, dim) for aggregation in self.aggrs])


def _with_globals(method: Any, **functions: Any) -> Any:
    """A method that calls these functions in place of PyG's of the same names.

    PyG imports `softmax` and `degree` into its modules by name. A change there would be seen by all convs
    of the process, so the method is copied with a dictionary of globals of its own. The method itself is
    returned if its code uses none of the functions.
    """
    function = method.__func__
    # A module may have a global of the same name that is not PyG's function. That one stays.
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
