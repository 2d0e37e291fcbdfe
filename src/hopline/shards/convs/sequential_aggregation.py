"""Sequential aggregation and rematerialization (SAR): a PyG conv over shards, part by part.

The method is SAR's (Mostafa, MLSys 2022), for stock PyG convs. A shard computes the outputs of its own
nodes. Their in-edges are in one part E_k per shard: k is the round in which the rows of the part's sources
arrive. For an edge e = (j, i), with source row h_j, destination row x_i, edge row a_e and the conv's
parameters w:

    m_e   = message(h_j, x_i, a_e; w)                                PyG's code: `messages.replay`
    R_i   = sum over k  sum over the edges e of E_k into i of  m_e   or max, min, softmax: `accumulate`
    out_i = the conv's aggregation, given R_i                        PyG's code: `messages.finish`

**Forward** records no gradients. Only R outlives a round, and only one chunk's messages exist at a time:

    owner of part k's sources                  this shard
    h of part k            ---- FORWARD ---->  for each chunk of E_k: message, add to R. Then drop the rows.

**Backward** is given g = dL/dR. Autograd computes it, because `finish` is ordinary torch code. By the chain
rule, for a sum:

    dL/dh_j = sum over the edges e from j of  (dm_e/dh_j)^T g_i      x_i, a_e and w in the same way

The derivatives of `message` depend on the rows that forward dropped. So backward fetches them again
(rematerialization) and runs `message` once more, with autograd on, one chunk at a time:

    owner of part k's sources                  this shard
    h of part k            ---- REFETCH ---->  for each chunk of E_k: message with autograd, then
    dL/dh += ...           <--- GRADIENT ----      dL/dh of part k into a buffer
                                                   dL/dx, dL/da, dL/dw added up here

With max and min, `accumulate.gradient_of_rows` replaces g_i. A softmax gives two sums, S and Z, with a
gradient each. All its weights are exp(l - m) with the final m, saved from forward.

REFETCH is left out where no gradient depends on the values of h, as in GCN and SAGE-mean: there zeros serve
as well. `profile_messages` finds that out.

Memory: between ranks, forward holds the source rows of at most depth + 1 parts. Saved for backward are the
conv's own inputs and a few numbers per destination (maxima, tie counts, m). Messages and rows of other shards
are not saved. The price is that `message` runs twice, and that rows travel twice where backward needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from hopline.device.snapshots import RandomState, preserve_modes, preserve_rng
from hopline.shards.convs.accumulate import Accumulators, ReductionSpec, gradient_of_rows
from hopline.shards.convs.edges import Chunk, ConvEdges
from hopline.shards.convs.messages import Call, CannotSplit, ChunkReductions, Inputs, Role, finish, plan, replay
from hopline.shards.transports import FORWARD, REFETCH, Transport

ROLES: tuple[Role, ...] = ("source", "destination", "edge", "constant")
"""The roles of a message's inputs (`messages.Inputs`), in the order in which they are passed to autograd."""
PROBE_EDGES = 5
"""Edges of the made-up chunk on which `profile_messages` runs a conv."""
MIN_CHUNK_BYTES = 1 << 20
"""Chunks take at most half the bytes of a shard's own rows, so that they shrink with the shard, but not below
this size. Smaller chunks cost time (docs/full_batch.md)."""


@dataclass(frozen=True, eq=False)
class MessageProfile:
    """The properties of a conv's messages that a run on a few edges shows."""

    specs: tuple[ReductionSpec, ...]
    softmax_spec: ReductionSpec | None
    """The weights of its softmax over edges; None if it has none."""
    reduce_order: tuple[int, ...]
    """The index in `specs` of the first, second, ... call of `reduce`."""
    needs_sources: bool
    """Whether some gradient depends on the values of the source rows."""
    edge_bytes: int
    """Bytes that one edge takes in a chunk: its rows, and what autograd saves for its gradients."""


@dataclass(frozen=True, eq=False)
class AggregationRun:
    """One aggregation over all parts: everything but its tensors. Forward hands it to backward."""

    conv: MessagePassing
    call: Call
    edges: ConvEdges
    transport: Transport
    depth: int
    profile: MessageProfile
    max_edges: int
    role_counts: tuple[int, ...]
    """The number of inputs of each role, in the order of `ROLES`."""

    def by_role(self, tensors: Sequence[Any]) -> dict[Role, list[Any]]:
        """By role, the entries of a list with an entry per input. Entries of parameters are left out."""
        groups = {}
        first = 0
        for role, count in zip(ROLES, self.role_counts, strict=True):
            groups[role] = list(tensors[first : first + count])
            first += count
        return groups


