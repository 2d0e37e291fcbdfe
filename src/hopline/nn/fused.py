"""Convs whose aggregation is a plain sum, mean or max: computed without a matrix with a row per edge.

The conv's own `forward` runs, on a stand-in that replaces only `propagate`, so every option of the conv (projection,
root weight, normalisation of the output, bias) is PyG's own code and the conv itself is never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import APPNP, GCN2Conv, GCNConv, GINConv, GraphConv, Linear, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import Handle, ReducedRows, Rows, as_dtype, as_tensor
from hopline.core.tree_layout import TreeBlock
from hopline.nn.gcn_norm import gcn_weights
from hopline.nn.tree_layers import PendingRows, pending_rows, reduce_on_tree, two_part_linear

REDUCE = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}
PLAIN = (SAGEConv, GINConv, GraphConv)
"""Convs that send rows (times an edge weight) and take a pair of source and destination rows."""
LINEARS = {SAGEConv: ("lin_l", "lin_r"), GraphConv: ("lin_rel", "lin_root")}
"""Their linear layers: of the reduced rows, with the bias, and of the destinations' own."""
NORMALISED = (GCNConv, GCN2Conv, APPNP)
"""Convs that send rows times the symmetric degree norm, with self-loops."""
NORMALISED_SUM = "normalised sum"
"""How these reduce rows."""


FLOPS = 16
"""Multiplications in the time that it takes to move an element: about 10 on a CPU, 25 on an H200."""


def is_fused(conv: Any) -> bool:
    """Exact types only: a subclass may have changed the message."""
    if type(conv) not in (*PLAIN, *NORMALISED):
        return False
    if isinstance(conv, APPNP) and (conv.K != 1 or conv.dropout):
        return False
    no_hooks = not (conv._forward_hooks or conv._forward_pre_hooks or conv.explain)
    reductions = REDUCE if type(conv) in PLAIN else (SumAggregation,)
    return no_hooks and type(conv.aggr_module) in reductions and conv.flow == "source_to_target"


def reads_rows(conv: Any) -> bool:
    """Whether the conv reads its input straight from a table into the aggregation."""
    return is_fused(conv) and type(conv) in PLAIN and not getattr(conv, "project", False)


