"""Sequential aggregation with rematerialization: a PyG conv over the parts of a shard's in-edges.

One part's source rows are there at a time. Of a layer only its inputs and a few numbers per destination are kept for
backward, which fetches the rows again and runs `message` once more; where the values of the source rows do not matter
for the gradients, it does not fetch them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing

from hopline.shards.convs.accumulate import Accumulators, Kind, gradient_of_rows
from hopline.shards.convs.edges import Chunk, Edges
from hopline.shards.convs.messages import Call, CannotSplit, ChunkReductions, Inputs, Role, finish, plan, replay
from hopline.shards.transports import FORWARD, REFETCH, Transport

ROLES: tuple[Role, ...] = ("source", "destination", "edge", "constant")
TRIED_EDGES = 5
"""Edges on which a conv is looked at before it runs."""
MIN_CHUNK_BYTES = 1 << 20
"""Chunks are no larger than half of a shard's own rows, so that they shrink with it, down to this size."""


@dataclass(frozen=True, eq=False)
class MessageProfile:
    """What a look at a conv's messages tells."""

    kinds: tuple[Kind, ...]
    weights: Kind | None
    """Of a softmax's weights."""
    calls: tuple[int, ...]
    needs_sources: bool
    """Whether the gradients depend on the values of the source rows."""
    edge_bytes: int
    """What one edge costs in a forward and backward of its own."""


@dataclass(frozen=True, eq=False)
class AggregationRun:
    """One aggregation over all parts: everything about it but the tensors."""

    conv: MessagePassing
    call: Call
    edges: Edges
    transport: Transport
    depth: int
    found: MessageProfile
    max_edges: int
    """Of a chunk."""
    counts: tuple[int, ...]
    """How many inputs there are of each role; behind them come the conv's parameters."""

    def by_role(self, tensors: Sequence[Any]) -> dict[Role, list[Any]]:
        ends = [sum(self.counts[: i + 1]) for i in range(len(ROLES))]
        return {role: list(tensors[end - n : end]) for role, n, end in zip(ROLES, self.counts, ends, strict=True)}

    def parameters(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors[sum(self.counts) :])


