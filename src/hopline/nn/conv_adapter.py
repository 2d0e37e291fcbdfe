"""An adapter that runs any PyG conv on a block, with the output that it has on the whole graph.

PyG convs do not declare whether they can run on a bipartite block, so hopline tries it. The first time that
a conv is used, copies of it run on the tiny graph of `probe`: on the whole of it, and on blocks of it. The
conv is then called in the first way whose outputs are equal:

    fused     hopline's kernels (`fused`), the only way tried for the convs that they know
    block     `conv.on_block(rows, block)`, the only way tried if the conv's author has written it
    pair      `conv((source rows, destination rows), edge_index)`
    square    `conv(source rows, edge_index)`, keeping the outputs of the destinations

A conv for which no way is right is refused by name: one that takes several hops in a layer, has a norm over
the nodes present, or pads to the largest degree present.

The way is cached by conv and layout in `probe.findings`, together with the conv's settings. So later calls
cost only a look-up, and a changed setting of a conv causes a new trial. GATConv and GATv2Conv are tried like
any conv, and then run by `attention` on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import CGConv, GENConv

from hopline.core.batch import Block
from hopline.core.graph import Graph
from hopline.core.row_handles import Handle, as_dtype
from hopline.core.tree_layout import TreeBlock
from hopline.device.snapshots import eval_mode
from hopline.nn.attention import attention, is_fused_attention
from hopline.nn.fused import NORMALISED, dtype_of, is_fused, run_fused
from hopline.nn.probe import (
    BATCH_WITH_HUB,
    BATCHES,
    BATCHES_OF_FEW_EDGES,
    block_of,
    findings,
    has_cache,
    is_close,
    options_of,
    probe_graph,
    random_rows,
    reverse_edges_of_nodes,
    tree_of,
    trial_of,
    without_caches,
)

Convention = Literal["fused", "block", "pair", "square"]
"""A way to call a conv; the module docstring explains the four."""
Layout = Literal["block", "tree", "padded tree"]
"""The kind of edges that a conv is given. A tree has a slot for every possible draw, so every edge has a source
of its own. In a padded tree, used on a GPU, there is an edge out of every slot, empty ones included."""

CALLS: tuple[Convention, ...] = ("pair", "square")
"""The conventions in which the conv's own `forward` runs, in the order of the trial."""
EDGE_ARGUMENTS = {"edge_weight": "weight", "edge_attr": "attr", "edge_type": "type"}
"""Argument of a PyG conv -> name of the graph's edge array."""


class NeedsWholeGraph(ValueError):
    """Raised for a conv whose output at a node depends on more than the node and its in-edges.

    No block holds all that such a conv needs. Methods that run convs on the whole graph may still take it.
    """


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


def convolve(conv: nn.Module, h: Handle | Tensor, block: Block, x0: Tensor | None = None, layer: int = 0) -> Tensor:
    """Run a PyG conv on a block. For a module of your own that is called with batches.

    Where the block has all in-edges of a destination, the output is that of the conv on the whole graph. On
    a block of `hl.FullBatch(...).loader(...)`, rows of other shards are fetched in forward, and again in
    backward.

    Args:
        conv: A PyG conv, or any module with forward(x, edge_index).
        h: [num_src, ...] rows of the block's sources, or a handle to them, such as `batch.x`.
        block: One of `batch.blocks`.
        x0: Initial rows for convs that take them, such as GCN2Conv. The first num_dst are those of the
            destinations.
        layer: The number of the layer in the model. Every layer draws other random numbers.

    Returns:
        [num_dst, ...] rows of the block's destinations.

    Raises:
        ValueError: The conv cannot compute on a block, or over shards, what it computes in plain PyG.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.convs = torch.nn.ModuleList([SAGEConv(4, 8), SAGEConv(8, 2)])
        ...
        ...     def forward(self, batch):
        ...         h = batch.x
        ...         for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks)):
        ...             h = hl.nn.convolve(conv, h, block, layer=layer)
        ...             h = h.relu() if layer == 0 else h
        ...         return h[batch.output_idx]
        >>> data = hl.from_edges(
        ...     torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), splits={"train": [0, 2]}
        ... )
        >>> for batch in hl.FullBatch(num_shards=2, partition="range").loader(data, num_layers=2):
        ...     print(Net()(batch).shape)
        torch.Size([2, 2])
    """
    if isinstance(block, Tensor):
        raise ValueError(
            f"block must be one of batch.blocks, not a tensor of shape {list(block.shape)}: to run {_name(conv)} on an "
            "edge_index, call it as in plain PyG, conv(x, edge_index)"
        )
    if block.convs is not None:  # a runner for source rows that are in other shards
        return block.convs.run(conv, h, x0)
    layout = layout_of(conv, block)
    # `block.edge` of a tree gathers its arrays. The look-up needs only their names, which the graph has too.
    named_arrays = block.edge if block.graph is None else block.graph.edge
    way = _cached_convention(conv, layout, named_arrays)
    if way is None:
        initial_width = None if x0 is None else x0.size(1)
        way = calling_convention(conv, h.shape[1], block.edge, layout, initial_width)
    if block.scale_sums and way.convention != "fused":
        raise ValueError(
            f"scale_sums=true needs convs that sum plain rows (SAGEConv, GINConv, GraphConv); {_name(conv)} does not: "
            "set method.scale_sums=false"
        )
    if way.by_order and not block.in_graph_order:
        raise ValueError(
            f"the output of {_name(conv)} depends on the order of a node's in-edges, which sampling does not keep: "
            "set fanouts to -1 at every layer, or use an aggregation such as mean or max"
        )
    if is_fused_attention(conv) and block.on_gpu:
        return attention(conv, h, block, layer)
    with without_caches(conv) if way.has_cache else nullcontext():
        return _call(conv, way, h, block, x0)