def aggregate(
    conv: MessagePassing,
    kwargs: Mapping[str, Any],
    edges: ConvEdges,
    transport: Transport,
    depth: int,
    chunk_bytes: int,
) -> Tensor:
    """[num_dst, ...]: what `propagate` computes before `update`. Collective, in backward too.

    kwargs: the arguments of `propagate`. Rows of nodes are [num_own, ...].
    depth: rounds of rows that are prefetched.
    chunk_bytes: about the most bytes of the messages of a chunk. Less on small shards: `MIN_CHUNK_BYTES`.

    Raises:
        CannotSplit: The aggregation cannot be accumulated chunk by chunk.
    """
    inputs = Inputs()  # `plan` enters the tensors
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
    # Parameters that `message` uses must be inputs of the Function, or they would get no gradients. Which
    # ones it uses is not known, so all of them are passed.
    parameters = [p for p in conv.parameters() if p.requires_grad]
    outputs = cast(tuple[Tensor, ...], _Aggregate.apply(run, *tensors, *parameters))
    num_reductions = len(profile.specs)
    weight_sum = outputs[num_reductions] if profile.softmax_spec else None
    return finish(conv, profile.reduce_order, outputs[:num_reductions], weight_sum, edges.degrees)


def profile_messages(conv: MessagePassing, call: Call, inputs: Inputs) -> MessageProfile:
    """Run a conv on a few made-up edges, and look at what autograd saves for backward.

    It runs twice, with different source rows. If autograd saves the same tensors both times, no gradient
    depends on the source rows. Gradients of maxima and minima always do: the rows decide which edge gets
    the gradient.
    """
    device = next((t.device for role in ROLES for t in getattr(inputs, role)), torch.device("cpu"))
    # Five edges into two destinations.
    chunk = Chunk(
        edges=slice(0, PROBE_EDGES),
        dst_rows=slice(0, 2),
        src=torch.arange(PROBE_EDGES, device=device),
        dst=torch.tensor([0, 0, 0, 1, 1], device=device),
    )
    degrees = torch.tensor([3, 2], device=device)

    def zero_max_logit(logits: Tensor) -> Tensor:
        """Zeros for the two destinations, in place of the largest logits of a softmax."""
        return logits.new_zeros(2, *logits.shape[1:])

    saved_tensors: list[list[Tensor]] = []  # by run
    for is_second_run in (False, True):
        edge_inputs = {}
        for role in ROLES:
            is_other = is_second_run and role == "source"
            edge_inputs[role] = [_probe_rows(t, is_other) for t in getattr(inputs, role)]
        saved: list[Tensor] = []
        saved_tensors.append(saved)
        collect_saved = saved_tensors_hooks(_append_to(saved), lambda t: t)
        with preserve_rng(device), _refuse_batch_norm(conv), _restore_attributes(conv), collect_saved:
            chunk_reductions = replay(conv, call, edge_inputs, chunk, degrees, zero_max_logit)

    reductions = chunk_reductions.reductions
    weights = chunk_reductions.softmax_weights
    specs = tuple(ReductionSpec(r.how, tuple(r.rows.shape[1:]), r.rows.dtype) for r in reductions)
    softmax_spec = None if weights is None else ReductionSpec("sum", tuple(weights.shape[1:]), weights.dtype)

    first_saved, second_saved = saved_tensors
    saved_the_same = len(first_saved) == len(second_saved) and all(map(torch.equal, first_saved, second_saved))
    has_only_sums = all(spec.how == "sum" for spec in specs)

    saved_or_reduced = [*second_saved, *(r.rows for r in reductions)]
    per_edge = [t for t in saved_or_reduced if t.dim() and t.size(0) == PROBE_EDGES]
    per_edge += edge_inputs["source"] + edge_inputs["destination"] + edge_inputs["edge"]
    # By address, because several of them may be one tensor.
    bytes_by_address = {t.data_ptr(): t.numel() * t.element_size() for t in per_edge}
    return MessageProfile(
        specs=specs,
        softmax_spec=softmax_spec,
        reduce_order=tuple(chunk_reductions.reduce_order),
        needs_sources=not (saved_the_same and has_only_sums),
        edge_bytes=sum(bytes_by_address.values()) // PROBE_EDGES,
    )


