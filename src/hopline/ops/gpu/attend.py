"""Triton kernels of graph attention (GATConv, GATv2Conv) over a tree's or a block's edges, with their gradients.

The softmax over a destination's edges runs while their source rows pass by, so neither the messages nor the attention
weights of all edges are ever built. Only the log of the softmax's sum is kept, per destination and head: backward
makes the weights again from it. In a tree each source has one parent, whose program writes the source's gradient; in
a block gradients are summed over edges grouped by source. No two threads add to the same number, so that every run
gives the same bits. Half types are summed in float32. Nothing here waits for the device.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.ops.gpu.attend_kernels import attend_kernel, backward_kernel, gather_kernel
from hopline.ops.gpu.errors import error_flags
from hopline.ops.gpu.runtime import is_interpreted, key_on, launching
from hopline.ops.gpu.sampling import group_edges
from hopline.ops.tree_slots import Slots

TILE = 2048
"""Numbers of source rows that a program has in flight: destinations times edges times columns of one head."""
EDGES_AT_ONCE = 8
"""Of one destination; more where destinations of a block have more."""
MOST_EDGES_AT_ONCE = 32
LEAST_COLUMNS, MOST_ROWS = 8, 32
"""Of a tile. With a head of 1 column and 256 rows in a tile, four warps of an H200 summed some rows wrongly (Triton
3.6; 128 rows, or eight warps, did not), so tiles stay where a thread never holds two of them."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Which sources each destination attends to; the destinations are the first sources."""

    num_src: int
    num_dst: int
    starts: Tensor
    """[num_dst] each destination's first edge; in a tree an edge is numbered by the source it comes out of."""
    stops: Tensor
    """[num_dst] where its edges end; in a tree how many there are."""
    ids: Tensor
    """[num_dst] int64: what the draws at each destination are keyed by."""
    sources: Tensor
    """[num_edges] each edge's source; in a tree [num_src] the node at each slot, -1 where it is empty."""
    slots: Slots | None = None
    """How a tree's slots are numbered; None in a block."""
    hop: int = 0


def tree_edges(slots: Slots, hop: int, nodes: Tensor, counts: Tensor) -> Edges:
    """From hop + 1 and the hops before it to the hops 0 .. hop of a tree."""
    num_dst, device = slots.up_to(hop), nodes.device
    first = slots.first_children(device)
    return Edges(slots.up_to(hop + 1), num_dst, first, counts, slots.ids(device), nodes, slots, hop)


def block_edges(indptr: Tensor, src_idx: Tensor, num_src: int, ids: Tensor) -> Edges:
    return Edges(num_src, indptr.numel() - 1, indptr[:-1], indptr[1:], ids, src_idx)


@dataclass(frozen=True)
class _Plan:
    """What attention is computed, apart from its tensors."""

    heads: int
    v2: bool
    slope: float
    loops: bool
    p: float

    def constants(self, x: Tensor, with_draws: bool = True) -> dict[str, Any]:
        columns = x.size(1) // self.heads
        found = {
            "HEADS": self.heads,
            "C": columns,
            "CP": max(LEAST_COLUMNS, triton.next_power_of_2(columns)),
            "V2": self.v2,
            "SLOPE": self.slope,
            "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
        }
        if with_draws:
            threshold = round(self.p * 65536)
            scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
            found |= {"LOOPS": self.loops, "THRESHOLD": threshold, "SCALE": scale}
        return found


