"""`ShardConvs`: a shard's in-edges, handed to a conv where it expects `edge_index`.

What a conv does to its edges before it sends messages (nothing, self-loops, the degree norm of GCN) is found by a
probe on a tiny graph: the first way whose outputs and gradients equal the conv's own on plain PyG. A conv that equals
itself in none of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from hopline.core.batch import Block, ConvRunner
from hopline.core.graph import Graph
from hopline.core.row_handles import Handle, as_dtype
from hopline.nn.conv_adapter import edge_arguments, initialise, takes_x0, whole_output
from hopline.nn.fused import dtype_of
from hopline.nn.probe import findings, options_of, probe_graph, random_rows, trial_of, without_caches
from hopline.shards.convs.edges import Edges, gcn_norm, loop_attributes, outside_inference_mode
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.norm import norms_over_ranks
from hopline.shards.convs.patch_message_passing import Mode, patch_convs
from hopline.shards.layout import ShardLayout, contiguous_layout
from hopline.shards.transports import LocalTransport, Transport

Rule = Literal["plain", "loops", "gcn"]
DEPTH = 1
"""Rounds of rows that are asked for ahead: one more would take memory for the rows of another shard."""
CHUNK_BYTES = 4 << 20
"""Memory for the messages of one chunk of edges, in forward and backward."""
CONVS_THAT_RUN = (
    "Convs such as SAGEConv, GCNConv, GINConv, GINEConv, GraphConv, GATConv, GATv2Conv, PNAConv, NNConv, EdgeConv, "
    "ResGatedGraphConv, TAGConv, SGConv and TransformerConv can, with aggregations put together from sum, mean, max, "
    "min, var, std, softmax and powermean; aggregation=one_shot takes any other one"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardConvs(ConvRunner):
    """Runs convs on all in-edges of a shard's nodes. Its blocks' sources and destinations are these nodes; rows of
    other shards are fetched.
    """

    layout: ShardLayout
    transport: Transport
    edge_rows: Mapping[str, Tensor]
    """[num_edges, ...] rows of the graph's edge arrays, part after part."""
    mode: Mode = "sequential"
    """"sequential": one part's rows at a time, fetched again in backward. "stored": rows and messages are kept for
    backward. "one_shot": the same, and the rows come in one exchange per layer and direction."""
    depth: int = DEPTH
    """Rounds of rows that are asked for ahead; no result depends on it."""
    chunk_bytes: int = CHUNK_BYTES
    """About what the messages of a chunk of edges take."""

    @classmethod
    def of(cls, layout: ShardLayout, transport: Transport | None = None, **options: Any) -> Self:
        """transport: by default that of virtual shards in one process. options: mode, depth, chunk_bytes, ..."""
        if transport is None:
            transport = LocalTransport(layout)
        names = layout.parts[0].edge
        edge_rows = {name: torch.cat([part.edge[name] for part in layout.parts]) for name in names}
        options.setdefault("edge_rows", edge_rows)
        return cls(layout=layout, transport=transport, **options)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r}: choose one of {', '.join(get_args(Mode))}")
        if self.depth < 0 or self.chunk_bytes < 1:
            raise ValueError(
                f"depth={self.depth}, chunk_bytes={self.chunk_bytes}: give depth of 0 or more, and chunk_bytes of at "
                "least 1"
            )

    def block(self, key: int | None = None) -> Block:
        """The shard's nodes and their in-edges, for a layer of a model."""
        layout = self.layout
        src_ids = layout.own_ids.to(layout.degrees.device)
        return Block(src_ids, layout.num_own, layout.parts, key=key, convs=self)

    def to(self, device: torch.device) -> Self:
        layout = self.layout.to(device)
        edge_rows = {name: rows.to(device) for name, rows in self.edge_rows.items()}
        return replace(self, layout=layout, transport=self.transport.with_layout(layout), edge_rows=edge_rows)

    def block_to(self, block: Block, device: torch.device) -> Block:
        convs = self.to(device)
        return replace(block, src_ids=block.src_ids.to(device), parts=convs.layout.parts, convs=convs)

    @cached_property
    def edges(self) -> Edges:
        return Edges.of(self.layout)

    @cached_property
    def edges_with_loops(self) -> Edges:
        with outside_inference_mode():
            return self.edges.with_loops()

    @cached_property
    def _norm_cache(self) -> dict[tuple[bool, bool, torch.dtype], Tensor]:
        return {}

    @property
    def over_ranks(self) -> bool:  # type: ignore[override]
        return self.transport.world is not None and self.transport.world.size > 1

    def norms(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.transport.world is None else norms_over_ranks(self.transport.world)

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        return run_conv(conv, h, self, x0)

    def norm(self, add_loops: bool, improved: bool, dtype: torch.dtype) -> Tensor:
        """[num_edges] the degree norm of GCN: exchanged once where it has no gradient."""
        weight = self.edge_rows.get("weight")
        edges_with_loops = self.edges_with_loops if add_loops else None
        if weight is not None and weight.requires_grad:
            return gcn_norm(self.edges, edges_with_loops, self.transport, weight, improved, dtype)
        key = (add_loops, improved, dtype)
        if key not in self._norm_cache:
            with outside_inference_mode():
                norm = gcn_norm(self.edges, edges_with_loops, self.transport, weight, improved, dtype)
            self._norm_cache[key] = norm
        return self._norm_cache[key]


def run_conv(conv: nn.Module, h: Handle | Tensor, convs: ShardConvs, x0: Tensor | None = None) -> Tensor:
    """A PyG conv on a shard: the output of its own nodes, [num_own, ...], differentiable. h: their rows.

    Every rank must call it, and backward, in the same order.
    """
    question = ("rule", convs.mode, conv.training)
    settings = (options_of(conv), frozenset(convs.edge_rows))
    rule: Rule | None = findings.get(conv, question, settings)
    if rule is None:
        initialise(conv, h.shape[1], convs.edge_rows, None if x0 is None else x0.size(1))
        with torch.inference_mode(False):
            rule = find_rule(conv, h.shape[1], convs, x0)
        findings.put(conv, question, settings, rule)
    return run_by_rule(conv, rule, h, convs, x0)


def run_by_rule(conv: nn.Module, rule: Rule, h: Handle | Tensor, convs: ShardConvs, x0: Tensor | None = None) -> Tensor:
    rows = as_dtype(h, dtype_of(conv, h))
    dtype = rows.dtype
    edges = convs.edges
    arguments = edge_arguments(conv, convs.edge_rows, dtype)
    if rule == "loops":
        edges = convs.edges_with_loops
        fill = getattr(conv, "fill_value", 1.0)
        arguments = {
            name: edges.rows_with_loops(values, loop_attributes(convs.edges, values, fill))
            for name, values in arguments.items()
        }
    elif rule == "gcn":
        add_loops = bool(getattr(conv, "add_self_loops", False))
        improved = bool(getattr(conv, "improved", False))
        edges = convs.edges_with_loops if add_loops else convs.edges
        arguments = {"edge_weight": convs.norm(add_loops, improved, dtype)}
    x0_argument = (x0,) if takes_x0(conv) else ()
    with (
        without_caches(conv),
        patch_convs(conv, edges, convs.transport, convs.mode, convs.depth, convs.chunk_bytes),
    ):
        return conv(rows, *x0_argument, convs, **arguments)


def find_rule(conv: nn.Module, width: int, convs: ShardConvs, x0: Tensor | None) -> Rule:
    """How the conv's edges are made, by comparing it with plain PyG on a tiny graph, outputs and gradients."""
    trial = trial_of(conv)
    graph = probe_graph(convs.edge_rows)
    x = random_rows(graph.num_nodes, width)
    x0_argument = ()
    if x0 is not None and takes_x0(conv):
        x0_argument = (random_rows(graph.num_nodes, x0.size(1)),)
    whole_output(conv, x, graph, *(x0_argument or (None,)))
    arguments = edge_arguments(trial, graph.edge, torch.float64)
    with without_caches(trial):
        expected = _output_and_gradients(trial, x, lambda h: trial(h, *x0_argument, graph.edge_index(), **arguments))

    probe_convs = _probe_convs(graph, convs.mode)
    reason = "it does something to its edges that is neither self-loops nor the norm of GCNConv"
    for rule in get_args(Rule):
        try:
            results = _output_and_gradients(
                trial, x, lambda h, rule=rule: run_by_rule(trial, rule, h, probe_convs, *x0_argument)
            )
            if not _are_equal(results, expected):
                continue
            if not isinstance(convs.transport, LocalTransport):
                _check_row_wise(trial, rule, graph, convs.mode, x, *x0_argument)

            with torch.random.fork_rng([]):
                run_by_rule(trial.train(conv.training), rule, x, probe_convs, *x0_argument)
                plain = trial_of(conv).train(conv.training)
                if any(True for _ in plain.buffers()):
                    plain(x, *x0_argument, graph.edge_index(), **arguments)
            if not all(map(torch.allclose, trial.buffers(), plain.buffers())):
                raise CannotSplit("it changes its buffers in each call of message, which runs once per chunk")
            return rule
        except CannotSplit as error:
            reason = str(error)
            if isinstance(error, MixesRows):
                break
        except Exception as error:
            if rule == "plain":
                reason = f"it works on edge_index itself, which no shard has whole ({type(error).__name__}: {error})"
    raise CannotSplit(
        f"{type(conv).__name__} cannot run over shards with aggregation={convs.mode}: {reason}. {CONVS_THAT_RUN}"
    )


class MixesRows(CannotSplit):
    """A conv looks at rows of other nodes outside of its messages, and a rank has only its own."""


def _probe_convs(graph: Graph, mode: Mode) -> ShardConvs:
    """Three virtual shards."""
    ptr = torch.tensor([0, 5, 8, graph.num_nodes])
    return ShardConvs.of(contiguous_layout(graph, ptr), mode=mode, chunk_bytes=1 << 10)


def _check_row_wise(
    trial: nn.Module, rule: Rule, graph: Graph, mode: Mode, x: Tensor, x0: Tensor | None = None
) -> None:
    """Refuse a conv that is not the same when there are three more nodes, without edges."""
    longer_graph = Graph(nn.functional.pad(graph.indptr, (0, 3), value=graph.num_edges), graph.indices, graph.edge)
    longer_x = torch.cat([x, 1 + x[:3]])
    longer_x0 = None if x0 is None else torch.cat([x0, 1 + x0[:3]])
    with torch.no_grad():
        expected = run_by_rule(trial, rule, x, _probe_convs(graph, mode), x0)
        longer_output = run_by_rule(trial, rule, longer_x, _probe_convs(longer_graph, mode), longer_x0)
    if not torch.allclose(longer_output[: x.size(0)], expected, 1e-7, 1e-9, equal_nan=True):
        raise MixesRows("its output at a node depends on rows of nodes that send it nothing, and a rank has its own")


def _output_and_gradients(conv: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """The output of a call, and the gradients of its input and of the conv's parameters."""
    h = x.clone().requires_grad_()
    with torch.enable_grad():
        out = call(h)
        leaves = [h, *(p for p in conv.parameters() if p.requires_grad)]
        loss = (out * random_rows(*out.shape)).sum()
        return [out.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def _are_equal(results: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """No gradient is one of 0."""
    output = results[0]
    expected_output = expected[0]
    if output is None or expected_output is None or output.shape != expected_output.shape:
        return False
    zero = torch.zeros((), dtype=torch.float64)
    for tensor, other in zip(results, expected, strict=True):
        tensor = zero if tensor is None else tensor
        other = zero if other is None else other
        if not torch.allclose(tensor, other, 1e-7, 1e-9, equal_nan=True):
            return False
    return True
