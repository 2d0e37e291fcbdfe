"""Every operation in plain torch: the definition, and the oracle of the tests. Written to be read, not to be fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hopline.ops.random import bounded, draw
from hopline.ops.tree_slots import Slots


class Neighbors(NamedTuple):
    """In-edges of a list of nodes, grouped by node."""

    indptr: Tensor
    """[num_nodes + 1] int64: node i has edges indptr[i] .. indptr[i + 1]."""
    ids: Tensor
    """[num_edges], dtype of the graph's indices: the source node of each edge."""
    edge_ids: Tensor
    """[num_edges] int64: its position in the graph's edge arrays."""


def row_positions(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, positions) of all entries of the given rows of a CSR structure, row after row."""
    starts = indptr[nodes]
    counts = indptr[nodes + 1] - starts
    out_indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = torch.repeat_interleave(starts - out_indptr[:-1], counts)
    return out_indptr, torch.arange(int(out_indptr[-1]), device=nodes.device) + shift


def sample_neighbors(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, key: int, replace: bool = False
) -> Neighbors:
    """Up to `fanout` in-edges of each node: the first of one keyed sequence, so that samples nest; -1 takes all.

    Without replacement the sequence is a Fisher-Yates shuffle of the node's edges, of which only the touched
    positions are kept; with replacement it is one bounded draw after the other.
    """
    if fanout < 0:
        out_indptr, edge_ids = row_positions(indptr, nodes)
        return Neighbors(out_indptr, indices[edge_ids], edge_ids)
    starts = indptr[nodes]
    degrees = indptr[nodes + 1] - starts
    counts = torch.where(degrees > 0, fanout, 0) if replace else degrees.clamp(max=fanout)
    width = int(counts.max()) if counts.numel() else 0
    picks = _picks(degrees, nodes, width, key, replace)
    taken = torch.arange(width, device=nodes.device) < counts[:, None]
    edge_ids = (starts[:, None] + picks)[taken]
    return Neighbors(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), indices[edge_ids], edge_ids)


class Children(NamedTuple):
    """Neighbours drawn for the slots of a tree, each slot by itself."""

    ids: Tensor
    """[num_slots, fanout], dtype of the graph's indices: the source nodes, -1 where a slot has fewer."""
    counts: Tensor
    """[num_slots] int32: how many there are; they come first."""
    edge_ids: Tensor
    """[num_slots, fanout] int64: positions in the graph's edge arrays, 0 where there is none."""


def sample_children(
    indptr: Tensor, indices: Tensor, nodes: Tensor, slots: Tensor, fanout: int, key: int, replace: bool = False
) -> Children:
    """Up to `fanout` in-edges of the node at each slot, drawn as in `sample_neighbors` but by the slot's id.

    nodes: -1 where a slot is empty; slots: [n] int64.
    """
    there = nodes >= 0
    at = nodes.long().clamp(min=0)
    starts = indptr[at]
    degrees = torch.where(there, indptr[at + 1] - starts, 0)
    counts = torch.where(degrees > 0, fanout, 0) if replace else degrees.clamp(max=fanout)
    picks = _picks(degrees, slots, fanout, key, replace)
    taken = torch.arange(fanout, device=nodes.device) < counts[:, None]
    edge_ids = torch.where(taken, starts[:, None] + picks, 0)
    ids = indices[edge_ids] if indices.numel() else edge_ids.to(indices.dtype)
    return Children(torch.where(taken, ids, -1), counts.int(), edge_ids)