def calling_convention(
    conv: nn.Module,
    width: int,
    edge: Mapping[str, Tensor],
    layout: Layout = "block",
    initial_width: int | None = None,
) -> CallingConvention:
    """The calling convention of a conv for blocks of a layout. Tried out at the first call, then cached.

    width: columns of the conv's input rows.
    edge: the graph's edge arrays, of which the trial takes names, dtypes and some values.
    initial_width: columns of the initial rows, or None if the model has none.
    """
    way = _cached_convention(conv, layout, edge)
    if way is None:
        way = find_calling_convention(conv, width, edge, layout, initial_width)
        findings.put(conv, ("way", layout), _cache_key(conv, edge), way)
    return way


def _cached_convention(conv: nn.Module, layout: Layout, edge: Mapping[str, Tensor]) -> CallingConvention | None:
    """The calling convention that an earlier trial found; None before a trial, or if the conv has changed
    since."""
    return findings.get(conv, ("way", layout), _cache_key(conv, edge))


def _cache_key(conv: nn.Module, edge: Mapping[str, Tensor]) -> Any:
    """Everything that a calling convention depends on and that may change after a trial.

    Both `is_fused` and `reads_blocks` depend on hooks, which may be added or removed at any time.
    """
    return options_of(conv), is_fused(conv), reads_blocks(conv), frozenset(edge)


def layout_of(conv: nn.Module, block: Block) -> Layout:
    """The layout that decides how the conv is called on a block.

    On a GPU convs get padded trees. Fused convs do not need them: their kernels skip empty slots.
    """
    if not isinstance(block, TreeBlock):
        return "block"
    return "padded tree" if block.on_gpu and not is_fused(conv) else "tree"


def _call(conv: nn.Module, way: CallingConvention, h: Handle | Tensor, block: Block, x0: Tensor | None) -> Tensor:
    """[num_dst, ...]: the conv's output on a block, called in the given way."""
    if way.convention == "fused":
        return run_fused(conv, h, block, x0 if takes_x0(conv) else None)
    dtype = dtype_of(conv, h)
    src_rows = as_dtype(h, dtype)
    if way.convention == "block":
        return conv.on_block(src_rows, block)  # type: ignore[operator]

    is_pair = way.convention == "pair"
    num_dst = block.num_dst
    edge_index, edge_arrays = _edges_of(block, way)
    edge_kwargs = edge_arguments(conv, edge_arrays, dtype)
    initial = (_pad_rows(x0, src_rows.size(0)),) if takes_x0(conv) and x0 is not None else ()
    dst_rows = src_rows[:num_dst]
    if is_pair and way.padded:
        # Edges out of empty slots lead to destination num_dst, which needs a row. Any row will do.
        dst_rows = torch.cat([dst_rows, src_rows[:1]])

    first_dst = 0
    if way.with_edges:
        # A new destination 0 with two edges from source 0. All other destinations move up by one. In a
        # square call sources and destinations share their numbers, so the sources move up as well.
        first_dst = 1
        edge_kwargs = {name: torch.cat([_two_rows(values), values]) for name, values in edge_kwargs.items()}
        shift = edge_index.new_tensor([[0], [1]] if is_pair else [[1], [1]])
        edge_index = torch.cat([edge_index.new_zeros(2, 2), edge_index + shift], dim=1)
        dst_rows = torch.cat([src_rows[:1], dst_rows])
        if not is_pair:
            src_rows = torch.cat([src_rows[:1], src_rows])
            initial = tuple(torch.cat([rows[:1], rows]) for rows in initial)

    x = (src_rows, dst_rows) if is_pair else src_rows
    outputs = conv(x, *initial, edge_index, **edge_kwargs)
    return outputs[first_dst : first_dst + num_dst]


