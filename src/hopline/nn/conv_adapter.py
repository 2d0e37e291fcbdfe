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

The way is cached by layout among the facts about the conv (`conv_facts`). So later calls cost only a look-up, and a
changed setting or hook of a conv causes a new trial. GATConv and GATv2Conv are tried like any conv, and then run by
`attention` on a GPU.

The destinations of a block are the first of its sources, so `convolve` takes one table of rows. Between two node types
they are not. `convolve_pair` takes the rows of both, and its trial is on two tables of different sizes and widths.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import CGConv, GENConv

from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.core.row_handles import Handle, as_dtype
from hopline.core.tree_layout import TreeBlock
from hopline.device.snapshots import eval_mode
from hopline.nn.attention import attention
from hopline.nn.conv_facts import (
    NORMALISED,
    CallingConvention,
    Convention,
    ConvFacts,
    Layout,
    arguments_of,
    facts_of,
    is_changed,
    takes_x0,
)
from hopline.nn.fused import dtype_of, run_fused
from hopline.nn.probe import (
    BATCH_WITH_HUB,
    BATCHES,
    BATCHES_OF_FEW_EDGES,
    block_of,
    has_cache,
    is_close,
    probe_graph,
    random_rows,
    reverse_edges_of_nodes,
    sources_of,
    tree_of,
    trial_of,
    without_caches,
)

CALLS: tuple[Convention, ...] = ("pair", "square")
"""The conventions in which the conv's own `forward` runs, in the order of the trial."""
EDGE_ARGUMENTS = {"edge_weight": "weight", "edge_attr": "attr", "edge_type": "type"}
"""Argument of a PyG conv -> name of the graph's edge array."""
PAIR_CONVS = (
    "between two tables of rows use a conv that PyG calls with a pair, such as SAGEConv, GraphConv and GINConv, or "
    "GATConv and GATv2Conv with add_self_loops=False"
)
"""What the refusal of a conv for a pair of tables says to type."""


class NeedsWholeGraph(ValueError):
    """Raised for a conv whose output at a node depends on more than the node and its in-edges.

    No block holds all that such a conv needs. Methods that run convs on the whole graph may still take it.
    """


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
    facts = facts_of(conv)
    layout: Layout = "block"
    if isinstance(block, TreeBlock):  # fused kernels skip empty slots, so they need no edges out of them
        layout = "padded tree" if block.on_gpu and not facts.is_fused else "tree"
    # `block.edge` of a tree gathers its arrays. The look-up needs only their names, which the graph has too.
    named_arrays = block.edge if block.graph is None else block.graph.edge
    way = facts.ways.get((layout, frozenset(named_arrays)))
    if way is None:
        initial_width = None if x0 is None else x0.size(1)
        way = calling_convention(conv, h.shape[1], block.edge, layout, initial_width)
        facts = facts_of(conv)  # the trial may have given the conv its input width
    if block.scale_sums and way.convention != "fused":
        raise ValueError(
            f"scale_sums=true needs convs that sum plain rows (SAGEConv, GINConv, GraphConv); {_name(conv)} does not: "
            "set method.scale_sums=false"
        )
    return _run(conv, facts, way, h, None, block, x0, layer)


def convolve_pair(
    conv: nn.Module,
    h_src: Handle | Tensor,
    h_dst: Handle | Tensor,
    part: Part,
    dst_ids: Tensor,
    *,
    key: int | Tensor | None = None,
    in_graph_order: bool = True,
    layer: int = 0,
) -> Tensor:
    """[num_dst, ...]: the output of a conv between two tables of rows, such as those of two node types.

    It equals conv((x_src, x_dst), edge_index) in plain PyG. Unlike in `convolve`, the destinations are not among the
    sources, and rows of the two may have different widths. Convs that plain PyG cannot call with a pair are refused,
    GCNConv among them.

    h_src: [num_src, ...] rows of the sources, or a handle to them. h_dst: [num_dst, ...] those of the destinations.
    part: the edges. Sources are positions in h_src.
    dst_ids: [num_dst] int64, ids of the destinations. They decide the dropout of attention.
    key, in_graph_order: as in `Block`.
    layer: the number of the layer in the model, so that every layer draws other random numbers.

    Raises:
        ValueError: Plain PyG cannot call the conv with a pair, or its output on all edges of a destination differs
            from that on the whole graph.
    """
    way = calling_convention(conv, (h_src.shape[1], h_dst.shape[1]), part.edge, "two tables")
    # A block that lists the destinations alone as its sources: nothing that runs on pairs asks for ids of the others.
    block = Block(dst_ids, dst_ids.numel(), (part,), None, key, in_graph_order=in_graph_order)
    return _run(conv, facts_of(conv), way, h_src, h_dst, block, None, layer)


