"""`ShardConvs`: runs a PyG conv on the in-edges of a shard, in place of its `edge_index`.

PyG convs prepare their edges in `forward`: some add self-loops, some compute GCN's norm. On a shard they
get no `edge_index`, so this has to be done for them, by one of three *rules*:

    plain     the graph's edges
    loops     one self-loop per node, with attributes as PyG fills them in
    gcn       GCN's degree norm as edge weights, with self-loops if the conv adds them

PyG does not declare which rule a conv needs. `find_rule` tries them on a tiny graph: the first rule whose
outputs and gradients equal those of plain PyG is taken. A conv that equals plain PyG under no rule is
refused by name. The answer is stored per conv, so that the probe runs once.
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
from hopline.shards.convs.batch_norm import norms_over_ranks
from hopline.shards.convs.edges import ConvEdges, gcn_norm, loop_attributes, outside_inference_mode
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.patch_message_passing import FetchMode, patch_convs
from hopline.shards.layout import ShardLayout, contiguous_layout
from hopline.shards.transports import LocalTransport, Transport

Rule = Literal["plain", "loops", "gcn"]
"""The ways to prepare a conv's edges, in the order of trial."""
DEPTH = 1
"""Rounds of rows that are prefetched. A round brings the rows of one shard, and takes memory for them."""
CHUNK_BYTES = 4 << 20
"""Bytes of the messages of one chunk of edges. Smaller chunks cost time (docs/full_batch.md)."""
CONVS_THAT_RUN = (
    "Convs such as SAGEConv, GCNConv, GINConv, GINEConv, GraphConv, GATConv, GATv2Conv, PNAConv, NNConv, EdgeConv, "
    "ResGatedGraphConv, TAGConv, SGConv and TransformerConv can, with aggregations put together from sum, mean, max, "
    "min, var, std, softmax and powermean; aggregation=one_shot takes any other one"
)
"""The end of the error message of a conv that is refused."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardConvs(ConvRunner):
    """Runs convs on all in-edges of a shard's own nodes.

    The own nodes are both sources and destinations of its blocks. Rows of other shards are fetched while a
    conv runs. Collective: every rank must run the same convs in the same order, forward and backward.
    """

    layout: ShardLayout
    transport: Transport
    edge_rows: Mapping[str, Tensor]
    """[num_edges, ...] each, by name: the graph's edge arrays at the shard's edges, part after part."""
    mode: FetchMode = "sequential"
    """The way source rows of other shards come; see `FetchMode`."""
    depth: int = DEPTH
    """Rounds of rows that are prefetched. No result depends on it."""
    chunk_bytes: int = CHUNK_BYTES
    """About the most bytes of the messages of one chunk of edges, with mode "sequential"."""

    @classmethod
    def of(cls, layout: ShardLayout, transport: Transport | None = None, **options: Any) -> Self:
        """A runner for a layout.

        transport: by default that of virtual shards in one process.
        options: other fields, such as mode, depth and chunk_bytes.
        """
        if transport is None:
            transport = LocalTransport(layout)
        names = layout.parts[0].edge
        edge_rows = {name: torch.cat([part.edge[name] for part in layout.parts]) for name in names}
        options.setdefault("edge_rows", edge_rows)
        return cls(layout=layout, transport=transport, **options)

    def __post_init__(self) -> None:
        if self.mode not in get_args(FetchMode):
            raise ValueError(f"mode={self.mode!r}: choose one of {', '.join(get_args(FetchMode))}")
        if self.depth < 0 or self.chunk_bytes < 1:
            raise ValueError(
                f"depth={self.depth}, chunk_bytes={self.chunk_bytes}: give depth of 0 or more, and chunk_bytes of at "
                "least 1"
            )

    def block(self, key: int | None = None) -> Block:
        """The own nodes and their in-edges, for a layer of a model. key: of the step's random draws."""
        layout = self.layout
        src_ids = layout.own_ids.to(layout.degrees.device)
        return Block(src_ids, layout.num_own, layout.parts, key=key, convs=self)

    def to(self, device: torch.device) -> Self:
        """A copy on a device, with empty caches. It counts its bytes in the same `transport.traffic`."""
        layout = self.layout.to(device)
        edge_rows = {name: rows.to(device) for name, rows in self.edge_rows.items()}
        return replace(self, layout=layout, transport=self.transport.with_layout(layout), edge_rows=edge_rows)

    def block_to(self, block: Block, device: torch.device) -> Block:
        convs = self.to(device)
        return replace(block, src_ids=block.src_ids.to(device), parts=convs.layout.parts, convs=convs)

    @cached_property
    def edges(self) -> ConvEdges:
        return ConvEdges.of(self.layout)

    @cached_property
    def edges_with_loops(self) -> ConvEdges:
        with outside_inference_mode():
            return self.edges.with_loops()

    @cached_property
    def _norm_cache(self) -> dict[tuple[bool, bool, torch.dtype], Tensor]:
        """By (add_loops, improved, dtype): the norm of GCN."""
        return {}

    @property
    def over_ranks(self) -> bool:  # type: ignore[override]
        return self.transport.world is not None and self.transport.world.size > 1

    def global_norms(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.transport.world is None else norms_over_ranks(self.transport.world)

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        return run_conv(conv, h, self, x0)

    def norm(self, add_loops: bool, improved: bool, dtype: torch.dtype) -> Tensor:
        """[num_edges]: the degree norm of GCN, of the edges with or without self-loops. Collective.

        Cached, because the degrees of the halo have to be fetched. Only a weight that is learnt changes the
        norm from step to step, and then it is computed anew.
        """
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
    """[num_own, ...]: the output of a PyG conv for a shard's own nodes. Differentiable.

    Collective: every rank must call it, and its backward, in the same order.

    h: [num_own, width] rows of the own nodes.
    x0: [num_own, width] initial rows, for convs that take them.

    Raises:
        CannotSplit: The conv cannot run over shards.
    """
    question = ("rule", convs.mode, conv.training)
    settings = (options_of(conv), frozenset(convs.edge_rows))
    rule: Rule | None = findings.get(conv, question, settings)
    if rule is None:
        initialise(conv, h.shape[1], convs.edge_rows, None if x0 is None else x0.size(1))
        with torch.inference_mode(False):  # the probe computes gradients
            rule = find_rule(conv, h.shape[1], convs, x0)
        findings.put(conv, question, settings, rule)
    return run_by_rule(conv, rule, h, convs, x0)


def run_by_rule(conv: nn.Module, rule: Rule, h: Handle | Tensor, convs: ShardConvs, x0: Tensor | None = None) -> Tensor:
    """[num_own, ...]: the output of a conv whose edges are prepared by a rule. See `run_conv`."""
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
        # A conv with cached=True must not reuse edges of a graph that it has run on before.
        without_caches(conv),
        patch_convs(conv, edges, convs.transport, convs.mode, convs.depth, convs.chunk_bytes),
    ):
        # `convs` stands where the conv expects `edge_index`. The conv leaves it alone, because it is
        # neither a Tensor nor a SparseTensor, and hands it to `propagate`, which ignores it.
        return conv(rows, *x0_argument, convs, **arguments)