def _probe_rows(tensor: Tensor, is_other: bool) -> Tensor:
    """[PROBE_EDGES, ...]: made-up rows in the shape and dtype of an input.

    Integers are 0: they may have a meaning, such as an edge type.

    is_other: whether to return rows of other signs and sizes, so that masks computed from them differ too.
    """
    shape = (PROBE_EDGES, *tensor.shape[1:])
    if not tensor.is_floating_point():
        return tensor.new_zeros(shape)
    rows = torch.linspace(-0.7, 1.1, math.prod(shape), dtype=tensor.dtype, device=tensor.device).view(shape)
    rows = -9.7 * rows if is_other else rows
    return rows.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _append_to(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A hook for `saved_tensors_hooks` that appends every saved tensor to a list."""

    def append(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return append


@contextmanager
def _restore_attributes(conv: nn.Module) -> Iterator[None]:
    """Undo all changes of a conv's attributes at the end of the context.

    `message` may store tensors on the conv, such as attention weights. Those of a few edges are of no use.
    """
    attributes = dict(conv.__dict__)
    try:
        yield
    finally:
        conv.__dict__.clear()
        conv.__dict__.update(attributes)


@contextmanager
def _refuse_batch_norm(conv: nn.Module) -> Iterator[None]:
    """Raise `CannotSplit` if a batch norm runs in training mode: it would see the messages of one chunk."""

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
    """By role, one row per edge of a chunk.

    inputs: by role, rows of the part's sources, of all destinations and of all edges, and the constants.
    """
    return {
        "source": [t.index_select(0, chunk.src) for t in inputs["source"]],
        "destination": [t[chunk.dst_rows].index_select(0, chunk.dst) for t in inputs["destination"]],
        "edge": [t[chunk.edges] for t in inputs["edge"]],
        "constant": list(inputs["constant"]),
    }


class _Aggregate(torch.autograd.Function):
    """(run, inputs by role, parameters) -> the reductions over all edges; with a softmax, Z last."""

    @staticmethod
    def forward(ctx: Any, run: AggregationRun, *tensors: Tensor) -> tuple[Tensor, ...]:
        edges = run.edges
        profile = run.profile
        device = edges.degrees.device

        # Backward runs `message` again and must compute the same: with the same draws, modes and precision.
        ctx.random_state = RandomState.of(device) if run.conv.training else None
        ctx.modes = [(module, module.training) for module in run.conv.modules()]
        ctx.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))

        inputs = run.by_role([t.detach() for t in tensors])
        accumulators = Accumulators(
            specs=profile.specs, softmax_spec=profile.softmax_spec, num_dst=edges.num_dst, device=device
        )
        fetched = run.transport.fetch(inputs["source"], FORWARD, run.depth)
        for k in range(len(edges.parts)):
            # The part's rows have no name here, so that they are freed before the next ones are waited for.
            _add_part(run, accumulators, k, {**inputs, "source": next(fetched)})
        accumulators.close(edges.degrees)

        ctx.run = run
        ctx.source_specs = [_SourceSpec(t.shape, t.dtype) for t in inputs["source"]]
        num_sources = len(inputs["source"])
        saved_inputs = tensors if profile.needs_sources else (*[None] * num_sources, *tensors[num_sources:])
        with_ties = zip(accumulators.reduced, accumulators.ties, strict=True)
        extremes = [None if ties is None else reduced for reduced, ties in with_ties]
        ctx.save_for_backward(*saved_inputs, *extremes, *accumulators.ties, accumulators.max_logit)
        weight_sum = [] if accumulators.weight_sum is None else [accumulators.weight_sum]
        return (*accumulators.reduced, *weight_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[override]
        run: AggregationRun = ctx.run
        # As saved by forward: inputs, extremes and ties of each reduction, m.
        saved = ctx.saved_tensors
        num_reductions = len(run.profile.specs)
        num_inputs = len(saved) - 2 * num_reductions - 1
        output_gradients = _OutputGradients(
            gradients=gradients,
            extremes=saved[num_inputs : num_inputs + num_reductions],
            ties=saved[num_inputs + num_reductions : num_inputs + 2 * num_reductions],
            max_logit=saved[-1],
        )
        conv = run.conv
        # Autograd calls this at a time of its own. Nothing that runs afterwards may see what it sets here.
        with (
            preserve_rng(run.edges.degrees.device),
            preserve_modes(conv),
            torch.autocast(*ctx.autocast),
            _restore_attributes(conv),
        ):
            if ctx.random_state is not None:
                ctx.random_state.restore()
            for module, training in ctx.modes:
                module.training = training
            backward = _Backward(run, saved[:num_inputs], ctx.needs_input_grad[1:], ctx.source_specs)
            return None, *backward.run_parts(output_gradients)


def _add_part(run: AggregationRun, accumulators: Accumulators, k: int, inputs: Mapping[Role, Sequence[Tensor]]) -> None:
    """Add the messages of part k to the reductions, chunk by chunk.

    inputs: by role, rows of the part's sources, of all destinations and of all edges, and the constants.
    """
    for chunk in run.edges.chunks(k, run.max_edges):
        degrees = run.edges.degrees[chunk.dst_rows]
        raise_max_logit = partial(accumulators.raise_max_logit, chunk)
        # The chunk's rows have no name here, so that they are freed before the next chunk's are made.
        accumulators.add(
            chunk, replay(run.conv, run.call, rows_per_edge(inputs, chunk), chunk, degrees, raise_max_logit)
        )


class _SourceSpec(NamedTuple):
    """Shape and dtype of an input of role "source". Backward needs them even if the rows were not saved."""

    shape: torch.Size
    dtype: torch.dtype


class _OutputGradients(NamedTuple):
    """The gradients of the reductions, and values of forward from which those of single edges follow."""

    gradients: Sequence[Tensor | None]
    """By reduction: [num_dst, ...], then that of `weight_sum` if any. None: the loss does not use it."""
    extremes: Sequence[Tensor | None]
    """By reduction: [num_dst, ...], the maxima or minima; None for sums."""
    ties: Sequence[Tensor | None]
    """By reduction: [num_dst, ...] int32, how many edges attain the maximum or minimum; None for sums."""
    max_logit: Tensor | None
    """[num_dst, ...]: the m of the softmax; None without one."""

    def of_chunk(self, chunk: Chunk, chunk_reductions: ChunkReductions) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (rows [n, ...] that a chunk's edges add to a reduction, the gradient of these rows)."""
        # Not strict: with a softmax, `gradients` has one more entry.
        by_reduction = zip(chunk_reductions.reductions, self.gradients, self.extremes, self.ties, strict=False)
        for reduction, gradient, extremes, ties in by_reduction:
            if reduction.rows.requires_grad and gradient is not None:
                yield reduction.rows, gradient_of_rows(chunk, reduction, gradient, extremes, ties)
        weights = chunk_reductions.softmax_weights
        weight_sum_gradient = self.gradients[-1]
        if weights is not None and weights.requires_grad and weight_sum_gradient is not None:
            yield weights, weight_sum_gradient[chunk.dst_rows].index_select(0, chunk.dst)


class _Backward:
    """Computes the gradients of all inputs and parameters, chunk by chunk. Used for one backward pass."""

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
        """By role. Those of role "source" are None if forward did not save them."""
        device = run.edges.degrees.device
        self.source_templates = [
            torch.empty((), dtype=spec.dtype, device=device).expand(spec.shape) for spec in source_specs
        ]
        """Tensors in shape and dtype of the inputs of role "source", without memory for their values."""

        self.totals: dict[Role, list[Any]] = {}
        """By role, without "source": the gradients so far; None for inputs that need none."""
        for role in ("destination", "edge", "constant"):
            pairs = zip(self.inputs[role], self.needs[role], strict=True)
            self.totals[role] = [torch.zeros_like(t) if need else None for t, need in pairs]
        for t, need in zip(self.inputs["constant"], self.needs["constant"], strict=True):
            t.requires_grad_(need)
        self.parameters = list(saved_inputs[sum(run.role_counts) :])
        self.parameter_gradients: list[Tensor | None] = [None] * len(self.parameters)

    def run_parts(self, output_gradients: _OutputGradients) -> list[Any]:
        """The gradients of all inputs, in the order of `ROLES`, and of all parameters, over all parts."""
        run = self.run
        needed_sources = [t for t, need in zip(self.source_templates, self.needs["source"], strict=True) if need]
        gradient_return = run.transport.start_return(needed_sources, run.depth)
        # `fetch` enters calls that request the rows of later parts. `switch_transfers` makes the calls.
        deferred_requests: list[Callable[[], None]] = []
        fetched: Iterator[Any] = repeat(None)
        if run.profile.needs_sources:
            fetched = run.transport.fetch(self.inputs["source"], REFETCH, run.depth, deferred_requests)

        def switch_transfers() -> None:
            """Wait for the oldest gradients in transfer, then request rows.

            With depth 1, only one of the two is in transfer at a time.
            """
            gradient_return.settle()
            while deferred_requests:
                deferred_requests.pop(0)()

        for k in range(len(run.edges.parts)):
            # The part's rows have no name here, so that they are freed before the next ones are waited for.
            self._add_part(k, next(fetched), gradient_return.buffers(k), output_gradients, switch_transfers)
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
        output_gradients: _OutputGradients,
        switch_transfers: Callable[[], None],
    ) -> None:
        """Add the gradients of part k, and call `switch_transfers` once on the way.

        source_rows: of the part; None if no gradient depends on them.
        buffers: for the gradients of the part's source rows.
        """
        num_chunks = self.run.edges.num_chunks(k, self.run.max_edges)
        # During the first half of the chunks the gradients of the part before travel, during the second half the
        # rows of the next part. Part 0 sends no gradients. So in parts 0 and 1 none are in transfer, and rows
        # can be requested at once.
        switch_chunk = num_chunks // 2 if k > 1 else 0
        for i, chunk in enumerate(self.run.edges.chunks(k, self.run.max_edges)):
            if i == switch_chunk:
                switch_transfers()
            self._add_chunk(chunk, source_rows, buffers, output_gradients)
        if not num_chunks:
            switch_transfers()

    def _add_chunk(
        self, chunk: Chunk, source_rows: list[Tensor] | None, buffers: list[Tensor], output_gradients: _OutputGradients
    ) -> None:
        """Run `message` again on a chunk, and add the gradients of its inputs. See `_add_part`."""
        edge_inputs = self._make_leaves(chunk, source_rows)
        wanted_inputs = [(role, i) for role in ROLES for i, need in enumerate(self.needs[role]) if need]
        leaves = [*(edge_inputs[role][i] for role, i in wanted_inputs), *self.parameters]

        def final_max_logit(_: Tensor) -> Tensor:
            assert output_gradients.max_logit is not None
            return output_gradients.max_logit[chunk.dst_rows]

        with torch.enable_grad():
            degrees = self.run.edges.degrees[chunk.dst_rows]
            chunk_reductions = replay(self.run.conv, self.run.call, edge_inputs, chunk, degrees, final_max_logit)
        pairs = list(output_gradients.of_chunk(chunk, chunk_reductions))
        if not pairs or not leaves:
            return

        reduced_rows, row_gradients = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(reduced_rows, leaves, row_gradients, allow_unused=True)
        # `buffers` has an entry per source that needs a gradient, in the order of `wanted_inputs`. `gradients`
        # has those of the parameters last, hence not strict.
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
        """By role, one row per edge of the chunk, as leaves of autograd. Missing source rows are 0."""
        edge_inputs = rows_per_edge({**self.inputs, "source": source_rows or []}, chunk)
        if source_rows is None:
            edge_inputs["source"] = [t.new_zeros(chunk.num_edges, *t.shape[1:]) for t in self.source_templates]
        for role in ("source", "destination", "edge"):
            for t, need in zip(edge_inputs[role], self.needs[role], strict=True):
                t.requires_grad_(need)
        return edge_inputs


def _add_gradient(role: Role, chunk: Chunk, total: Tensor, gradient: Tensor) -> None:
    """Add the gradient of a chunk's input to the total of that input.

    gradient: [n, ...] of the chunk's n edges, or of a constant as a whole.
    total: of the part's sources, of all destinations, of all edges, or of the constant.
    """
    if role == "source":
        total.index_add_(0, chunk.src, gradient)
    elif role == "destination":
        total[chunk.dst_rows].index_add_(0, chunk.dst, gradient)
    elif role == "edge":
        total[chunk.edges] = gradient  # no other chunk has these edges
    else:
        total += gradient
