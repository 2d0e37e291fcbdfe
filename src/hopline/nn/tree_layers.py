"""Layers on trees on a GPU: children's rows reduced in one kernel, and hidden layers that run into the next one.

Shapes never depend on what was drawn, and nothing here waits for the device.
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
MAX_DEPTH = 512
"""The widest [reduced | own] rows that the kernel `hidden_then_reduce` takes."""


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
    """Each destination's reduced children, with its own row to their right where asked for.

    weight: by the slot that an edge comes out of. dense: `RowMap.place`, to write rows only for slots that are there.
    """
    tree = block.tree
    if how == "sum" and block.scale_sums:
        factor = block.sampling_factor.to(dtype)[block.parents.clamp(min=0).long()]
        weight = factor if weight is None else weight * factor
    if isinstance(rows, PendingRows) and weight is None and with_own and how != "max":
        return rows.reduced(block, how)
    tiers = rows.table.tiers(tree.nodes.device) if isinstance(rows, Rows) else None
    if isinstance(rows, Rows) and tiers is not None and tiers.hot.is_contiguous():
        cold = None
        if tiers.hot_slot is not None:
            rows.table.observe(tree.nodes)  # type: ignore[attr-defined]
            cold = (tiers.cold, tiers.hot_slot, rows.table.counts(tree.nodes.device))  # type: ignore[attr-defined]
        x, kind = tiers.hot, compute_dtype(dtype)
        return ops.gpu_kernels("tree").reduce_rows(
            x, tree.slots, block.hop, tree.nodes, how, weight, with_own, kind, table=True, tiers=cold, dense_out=dense
        )
    return ops.gpu_kernels("tree").reduce_tree(
        as_dtype(rows, dtype), tree.slots, block.hop, tree.nodes, tree.counts, how, weight, with_own
    )


def edges_to_attend(block: Block) -> Any:
    """The edges of a block on a GPU, as the kernels of attention take them."""
    kernels = ops.gpu_kernels("attention")
    if isinstance(block, TreeBlock):
        return kernels.tree_edges(block.tree.slots, block.hop, block.tree.nodes, block.tree.counts)
    return kernels.block_edges(block.part.indptr, block.part.src_idx, block.num_src, block.src_keys)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that a product of float32 parameters runs in."""
    autocast = torch.is_autocast_enabled("cuda") and dtype == torch.float32
    return torch.get_autocast_dtype("cuda") if autocast else dtype


def two_part_linear(reduced_and_own: Tensor, linears: tuple[Any, Any]) -> Tensor:
    """The linear layers of reduced and own rows, on both side by side; the first one has the bias."""
    left, right, bias = linears[0].weight, linears[1].weight, linears[0].bias
    single = reduced_and_own.dtype == torch.float32 == compute_dtype(torch.float32)
    if reduced_and_own.is_cuda and (single or reduced_and_own.dtype in HALVES) and bias is not None:
        return ops.gpu_kernels("dense").two_part_linear(reduced_and_own, left, right, bias)
    return torch.nn.functional.linear(reduced_and_own, torch.cat([left, right], dim=1), bias)


@dataclass(frozen=True, eq=False)
class PendingRows(Handle):
    """Hidden rows dropout(relu(a W' + b)) that the next layer's kernel makes, reduces and forgets."""

    a: Tensor
    """[num_dst, 2 * width] what the layer's aggregation left, with the rows that `rows` says."""
    left: Tensor
    """[columns, width] the weight of the reduced rows."""
    right: Tensor
    """[columns, width] the weight of the own rows."""
    bias: Tensor
    block: TreeBlock
    """The layer's own block."""
    rows: Any
    """`ops.gpu.tree.RowMap`."""
    p: float
    key: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block.num_dst, self.left.size(0))

    def reduced(self, block: TreeBlock, how: str) -> Tensor:
        """[reduced | own] rows for the next layer's destinations."""
        tree = block.tree
        return ops.gpu_kernels("dense").hidden_then_reduce(
            self.a, self.left, self.right, self.bias, tree.slots, block.hop, tree.nodes, tree.counts, self.rows, how,
            self.p, self.key,
        )  # fmt: skip

    def read(self) -> Tensor:
        place = torch.where(self.block.present[: self.block.num_dst], self.rows.row_of_slot, 0)
        weight = torch.cat([self.left, self.right], dim=1)
        h = torch.relu(torch.nn.functional.linear(self.a[place.long()], weight, self.bias))
        if self.key is None or not self.p:
            return h
        return ops.keyed_dropout(h, self.p, self.key, self.block.src_keys[: self.block.num_dst])


def pending_rows(
    h: Handle | Tensor, block: Block, how: str, linears: tuple[Any, Any], p: float, key: Any
) -> PendingRows | None:
    """A hidden layer of [reduced | own] rows on a tree, left to the next layer; None where it cannot be.

    linears: of the reduced rows, with the bias, and of the own ones.
    """
    left, right = linears[0].weight, linears[1].weight
    dtype = compute_dtype(left.dtype)
    if not isinstance(block, TreeBlock) or not block.on_gpu or dtype not in HALVES or how == "max":
        return None
    if block.scale_sums or 2 * left.size(1) > MAX_DEPTH or not (key is None or isinstance(key, Tensor)):
        return None
    tree, num_dst = block.tree, block.num_dst
    reads = isinstance(h, Rows) and h.table.tiers(tree.nodes.device) is not None
    if isinstance(h, Tensor) and h.dtype != dtype:
        h = h.to(dtype)
    # Most slots are in the outermost hops, whose layer reads the table: empty ones are left out there.
    kernels = ops.gpu_kernels("tree")
    with_index = kernels.dense_rows if reads else kernels.rows_by_slot
    rows = with_index(tree.nodes[:num_dst], tree.slots.parents(tree.nodes.device))
    a = reduce_on_tree(h, block, how, None, left.dtype, True, rows.row_of_slot if reads else None)
    bias = linears[0].bias
    bias = torch.zeros(left.size(0), device=a.device) if bias is None else bias
    return PendingRows(a.to(dtype), left, right, bias, block, rows, p, key)