def aggregate(
    conv: MessagePassing, kwargs: Mapping[str, Any], edges: Edges, transport: Transport, depth: int, chunk_bytes: int
) -> Tensor:
    """What `propagate` computes before `update`, for all destinations: [num_dst, ...]."""
    inputs = Inputs()
    call = plan(conv, "message", kwargs, inputs, edges.num_edges, edges.num_dst)
    found = profile_messages(conv, call, inputs)
    tensors = [t for role in ROLES for t in getattr(inputs, role)]
    parameters = [p for p in conv.parameters() if p.requires_grad]
    own_bytes = sum(t.numel() * t.element_size() for t in inputs.source)
    chunk_bytes = min(chunk_bytes, max(MIN_CHUNK_BYTES, own_bytes // 2))
    max_edges = max(1, chunk_bytes // max(1, found.edge_bytes))
    counts = tuple(len(getattr(inputs, role)) for role in ROLES)
    run = AggregationRun(conv, call, edges, transport, depth, found, max_edges, counts)
    out = cast(tuple[Tensor, ...], _Aggregate.apply(run, *tensors, *parameters))
    num = len(found.kinds)
    return finish(conv, found.calls, out[:num], out[num] if found.weights else None, edges.degrees)


def profile_messages(conv: MessagePassing, call: Call, inputs: Inputs) -> MessageProfile:
    """Run the conv on a few made-up edges, twice with different source rows, and see what it keeps for backward."""
    device = next((t.device for role in ROLES for t in getattr(inputs, role)), torch.device("cpu"))
    chunk = Chunk(
        slice(0, TRIED_EDGES),
        slice(0, 2),
        torch.arange(TRIED_EDGES, device=device),
        torch.tensor([0, 0, 0, 1, 1], device=device),
    )
    degrees = torch.tensor([3, 2], device=device)
    kept: list[list[Tensor]] = []
    for other in (False, True):
        given = {role: [_like(t, other and role == "source") for t in getattr(inputs, role)] for role in ROLES}
        saved: list[Tensor] = []
        kept.append(saved)
        keeping = saved_tensors_hooks(_keeping(saved), lambda t: t)
        with _same_draws(device), _no_batch_norm(conv), _restore_attributes(conv), keeping:
            found = replay(conv, call, given, chunk, degrees, lambda logits: logits.new_zeros(2, *logits.shape[1:]))
    kinds = tuple(Kind(r.how, tuple(r.rows.shape[1:]), r.rows.dtype) for r in found.records)
    weights = None if found.weights is None else Kind("sum", tuple(found.weights.shape[1:]), found.weights.dtype)
    same = len(kept[0]) == len(kept[1]) and all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    per_edge = [t for t in [*kept[1], *(r.rows for r in found.records)] if t.dim() and t.size(0) == TRIED_EDGES]
    per_edge += given["source"] + given["destination"] + given["edge"]
    num_bytes = sum({t.data_ptr(): t.numel() * t.element_size() for t in per_edge}.values())
    only_sums = all(kind.how == "sum" for kind in kinds)
    return MessageProfile(kinds, weights, tuple(found.calls), not (same and only_sums), num_bytes // TRIED_EDGES)


def _like(tensor: Tensor, other: bool) -> Tensor:
    """A few rows like those of an input. Whole numbers may have a meaning, such as a type: these are 0.

    `other` rows have other signs and sizes, so that masks made of them differ as well.
    """
    shape = (TRIED_EDGES, *tensor.shape[1:])
    if not tensor.is_floating_point():
        return tensor.new_zeros(shape)
    rows = torch.linspace(-0.7, 1.1, math.prod(shape), dtype=tensor.dtype, device=tensor.device).view(shape)
    rows = -9.7 * rows if other else rows
    return rows.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _keeping(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return keep


@contextmanager
def _same_draws(device: torch.device, states: tuple[Tensor, Tensor | None] | None = None) -> Iterator[None]:
    """Within, random draws go on from the given states; afterwards those outside go on as if there had been none."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1], device)
        yield


@contextmanager
def _restore_attributes(conv: nn.Module) -> Iterator[None]:
    """What messages keep on the conv, such as attention weights, is that of a few edges: it is dropped."""
    before = dict(conv.__dict__)
    try:
        yield
    finally:
        conv.__dict__.clear()
        conv.__dict__.update(before)


@contextmanager
def _in_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Within, each module is in training or evaluation as it was in forward."""
    now = [(module, module.training) for module, _ in modes]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in now:
            module.training = training


@contextmanager
def _no_batch_norm(conv: nn.Module) -> Iterator[None]:
    """Within, a batch norm that runs is refused: its statistics would be those of a few edges."""

    def refuse(module: nn.Module, _: Any) -> None:
        raise CannotSplit(f"its messages go through {type(module).__name__}, which looks at all edges at once")

    hooks = [m.register_forward_pre_hook(refuse) for m in conv.modules() if isinstance(m, _BatchNorm) and m.training]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rows_per_edge(given: Mapping[Role, Sequence[Tensor]], chunk: Chunk) -> dict[Role, list[Tensor]]:
    """Rows by role to one per edge of a chunk. given: of a part's sources, of all destinations and of all edges."""
    return {
        "source": [t.index_select(0, chunk.src) for t in given["source"]],
        "destination": [t[chunk.dst_rows].index_select(0, chunk.dst) for t in given["destination"]],
        "edge": [t[chunk.edges] for t in given["edge"]],
        "constant": list(given["constant"]),
    }


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: AggregationRun, *tensors: Tensor) -> tuple[Tensor, ...]:
        edges, found = run.edges, run.found
        device = edges.degrees.device
        ctx.states = _states(device) if run.conv.training else None
        ctx.modes = [(module, module.training) for module in run.conv.modules()]
        ctx.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
        given = run.by_role([t.detach() for t in tensors])
        so_far = Accumulators(found.kinds, found.weights, edges.num_dst, device)
        fetched = run.transport.fetch(given["source"], FORWARD, run.depth)
        for k in range(len(edges.parts)):
            _add_part(run, so_far, k, {**given, "source": next(fetched)})
        so_far.close(edges.degrees)
        ctx.run = run
        ctx.shapes = [(t.shape, t.dtype) for t in given["source"]]
        sources = run.counts[0]
        inputs = tensors if found.needs_sources else (*[None] * sources, *tensors[sources:])
        mosts = [None if ties is None else r for r, ties in zip(so_far.reduced, so_far.ties, strict=True)]
        ctx.save_for_backward(*inputs, *mosts, *so_far.ties, so_far.m)
        return (*so_far.reduced, *([] if so_far.weight_sum is None else [so_far.weight_sum]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[override]
        run: AggregationRun = ctx.run
        num, saved = len(run.found.kinds), ctx.saved_tensors
        inputs, rest = saved[: -2 * num - 1], saved[-2 * num - 1 :]
        kept = _BackwardInputs(gradients, rest[:num], rest[num : 2 * num], rest[-1])
        device = run.edges.degrees.device
        draws = nullcontext() if ctx.states is None else _same_draws(device, ctx.states)
        with draws, torch.autocast(*ctx.autocast), _restore_attributes(run.conv), _in_modes(ctx.modes):
            return None, *_Backward(run, inputs, ctx.needs_input_grad[1:], ctx.shapes).over_parts(kept)


def _add_part(run: AggregationRun, so_far: Accumulators, k: int, given: Mapping[Role, Sequence[Tensor]]) -> None:
    """Part k's messages, chunk by chunk. given: rows of its sources, of all destinations and of all edges."""
    for chunk in run.edges.chunks(k, run.max_edges):
        degrees = run.edges.degrees[chunk.dst_rows]
        largest = partial(so_far.largest, chunk)
        so_far.add(chunk, replay(run.conv, run.call, rows_per_edge(given, chunk), chunk, degrees, largest))


def _states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


class _BackwardInputs(NamedTuple):
    """What backward starts from; the first three by reduction."""

    gradients: Sequence[Tensor | None]
    """Of the reductions, and behind them of the sum of a softmax's weights."""
    mosts: Sequence[Tensor | None]
    """Maxima and minima; None for sums."""
    ties: Sequence[Tensor | None]
    m: Tensor | None
    """The largest logits."""

    def of_rows(self, chunk: Chunk, found: ChunkReductions) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, their gradient) on a chunk's edges."""
        for record, gradient, most, ties in zip(found.records, self.gradients, self.mosts, self.ties, strict=False):
            if record.rows.requires_grad and gradient is not None:
                yield record.rows, gradient_of_rows(chunk, record, gradient, most, ties)
        of_weights = self.gradients[-1]
        if found.weights is not None and found.weights.requires_grad and of_weights is not None:
            yield found.weights, of_weights[chunk.dst_rows].index_select(0, chunk.dst)


class _Backward:
    """The gradients of all inputs, collected chunk by chunk."""

    def __init__(
        self,
        run: AggregationRun,
        inputs: Sequence[Tensor | None],
        needs: Sequence[bool],
        shapes: Sequence[tuple[Any, Any]],
    ) -> None:
        self.run, self.needs = run, run.by_role(needs)
        self.given = run.by_role([None if t is None else t.detach() for t in inputs])
        device = run.edges.degrees.device
        self.like = [torch.empty((), dtype=dtype, device=device).expand(shape) for shape, dtype in shapes]
        """As the own source rows, without their numbers."""
        self.totals: dict[Role, list[Any]] = {}
        for role in ("destination", "edge", "constant"):
            pairs = zip(self.given[role], self.needs[role], strict=True)
            self.totals[role] = [torch.zeros_like(t) if need else None for t, need in pairs]
        for t, need in zip(self.given["constant"], self.needs["constant"], strict=True):
            t.requires_grad_(need)
        self.parameters = run.parameters(inputs)
        self.parameter_gradients: list[Tensor | None] = [None] * len(self.parameters)

    def over_parts(self, kept: _BackwardInputs) -> list[Any]:
        run = self.run
        wanted = [t for t, need in zip(self.like, self.needs["source"], strict=True) if need]
        returns, later = run.transport.returns(wanted, run.depth), list[Callable[[], None]]()
        fetched: Iterator[Any] = repeat(None)
        if run.found.needs_sources:
            fetched = run.transport.fetch(self.given["source"], REFETCH, run.depth, later)

        def turn() -> None:
            """The gradients under way arrive before the next rows are asked for: one of both is in memory."""
            returns.settle()
            while later:
                later.pop(0)()

        for k in range(len(run.edges.parts)):
            self._add_part(k, next(fetched), returns.buffers(k), kept, turn)
            if wanted:
                returns.push(k)
        arrived = iter(returns.finish())
        of_sources = [next(arrived) if need else None for need in self.needs["source"]]
        totals = self.totals
        return [*of_sources, *totals["destination"], *totals["edge"], *totals["constant"], *self.parameter_gradients]

    def _add_part(
        self, k: int, rows: list[Tensor] | None, buffers: list[Tensor], kept: _BackwardInputs, turn: Callable[[], None]
    ) -> None:
        """Part k's gradients. turn: called when half of its chunks are done."""
        num_chunks = self.run.edges.num_chunks(k, self.run.max_edges)
        half = num_chunks // 2 if k > 1 else 0  # before the third part no gradients are under way
        for i, chunk in enumerate(self.run.edges.chunks(k, self.run.max_edges)):
            if i == half:
                turn()
            self._add(chunk, rows, buffers, kept)
        if not num_chunks:
            turn()

    def _add(self, chunk: Chunk, rows: list[Tensor] | None, buffers: list[Tensor], kept: _BackwardInputs) -> None:
        """One chunk's messages again, and its gradients. rows: of the part's sources; buffers: for their gradients."""
        of_edges = self._leaves(chunk, rows)
        asked = [(role, i) for role in ROLES for i, need in enumerate(self.needs[role]) if need]
        leaves = [*(of_edges[role][i] for role, i in asked), *self.parameters]
        with torch.enable_grad():
            degrees = self.run.edges.degrees[chunk.dst_rows]
            found = replay(self.run.conv, self.run.call, of_edges, chunk, degrees, lambda _: _rows(kept.m, chunk))
        outputs = list(kept.of_rows(chunk, found))
        if not outputs or not leaves:
            return
        messages, gradients = zip(*outputs, strict=True)
        results = torch.autograd.grad(messages, leaves, gradients, allow_unused=True)
        place = iter(buffers)
        for (role, i), gradient in zip(asked, results, strict=False):
            total = next(place) if role == "source" else self.totals[role][i]
            if gradient is not None:
                _add_gradient(role, chunk, total, gradient)
        for i, gradient in enumerate(results[len(asked) :]):
            if gradient is not None:
                total = self.parameter_gradients[i]
                self.parameter_gradients[i] = gradient if total is None else total + gradient

    def _leaves(self, chunk: Chunk, rows: list[Tensor] | None) -> dict[Role, list[Tensor]]:
        """The inputs on a chunk's edges, with gradients of their own. Sources whose values do not matter are 0."""
        found = rows_per_edge({**self.given, "source": rows or []}, chunk)
        if rows is None:
            found["source"] = [t.new_zeros(chunk.num_edges, *t.shape[1:]) for t in self.like]
        for role in ("source", "destination", "edge"):
            for t, need in zip(found[role], self.needs[role], strict=True):
                t.requires_grad_(need)
        return found


def _rows(m: Tensor | None, chunk: Chunk) -> Tensor:
    assert m is not None
    return m[chunk.dst_rows]


def _add_gradient(role: Role, chunk: Chunk, total: Tensor, gradient: Tensor) -> None:
    if role == "source":
        total.index_add_(0, chunk.src, gradient)
    elif role == "destination":
        total[chunk.dst_rows].index_add_(0, chunk.dst, gradient)
    elif role == "edge":
        total[chunk.edges] = gradient
    else:
        total += gradient