def _two_rows(like: Tensor) -> Tensor:
    """[2, ...]: values for the two edges that `with_edges` adds: 1.0, or 0 in an array of whole numbers."""
    value = 1 if like.is_floating_point() else 0
    return like.new_full((2, *like.shape[1:]), value)


def _edges_of(block: Block, way: CallingConvention) -> tuple[Tensor, Mapping[str, Tensor]]:
    """(edge_index [2, num_edges], edge arrays) of a block, in the form that `way` asks for."""
    if not isinstance(block, TreeBlock):
        return block.edge_index, block.edge
    # `block.padded` has an edge out of every slot, `block.part` only those of slots that are not empty.
    edge_index, edge = block.padded if way.padded else (block.part.edge_index, block.part.edge)
    graph_has_loops = block.graph is not None and block.graph.self_loops.numel() > 0
    if not way.without_loops or not graph_has_loops:
        return edge_index, edge
    src, dst = edge_index
    # Clamped because padded edges lead to row num_dst, behind the destinations.
    is_loop = block.src_ids[src] == block.src_ids[dst.clamp(max=block.num_dst - 1)]
    if way.padded:
        # Selecting edges by a mask would synchronise. Loops go to row num_dst too, whose output is dropped.
        return torch.stack([src, torch.where(is_loop, block.num_dst, dst)]), edge
    return edge_index[:, ~is_loop], {name: rows[~is_loop] for name, rows in edge.items()}


def _pad_rows(x0: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...]: `x0` with rows of zeros behind it. A square call takes a row per source.

    Only the outputs of the destinations are kept, so only their initial rows matter.
    """
    missing = num_rows - x0.size(0)
    return x0 if missing <= 0 else torch.cat([x0, x0.new_zeros(missing, *x0.shape[1:])])


def reads_blocks(conv: nn.Module) -> bool:
    """Whether the conv's author has written a method `on_block(rows, block)` that may run in place of `forward`.

    It may not if the conv has hooks, which torch runs only around `forward`.
    """
    return callable(getattr(conv, "on_block", None)) and not conv._forward_hooks and not conv._forward_pre_hooks


def takes_x0(conv: nn.Module) -> bool:
    """Whether the conv takes the initial rows as an argument, as GCN2Conv does."""
    return "x_0" in _arguments(type(conv))


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the arguments of a class's `forward`.

    Cached by class, since every call of a conv asks for them.
    """
    return frozenset(inspect.signature(kind.forward).parameters)


