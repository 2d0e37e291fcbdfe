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
            return _trim_edges(self.is_needed, self.edges.with_loops())

    def norm(self, add_loops: bool, improved: bool, dtype: torch.dtype) -> Tensor:
        key = (add_loops, improved, dtype)
        if key not in self._norm_cache:
            whole_edges = self.whole.edges_with_loops if add_loops else self.whole.edges
            norm = self.whole.norm(*key).index_select(0, _edges_into(self.is_needed, whole_edges))
            if norm.requires_grad:
                return norm
            self._norm_cache[key] = norm
        return self._norm_cache[key]

    def to(self, device: torch.device) -> Self:
        is_on_device = self.whole.layout.degrees.device == device
        whole = self.whole if is_on_device else self.whole.to(device)
        return replace(super().to(device), whole=whole, is_needed=self.is_needed.to(device))

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        question = "looks one hop far"
        if not findings.get(conv, question, options_of(conv)):
            initialise(conv, h.shape[1], self.edge_rows, None if x0 is None else x0.size(1))
            with torch.inference_mode(False):
                check_one_hop(conv, h.shape[1], self, x0)
            findings.put(conv, question, options_of(conv), True)
        return super().run(conv, h, x0)


def trimmed_convs(
    whole: ShardConvs, is_needed: Tensor, num_layers: int, device: torch.device | str = "cpu", **options: Any
) -> tuple[TrimmedConvs, ...]:
    """A runner per layer, in the order of computation. All ranks must ask at once, with the same number of layers.

    whole: on the host. is_needed: [num_own] bool, the own nodes whose outputs are looked at. device: for the runners.
    """
    target = torch.device(device)
    whole_on_device = whole.to(target)
    runners: list[TrimmedConvs] = []
    for _ in range(num_layers):
        layout, is_read = _trim_layout(whole.layout, is_needed, whole.transport)
        transport = whole.transport.with_layout(layout)
        runner = TrimmedConvs.of(layout, transport, whole=whole_on_device, is_needed=is_needed, **options)
        runners.insert(0, runner.to(target))
        is_needed = is_needed | is_read
    return tuple(runners)


def _trim_layout(layout: ShardLayout, is_needed: Tensor, transport: Transport) -> tuple[ShardLayout, Tensor]:
    """(the layout of one layer, [num_own] bool: the own rows that it reads here or elsewhere)."""
    parts = []
    halos = []
    halo_masks = []
    for k, part in enumerate(layout.parts):
        trimmed_part, edges = _trim_part(is_needed, part)
        src = part.src_idx[edges].long()
        halo = layout.halos[k]
        is_used = torch.zeros(halo.numel(), dtype=torch.bool)
        is_used[src] = True
        if layout.own_range(k) == (0, 0):
            src = is_used.cumsum(0)[src] - 1
            halo = halo[is_used]
        edge = {name: rows[edges] for name, rows in part.edge.items()}
        parts.append(replace(trimmed_part, src_idx=src.int(), edge=edge))
        halos.append(halo)
        halo_masks.append(is_used)

    send_masks = transport.exchange_masks(halo_masks)
    is_read = torch.zeros_like(is_needed)
    sends = list(layout.sends)
    for k, is_sent in enumerate(send_masks):
        first, stop = layout.own_range(k)
        if stop > first:
            is_read[first:stop] |= is_sent
        else:
            sends[k] = sends[k][is_sent]
            is_read[sends[k]] = True
    trimmed_layout = replace(
        layout,
        parts=tuple(parts),
        halos=tuple(halos),
        sends=tuple(sends),
        degrees=layout.degrees * is_needed,
        reads=tuple(int(is_used.sum()) for is_used in halo_masks),
    )
    return trimmed_layout, is_read


def _trim_part(is_needed: Tensor, part: Part) -> tuple[Part, Tensor]:
    """(the edges that lead to some nodes, their places among all)."""
    counts = part.indptr.diff()
    edges = is_needed.repeat_interleave(counts, output_size=part.num_edges).nonzero().view(-1)
    indptr = torch.zeros_like(part.indptr)
    torch.cumsum(counts * is_needed, 0, out=indptr[1:])
    edge_ids = None if part.edge_ids is None else part.edge_ids[edges]
    return Part(indptr, part.src_idx[edges], edge_ids=edge_ids), edges


def _edges_into(is_needed: Tensor, edges: Edges) -> Tensor:
    """[n] int64: the places of the edges that lead to some nodes."""
    return is_needed[edges.destinations()].nonzero().view(-1)


def _trim_edges(is_needed: Tensor, edges: Edges) -> Edges:
    """Edges with loops, without those that lead to nodes that nobody needs."""
    assert edges.origins is not None
    parts = tuple(_trim_part(is_needed, part)[0] for part in edges.parts)
    origins = edges.origins[_edges_into(is_needed, edges)]
    return replace(edges, parts=parts, degrees=edges.degrees * is_needed, origins=origins)


def check_one_hop(conv: nn.Module, width: int, convs: ShardConvs, x0: Tensor | None) -> None:
    """Refuse a conv whose output at a node depends on edges of other nodes, or on rows that nobody needs."""
    rule = find_rule(conv, width, convs, x0)
    trial = trial_of(conv)
    graph = probe_graph(convs.edge_rows)
    x = random_rows(graph.num_nodes, width)
    x0_argument = ()
    if x0 is not None and takes_x0(conv):
        x0_argument = (random_rows(graph.num_nodes, x0.size(1)),)
    whole = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, 5, 8, 12])), mode=convs.mode)
    is_needed = torch.arange(graph.num_nodes) % 3 == 0
    (trimmed,) = trimmed_convs(whole, is_needed, 1, mode=convs.mode)

    is_read = is_needed.clone()
    is_read[graph.indices[is_needed.repeat_interleave(graph.in_degrees())]] = True
    changed_x = torch.where(is_read[:, None], x, 1 + x)
    with torch.no_grad():
        expected = run_by_rule(trial, rule, x, whole, *x0_argument)[is_needed]
        output = run_by_rule(trial, rule, changed_x, trimmed, *x0_argument)[is_needed]
    if not torch.allclose(output, expected, 1e-7, 1e-9, equal_nan=True):
        raise ValueError(
            f"{type(conv).__name__} looks further than a node's in-edges (several hops in one layer, or a mean over "
            "all nodes), and trim=true leaves out what is not needed: set trim=false"
        )