def run_fused(conv: Any, h: Handle | Tensor, block: Block, x0: Tensor | None = None) -> Tensor:
    """`conv` on a block: [num_dst, ...]."""
    how = REDUCE[type(conv.aggr_module)]
    dtype = dtype_of(conv, h)
    if type(conv) in PLAIN:
        return _plain(conv, h, block, how, dtype)

    if isinstance(h, ReducedRows) and h.how == NORMALISED_SUM:
        return _product(conv, h.reduced_and_own)

    def propagate(b: Block, x: Tensor, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
        return _normalised_sum(conv, x, b, dtype)

    if isinstance(block, TreeBlock) and block.on_gpu and isinstance(conv, GCNConv):
        # The product is linear: after the reduction it has a row per destination, before it one per slot.
        weight, loops = gcn_weights(conv, block, dtype)
        plain = block.scaling_sums(False) if conv.normalize else block
        reduced, own = _reduce(h, plain, how, weight, dtype, with_own=True).chunk(2, dim=1)
        return _product(conv, reduced if loops is None else reduced + loops[:, None].to(own.dtype) * own)
    if isinstance(conv, APPNP):  # its one step mixes in own rows, of which a block has fewer than sources
        rows = as_dtype(h, dtype)
        return (1 - conv.alpha) * propagate(block, rows) + conv.alpha * rows[: block.num_dst]
    if isinstance(conv, GCN2Conv):
        stand_in = _StandIn(conv, propagate, normalize=False)
        return GCN2Conv.forward(stand_in, as_dtype(h, dtype), x0, block)  # type: ignore[arg-type]
    if _reduces_first(conv, h, block):
        return _product(conv, propagate(block, as_dtype(h, dtype)))
    stand_in = _StandIn(conv, propagate, normalize=False, lin=lambda x: project(conv.lin, x))
    return GCNConv.forward(stand_in, h, block)  # type: ignore[arg-type]


def _normalised_sum(conv: Any, x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """What a GCN-like conv sends, summed, with the loops."""
    weight, loops = gcn_weights(conv, block, dtype)
    plain = block.scaling_sums(False) if conv.normalize else block  # the factor is in the weights
    out = _reduce(x, plain, "sum", weight, dtype)
    return out if loops is None else out + loops[:, None].to(x.dtype) * x[: block.num_dst]


def _product(conv: GCNConv, reduced: Tensor) -> Tensor:
    out = conv.lin(reduced)
    return out if conv.bias is None else out + conv.bias


def _reduces_first(conv: GCNConv, h: Handle | Tensor, block: Block) -> bool:
    """Whether the product is better taken of the reduced rows, which is the same since it is linear.

    Counted in elements moved, with `FLOPS` multiplications for the price of one: a block has fewer destinations than
    sources, but wide rows are dear to reduce.
    """
    if isinstance(h, Rows) and h.table.read_csr(h.ids[:0]) is not None:
        return False  # stored sparse: the product is what makes them narrow
    if not is_linear(conv.lin) or conv.lin._forward_hooks or conv.lin._forward_pre_hooks:
        return False
    before, after = conv.lin.weight.size(1), conv.lin.weight.size(0)
    per_row = before + after + before * after / FLOPS
    project_first = block.num_src * per_row + block.num_edges * after
    return block.num_edges * before + block.num_dst * per_row < project_first


def dtype_of(conv: Any, h: Handle | Tensor) -> torch.dtype:
    """What a conv computes in: that of its parameters, or of its rows where it has none."""
    known = next((p.dtype for p in conv.parameters()), None)
    given = h.dtype if isinstance(h, Tensor) else h.table.dtype if isinstance(h, Rows) else torch.float32
    return known or (given if given.is_floating_point else torch.float32)


def _plain(conv: Any, h: Handle | Tensor, block: Block, how: str, dtype: torch.dtype) -> Tensor:
    """A conv that sends rows, and its destinations' own rows as they are."""
    linears = _linears_of_one_row(conv, h)
    reads = isinstance(h, Rows) and reads_rows(conv)
    runs_on = isinstance(h, PendingRows) and linears is not None and how != "max"
    source = h if reads or runs_on else as_dtype(h, dtype)
    if linears is None and isinstance(block, TreeBlock) and block.on_gpu and not getattr(conv, "project", False):
        weight = block.edge.get("weight") if isinstance(conv, GraphConv) else None
        reduced, own = _reduce(source, block, how, weight, dtype, with_own=True).chunk(2, dim=1)
        stand_in = _StandIn(conv, lambda b, x, edge_weight=None, size=None: reduced)
    elif linears is None:
        own = as_dtype(own_rows(source, block.num_dst), dtype)
        stand_in = _StandIn(conv, lambda b, x, edge_weight=None, size=None: _reduce(x[0], b, how, edge_weight, dtype))
    else:
        # Both products in one: [reduced, own] times the weights side by side. The conv is told of no own rows.
        own, pair = None, (getattr(conv, linears[0]), getattr(conv, linears[1]))
        stand_in = _StandIn(
            conv,
            lambda b, x, edge_weight=None, size=None: _reduce(x[0], b, how, edge_weight, dtype, with_own=True),
            **{linears[0]: lambda reduced_and_own: two_part_linear(reduced_and_own, pair)},
        )
    if isinstance(conv, GraphConv):
        return type(conv).forward(stand_in, (source, own), block, block.edge.get("weight"))  # type: ignore[arg-type]
    return type(conv).forward(stand_in, (source, own), block)  # type: ignore[arg-type]


def defer_layer(conv: Any, h: Handle | Tensor, block: Block, p: float, key: Any) -> PendingRows | None:
    """A conv followed by ReLU and dropout on a tree on a GPU, left to the next layer's kernel; None where it cannot."""
    if not isinstance(block, TreeBlock) or not is_fused(conv) or getattr(conv, "normalize", False) or block.edge:
        return None
    linears = _linears_of_one_row(conv, h)
    if linears is None:
        return None
    pair = (getattr(conv, linears[0]), getattr(conv, linears[1]))
    return pending_rows(h, block, REDUCE[type(conv.aggr_module)], pair, p, key)


def _linears_of_one_row(conv: Any, source: Handle | Tensor) -> tuple[str, str] | None:
    """Names of the linear layers of reduced and of own rows, where both take the same rows and nothing listens."""
    names = LINEARS.get(type(conv))
    if (
        names is None
        or len(source.shape) != 2
        or getattr(conv, "project", False)
        or not getattr(conv, "root_weight", True)
    ):
        return None
    pair = [getattr(conv, name) for name in names]
    plain = all(is_linear(l) and not l._forward_hooks and not l._forward_pre_hooks for l in pair)
    return names if plain and pair[1].bias is None else None


def input_reduction(conv: Any) -> tuple[Any, ...] | None:
    """Names the part of a conv that needs no parameter, if its input is the features; None where there is none such."""
    if type(conv) is GCNConv and is_fused(conv) and is_linear(conv.lin):
        weight = conv.lin.weight
        return (NORMALISED_SUM, conv.normalize, conv.add_self_loops, conv.improved, weight.shape, weight.dtype)
    if not reads_rows(conv):
        return None
    takes_weights = type(conv) is GraphConv
    return REDUCE[type(conv.aggr_module)], takes_weights, next((p.dtype for p in conv.parameters()), None)


def reduced_input(conv: Any, h: Handle | Tensor, block: Block) -> tuple[Tensor, str] | None:
    """That part of it on a block, and how it was reduced, as `ReducedRows` have both; None where it has none there."""
    if isinstance(block, TreeBlock) or input_reduction(conv) is None:
        return None
    dtype = dtype_of(conv, h)
    with torch.no_grad():
        if type(conv) is GCNConv:
            first = _reduces_first(conv, h, block)
            return (_normalised_sum(conv, as_dtype(h, dtype), block, dtype), NORMALISED_SUM) if first else None
        how = REDUCE[type(conv.aggr_module)]
        weighted = isinstance(conv, GraphConv) and "weight" in block.edge
        if weighted or (how == "sum" and block.scale_sums):
            return None
        return _reduce(h if isinstance(h, Rows) else as_dtype(h, dtype), block, how, None, dtype, with_own=True), how


def read_ahead(conv: Any, rows: Rows, block: Block) -> Rows:
    """What a conv with `reads_rows` will read of a table, read and reduced now; else the handle as it is."""
    reduced = None if rows.table.storage() is None else reduced_input(conv, rows, block)
    return rows if reduced is None else ReducedRows(rows.table, rows.ids, *reduced)


def own_rows(h: Handle | Tensor, num_dst: int) -> Rows | Tensor:
    """The destinations' own rows, which are the first."""
    if isinstance(h, ReducedRows):
        return h.own
    return h.head(num_dst) if isinstance(h, Rows) else as_tensor(h)[:num_dst]


def is_linear(module: Any) -> bool:
    """Whether `project` can stand in for the module; exact types only, as above."""
    return type(module) in (nn.Linear, Linear) and "forward" not in vars(module) and not is_lazy(module.weight)


def project(linear: Any, rows: Rows | Tensor) -> Tensor:
    """`linear` on rows; stored sparse, they are never made dense."""
    dtype = linear.weight.dtype
    csr = rows.read_csr() if isinstance(rows, Rows) else None
    if csr is None or linear._forward_hooks or linear._forward_pre_hooks:
        return linear(as_dtype(rows, dtype))
    indptr, columns, values = csr
    out = ops.reduce_edges(linear.weight.t(), indptr, columns, "sum", values.to(dtype))
    return out if linear.bias is None else out + linear.bias


def _reduce(
    rows: Handle | Tensor, block: Block, how: str, weight: Tensor | None, dtype: torch.dtype, with_own: bool = False
) -> Tensor:
    """Each destination's reduced rows, with its own to their right where asked for."""
    if isinstance(block, TreeBlock) and block.on_gpu:
        return reduce_on_tree(rows, block, how, weight, dtype, with_own)
    part = block.part
    if isinstance(rows, ReducedRows) and weight is None and rows.how == how:
        return rows.reduced_and_own if with_own else rows.reduced
    if how == "sum" and block.scale_sums:
        factor = torch.repeat_interleave(block.sampling_factor, part.indptr.diff(), output_size=part.num_edges)
        weight = factor if weight is None else weight * factor
    if isinstance(rows, Rows):
        stored = rows.table.storage()
        if stored is not None and stored.dtype == dtype and not ops.is_cold(stored, rows.ids):
            own = rows.ids[: block.num_dst] if with_own else None
            return ops.reduce_edges(stored, part.indptr, ops.gather_rows(rows.ids, part.src_idx), how, weight, own)
    rows = as_dtype(rows, dtype) if isinstance(rows, Handle) else rows
    own = torch.arange(block.num_dst, device=rows.device) if with_own else None
    return ops.reduce_edges(rows, part.indptr, part.src_idx, how, weight, own)


class _StandIn:
    """A conv with another `propagate`: everything else is looked up on the conv."""

    def __init__(self, conv: nn.Module, propagate: Callable[..., Tensor], **changed: Any) -> None:
        self.__dict__.update(changed, propagate=propagate, _conv=conv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conv, name)
