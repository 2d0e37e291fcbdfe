"""Convs whose aggregation is a plain sum, mean or max, computed without a matrix with a row per edge.

PyG's `propagate` builds a message per edge and then aggregates. Here one kernel does both
(`ops.reduce_edges`, or `reduce_on_tree` for trees on a GPU), and reads the rows straight from the feature
table where it can:

    h, a tensor or a handle  ->  _reduce  ->  [num_dst, width]  ->  the rest of the conv's forward

The rest is PyG's code. `_StandIn` looks like the conv but has another `propagate`. The conv's `forward` is
called with the stand-in as `self`, and with the block in place of `edge_index`. So projection, root weight,
normalisation of the output and bias stay PyG's, and the conv itself is never changed. What they compute is
written out here where the order differs: for APPNP, for SAGEConv and GraphConv where one product takes both kinds of
rows, and for GCNConv where its product comes after the aggregation.

Two families are fused: `PLAIN` convs send rows, `NORMALISED` convs send rows times GCN's degree norm. Where
the aggregation of the first layer needs no weight, it can run before the layer does: in a loader's thread
(`read_ahead`), or once for several evaluations (`reduced_input`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GCN2Conv, GCNConv, GraphConv

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import Handle, ReducedRows, Rows, as_dtype, as_tensor
from hopline.core.tree_layout import TreeBlock
from hopline.nn.conv_facts import PLAIN, REDUCE, ConvFacts, facts_of, has_hooks
from hopline.nn.gcn_norm import gcn_weights
from hopline.nn.tree_layers import PendingRows, is_tree_on_gpu, pending_rows, reduce_on_tree, two_part_linear

NORMALISED_SUM = "normalised sum"
"""The first words of `ReducedRows.how` of rows that a GCNConv has aggregated. Its settings follow."""


FLOPS_PER_ELEMENT = 16
"""Multiplications in the time that moving one element takes: about 10 on a CPU, 25 on an H200."""


def run_fused(
    conv: Any,
    facts: ConvFacts,
    h: Handle | Tensor,
    h_dst: Handle | Tensor | None,
    block: Block,
    x0: Tensor | None = None,
) -> Tensor:
    """[num_dst, ...]: the output of a conv with `is_fused` on a block.

    h: rows of the sources, or a handle to them.
    h_dst: rows of the destinations, for `PLAIN` convs between two tables of rows. None: the first rows of h.
    x0: initial rows of the destinations, for GCN2Conv.
    """
    how = REDUCE[type(conv.aggr_module)]
    dtype = dtype_of(conv, h)
    if type(conv) in PLAIN:
        return _plain(conv, facts, h, h_dst, block, how, dtype)
    # From here on a destination is one of the sources: PyG refuses these convs for a pair.

    if isinstance(h, ReducedRows) and h.how == _normalised_how(conv):  # aggregated already: the product is left
        return _product(conv, h.reduced_and_own)

    def propagate(b: Block, x: Tensor, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
        """In place of `MessagePassing.propagate`. Weights come from `gcn_weights`."""
        return _normalised_sum(conv, x, b, dtype)

    if isinstance(conv, GCNConv) and is_tree_on_gpu(block):
        # The product is linear, so it may come after the aggregation: a row per destination, not one per
        # slot.
        weight, loops = gcn_weights(conv, block, dtype)
        # The factor that scales up sampled sums is in GCN's weights already.
        unscaled = block.with_scale_sums(False) if conv.normalize else block
        reduced, own = _reduce(h, unscaled, how, weight, dtype, with_own=True).chunk(2, dim=1)
        if loops is not None:
            reduced = reduced + loops[:, None].to(own.dtype) * own
        return _product(conv, reduced)
    if isinstance(conv, APPNP):
        # Not by its forward, which adds all rows to the aggregated ones. A block has more sources than
        # destinations.
        rows = as_dtype(h, dtype)
        return (1 - conv.alpha) * propagate(block, rows) + conv.alpha * rows[: block.num_dst]
    if isinstance(conv, GCN2Conv):
        stand_in = _StandIn(conv, propagate, normalize=False)
        return GCN2Conv.forward(stand_in, as_dtype(h, dtype), x0, block)  # type: ignore[arg-type]
    if _reduces_first(conv, facts, h, block):
        return _product(conv, propagate(block, as_dtype(h, dtype)))
    stand_in = _StandIn(conv, propagate, normalize=False, lin=lambda x: project(conv.lin, x))
    return GCNConv.forward(stand_in, h, block)  # type: ignore[arg-type]


def _normalised_sum(conv: Any, x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """[num_dst, ...]: sum over in-edges of weight * x[src], plus loop weight * own row, for a `NORMALISED`
    conv."""
    weight, loops = gcn_weights(conv, block, dtype)
    # The factor that scales up sampled sums is in GCN's weights already.
    unscaled = block.with_scale_sums(False) if conv.normalize else block
    out = _reduce(x, unscaled, "sum", weight, dtype)
    return out if loops is None else out + loops[:, None].to(x.dtype) * x[: block.num_dst]


def _normalised_how(conv: Any) -> str | None:
    """`ReducedRows.how` of rows that a conv with these settings aggregates; None for other convs than GCNConv.

    A callback may change the settings after a thread has aggregated the rows of the next batch.
    """
    if type(conv) is not GCNConv:
        return None
    return f"{NORMALISED_SUM}, {conv.normalize=}, {conv.add_self_loops=}, {conv.improved=}"


def _product(conv: GCNConv, reduced: Tensor) -> Tensor:
    """The rest of GCNConv once rows are aggregated: the linear layer and the bias."""
    out = conv.lin(reduced)
    return out if conv.bias is None else out + conv.bias


def _reduces_first(conv: GCNConv, facts: ConvFacts, h: Handle | Tensor, block: Block) -> bool:
    """Whether GCNConv aggregates before its product. The result is the same, since the product is linear.

    The cheaper order is taken. Costs are counted in elements moved, `FLOPS_PER_ELEMENT` multiplications being one
    element:

        a product, per row       before + after + before * after / FLOPS_PER_ELEMENT      (columns before and after it)
        aggregation, per edge    the width of the rows that are aggregated

    A block has fewer destinations than sources, so a product that comes last has fewer rows. But if the
    product makes rows narrower, an aggregation that comes last is cheaper.
    """
    is_sparse = isinstance(h, Rows) and h.table.read_csr(h.ids[:0]) is not None  # asked by reading no rows
    if is_sparse:  # a product reads sparse rows as they are, and aggregation before it would make them dense
        return False
    if facts.linears is None:  # a hook, or another type than Linear, must see the rows that PyG would give it
        return False
    after, before = conv.lin.weight.shape  # (out_features, in_features)
    product_per_row = before + after + before * after / FLOPS_PER_ELEMENT
    cost_product_first = block.num_src * product_per_row + block.num_edges * after
    cost_reduce_first = block.num_edges * before + block.num_dst * product_per_row
    return cost_reduce_first < cost_product_first


def dtype_of(conv: Any, h: Handle | Tensor) -> torch.dtype:
    """The dtype that a conv computes in: of its parameters, else of floating-point rows, else float32."""
    parameter = next(conv.parameters(), None)
    if parameter is not None:
        return parameter.dtype
    if isinstance(h, Tensor):
        dtype = h.dtype
    elif isinstance(h, Rows):
        dtype = h.table.dtype
    else:
        dtype = torch.float32
    return dtype if dtype.is_floating_point else torch.float32


def _plain(
    conv: Any,
    facts: ConvFacts,
    h: Handle | Tensor,
    h_dst: Handle | Tensor | None,
    block: Block,
    how: str,
    dtype: torch.dtype,
) -> Tensor:
    """[num_dst, ...]: the output of a `PLAIN` conv on a block.

    The first of these cases that holds is taken. In the last two, the conv's own `forward` does the rest.

        one table, linear layers that can be merged     [reduced | own] rows, then both products as one
        a tree on a GPU                                 [reduced | own] rows by one kernel
        any other                                       `propagate` aggregates, own rows are read apart
    """
    linears = facts.linears if h_dst is None and len(h.shape) == 2 else None
    # Handles stay handles where the kernel takes them: to rows of a table, or to rows that `defer_layer` has left
    # for this kernel to finish. A maximum cannot finish them.
    reads_table = isinstance(h, Rows) and facts.reads_rows
    reads_deferred = isinstance(h, PendingRows) and linears is not None and how != "max"
    source = h if reads_table or reads_deferred else as_dtype(h, dtype)
    weight = block.edge.get("weight") if isinstance(conv, GraphConv) else None

    if linears is not None:
        pair = (getattr(conv, linears[0]), getattr(conv, linears[1]))
        out = two_part_linear(_reduce(source, block, how, weight, dtype, with_own=True), pair)
        return torch.nn.functional.normalize(out, dim=-1) if getattr(conv, "normalize", False) else out
    own: Rows | Tensor
    if is_tree_on_gpu(block) and not getattr(conv, "project", False):
        reduced, own = _reduce(source, block, how, weight, dtype, with_own=True).chunk(2, dim=1)
        stand_in = _StandIn(conv, lambda b, x, edge_weight=None, size=None: reduced)
    else:
        own = as_dtype(own_rows(source, block.num_dst) if h_dst is None else h_dst, dtype)
        stand_in = _StandIn(conv, lambda b, x, edge_weight=None, size=None: _reduce(x[0], b, how, edge_weight, dtype))
    if isinstance(conv, GraphConv):
        return type(conv).forward(stand_in, (source, own), block, weight)  # type: ignore[arg-type]
    return type(conv).forward(stand_in, (source, own), block)  # type: ignore[arg-type]


def defer_layer(conv: Any, h: Handle | Tensor, block: Block, p: float, key: Any) -> PendingRows | None:
    """Aggregate a hidden layer conv -> ReLU -> dropout(p, key), and leave the rest to the next kernel.

    None where that is not possible: only plain convs of two linear layers on a tree on a GPU are deferred
    (`tree_layers`), without edge arrays and without normalised outputs.
    """
    facts = facts_of(conv)
    if getattr(conv, "normalize", False) or block.edge:
        return None
    if not facts.reads_rows or facts.linears is None or len(h.shape) != 2:
        return None
    pair = (getattr(conv, facts.linears[0]), getattr(conv, facts.linears[1]))
    return pending_rows(h, block, REDUCE[type(conv.aggr_module)], pair, p, key)


def input_reduction(conv: Any) -> tuple[Any, ...] | None:
    """A key for the part of a first conv that needs no parameter: its aggregation of the features.

    Convs with equal keys aggregate the features alike, whatever their weights. So the result may be cached
    by the key. None if a conv has no such part.
    """
    facts = facts_of(conv)
    if type(conv) is GCNConv and facts.is_fused and facts.linears is not None:
        # The shape of the weight is part of the key because `_reduces_first` decides by it.
        weight = conv.lin.weight
        return (_normalised_how(conv), weight.shape, weight.dtype)
    if not facts.reads_rows:
        return None
    takes_weights = type(conv) is GraphConv
    return REDUCE[type(conv.aggr_module)], takes_weights, next((p.dtype for p in conv.parameters()), None)


def reduced_input(conv: Any, h: Handle | Tensor, block: Block) -> tuple[Tensor, str] | None:
    """(rows, how): the first conv's aggregation of the features on a block, as `ReducedRows` hold it.

    rows: [num_dst, 2 * width], [reduced | own]; or [num_dst, width] for GCNConv. how: the name of the
    aggregation. None on trees, if GCNConv multiplies first, or if edge weights or sampling factors enter a
    plain conv's sum.
    """
    if isinstance(block, TreeBlock) or input_reduction(conv) is None:
        return None
    dtype = dtype_of(conv, h)
    with torch.no_grad():
        if type(conv) is GCNConv:
            if not _reduces_first(conv, facts_of(conv), h, block):
                return None
            return _normalised_sum(conv, as_dtype(h, dtype), block, dtype), str(_normalised_how(conv))
        how = REDUCE[type(conv.aggr_module)]
        has_weights = isinstance(conv, GraphConv) and "weight" in block.edge
        has_factors = how == "sum" and block.scale_sums
        if has_weights or has_factors:
            return None
        rows = h if isinstance(h, Rows) else as_dtype(h, dtype)
        return _reduce(rows, block, how, None, dtype, with_own=True), how


def read_ahead(conv: Any, rows: Rows, block: Block) -> Rows:
    """The input rows aggregated now, by a thread that prefetches batches.

    The handle is returned as it is if the table has no dense tensor of all rows (`Table.storage`), or if the
    conv has no `reduced_input`.
    """
    reduced = None if rows.table.storage() is None else reduced_input(conv, rows, block)
    return rows if reduced is None else ReducedRows(rows.table, rows.ids, *reduced)


def own_rows(h: Handle | Tensor, num_dst: int) -> Rows | Tensor:
    """The destinations' own rows: the first `num_dst` of the sources' rows `h`."""
    if isinstance(h, ReducedRows) and not h.how.startswith(NORMALISED_SUM):
        return h.own
    return h.head(num_dst) if isinstance(h, Rows) else as_tensor(h)[:num_dst]


def project(linear: Any, rows: Rows | Tensor) -> Tensor:
    """`linear` on rows. Rows that are stored sparse (CSR) are not made dense, unless `linear` has hooks.

    Row i of the product is the sum of the weight's columns at the stored entries of row i, times their
    values. That is an aggregation over edges, with stored entries as edges.
    """
    dtype = linear.weight.dtype
    csr = rows.read_csr() if isinstance(rows, Rows) else None
    if csr is None or has_hooks(linear):
        return linear(as_dtype(rows, dtype))
    indptr, columns, values = csr
    out = ops.reduce_edges(linear.weight.t(), indptr, columns, "sum", values.to(dtype))
    return out if linear.bias is None else out + linear.bias


def _reduce(
    rows: Handle | Tensor, block: Block, how: str, weight: Tensor | None, dtype: torch.dtype, with_own: bool = False
) -> Tensor:
    """[num_dst, width]: the aggregated rows of each destination's sources.

    [num_dst, 2 * width] if `with_own`.

    weight: [num_edges] or None; by slot, [num_src], for a tree on a GPU.
    with_own: whether the destination's own row stands to the right of the aggregated one.
    """
    if isinstance(block, TreeBlock) and block.on_gpu:
        return reduce_on_tree(rows, block, how, weight, dtype, with_own)
    part = block.part
    if isinstance(rows, ReducedRows) and weight is None and rows.how == how:
        return rows.reduced_and_own if with_own else rows.reduced
    if how == "sum" and block.scale_sums:
        weight = block.edge_factors if weight is None else weight * block.edge_factors
    # Read the table inside the kernel, if that needs no conversion. Rows on disk are read before, in the
    # order of the file, which the kernel would not keep to.
    if isinstance(rows, Rows):
        stored = rows.table.storage()
        if stored is not None and stored.dtype == dtype and not ops.is_cold(stored, rows.ids):
            own_ids = rows.ids[: block.num_dst] if with_own else None
            edge_src_ids = ops.gather_rows(rows.ids, part.src_idx)
            return ops.reduce_edges(stored, part.indptr, edge_src_ids, how, weight, own_ids)
    if isinstance(rows, Handle):
        rows = as_dtype(rows, dtype)
    own_idx = torch.arange(block.num_dst, device=rows.device) if with_own else None
    return ops.reduce_edges(rows, part.indptr, part.src_idx, how, weight, own_idx)


class _StandIn:
    """A conv with another `propagate`, and other `changed` attributes; all else is looked up on the conv.

    Passed as `self` to the conv's `forward`, so that the conv itself is never changed.
    """

    def __init__(self, conv: nn.Module, propagate: Callable[..., Tensor], **changed: Any) -> None:
        self.__dict__.update(changed, propagate=propagate, _conv=conv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conv, name)