def find_rule(conv: nn.Module, width: int, convs: ShardConvs, x0: Tensor | None) -> Rule:
    """The rule by which a conv's edges must be prepared, by comparison with plain PyG on a tiny graph.

    A copy of the conv runs on three virtual shards of the tiny graph, in float64.

    width: of the conv's input rows.

    Raises:
        CannotSplit: The conv equals plain PyG under no rule, or chunks or ranks would change what it does.
    """
    trial = trial_of(conv)
    graph = probe_graph(convs.edge_rows)
    x, *x0_argument = probe_rows(conv, graph, width, x0)
    whole_output(
        conv, x, graph, x0_argument[0] if x0_argument else None
    )  # for its error alone, if plain PyG cannot run the conv
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
            # Virtual shards have all rows in one process, ranks do not.
            if not isinstance(convs.transport, LocalTransport):
                _check_row_wise(trial, rule, graph, convs.mode, x, *x0_argument)

            # Until here in evaluation mode. In the conv's own mode, the run may raise `CannotSplit`. Buffers that
            # it changes, such as running statistics, must end as in plain PyG.
            with torch.random.fork_rng([]):
                run_by_rule(trial.train(conv.training), rule, x, probe_convs, *x0_argument)
                plain = trial_of(conv).train(conv.training)
                has_buffers = next(plain.buffers(), None) is not None
                if has_buffers:
                    plain(x, *x0_argument, graph.edge_index(), **arguments)
            if not all(map(torch.allclose, trial.buffers(), plain.buffers())):
                raise CannotSplit("it changes its buffers in each call of message, which runs once per chunk")
            return rule
        except CannotSplit as error:
            reason = str(error)
            if isinstance(error, MixesRows):  # true of the conv under any rule
                break
        except Exception as error:  # the conv cannot run by this rule; another may do
            if rule == "plain":
                reason = f"it works on edge_index itself, which no shard has whole ({type(error).__name__}: {error})"
    raise CannotSplit(
        f"{type(conv).__name__} cannot run over shards with aggregation={convs.mode}: {reason}. {CONVS_THAT_RUN}"
    )


