"""Aggregation in the tree layout on a GPU, and hidden layers that the next layer computes with its
aggregation.

In the tree layout every drawn neighbour has a slot of its own, so the sources of a destination are its
child slots. `reduce_on_tree` aggregates them in one kernel, straight from the feature table where the
device can read it.

A hidden layer SAGEConv or GraphConv -> ReLU -> dropout may be deferred. `pending_rows` computes only its
aggregation, and the next layer does the rest, as one autograd function. For each destination, `reduced` is the
aggregated row of its children, and `own` its own row:

    layer l                                   layer l + 1
    a = [reduced | own]   -- PendingRows -->  h = dropout(relu(a [left | right]' + bias)), then [reduced | own] of h

One kernel computes product, ReLU and dropout. It writes h to memory, which the aggregation and the backward
pass read (`ops.gpu.dense`). It writes neither the product, nor the rows before dropout, nor a dropout mask.

Shapes never depend on what was drawn, and nothing in this file synchronises. The capture of a CUDA graph needs
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import Handle, Rows, as_dtype
from hopline.core.tree_layout import TreeBlock

HALVES = (torch.bfloat16, torch.float16)
"""The half precisions. Layers are deferred only in these."""
MAX_DEPTH = 512
"""Most columns of the [reduced | own] rows of a layer that is deferred.

They are the depth of its product: the dimension that `hidden_then_reduce` sums over.
"""


def is_tree_on_gpu(block: Block) -> bool:
    return isinstance(block, TreeBlock) and block.on_gpu


def reduce_on_tree(
    rows: Handle | Tensor,
    block: TreeBlock,
    how: str,
    weight: Tensor | None,
    dtype: torch.dtype,
    with_own: bool,
    dense: Any = None,
) -> Tensor:
    """[num_dst, width]: the aggregated rows of each destination's children.

    [num_dst, 2 * width] if `with_own`.

    rows: rows of all slots, or a handle to them.
    how: "sum", "mean" or "max".
    weight: [num_src] a weight for the edge out of each slot, or None.
    dtype: the precision of the conv's parameters.
    with_own: whether the destination's own row stands to the right of the aggregated one.
    dense: the output row of each slot (`ops.gpu.tree.RowMap.row_of_slot`), by which empty slots get no row. None:
    every slot has a row. Used only where a table is read.
    """
    tree = block.tree
    if how == "sum" and block.scale_sums:
        # `sampling_factor` has a number per destination, `weight` one per child slot. So each child gets the
        # factor of its parent. Seeds have the parent -1, and the clamp gives them the factor of slot 0. That
        # does no harm, since no edge leaves a seed.
        factor = block.sampling_factor.to(dtype)[block.parents.clamp(min=0).long()]
        weight = factor if weight is None else weight * factor
    if isinstance(rows, PendingRows) and weight is None and with_own and how != "max":
        return rows.reduce(block, how)
    # Where the device can read the table, the kernel takes the rows from it. No row per slot is gathered
    # first. The tiers say where the rows are: `hot` in fast memory, `cold` in slower memory (`tables.base.Tiers`).
    tiers = rows.table.tiers(tree.nodes.device) if isinstance(rows, Rows) else None
    if isinstance(rows, Rows) and tiers is not None and tiers.hot.is_contiguous():
        # None: `tiers.hot` holds all rows. Otherwise (cold rows, hot slot of each row, counters of reads).
        cold = None
        if tiers.hot_slot is not None:
            # The table does not see what a kernel reads. It is told here, so that it can choose its hot rows.
            rows.table.observe(tree.nodes)  # type: ignore[attr-defined]
            cold = (tiers.cold, tiers.hot_slot, rows.table.counts(tree.nodes.device))  # type: ignore[attr-defined]
        out_dtype = compute_dtype(dtype)
        return ops.gpu_kernels("tree").reduce_rows(
            tiers.hot, tree.slots, block.hop, tree.nodes, how, weight, with_own, out_dtype,
            table=True, tiers=cold, dense_out=dense,
        )  # fmt: skip
    return ops.gpu_kernels("tree").reduce_tree(
        as_dtype(rows, dtype), tree.slots, block.hop, tree.nodes, tree.counts, how, weight, with_own
    )


def edges_to_attend(block: Block, num_src: int) -> Any:
    """The edges of a block on a GPU, in the form that the attention kernels take: `ops.gpu.attention.AttentionEdges`.

    num_src: number of source rows.
    """
    kernels = ops.gpu_kernels("attention")
    if isinstance(block, TreeBlock):
        return kernels.tree_edges(block.tree.slots, block.hop, block.tree.nodes, block.tree.counts)
    return kernels.block_edges(block.part.indptr, block.part.src_idx, num_src, block.src_keys)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which a product with parameters of this dtype runs: autocast's for float32, else
    `dtype`."""
    autocast = torch.is_autocast_enabled("cuda") and dtype == torch.float32
    return torch.get_autocast_dtype("cuda") if autocast else dtype


