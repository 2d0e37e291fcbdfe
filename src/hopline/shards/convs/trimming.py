"""Message-flow graphs over shards: per layer only the edges, and of other shards only the rows, that the outputs need.

A node whose row nobody needs keeps its place, without edges: what comes out there is never looked at, and its gradient
is 0. Nodes that are needed have all their edges, so outputs and gradients are those of the whole graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from hopline.core.batch import Part
from hopline.core.row_handles import Handle
from hopline.nn.conv_adapter import initialise, takes_x0
from hopline.nn.probe import findings, options_of, probe_graph, random_rows, trial_of
from hopline.shards.convs.edges import Edges, outside_inference_mode
from hopline.shards.convs.runner import ShardConvs, find_rule, run_by_rule
from hopline.shards.layout import ShardLayout, contiguous_layout
from hopline.shards.transports import Transport


@dataclass(frozen=True, eq=False, kw_only=True)
class TrimmedConvs(ShardConvs):
    """Runs convs on the in-edges of some of a shard's nodes. Norms by degree are those of all edges."""

    whole: ShardConvs
    is_needed: Tensor
    """[num_own] bool: the nodes that have their edges."""

    @cached_property
    def edges_with_loops(self) -> Edges:
        with outside_inference_mode():
            return _leading_to(self.is_needed, self.edges.with_loops())

    def norm(self, add_loops: bool, improved: bool, dtype: torch.dtype) -> Tensor:
        edges, key = self.whole.edges_with_loops if add_loops else self.whole.edges, (add_loops, improved, dtype)
        if key not in self._norms:
            norm = self.whole.norm(*key).index_select(0, _are_leading_to(self.is_needed, edges))
            if norm.requires_grad:
                return norm
            self._norms[key] = norm
        return self._norms[key]

    def to(self, device: torch.device) -> Self:
        whole = self.whole if self.whole.layout.degrees.device == device else self.whole.to(device)
        return replace(super().to(device), whole=whole, is_needed=self.is_needed.to(device))

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        if not findings.get(conv, "looks one hop far", options_of(conv)):
            initialise(conv, h.shape[1], self.edge_rows, None if x0 is None else x0.size(1))
            with torch.inference_mode(False):
                check_one_hop(conv, h.shape[1], self, x0)
            findings.put(conv, "looks one hop far", options_of(conv), True)
        return super().run(conv, h, x0)


def trimmed_convs(
    whole: ShardConvs, is_needed: Tensor, num_layers: int, device: torch.device | str = "cpu", **options: Any
) -> tuple[TrimmedConvs, ...]:
    """A runner per layer, in the order of computation. All ranks must ask at once, with the same number of layers.

    whole: on the host. is_needed: [num_own] bool, the own nodes whose outputs are looked at. device: for the runners.
    """
    found, target = list[TrimmedConvs](), torch.device(device)
    placed = whole.to(target)
    for _ in range(num_layers):
        layout, is_read = _trimmed(whole.layout, is_needed, whole.transport)
        transport = whole.transport.on(layout)
        convs = TrimmedConvs.of(layout, transport, whole=placed, is_needed=is_needed, **options)
        found.insert(0, convs.to(target))
        is_needed = is_needed | is_read
    return tuple(found)


def _trimmed(layout: ShardLayout, is_needed: Tensor, transport: Transport) -> tuple[ShardLayout, Tensor]:
    """(the layout of one layer, [num_own] bool: the own rows that it reads here or elsewhere)."""
    parts, halos, are_used = [], [], []
    for k, part in enumerate(layout.parts):
        cut, kept = _part_leading_to(is_needed, part)
        src = part.src_idx[kept].long()
        used = torch.zeros(layout.halos[k].numel(), dtype=torch.bool)
        used[src] = True
        halo = layout.halos[k]
        if layout.own_range(k) == (0, 0):  # another's rows, of which fewer will come
            src, halo = used.cumsum(0)[src] - 1, halo[used]
        edge = {name: rows[kept] for name, rows in part.edge.items()}
        parts.append(replace(cut, src_idx=src.int(), edge=edge))
        halos.append(halo)
        are_used.append(used)
    wanted, is_read = transport.still_wanted(are_used), torch.zeros_like(is_needed)
    sends = list(layout.sends)
    for k, mask in enumerate(wanted):
        first, stop = layout.own_range(k)
        is_read[first:stop] |= mask if stop > first else False
        if stop == first:
            sends[k] = sends[k][mask]
            is_read[sends[k]] = True
    degrees = layout.degrees * is_needed
    reads = tuple(int(used.sum()) for used in are_used)
    trimmed = replace(
        layout, parts=tuple(parts), halos=tuple(halos), sends=tuple(sends), degrees=degrees, reads=reads
    )  # fmt: skip
    return trimmed, is_read


def _part_leading_to(is_needed: Tensor, part: Part) -> tuple[Part, Tensor]:
    """(the edges that lead to some nodes, their places among all)."""
    counts = part.indptr.diff()
    kept = is_needed.repeat_interleave(counts, output_size=part.num_edges).nonzero().view(-1)
    indptr = torch.zeros_like(part.indptr)
    torch.cumsum(counts * is_needed, 0, out=indptr[1:])
    edge_ids = None if part.edge_ids is None else part.edge_ids[kept]
    return Part(indptr, part.src_idx[kept], edge_ids=edge_ids), kept


def _are_leading_to(is_needed: Tensor, edges: Edges) -> Tensor:
    """[n] int64: the places of the edges that lead to some nodes."""
    return is_needed[edges.destinations()].nonzero().view(-1)


def _leading_to(is_needed: Tensor, edges: Edges) -> Edges:
    """Edges with loops, without those that lead to nodes that nobody needs."""
    assert edges.takes is not None
    parts = tuple(_part_leading_to(is_needed, part)[0] for part in edges.parts)
    takes = edges.takes[_are_leading_to(is_needed, edges)]
    return replace(edges, parts=parts, degrees=edges.degrees * is_needed, takes=takes)


def check_one_hop(conv: nn.Module, width: int, convs: ShardConvs, x0: Tensor | None) -> None:
    """Refuse a conv whose output at a node depends on edges of other nodes, or on rows that nobody needs."""
    rule = find_rule(conv, width, convs, x0)
    trial, graph = trial_of(conv), probe_graph(convs.edge_rows)
    x = random_rows(graph.num_nodes, width)
    start = () if x0 is None or not takes_x0(conv) else (random_rows(graph.num_nodes, x0.size(1)),)
    whole = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, 5, 8, 12])), mode=convs.mode)
    is_needed = torch.arange(graph.num_nodes) % 3 == 0
    (trimmed,) = trimmed_convs(whole, is_needed, 1, mode=convs.mode)
    is_read = is_needed.clone()
    is_read[graph.indices[is_needed.repeat_interleave(graph.in_degrees())]] = True
    unread = torch.where(is_read[:, None], x, 1 + x)  # what the layer before leaves at nodes that nobody needs
    with torch.no_grad():
        expected = run_by_rule(trial, rule, x, whole, *start)[is_needed]
        found = run_by_rule(trial, rule, unread, trimmed, *start)[is_needed]
    if not torch.allclose(found, expected, 1e-7, 1e-9, equal_nan=True):
        raise ValueError(
            f"{type(conv).__name__} looks further than a node's in-edges (several hops in one layer, or a mean over "
            "all nodes), and trim=true leaves out what is not needed: set trim=false"
        )