def edge_arguments(conv: nn.Module, edge: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The graph's edge arrays that this conv takes, by argument name.

    Weights and real numbers become `dtype`.
    """
    arguments = {}
    for argument in edge_arguments_of(conv, edge):
        name = EDGE_ARGUMENTS[argument]
        rows = edge[name]
        is_real = rows.is_floating_point() or name == "weight"
        arguments[argument] = rows.to(dtype) if is_real else rows
    return arguments


def edge_arguments_of(conv: nn.Module, edge: Mapping[str, Tensor]) -> list[str]:
    """Names of the arguments for which this conv is given one of the graph's edge arrays."""
    names = [argument for argument in EDGE_ARGUMENTS if argument in _arguments(type(conv))]
    names = [argument for argument in names if EDGE_ARGUMENTS[argument] in edge]
    if "edge_attr" in names and _lacks_edge_features(conv, edge["attr"]):
        names.remove("edge_attr")
    return names


def _lacks_edge_features(conv: nn.Module, attr: Tensor) -> bool:
    """Whether a conv was built without edge features.

    In plain PyG its user would not pass `edge_attr` to it.
    """
    # None means no edge features. Other convs lack the attribute, hence the default of 0.
    if any(getattr(conv, name, 0) is None for name in ("edge_dim", "in_edge_channels")):
        return True
    if isinstance(conv, CGConv):
        return conv.dim == 0
    # GENConv does not store it. Without `lin_edge` it adds edge features to its messages, which works only if
    # both have the same width.
    return isinstance(conv, GENConv) and not hasattr(conv, "lin_edge") and attr.size(-1) != conv.out_channels


def find_calling_convention(
    conv: nn.Module, width: int, edge: Mapping[str, Tensor], layout: Layout, initial_width: int | None
) -> CallingConvention:
    """The first way of calling a conv that gives the whole graph's outputs on all `BATCHES`.

    The batches of `probe` differ in which other nodes they hold. So a conv whose output at a node depends
    on the other nodes fails on one of them. Copies of the conv run, in float64 on the host.

    Raises:
        NeedsWholeGraph: No way is right, since the conv needs more than a node's in-edges.
        ValueError: Plain PyG cannot run the conv on the tiny graph. Or the conv keeps something between
            calls, sends messages from target to source, has a wrong `on_block`, or cannot run on trees.
    """
    if getattr(conv, "flow", "source_to_target") != "source_to_target":
        raise ValueError(f"{_name(conv)} sends messages from target to source: build it with the default flow")
    initialise(conv, width, edge, initial_width)
    graph = probe_graph(edge)
    x = random_rows(graph.num_nodes, width)
    x0 = None if initial_width is None else random_rows(graph.num_nodes, initial_width)
    expected = whole_output(conv, x, graph, x0)
    # One copy for all blocks: if the conv keeps something of the first block, its output on the next is
    # wrong.
    trial = trial_of(conv)
    is_tree = layout != "block"

    def output(trial: nn.Module, way: CallingConvention, graph: Graph, nodes: Sequence[int]) -> Tensor | None:
        """The output at `nodes`; None if the conv cannot be called in this way."""
        block = tree_of(graph, nodes) if is_tree else block_of(graph, nodes)
        block_x0 = None if x0 is None else x0[block.dst_ids]
        try:
            with without_caches(trial):
                return _call(trial, way, x[block.src_ids], block, block_x0)
        except Exception:
            return None

    def is_right(
        way: CallingConvention, graph: Graph, batches: Sequence[Sequence[int]] = BATCHES, anew: bool = False
    ) -> bool:
        """Whether a way gives the whole graph's outputs. anew: with a new copy of the conv for each block."""
        for nodes in batches:
            rows = output(trial_of(conv) if anew else trial, way, graph, nodes)
            expected_rows = expected[[*nodes]]
            if rows is None or rows.shape != expected_rows.shape:
                return False
            if not is_close(rows, expected_rows):
                return False
        return True

    def trains(way: CallingConvention) -> bool:
        """Whether the conv can also be called in training mode, with few edges or none.

        Outputs are not compared: SuperGATConv, for example, draws edges in training.
        """
        training_trial = trial_of(conv).train()  # a copy of its own: running statistics of norms change in training
        with torch.random.fork_rng([]):
            return all(output(training_trial, way, graph, nodes) is not None for nodes in BATCHES_OF_FEW_EDGES)

    if is_fused(conv):
        ways = [CallingConvention("fused", has_cache=has_cache(conv))]
    elif reads_blocks(conv):
        ways = [CallingConvention("block", has_cache=has_cache(conv))]
    else:
        # In a tree a conv does not see which edges are loops, so leaving them out is tried too.
        loop_choices = (False, True) if is_tree else (False,)
        ways = [
            CallingConvention(
                convention,
                without_loops=without_loops,
                with_edges=with_edges,
                has_cache=has_cache(conv),
                padded=layout == "padded tree",
            )
            for with_edges, convention, without_loops in itertools.product((False, True), CALLS, loop_choices)
        ]
    with torch.no_grad():
        for way in ways:
            if is_right(way, graph) and (way.convention == "fused" or trains(way)):
                # Fused convs count as independent of the order. GCN takes the last of a node's self-loops,
                # but from the graph and not from the block, so the block's order does not matter.
                by_order = way.convention != "fused" and not is_right(
                    way, reverse_edges_of_nodes(graph), [BATCH_WITH_HUB]
                )
                return replace(way, by_order=by_order)
        # No way is right and trains. If one is right only with a new copy per block, the conv keeps something
        # between calls.
        keeps_state = any(is_right(way, graph, anew=True) and not is_right(way, graph) for way in ways)
    if keeps_state:
        raise ValueError(
            f"{_name(conv)} keeps something of its first call, such as the edges, and every block has others: let it "
            "compute that anew in each call"
        )
    if reads_blocks(conv):
        raise ValueError(
            f"{_name(conv)}.on_block does not put out at a node what {_name(conv)}.forward puts out on a whole graph: "
            "let it read degrees from block.graph and edges from block.edge_index, or leave on_block out"
        )
    if is_tree:
        # Raises its own error if the conv cannot run on blocks either: layout=block would then be no advice.
        calling_convention(conv, width, edge, "block", initial_width)
        raise ValueError(
            f"{_name(conv)} cannot run on trees, in which every edge has a source of its own: set layout=block"
        )
    if isinstance(conv, NORMALISED) and (conv._forward_hooks or conv._forward_pre_hooks):
        raise NeedsWholeGraph(
            f"{_name(conv)} has hooks, so PyG's own forward must run. It takes degrees from the edges of a batch, "
            "which has only some: remove the hooks, or use method=full_batch with aggregation=sequential"
        )
    for name, part in conv.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats:
            raise NeedsWholeGraph(
                f"{_name(conv)} has a {type(part).__name__}(track_running_stats=False) ({name}), which in evaluation "
                "too takes its statistics from the nodes that are present: build it with track_running_stats=True, or "
                "use method=full_batch"
            )
    raise NeedsWholeGraph(
        f"{_name(conv)} cannot run on sampled blocks: its output at a node depends on more than the node and its "
        "in-edges (several hops in one layer, a norm by degrees or nodes that are present, padding to the largest "
        "degree present); convs such as SAGEConv, GCNConv, GATConv, GINConv, PNAConv and TransformerConv can, and "
        "method=full_batch runs most others"
    )


def whole_output(conv: nn.Module, x: Tensor, graph: Graph, x0: Tensor | None) -> Tensor:
    """[num_nodes, ...] float64: the output of plain PyG's conv, in evaluation mode, on a whole graph.

    Raises:
        ValueError: The call fails, or returns something else than one tensor with a row per node, or a tensor
            without a finite number.
    """
    trial = trial_of(conv)
    initial = (x0,) if takes_x0(conv) else ()
    edge_kwargs = edge_arguments(trial, graph.edge, torch.float64)
    with torch.no_grad():
        try:
            out = trial(x, *initial, graph.edge_index(), **edge_kwargs)
        except Exception as error:
            names = ", ".join(["x", "edge_index", *edge_kwargs])
            raise ValueError(
                f"{_name(conv)} cannot be called as conv({names}) with rows of width {x.size(1)}: "
                f"{_reason(conv, error, edge_kwargs)}"
            ) from error
    if not isinstance(out, Tensor) or out.size(0) != x.size(0):
        kind = f"shape {list(out.shape)}" if isinstance(out, Tensor) else f"type {type(out).__name__}"
        raise ValueError(f"{_name(conv)} puts out {kind}: a conv must put out one tensor, with a row per node")
    if not out.isfinite().any():
        raise ValueError(f"{_name(conv)} puts out nothing but inf and nan for ordinary rows")
    return out


def _reason(conv: nn.Module, error: Exception, edge_kwargs: Mapping[str, Tensor]) -> str:
    """The text of an error, and the edge arrays that the conv could take and the graph does not have.

    An assertion without a message is described by its line of code.

    edge_kwargs: the edge arrays that the conv was given, by argument name.
    """
    reason = " ".join(str(error).split()) or f"it stops at `{traceback.extract_tb(error.__traceback__)[-1].line}`"
    missing = [name for name in EDGE_ARGUMENTS if name in _arguments(type(conv)) and name not in edge_kwargs]
    if not missing:
        return reason
    arrays = " and ".join(f"{name} (edge array {EDGE_ARGUMENTS[name]!r})" for name in missing)
    return f"{reason}; it can take {arrays}, which the graph does not have"


def initialise(conv: nn.Module, width: int, edge: Mapping[str, Tensor], initial_width: int | None) -> None:
    """Give a conv that was built with in_channels=-1 its parameters, by a forward pass on the tiny graph."""
    if not any(is_lazy(p) for p in conv.parameters()):
        return
    like = next(conv.parameters())
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    graph = probe_graph(edge)
    x = torch.zeros(graph.num_nodes, width, **options)
    initial = []
    if takes_x0(conv) and initial_width is not None:
        initial.append(torch.zeros(graph.num_nodes, initial_width, **options))
    edge_kwargs = {name: rows.to(like.device) for name, rows in edge_arguments(conv, graph.edge, like.dtype).items()}
    with eval_mode(conv), torch.no_grad():
        conv(x, *initial, graph.edge_index().to(like.device), **edge_kwargs)


def _name(conv: nn.Module) -> str:
    return type(conv).__name__