def probe_rows(conv: nn.Module, graph: Graph, width: int, x0: Tensor | None) -> list[Tensor]:
    """Random rows for the nodes of a tiny graph, of this width, and initial rows like `x0` if the conv takes them."""
    rows = [random_rows(graph.num_nodes, width)]
    return rows if x0 is None or not takes_x0(conv) else [*rows, random_rows(graph.num_nodes, x0.size(1))]


class MixesRows(CannotSplit):
    """A conv reads rows of other nodes outside of its messages. A rank has only its own rows."""


def _probe_convs(graph: Graph, mode: FetchMode) -> ShardConvs:
    ptr = torch.tensor([0, 5, 8, graph.num_nodes])
    return ShardConvs.of(contiguous_layout(graph, ptr), mode=mode, chunk_bytes=1 << 10)


def _check_row_wise(
    trial: nn.Module, rule: Rule, graph: Graph, mode: FetchMode, x: Tensor, x0: Tensor | None = None
) -> None:
    """Refuse a conv whose output at a node changes if there are three more nodes, without edges."""
    longer_indptr = nn.functional.pad(graph.indptr, (0, 3), value=graph.num_edges)
    longer_graph = graph.with_arrays(longer_indptr, graph.indices, graph.edge)
    longer_x = torch.cat([x, 1 + x[:3]])
    longer_x0 = None if x0 is None else torch.cat([x0, 1 + x0[:3]])
    with torch.no_grad():
        expected = run_by_rule(trial, rule, x, _probe_convs(graph, mode), x0)
        longer_output = run_by_rule(trial, rule, longer_x, _probe_convs(longer_graph, mode), longer_x0)
    if not is_close(longer_output[: x.size(0)], expected):
        raise MixesRows(
            "its output at a node depends on rows of nodes that send it nothing, and a rank has only the rows of its "
            "own nodes"
        )


def _output_and_gradients(conv: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """The output of a call with rows x, and the gradients of these rows and of the conv's parameters."""
    h = x.clone().requires_grad_()
    with torch.enable_grad():
        out = call(h)
        leaves = [h, *(p for p in conv.parameters() if p.requires_grad)]
        # Weighted by random numbers, so that no two outputs are interchangeable.
        loss = (out * random_rows(*out.shape)).sum()
        return [out.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def is_close(output: Tensor, expected: Tensor) -> bool:
    return torch.allclose(output, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


def _are_equal(results: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether two results of `_output_and_gradients` are equal up to rounding. None is a gradient of 0."""
    output = results[0]
    expected_output = expected[0]
    if output is None or expected_output is None or output.shape != expected_output.shape:
        return False
    zero = torch.zeros((), dtype=torch.float64)
    for tensor, other in zip(results, expected, strict=True):
        tensor = zero if tensor is None else tensor
        other = zero if other is None else other
        if not is_close(tensor, other):
            return False
    return True