def _tile(columns: int, edges: int) -> dict[str, int]:
    """R and E, destinations and edges of a tile, and the warps that share it: wide heads take many registers."""
    # In the interpreter work costs by the number of steps and not by their size.
    tile, most = (64 * TILE, 512) if is_interpreted() else (TILE, MOST_ROWS)
    edges = min(edges, max(1, tile // columns))
    return {"R": max(1, min(most, tile // (columns * edges))), "E": edges, "num_warps": 4 if columns < 256 else 8}


def _edges_at_once(edges: Edges, num_rows: int) -> int:
    """For a kernel over so many of the rows; in a block they may have any number of edges."""
    if edges.slots is not None:
        return EDGES_AT_ONCE
    mean = triton.next_power_of_2(triton.cdiv(edges.sources.numel(), num_rows))
    return min(max(mean, EDGES_AT_ONCE), MOST_EDGES_AT_ONCE)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, key: Tensor, edges: Edges,
        plan: _Plan,
    ) -> Tensor:  # fmt: skip
        x, own = x.contiguous(), None if own is None else own.contiguous()
        out = torch.empty(edges.num_dst, x.size(1), dtype=x.dtype, device=x.device)
        # Backward takes sums of differences that nearly cancel: rounded outputs would show in them.
        exact = out if x.dtype == _exact(x) else torch.empty_like(out, dtype=_exact(x))
        sums = torch.empty(edges.num_dst, plan.heads, dtype=_exact(x), device=x.device)
        constants = plan.constants(x)
        tile = _tile(constants["CP"], _edges_at_once(edges, edges.num_dst))
        with launching(x.device):
            attend_kernel[(triton.cdiv(edges.num_dst, tile["R"]) * plan.heads,)](
                x, x if own is None else own, att, att if att_own is None else att_own,
                edges.starts, edges.stops, edges.sources, edges.ids, key, out, exact, sums, error_flags(x.device),
                edges.num_dst, edges.num_src, edges.sources.numel(), TREE=edges.slots is not None, **constants, **tile,
            )  # fmt: skip
        ctx.edges, ctx.plan = edges, plan
        ctx.save_for_backward(x, own, att, att_own, key, exact, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, own, att, att_own, key, out, sums = ctx.saved_tensors
        edges, plan, grad, exact = ctx.edges, ctx.plan, grad.contiguous(), _exact(x)
        grad_x, grad_own = torch.empty_like(x), None if own is None else torch.empty_like(own)
        rows, is_tree, constants = x if own is None else own, edges.slots is not None, plan.constants(x)
        per_edge = torch.empty(2, 0 if is_tree else edges.sources.numel(), plan.heads, dtype=exact, device=x.device)
        launches = _launches(edges, constants["CP"])
        num_tiles = sum(triton.cdiv(num, tile["R"]) for _, num, _, tile in launches)
        parts = torch.empty(1 if plan.v2 else 2, num_tiles, *att.shape, dtype=exact, device=x.device)
        first_tile = 0
        with launching(x.device):
            for first, num, fanout, tile in launches:
                tiles = triton.cdiv(num, tile["R"])
                backward_kernel[(tiles * plan.heads,)](
                    x, rows, att, att if att_own is None else att_own, edges.starts, edges.stops, edges.sources,
                    edges.ids, key, out, sums, grad, grad_x, grad_x if grad_own is None else grad_own,
                    per_edge[0], per_edge[1], parts[0], parts[-1], error_flags(x.device), first, num, edges.num_src,
                    edges.sources.numel(), first_tile, TREE=is_tree, SHARED=own is None, ADD=first > 0, FANOUT=fanout,
                    **constants, **tile,
                )  # fmt: skip
                first_tile += tiles
        if not is_tree:
            _gather(x, rows, att, edges, plan, per_edge, grad, grad_x)
        of_att = parts.sum(1)
        of_att_own = None if att_own is None else of_att[1].to(att_own.dtype)
        return grad_x, grad_own, of_att[0].to(att.dtype), of_att_own, None, None, None


def _launches(edges: Edges, columns: int) -> list[tuple[int, int, int, dict[str, int]]]:
    """(first destination, how many, fan-out, tile): a tree's hops one after the other, a block at once."""
    if edges.slots is None:
        return [(0, edges.num_dst, 0, _tile(columns, _edges_at_once(edges, edges.num_dst)))]
    offsets, found = edges.slots.offsets, []
    for hop, fanout in enumerate(edges.slots.fanouts[: edges.hop + 1]):
        tile = _tile(columns, min(EDGES_AT_ONCE, triton.next_power_of_2(fanout)))
        found.append((offsets[hop], offsets[hop + 1] - offsets[hop], fanout, tile))
    return found


def _gather(
    x: Tensor, own: Tensor, att: Tensor, edges: Edges, plan: _Plan, per_edge: Tensor, grad: Tensor, grad_x: Tensor
) -> None:
    """Add to the gradients of a block's sources, in which the destinations' own are, those of their edges."""
    src_indptr, order = group_edges(edges.sources, edges.num_src)
    # Safe for any indptr, where `repeat_interleave` would have to ask its sum.
    positions = torch.arange(edges.sources.numel(), device=x.device)
    dst_idx = torch.searchsorted(edges.stops, positions, right=True, out_int32=True).clamp(max=edges.num_dst - 1)
    constants = plan.constants(x, with_draws=False)
    tile = _tile(constants["CP"], _edges_at_once(edges, edges.num_src))
    with launching(x.device):
        gather_kernel[(triton.cdiv(edges.num_src, tile["R"]) * plan.heads,)](
            x, own, att, src_indptr, order, dst_idx, per_edge[0], per_edge[1], grad, grad_x,
            edges.num_src, edges.num_dst, **constants, **tile,
        )  # fmt: skip


def attend(
    x: Tensor, own: Tensor | None, att: Tensor, att_own: Tensor | None, edges: Edges,
    *, slope: float = 0.2, loops: bool = True, p: float = 0.0, key: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[num_dst, heads * columns]: each destination's sources, weighted by the softmax of their scores; differentiable.

    x: [num_src, heads * columns] projected rows. own: those of the destinations, where they are not the first of x.
    att: [heads, columns]. att_own: of the destinations' side (GATConv's att_dst); None for GATv2Conv's scores,
    att . leaky_relu(x_j + own_i). loops: edges from a node to itself give way to one such edge each. p: dropout of
    the weights, drawn from (key, destination, place of the edge). Rows of a tree's empty slots are never read; their
    gradients are 0, and so are their outputs.
    """
    assert x.size(0) == edges.num_src, "one row per source"
    if edges.num_dst == 0 or x.numel() == 0:
        return x[: edges.num_dst] * 0
    plan = _Plan(att.size(0), att_own is None, slope, loops, p)
    device_key = edges.ids if not p or key is None else key_on(x.device, key)
    assert not p or key is not None, "dropout needs a key"
    out = _Attend.apply(
        x, own, att.contiguous(), None if att_own is None else att_own.contiguous(), device_key, edges, plan
    )
    assert isinstance(out, Tensor)
    return out