def _run(
    conv: nn.Module,
    facts: ConvFacts,
    way: CallingConvention,
    h_src: Handle | Tensor,
    h_dst: Handle | Tensor | None,
    block: Block,
    x0: Tensor | None,
    layer: int,
) -> Tensor:
    """[num_dst, ...]: the conv's output, by `attention` or called in the way that a trial has found.

    h_dst: rows of the destinations. None: the first rows of h_src.
    """
    if way.by_order and not block.in_graph_order:
        raise ValueError(
            f"the output of {_name(conv)} depends on the order of a node's in-edges, which sampling does not keep: "
            "set fanouts to -1 at every layer, or use an aggregation such as mean or max"
        )
    if facts.is_fused_attention and block.on_gpu:
        return attention(conv, h_src, block, h_dst, layer)
    with without_caches(conv) if way.has_cache else nullcontext():
        return _call(conv, facts, way, h_src, h_dst, block, x0)


def calling_convention(
    conv: nn.Module,
    width: int | tuple[int, int],
    edge: Mapping[str, Tensor],
    layout: Layout = "block",
    initial_width: int | None = None,
) -> CallingConvention:
    """The calling convention of a conv for blocks of a layout. Tried out at the first call, then cached.

    width: columns of the conv's input rows; between two tables, those of (sources, destinations).
    edge: the graph's edge arrays, of which the trial takes names, dtypes and some values.
    initial_width: columns of the initial rows, or None if the model has none.
    """
    key = (layout, frozenset(edge))
    way = facts_of(conv).ways.get(key)
    if way is None:
        way = find_calling_convention(conv, width, edge, layout, initial_width)
        facts_of(conv).ways[key] = way
    return way


def _call(
    conv: nn.Module,
    facts: ConvFacts,
    way: CallingConvention,
    h_src: Handle | Tensor,
    h_dst: Handle | Tensor | None,
    block: Block,
    x0: Tensor | None,
) -> Tensor:
    """[num_dst, ...]: the conv's output, called in the given way.

    h_dst: rows of the destinations. None: the first rows of h_src.
    """
    if way.convention == "fused":
        return run_fused(conv, facts, h_src, h_dst, block, x0 if facts.takes_x0 else None)
    dtype = dtype_of(conv, h_src)
    src_rows = as_dtype(h_src, dtype)
    if way.convention == "block":
        return conv.on_block(src_rows, block)  # type: ignore[operator]

    is_pair = way.convention == "pair"
    num_dst = block.num_dst
    edge_index, edge_arrays = _edges_of(block, way)
    edge_kwargs = edge_arguments(conv, edge_arrays, dtype)
    initial = (_pad_rows(x0, src_rows.size(0)),) if facts.takes_x0 and x0 is not None else ()
    dst_rows = src_rows[:num_dst] if h_dst is None else as_dtype(h_dst, dtype)
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
        dst_rows = torch.cat([_one_row(dst_rows), dst_rows])
        if not src_rows.size(0):
            src_rows = _one_row(src_rows)
        if not is_pair:
            src_rows = torch.cat([src_rows[:1], src_rows])
            initial = tuple(torch.cat([rows[:1], rows]) for rows in initial)

    x = (src_rows, dst_rows) if is_pair else src_rows
    outputs = conv(x, *initial, edge_index, **edge_kwargs)
    return outputs[first_dst : first_dst + num_dst]


def _one_row(rows: Tensor) -> Tensor:
    """[1, ...]: the first of some rows, or zeros if there is none, as in a table of a batch that has no such node."""
    return rows[:1] if rows.size(0) else rows.new_zeros(1, *rows.shape[1:])


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


