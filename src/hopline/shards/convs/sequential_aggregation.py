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

from hopline.shards.convs.accumulate import Accumulators, ReductionSpec, gradient_of_rows
from hopline.shards.convs.edges import Chunk, Edges
from hopline.shards.convs.messages import Call, CannotSplit, ChunkReductions, Inputs, Role, finish, plan, replay
from hopline.shards.transports import FORWARD, REFETCH, Transport

ROLES: tuple[Role, ...] = ("source", "destination", "edge", "constant")
PROBE_EDGES = 5
MIN_CHUNK_BYTES = 1 << 20
"""Chunks are no larger than half of a shard's own rows, so that they shrink with it, down to this size."""


@dataclass(frozen=True, eq=False)
class MessageProfile:
    """What a look at a conv's messages tells."""

    specs: tuple[ReductionSpec, ...]
    softmax_spec: ReductionSpec | None
    reduce_order: tuple[int, ...]
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
    profile: MessageProfile
    max_edges: int
    """Of a chunk."""
    role_counts: tuple[int, ...]

    def by_role(self, tensors: Sequence[Any]) -> dict[Role, list[Any]]:
        groups = {}
        first = 0
        for role, count in zip(ROLES, self.role_counts, strict=True):
            groups[role] = list(tensors[first : first + count])
            first += count
        return groups