def two_part_linear(reduced_and_own: Tensor, linears: tuple[Any, Any]) -> Tensor:
    """reduced @ left' + own @ right' + bias, computed as one product of [reduced | own] rows.

    linears: the layer of the reduced rows, which has the bias, and the layer of the own rows.
    """
    left = linears[0].weight
    right = linears[1].weight
    bias = linears[0].bias
    if reduced_and_own.is_cuda and bias is not None:
        # The kernel computes in the dtype of the rows. So float32 rows are left to torch where autocast would lower
        # them, that is where `compute_dtype(torch.float32)` is not float32.
        is_single = reduced_and_own.dtype == torch.float32 == compute_dtype(torch.float32)
        if is_single or reduced_and_own.dtype in HALVES:
            return ops.gpu_kernels("dense").two_part_linear(reduced_and_own, left, right, bias)
    return torch.nn.functional.linear(reduced_and_own, torch.cat([left, right], dim=1), bias)


@dataclass(frozen=True, eq=False)
class PendingRows(Handle):
    """A handle to hidden rows h = dropout(relu(a [left | right]' + bias)) that are not computed yet.

    The next layer computes h together with its aggregation (`reduce`). `read` computes h alone, for a next
    layer that needs the rows themselves.
    """

    a: Tensor
    """[num_dst, 2 * width] half precision: [reduced | own] rows of the deferred layer.

    `rows` maps slots to them. If it leaves out empty slots, `a` still has num_dst rows, and those beyond
    `rows.total` are undefined.
    """
    left: Tensor
    """[columns, width]: the weight of the reduced rows."""
    right: Tensor
    """[columns, width]: the weight of the own rows."""
    bias: Tensor
    """[columns]: zeros if the layer has no bias."""
    block: TreeBlock
    """The block of the deferred layer, not of the layer that reads these rows."""
    rows: Any
    """`ops.gpu.tree.RowMap`: the row of `a` for each slot, either for all slots or without the empty ones."""
    p: float
    """Dropout probability. 0 in evaluation."""
    key: Tensor | None
    """[1] int64 on the device: the key of the layer's dropout. None: no dropout, whatever `p` is."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block.num_dst, self.left.size(0))

    def reduce(self, block: TreeBlock, how: str) -> Tensor:
        """[next layer's num_dst, 2 * columns]: [reduced | own] rows of h for the layer that reads these rows.

        block: the block of that layer. how: its aggregation, "sum" or "mean".
        """
        tree = block.tree
        return ops.gpu_kernels("dense").hidden_then_reduce(
            self.a, self.left, self.right, self.bias, tree.slots, block.hop, tree.nodes, tree.counts, self.rows, how,
            self.p, self.key,
        )  # fmt: skip

    def read(self) -> Tensor:
        # `row_of_slot` may hold anything at an empty slot. Row 0 stands in, and nobody reads the result.
        row_of_slot = torch.where(self.block.present[: self.block.num_dst], self.rows.row_of_slot, 0)
        weight = torch.cat([self.left, self.right], dim=1)
        h = torch.relu(torch.nn.functional.linear(self.a[row_of_slot.long()], weight, self.bias))
        if self.key is None or not self.p:
            return h
        return ops.keyed_dropout(h, self.p, self.key, self.block.src_keys[: self.block.num_dst])


def pending_rows(
    h: Handle | Tensor, block: Block, how: str, linears: tuple[Any, Any], p: float, key: Any
) -> PendingRows | None:
    """Compute the aggregation of a hidden layer, and leave its product, ReLU and dropout to the next
    layer's kernel.

    None where that is not possible: outside of trees on a GPU, if products are not in half precision, for
    "max", with `block.scale_sums`, for [reduced | own] rows wider than `MAX_DEPTH`, or with a key that is no
    tensor.

    linears: the layer of the reduced rows, which has the bias, and the layer of the own rows.
    p, key: the dropout after the ReLU.
    """
    left = linears[0].weight
    right = linears[1].weight
    dtype = compute_dtype(left.dtype)
    if not isinstance(block, TreeBlock) or not block.on_gpu or dtype not in HALVES or how == "max":
        return None
    if block.scale_sums or 2 * left.size(1) > MAX_DEPTH or not (key is None or isinstance(key, Tensor)):
        return None
    tree = block.tree
    reads_table = isinstance(h, Rows) and h.table.tiers(tree.nodes.device) is not None
    if isinstance(h, Tensor) and h.dtype != dtype:
        h = h.to(dtype)
    # Most slots are in the outermost hops, and the layer that reads the table has these slots. So only that layer
    # leaves out empty slots. Later layers have few slots, and keep a row for each.
    kernels = ops.gpu_kernels("tree")
    map_rows = kernels.dense_rows if reads_table else kernels.rows_by_slot
    rows = map_rows(tree.nodes[: block.num_dst], tree.slots.parents(tree.nodes.device))
    dense = rows.row_of_slot if reads_table else None
    # `reduce_on_tree` takes the dtype of the parameters. Its result may have that dtype too, so `a` is converted
    # below.
    a = reduce_on_tree(h, block, how, None, left.dtype, with_own=True, dense=dense)
    bias = linears[0].bias
    if bias is None:
        bias = torch.zeros(left.size(0), device=a.device)
    return PendingRows(a=a.to(dtype), left=left, right=right, bias=bias, block=block, rows=rows, p=p, key=key)