def sample_tree(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    slots: Slots,
    key: int,
    replace: bool = False,
    with_edges: bool = False,
    draw: Callable[..., Children] = sample_children,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(nodes, counts, edge_ids) of the trees of `seeds`, hop by hop."""
    nodes, counts, edge_ids = [seeds.to(indices.dtype)], [], []
    for hop, fanout in enumerate(slots.fanouts):
        here = slots.ids(seeds.device)[slots.offsets[hop] : slots.offsets[hop + 1]]
        children = draw(indptr, indices, nodes[-1], here, fanout, key, replace)
        nodes.append(children.ids.view(-1))
        counts.append(children.counts)
        edge_ids.append(children.edge_ids.view(-1))
    return torch.cat(nodes), torch.cat(counts), torch.cat(edge_ids) if with_edges else None


def _picks(degrees: Tensor, draw_ids: Tensor, width: int, key: int, replace: bool) -> Tensor:
    """[n, width] int64: for each id the first `width` of its keyed sequence of positions below its degree."""
    picks = torch.zeros(draw_ids.numel(), width, dtype=torch.int64, device=draw_ids.device)
    swapped_from, swapped_in = torch.full_like(picks, -1), torch.full_like(picks, -1)
    for j in range(width):
        raw = draw(key, draw_ids, j)
        if replace:
            picks[:, j] = bounded(raw, degrees)
            continue
        target = j + bounded(raw, (degrees - j).clamp(min=1))
        at_target, at_j = target.clone(), torch.full_like(target, j)
        for i in range(j):  # the latest swap into a position says what it holds
            at_target = torch.where(swapped_from[:, i] == target, swapped_in[:, i], at_target)
            at_j = torch.where(swapped_from[:, i] == j, swapped_in[:, i], at_j)
        picks[:, j], swapped_from[:, j], swapped_in[:, j] = at_target, target, at_j
    return picks


def relabel(seeds: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, idx): the distinct nodes, seeds first, then by first occurrence; and each neighbour's place there."""
    both = torch.cat([seeds.long(), neighbors.long()])
    unique, inverse = torch.unique(both, return_inverse=True)
    first = torch.full_like(unique, both.numel())
    first.scatter_reduce_(0, inverse, torch.arange(both.numel(), device=both.device), "amin")
    order = torch.argsort(first)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return unique[order], place[inverse[seeds.numel() :]].int()


def gather_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids], for any dtype."""
    return rows[ids.long()]


def group_edges(keys: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(indptr, order): a stable sort of edges by key, as the start of each group and the edges in their new order."""
    counts = torch.bincount(keys.long(), minlength=num_groups)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return indptr, torch.argsort(keys, stable=True)


def self_loops(indptr: Tensor, indices: Tensor) -> Tensor:
    """Positions of the edges from a node to itself: int64."""
    dst = _destinations(indptr)
    return (indices == dst).nonzero().view(-1)


def reduce_edges(
    rows: Tensor,
    indptr: Tensor,
    src_idx: Tensor,
    reduce: str,
    weight: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Sum, mean or max over each destination's edges of (weight *) rows[src_idx]; 0 where there are none.

    With `own`, [num_dst, 2 * width]: rows[own] stand to the right of the reduced ones.

    The gradient of max is torch's: shared evenly by the edges that reach it, and by the initial 0 if it is 0.
    """
    num_dst = indptr.numel() - 1
    dst = _destinations(indptr)
    messages = rows.index_select(0, src_idx.long())  # in threads, rows[src_idx] adds up gradients in any order
    if weight is not None:
        messages = messages * weight.view(-1, *[1] * (messages.dim() - 1))
    out = messages.new_zeros(num_dst, *rows.shape[1:])
    if own is not None:
        return torch.cat([reduce_edges(rows, indptr, src_idx, reduce, weight), rows.index_select(0, own.long())], dim=1)
    if reduce == "max":
        index = dst.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        return out.scatter_reduce(0, index, messages, "amax", include_self=False)
    out = out.index_add(0, dst, messages)
    if reduce == "mean":
        out = out / indptr.diff().clamp(min=1).view(-1, *[1] * (out.dim() - 1))
    return out


def keyed_dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Dropout whose mask is drawn from (key, node id, column): 16 bits a column, four columns a draw."""
    threshold = round(p * 65536)
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()  # half types are scaled in float32
    flat = exact.reshape(x.size(0), math.prod(x.shape[1:]))
    column = torch.arange(flat.size(1), device=x.device)
    raw = draw(key, ids[:, None], column // 4)
    lane = (raw >> (16 * (column % 4))) & 0xFFFF
    keep = (lane >= threshold).to(exact.dtype)
    # p = 1 keeps nothing: there is nothing to scale up.
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return (flat * (keep * scale)).view_as(x).to(x.dtype)


def keyed_dropout_stored(values: Tensor, indptr: Tensor, columns: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """The same for rows of which only some columns are stored: their values, row after row."""
    threshold, column = round(p * 65536), columns.long()
    raw = draw(key, ids[_destinations(indptr)], column // 4)
    keep = ((raw >> (16 * (column % 4))) & 0xFFFF) >= threshold
    return values * keep * (65536 / (65536 - threshold) if threshold < 65536 else 0.0)


def _destinations(indptr: Tensor) -> Tensor:
    """The destination of each edge, from the start of each destination's edges."""
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=indptr.device), indptr.diff())


class SortedIdMap:
    """Global node ids to consecutive local ones, in order of first occurrence; reused batch after batch."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes = num_nodes
        self.device = device
        self.size = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, nodes: Tensor) -> Tensor:
        """Each node's local id [n] int32, new ones numbered on from the last. Waits for the device."""
        if bool(((nodes < 0) | (nodes >= self.num_nodes)).any()):
            raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")
        self._ids, idx = relabel(self.ids(), nodes)
        self.size = self._ids.numel()
        return idx

    def ids(self) -> Tensor:
        """The nodes added since the last clear, by local id: [size] int64."""
        return self._ids[: self.size]

    def clear(self) -> None:
        self.size = 0
