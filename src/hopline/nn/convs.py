"""Any PyG conv on a block, by one adapter.

A conv is called in the first of these ways that a probe on a tiny graph shows to be equal to the conv on the whole
graph: fused; with a pair (source rows, destination rows); square, with the output cut to the destinations. A conv
that equals itself in none of them (several hops in one layer, a norm over the nodes present) is refused by name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hopline.batch import Block, Handle, Part, as_tensor
from hopline.graph import Graph
from hopline.nn.attention import attention, is_fused_attention, is_on_gpu
from hopline.nn.fused import fused, is_fused
from hopline.nn.rows import typed
from hopline.tree import TreeBlock

Convention = Literal["fused", "pair", "square"]

EDGE_ARGUMENTS = {"edge_weight": "weight", "edge_attr": "attr", "edge_type": "type"}
"""Argument of a PyG conv -> name of the graph's edge array."""


class RunsConvs(Block, ABC):
    """A block that runs convs itself, since its source rows are not all here."""

    @abstractmethod
    def convolve(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        """The conv's output for the block's destinations."""


_conventions: WeakKeyDictionary[nn.Module, Convention] = WeakKeyDictionary()


def convolve(conv: nn.Module, h: Handle | Tensor, block: Block, x0: Tensor | None = None, layer: int = 0) -> Tensor:
    """The conv's output for the block's destinations: [num_dst, ...].

    h: source rows [num_src, ...] or the handle to them; x0: initial rows, whose first num_dst are the destinations'.
    layer: which of the model's it is, for draws of the conv's own.
    """
    if isinstance(block, RunsConvs):
        return block.convolve(conv, h, x0)
    convention = _conventions.get(conv)
    if convention is None or is_fused(conv) != (convention == "fused"):
        convention = _conventions[conv] = find_convention(conv, h.shape[1], block, x0)
    if block.scale_sums and convention != "fused":
        raise ValueError(
            f"scale_sums=true needs convs that sum plain rows (SAGEConv, GINConv, GraphConv); {_name(conv)} does not: "
            "set method.scale_sums=false"
        )
    if is_fused_attention(conv) and is_on_gpu(block):
        return attention(conv, h, block, layer)
    return _call(conv, convention, h, block, x0)


def _call(conv: nn.Module, convention: Convention, h: Handle | Tensor, block: Block, x0: Tensor | None) -> Tensor:
    if convention == "fused":
        return fused(conv, h, block, x0 if takes_x0(conv) else None)
    dtype = next((p.dtype for p in conv.parameters()), None) or as_tensor(h).dtype
    rows, num_dst = typed(h, dtype), block.num_dst
    edge_index, edge = _edges_of(block, without_loops=bool(getattr(conv, "add_self_loops", False)))
    edges = edge_arguments(conv, edge, dtype)
    if convention == "pair":
        # On a GPU edges out of a tree's empty slots lead to one row more, which is cut off again.
        own = rows[:num_dst] if not _is_padded(block) else torch.cat([rows[:num_dst], rows[:1]])
        return conv((rows, own), edge_index, **edges)[:num_dst]
    first = (_padded(x0, rows.size(0)),) if takes_x0(conv) and x0 is not None else ()
    return conv(rows, *first, edge_index, **edges)[:num_dst]


def _is_padded(block: Block) -> bool:
    return isinstance(block, TreeBlock) and block.on_gpu


def _edges_of(block: Block, without_loops: bool) -> tuple[Tensor, Mapping[str, Tensor]]:
    """(edge_index, edge arrays). In a tree a conv does not see which edges come from the node itself."""
    if not isinstance(block, TreeBlock):
        return block.edge_index, block.edge
    edge_index, edge = block.padded if block.on_gpu else (block.edge_index, block.edge)
    if not without_loops or block.graph is None or not block.graph.self_loops.numel():
        return edge_index, edge
    src, dst = edge_index
    loops = block.src_ids[src] == block.src_ids[dst.clamp(max=block.num_dst - 1)]
    if block.on_gpu:
        return torch.stack([src, torch.where(loops, block.num_dst, dst)]), edge
    return edge_index[:, ~loops], {name: rows[~loops] for name, rows in edge.items()}


def _padded(x0: Tensor, num_rows: int) -> Tensor:
    """A square call wants a row per source; only the destinations' are used."""
    missing = num_rows - x0.size(0)
    return x0 if missing <= 0 else torch.cat([x0, x0.new_zeros(missing, *x0.shape[1:])])


def takes_x0(conv: nn.Module) -> bool:
    """Whether the conv takes the initial rows as an argument, as GCN2Conv does."""
    return "x_0" in _arguments(type(conv))


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def edge_arguments(conv: nn.Module, edge: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The graph's edge arrays that this conv takes, by argument name."""
    parameters = _arguments(type(conv))
    found = {}
    for argument, name in EDGE_ARGUMENTS.items():
        wanted = argument in parameters and name in edge
        if argument == "edge_attr" and getattr(conv, "edge_dim", 0) is None:
            wanted = False  # the conv was built without edge features
        if wanted:
            rows = edge[name]
            found[argument] = rows.to(dtype) if rows.is_floating_point() or name == "weight" else rows
    return found


def find_convention(conv: nn.Module, width: int, block: Block, x0: Tensor | None) -> Convention:
    """The first way of calling that equals the conv on a whole (tiny, random) graph."""
    if getattr(conv, "flow", "source_to_target") != "source_to_target":
        raise ValueError(f"{_name(conv)} sends messages from target to source: build it with the default flow")
    initialise(conv, width, block, x0)
    trial = fresh_copy(conv).cpu().double().eval()
    options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    graph = _tiny_graph(block, options)
    x = torch.randn(graph.num_nodes, width, **options)
    start = None if x0 is None else torch.randn(graph.num_nodes, x0.size(1), **options)
    whole = _block(graph, graph.num_nodes)
    few = _block(graph, 4)
    with torch.no_grad():
        try:
            edges = edge_arguments(trial, whole.edge, torch.float64)
            first = (start,) if takes_x0(trial) else ()
            expected = trial(x, *first, whole.edge_index, **edges)[:4]
        except Exception as error:
            raise ValueError(f"{_name(conv)} cannot be called as conv(x, edge_index): {error}") from error
        choices: list[Convention] = ["fused"] if is_fused(conv) else ["pair", "square"]
        for convention in choices:
            try:
                rows = x[few.src_ids]
                found = _call(trial, convention, rows, few, None if start is None else start[:4])
            except Exception:  # not a way this conv can be called
                continue
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-8, atol=1e-10):
                return convention
    raise ValueError(
        f"{_name(conv)} cannot run on sampled blocks: its output at a node depends on more than the node and its "
        "in-neighbours' rows (several hops in one layer, or a norm by degrees or nodes that are present); "
        "convs such as SAGEConv, GCNConv, GATConv, GINConv, PNAConv and TransformerConv can"
    )


def fresh_copy(conv: nn.Module) -> nn.Module:
    """A copy that remembers no graph it was run on."""
    try:
        trial = copy.deepcopy(conv)
    except RuntimeError as error:  # torch does not copy what is in the middle of a computation
        raise ValueError(f"{_name(conv)} keeps tensors of an earlier call: build it anew ({error})") from error
    for name in ("_cached_edge_index", "_cached_adj_t", "_cached_x"):
        if getattr(trial, name, None) is not None:
            setattr(trial, name, None)
    return trial


def initialise(conv: nn.Module, width: int, block: Block, x0: Tensor | None) -> None:
    """Give a conv built with in_channels=-1 its parameters."""
    if not any(is_lazy(p) for p in conv.parameters()):
        return
    mode = conv.training
    conv.eval()
    device = next(conv.parameters()).device
    graph = _tiny_graph(block, {})
    first = (torch.zeros(graph.num_nodes, x0.size(1), device=device),) if takes_x0(conv) and x0 is not None else ()
    whole = _block(graph, graph.num_nodes).to(device)
    with torch.no_grad():
        conv(
            torch.zeros(graph.num_nodes, width, device=device),
            *first,
            whole.edge_index,
            **edge_arguments(conv, whole.edge, torch.float32),
        )
    conv.train(mode)


def _tiny_graph(block: Block, options: dict[str, Any]) -> Graph:
    """12 nodes, 3 in-edges each from different other nodes, with the same kinds of edge arrays as the block's graph."""
    num_nodes = 12
    sources = (torch.arange(num_nodes)[:, None] + torch.tensor([1, 4, 6])) % num_nodes
    edge = {}
    for name, rows in block.edge.items():
        shape = (sources.numel(), *rows.shape[1:])
        if rows.is_floating_point():
            edge[name] = torch.rand(shape, **options)
        else:
            edge[name] = torch.zeros(shape, dtype=rows.dtype)
    return Graph(torch.arange(0, 3 * num_nodes + 1, 3), sources.reshape(-1), edge)


def _block(graph: Graph, num_dst: int) -> Block:
    """The first nodes of a tiny graph with their in-edges; ids are positions."""
    stop = int(graph.indptr[num_dst])
    edge = {name: rows[:stop] for name, rows in graph.edge.items()}
    part = Part(graph.indptr[: num_dst + 1], graph.indices[:stop].int(), edge)
    num_src = max(num_dst, int(part.src_idx.max()) + 1)  # not all nodes, or a norm over those present would pass
    return Block(torch.arange(num_src), num_dst, (part,), graph)


def _name(conv: nn.Module) -> str:
    return type(conv).__name__