def edge_arguments(conv: nn.Module, edge: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The graph's edge arrays that this conv takes, by argument name.

    Weights and real numbers become `dtype`. Types of edges become int64.
    """
    arguments = {}
    for argument in edge_arguments_of(conv, edge):
        name = EDGE_ARGUMENTS[argument]
        rows = edge[name]
        if rows.is_floating_point() or name == "weight":
            arguments[argument] = rows.to(dtype)
        else:
            # Convs index weights by type. Torch takes a uint8 index for a mask, not for numbers.
            arguments[argument] = rows.long() if name == "type" else rows
    return arguments


def edge_arguments_of(conv: nn.Module, edge: Mapping[str, Tensor]) -> list[str]:
    """Names of the arguments for which this conv is given one of the graph's edge arrays."""
    names = [argument for argument in EDGE_ARGUMENTS if argument in arguments_of(type(conv))]
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
    conv: nn.Module,
    width: int | tuple[int, int],
    edge: Mapping[str, Tensor],
    layout: Layout,
    initial_width: int | None,
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
    facts = facts_of(conv)
    graph = probe_graph(edge)
    x = _trial_rows(graph, width)
    x0 = None if initial_width is None else random_rows(graph.num_nodes, initial_width)
    expected = whole_output(conv, x, graph, x0)
    # One copy for all blocks: if the conv keeps something of the first block, its output on the next is
    # wrong.
    trial = trial_of(conv)
    is_tree = layout in ("tree", "padded tree")

    def output(trial: nn.Module, way: CallingConvention, graph: Graph, nodes: Sequence[int]) -> Tensor | None:
        """The output at `nodes`; None if the conv cannot be called in this way."""
        block = tree_of(graph, nodes) if is_tree else block_of(graph, nodes)
        block_x0 = None if x0 is None else x0[block.dst_ids]
        if isinstance(x, tuple):
            src_ids, part = sources_of(block)
            h_src, h_dst = x[0][src_ids], x[1][block.dst_ids]
            block = Block(block.dst_ids, block.num_dst, (part,))
        else:
            h_src, h_dst = x[block.src_ids], None
        try:
            with without_caches(trial):
                return _call(trial, facts, way, h_src, h_dst, block, block_x0)
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

    if facts.is_fused:
        ways = [CallingConvention("fused", has_cache=has_cache(conv))]
    elif facts.reads_blocks and layout != "two tables":
        ways = [CallingConvention("block", has_cache=has_cache(conv))]
    else:
        # In a tree a conv does not see which edges are loops, so leaving them out is tried too.
        loop_choices = (False, True) if is_tree else (False,)
        calls = CALLS[:1] if layout == "two tables" else CALLS
        ways = [
            CallingConvention(
                convention,
                without_loops=without_loops,
                with_edges=with_edges,
                has_cache=has_cache(conv),
                padded=layout == "padded tree",
            )
            for with_edges, convention, without_loops in itertools.product((False, True), calls, loop_choices)
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
    if layout == "two tables":
        _refuse_pair(conv)
    if facts.reads_blocks:
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
    if isinstance(conv, NORMALISED) and is_changed(conv):
        raise NeedsWholeGraph(
            f"{_name(conv)} has hooks, or a method of it is replaced, so PyG's own forward must run. It takes degrees "
            "from the edges of a batch, which has only some: remove the hooks, or use method=full_batch with "
            "aggregation=sequential"
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


def _trial_rows(graph: Graph, width: int | tuple[int, int]) -> Tensor | tuple[Tensor, Tensor]:
    """[num_nodes, width] rows of the tiny graph.

    Of two tables, the sources have a row less than there are destinations, and no node has the same row in both.
    """
    if not isinstance(width, tuple):
        return random_rows(graph.num_nodes, width)
    return random_rows(graph.num_nodes - 1, width[0]), random_rows(graph.num_nodes, width[1]).flip(0)


def _refuse_pair(conv: nn.Module) -> NoReturn:
    """Raise the error of a conv that plain PyG can call with a pair, but whose output then differs on a batch."""
    if getattr(conv, "add_self_loops", False):
        raise ValueError(
            f"{_name(conv)} adds self-loops, and between two tables of rows these join nodes that have nothing to do "
            "with each other: build it with add_self_loops=False"
        )
    raise NeedsWholeGraph(
        f"{_name(conv)} cannot run between two tables of rows: its output at a node depends on more than the node and "
        f"its in-edges; {PAIR_CONVS}"
    )


def whole_output(conv: nn.Module, x: Tensor | tuple[Tensor, Tensor], graph: Graph, x0: Tensor | None) -> Tensor:
    """[num_nodes, ...] float64: the output of plain PyG's conv, in evaluation mode, on a whole graph.

    x: rows of the nodes; between two tables, (rows of the sources, rows of the destinations).

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
            names = ", ".join(["edge_index", *edge_kwargs])
            reason = _reason(conv, error, edge_kwargs)
            if isinstance(x, tuple):
                raise ValueError(
                    f"{_name(conv)} cannot be called as conv((x_src, x_dst), {names}) with rows of widths "
                    f"{x[0].size(1)} and {x[1].size(1)}: {reason}; {PAIR_CONVS}"
                ) from error
            raise ValueError(
                f"{_name(conv)} cannot be called as conv(x, {names}) with rows of width {x.size(1)}: {reason}"
            ) from error
    num_rows = (x[1] if isinstance(x, tuple) else x).size(0)
    if not isinstance(out, Tensor) or out.size(0) != num_rows:
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
    missing = [name for name in EDGE_ARGUMENTS if name in arguments_of(type(conv)) and name not in edge_kwargs]
    if not missing:
        return reason
    arrays = " and ".join(f"{name} (edge array {EDGE_ARGUMENTS[name]!r})" for name in missing)
    return f"{reason}; it can take {arrays}, which the graph does not have"


def initialise(
    conv: nn.Module, width: int | tuple[int, int], edge: Mapping[str, Tensor], initial_width: int | None
) -> None:
    """Give a conv that was built with in_channels=-1 its parameters, by a forward pass on the tiny graph."""
    if not any(is_lazy(p) for p in conv.parameters()):
        return
    like = next(conv.parameters())
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    graph = probe_graph(edge)
    widths = width if isinstance(width, tuple) else (width,)
    rows = tuple(torch.zeros(graph.num_nodes, columns, **options) for columns in widths)
    x = rows if isinstance(width, tuple) else rows[0]
    initial = []
    if takes_x0(conv) and initial_width is not None:
        initial.append(torch.zeros(graph.num_nodes, initial_width, **options))
    edge_kwargs = {name: rows.to(like.device) for name, rows in edge_arguments(conv, graph.edge, like.dtype).items()}
    with eval_mode(conv), torch.no_grad():
        conv(x, *initial, graph.edge_index().to(like.device), **edge_kwargs)


def _name(conv: nn.Module) -> str:
    return type(conv).__name__