def aggregate(
    conv: MessagePassing, kwargs: Mapping[str, Any], edges: Edges, transport: Transport, depth: int, chunk_bytes: int
) -> Tensor:
    """What `propagate` computes before `update`, for all destinations: [num_dst, ...]."""
    inputs = Inputs()
    call = plan(conv, "message", kwargs, inputs, edges.num_edges, edges.num_dst)
    profile = profile_messages(conv, call, inputs)

    own_bytes = sum(t.numel() * t.element_size() for t in inputs.source)
    chunk_bytes = min(chunk_bytes, max(MIN_CHUNK_BYTES, own_bytes // 2))
    run = AggregationRun(
        conv=conv,
        call=call,
        edges=edges,
        transport=transport,
        depth=depth,
        profile=profile,
        max_edges=max(1, chunk_bytes // max(1, profile.edge_bytes)),
        role_counts=tuple(len(getattr(inputs, role)) for role in ROLES),
    )
    tensors = [t for role in ROLES for t in getattr(inputs, role)]
    parameters = [p for p in conv.parameters() if p.requires_grad]
    outputs = cast(tuple[Tensor, ...], _Aggregate.apply(run, *tensors, *parameters))
    num_reductions = len(profile.specs)
    weight_sum = outputs[num_reductions] if profile.softmax_spec else None
    return finish(conv, profile.reduce_order, outputs[:num_reductions], weight_sum, edges.degrees)


def profile_messages(conv: MessagePassing, call: Call, inputs: Inputs) -> MessageProfile:
    """Run the conv on a few made-up edges, twice with different source rows, and see what it keeps for backward."""
    device = next((t.device for role in ROLES for t in getattr(inputs, role)), torch.device("cpu"))
    chunk = Chunk(
        edges=slice(0, PROBE_EDGES),
        dst_rows=slice(0, 2),
        src=torch.arange(PROBE_EDGES, device=device),
        dst=torch.tensor([0, 0, 0, 1, 1], device=device),
    )
    degrees = torch.tensor([3, 2], device=device)

    saved_tensors: list[list[Tensor]] = []
    for is_second_run in (False, True):
        edge_inputs = {}
        for role in ROLES:
            is_other = is_second_run and role == "source"
            edge_inputs[role] = [_probe_rows(t, is_other) for t in getattr(inputs, role)]
        saved: list[Tensor] = []
        saved_tensors.append(saved)
        collect_saved = saved_tensors_hooks(_append_to(saved), lambda t: t)
        with _fork_generators(device), _refuse_batch_norm(conv), _restore_attributes(conv), collect_saved:
            chunk_reductions = replay(
                conv, call, edge_inputs, chunk, degrees, lambda logits: logits.new_zeros(2, *logits.shape[1:])
            )

    reductions = chunk_reductions.reductions
    weights = chunk_reductions.softmax_weights
    specs = tuple(ReductionSpec(r.how, tuple(r.rows.shape[1:]), r.rows.dtype) for r in reductions)
    softmax_spec = None if weights is None else ReductionSpec("sum", tuple(weights.shape[1:]), weights.dtype)

    first_saved, second_saved = saved_tensors
    saved_the_same = len(first_saved) == len(second_saved) and all(map(torch.equal, first_saved, second_saved))
    has_only_sums = all(spec.how == "sum" for spec in specs)

    per_edge = [t for t in [*second_saved, *(r.rows for r in reductions)] if t.dim() and t.size(0) == PROBE_EDGES]
    per_edge += edge_inputs["source"] + edge_inputs["destination"] + edge_inputs["edge"]
    bytes_by_address = {t.data_ptr(): t.numel() * t.element_size() for t in per_edge}
    return MessageProfile(
        specs=specs,
        softmax_spec=softmax_spec,
        reduce_order=tuple(chunk_reductions.reduce_order),
        needs_sources=not (saved_the_same and has_only_sums),
        edge_bytes=sum(bytes_by_address.values()) // PROBE_EDGES,
    )


def _probe_rows(tensor: Tensor, is_other: bool) -> Tensor:
    """A few rows like those of an input. Whole numbers may have a meaning, such as a type: these are 0.

    `other` rows have other signs and sizes, so that masks made of them differ as well.
    """
    shape = (PROBE_EDGES, *tensor.shape[1:])
    if not tensor.is_floating_point():
        return tensor.new_zeros(shape)
    rows = torch.linspace(-0.7, 1.1, math.prod(shape), dtype=tensor.dtype, device=tensor.device).view(shape)
    rows = -9.7 * rows if is_other else rows
    return rows.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _append_to(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:

    def append(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return append


class _GeneratorStates(NamedTuple):
    host: Tensor
    cuda: Tensor | None


@contextmanager
def _fork_generators(device: torch.device, states: _GeneratorStates | None = None) -> Iterator[None]:
    """Within, random draws go on from the given states; afterwards those outside go on as if there had been none."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if states is not None:
            torch.set_rng_state(states.host)
            if states.cuda is not None:
                torch.cuda.set_rng_state(states.cuda, device)
        yield


@contextmanager
def _restore_attributes(conv: nn.Module) -> Iterator[None]:
    """What messages keep on the conv, such as attention weights, is that of a few edges: it is dropped."""
    attributes = dict(conv.__dict__)
    try:
        yield
    finally:
        conv.__dict__.clear()
        conv.__dict__.update(attributes)


@contextmanager
def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Within, each module is in training or evaluation as it was in forward."""
    current_modes = [(module, module.training) for module, _ in modes]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in current_modes:
            module.training = training


@contextmanager
def _refuse_batch_norm(conv: nn.Module) -> Iterator[None]:
    """Within, a batch norm that runs is refused: its statistics would be those of a few edges."""

    def refuse(module: nn.Module, _: Any) -> None:
        raise CannotSplit(f"its messages go through {type(module).__name__}, which looks at all edges at once")

    norms = [m for m in conv.modules() if isinstance(m, _BatchNorm) and m.training]
    hooks = [norm.register_forward_pre_hook(refuse) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rows_per_edge(inputs: Mapping[Role, Sequence[Tensor]], chunk: Chunk) -> dict[Role, list[Tensor]]:
    """Rows by role to one per edge of a chunk. given: of a part's sources, of all destinations and of all edges."""
    return {
        "source": [t.index_select(0, chunk.src) for t in inputs["source"]],
        "destination": [t[chunk.dst_rows].index_select(0, chunk.dst) for t in inputs["destination"]],
        "edge": [t[chunk.edges] for t in inputs["edge"]],
        "constant": list(inputs["constant"]),
    }


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: AggregationRun, *tensors: Tensor) -> tuple[Tensor, ...]:
        edges = run.edges
        profile = run.profile
        device = edges.degrees.device

        ctx.generator_states = _current_generator_states(device) if run.conv.training else None
        ctx.modes = [(module, module.training) for module in run.conv.modules()]
        ctx.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))

        inputs = run.by_role([t.detach() for t in tensors])
        accumulators = Accumulators(
            specs=profile.specs, softmax_spec=profile.softmax_spec, num_dst=edges.num_dst, device=device
        )
        fetched = run.transport.fetch(inputs["source"], FORWARD, run.depth)
        for k in range(len(edges.parts)):
            _add_part(run, accumulators, k, {**inputs, "source": next(fetched)})
        accumulators.close(edges.degrees)

        ctx.run = run
        ctx.source_specs = [_SourceSpec(t.shape, t.dtype) for t in inputs["source"]]
        num_sources = run.role_counts[0]
        saved_inputs = tensors if profile.needs_sources else (*[None] * num_sources, *tensors[num_sources:])
        extremes = [
            None if ties is None else total for total, ties in zip(accumulators.reduced, accumulators.ties, strict=True)
        ]
        ctx.save_for_backward(*saved_inputs, *extremes, *accumulators.ties, accumulators.max_logit)
        weight_sum = [] if accumulators.weight_sum is None else [accumulators.weight_sum]
        return (*accumulators.reduced, *weight_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[override]
        run: AggregationRun = ctx.run
        saved = ctx.saved_tensors
        num_reductions = len(run.profile.specs)
        num_inputs = len(saved) - 2 * num_reductions - 1
        outputs = _OutputGradients(
            gradients=gradients,
            extremes=saved[num_inputs : num_inputs + num_reductions],
            ties=saved[num_inputs + num_reductions : num_inputs + 2 * num_reductions],
            max_logit=saved[-1],
        )
        device = run.edges.degrees.device
        states = ctx.generator_states
        same_draws = nullcontext() if states is None else _fork_generators(device, states)
        with same_draws, torch.autocast(*ctx.autocast), _restore_attributes(run.conv), _set_modes(ctx.modes):
            backward = _Backward(run, saved[:num_inputs], ctx.needs_input_grad[1:], ctx.source_specs)
            return None, *backward.run_parts(outputs)


def _add_part(run: AggregationRun, accumulators: Accumulators, k: int, inputs: Mapping[Role, Sequence[Tensor]]) -> None:
    """Part k's messages, chunk by chunk. given: rows of its sources, of all destinations and of all edges."""
    for chunk in run.edges.chunks(k, run.max_edges):
        degrees = run.edges.degrees[chunk.dst_rows]
        raise_max_logit = partial(accumulators.raise_max_logit, chunk)
        accumulators.add(
            chunk, replay(run.conv, run.call, rows_per_edge(inputs, chunk), chunk, degrees, raise_max_logit)
        )


def _current_generator_states(device: torch.device) -> _GeneratorStates:
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _GeneratorStates(torch.get_rng_state(), cuda_state)


class _SourceSpec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class _OutputGradients(NamedTuple):
    """What backward starts from; the first three by reduction."""

    gradients: Sequence[Tensor | None]
    """Of the reductions, and behind them of the sum of a softmax's weights."""
    extremes: Sequence[Tensor | None]
    ties: Sequence[Tensor | None]
    max_logit: Tensor | None

    def of_chunk(self, chunk: Chunk, chunk_reductions: ChunkReductions) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, their gradient) on a chunk's edges."""
        by_reduction = zip(chunk_reductions.reductions, self.gradients, self.extremes, self.ties, strict=False)
        for reduction, gradient, extremes, ties in by_reduction:
            if reduction.rows.requires_grad and gradient is not None:
                yield reduction.rows, gradient_of_rows(chunk, reduction, gradient, extremes, ties)
        weights = chunk_reductions.softmax_weights
        weight_sum_gradient = self.gradients[-1]
        if weights is not None and weights.requires_grad and weight_sum_gradient is not None:
            yield weights, weight_sum_gradient[chunk.dst_rows].index_select(0, chunk.dst)


class _Backward:
    """The gradients of all inputs, collected chunk by chunk."""

    def __init__(
        self,
        run: AggregationRun,
        saved_inputs: Sequence[Tensor | None],
        needs_gradient: Sequence[bool],
        source_specs: Sequence[_SourceSpec],
    ) -> None:
        self.run = run
        self.needs = run.by_role(needs_gradient)
        self.inputs = run.by_role([None if t is None else t.detach() for t in saved_inputs])
        device = run.edges.degrees.device
        self.source_templates = [
            torch.empty((), dtype=spec.dtype, device=device).expand(spec.shape) for spec in source_specs
        ]

        self.totals: dict[Role, list[Any]] = {}
        for role in ("destination", "edge", "constant"):
            pairs = zip(self.inputs[role], self.needs[role], strict=True)
            self.totals[role] = [torch.zeros_like(t) if need else None for t, need in pairs]
        for t, need in zip(self.inputs["constant"], self.needs["constant"], strict=True):
            t.requires_grad_(need)
        self.parameters = list(saved_inputs[sum(run.role_counts) :])
        self.parameter_gradients: list[Tensor | None] = [None] * len(self.parameters)

    def run_parts(self, outputs: _OutputGradients) -> list[Any]:
        run = self.run
        needed_sources = [t for t, need in zip(self.source_templates, self.needs["source"], strict=True) if need]
        gradient_return = run.transport.start_return(needed_sources, run.depth)
        deferred_requests: list[Callable[[], None]] = []
        fetched: Iterator[Any] = repeat(None)
        if run.profile.needs_sources:
            fetched = run.transport.fetch(self.inputs["source"], REFETCH, run.depth, deferred_requests)

        def switch_transfers() -> None:
            gradient_return.settle()
            while deferred_requests:
                deferred_requests.pop(0)()

        for k in range(len(run.edges.parts)):
            self._add_part(k, next(fetched), gradient_return.buffers(k), outputs, switch_transfers)
            if needed_sources:
                gradient_return.push(k)
        returned = iter(gradient_return.finish())
        source_gradients = [next(returned) if need else None for need in self.needs["source"]]
        totals = self.totals
        return [
            *source_gradients,
            *totals["destination"],
            *totals["edge"],
            *totals["constant"],
            *self.parameter_gradients,
        ]

    def _add_part(
        self,
        k: int,
        source_rows: list[Tensor] | None,
        buffers: list[Tensor],
        outputs: _OutputGradients,
        switch_transfers: Callable[[], None],
    ) -> None:
        """Part k's gradients. turn: called when half of its chunks are done."""
        num_chunks = self.run.edges.num_chunks(k, self.run.max_edges)
        switch_chunk = num_chunks // 2 if k > 1 else 0
        for i, chunk in enumerate(self.run.edges.chunks(k, self.run.max_edges)):
            if i == switch_chunk:
                switch_transfers()
            self._add_chunk(chunk, source_rows, buffers, outputs)
        if not num_chunks:
            switch_transfers()

    def _add_chunk(
        self, chunk: Chunk, source_rows: list[Tensor] | None, buffers: list[Tensor], outputs: _OutputGradients
    ) -> None:
        """One chunk's messages again, and its gradients. rows: of the part's sources; buffers: for their gradients."""
        edge_inputs = self._make_leaves(chunk, source_rows)
        wanted_inputs = [(role, i) for role in ROLES for i, need in enumerate(self.needs[role]) if need]
        leaves = [*(edge_inputs[role][i] for role, i in wanted_inputs), *self.parameters]

        def final_max_logit(_: Tensor) -> Tensor:
            assert outputs.max_logit is not None
            return outputs.max_logit[chunk.dst_rows]

        with torch.enable_grad():
            degrees = self.run.edges.degrees[chunk.dst_rows]
            chunk_reductions = replay(self.run.conv, self.run.call, edge_inputs, chunk, degrees, final_max_logit)
        pairs = list(outputs.of_chunk(chunk, chunk_reductions))
        if not pairs or not leaves:
            return

        reduced_rows, row_gradients = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(reduced_rows, leaves, row_gradients, allow_unused=True)
        next_buffer = iter(buffers)
        for (role, i), gradient in zip(wanted_inputs, gradients, strict=False):
            total = next(next_buffer) if role == "source" else self.totals[role][i]
            if gradient is not None:
                _add_gradient(role, chunk, total, gradient)
        for i, gradient in enumerate(gradients[len(wanted_inputs) :]):
            if gradient is not None:
                total = self.parameter_gradients[i]
                self.parameter_gradients[i] = gradient if total is None else total + gradient

    def _make_leaves(self, chunk: Chunk, source_rows: list[Tensor] | None) -> dict[Role, list[Tensor]]:
        """The inputs on a chunk's edges, with gradients of their own. Sources whose values do not matter are 0."""
        edge_inputs = rows_per_edge({**self.inputs, "source": source_rows or []}, chunk)
        if source_rows is None:
            edge_inputs["source"] = [t.new_zeros(chunk.num_edges, *t.shape[1:]) for t in self.source_templates]
        for role in ("source", "destination", "edge"):
            for t, need in zip(edge_inputs[role], self.needs[role], strict=True):
                t.requires_grad_(need)
        return edge_inputs


def _add_gradient(role: Role, chunk: Chunk, total: Tensor, gradient: Tensor) -> None:
    if role == "source":
        total.index_add_(0, chunk.src, gradient)
    elif role == "destination":
        total[chunk.dst_rows].index_add_(0, chunk.dst, gradient)
    elif role == "edge":
        total[chunk.edges] = gradient
    else:
        total += gradient
