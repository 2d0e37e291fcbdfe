"""Trimmed layers over shards: only the edges, and of other shards only the rows, that the outputs need.

With few training nodes and few layers, most of a full-batch step is not needed. Let N_L be the nodes whose
outputs are needed. Layer L must compute N_L and therefore reads N_L and its in-neighbours:

    N_(l-1) = N_l and the sources of all in-edges of N_l

DGL calls such layers message-flow graphs. Layer l keeps all in-edges of N_l, so outputs and gradients of
these nodes are those of the whole graph. Norms by degree use the degrees of the whole graph too.

A node that is not needed keeps its row in all tensors, without edges. So rows need no new numbers from
layer to layer. What a layer puts out at such a node is never read, and its gradient is 0. Only halos
shrink, since their rows travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from hopline.core.batch import Part
from hopline.core.row_handles import Handle
from hopline.nn.conv_adapter import initialise
from hopline.nn.probe import findings, options_of, probe_graph, trial_of
from hopline.shards.convs.edges import ConvEdges, outside_inference_mode
from hopline.shards.convs.runner import ShardConvs, find_rule, is_close, probe_rows, run_by_rule
from hopline.shards.layout import ShardLayout, contiguous_layout
from hopline.shards.transports import Transport


@dataclass(frozen=True, eq=False, kw_only=True)
class TrimmedConvs(ShardConvs):
    """Runs convs on the in-edges of some of a shard's own nodes: the runner of one trimmed layer."""

    whole: ShardConvs
    """The runner on all edges, which the layers share. It has the norms by degree of the whole graph."""
    is_needed: Tensor
    """[num_own] bool: the nodes that the layer must compute. Only they have in-edges."""

    @cached_property
    def edges_with_loops(self) -> ConvEdges:
        with outside_inference_mode():
            return _trim_edges(self.is_needed, self.edges.with_loops())

    def norm(self, add_loops: bool, improved: bool, dtype: torch.dtype) -> Tensor:
        """[num_edges]: GCN's degree norm in the whole graph, at the edges of this layer. Collective."""
        key = (add_loops, improved, dtype)
        if key not in self._norm_cache:
            whole_edges = self.whole.edges_with_loops if add_loops else self.whole.edges
            norm = self.whole.norm(*key).index_select(0, _edges_into(self.is_needed, whole_edges))
            if norm.requires_grad:  # a weight is learnt: the norm differs in the next step
                return norm
            self._norm_cache[key] = norm
        return self._norm_cache[key]

    def to(self, device: torch.device) -> Self:
        # Not copied if it is on the device already, so that the runners of all layers keep one `whole`.
        is_on_device = self.whole.layout.degrees.device == device
        whole = self.whole if is_on_device else self.whole.to(device)
        return replace(super().to(device), whole=whole, is_needed=self.is_needed.to(device))

    def run(self, conv: nn.Module, h: Handle | Tensor, x0: Tensor | None = None) -> Tensor:
        """As in `ConvRunner`, but raise ValueError if the conv looks further than a node's in-edges."""
        question = "looks one hop far"
        if not findings.get(conv, question, options_of(conv)):
            initialise(conv, h.shape[1], self.edge_rows, None if x0 is None else x0.size(1))
            with torch.inference_mode(False):  # the probe computes gradients
                check_one_hop(conv, h.shape[1], self, x0)
            findings.put(conv, question, options_of(conv), True)
        return super().run(conv, h, x0)


def trimmed_convs(
    whole: ShardConvs, is_needed: Tensor, num_layers: int, device: torch.device | str = "cpu", **options: Any
) -> tuple[TrimmedConvs, ...]:
    """A runner for each layer, in the order of computation. Collective.

    All ranks call it at the same time, with the same number of layers.

    whole: the runner on all edges, on the host.
    is_needed: [num_own] bool, the own nodes whose outputs are needed.
    device: for the runners.
    options: other fields of the runners, such as mode.
    """
    target = torch.device(device)
    whole_on_device = whole.to(target)
    runners: list[TrimmedConvs] = []
    # From the last layer, whose outputs are needed, to the first.
    for _ in range(num_layers):
        layout, is_read = _trim_layout(whole.layout, is_needed, whole.transport)
        transport = whole.transport.with_layout(layout)
        runner = TrimmedConvs.of(layout, transport, whole=whole_on_device, is_needed=is_needed, **options)
        runners.insert(0, runner.to(target))
        is_needed = is_needed | is_read
    return tuple(runners)


def _trim_layout(layout: ShardLayout, is_needed: Tensor, transport: Transport) -> tuple[ShardLayout, Tensor]:
    """(layout of a trimmed layer, [num_own] bool: own rows that the layer reads on any shard). Collective.

    is_needed: [num_own] bool, the own nodes that the layer must compute.
    """
    parts = []
    halos = []
    halo_masks = []
    for k, part in enumerate(layout.parts):
        trimmed_part, edges = _trim_part(is_needed, part)
        src = part.src_idx[edges].long()
        halo = layout.halos[k]
        is_used = torch.zeros(halo.numel(), dtype=torch.bool)
        is_used[src] = True
        if layout.own_range(k) == (0, 0):  # the sources belong to another shard
            # Only rows that are used will come, so sources are numbered anew.
            src = is_used.cumsum(0)[src] - 1
            halo = halo[is_used]
        edge = {name: rows[edges] for name, rows in part.edge.items()}
        parts.append(replace(trimmed_part, src_idx=src.int(), edge=edge))
        halos.append(halo)
        halo_masks.append(is_used)

    # By round: which of the rows in `layout.sends` the receiver still reads.
    send_masks = transport.exchange_masks(halo_masks)
    is_read = torch.zeros_like(is_needed)
    sends = list(layout.sends)
    for k, is_sent in enumerate(send_masks):
        first, stop = layout.own_range(k)
        if stop > first:  # the sources of part k are own rows, first .. stop - 1
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
    """(the part with only the edges into some nodes, [n] int64: numbers of these edges in the old part).

    Sources and destinations keep their numbers. Edge arrays are left out.
    """
    counts = part.indptr.diff()
    edges = is_needed.repeat_interleave(counts, output_size=part.num_edges).nonzero().view(-1)
    indptr = torch.zeros_like(part.indptr)
    torch.cumsum(counts * is_needed, 0, out=indptr[1:])
    edge_ids = None if part.edge_ids is None else part.edge_ids[edges]
    return Part(indptr, part.src_idx[edges], edge_ids=edge_ids), edges


def _edges_into(is_needed: Tensor, edges: ConvEdges) -> Tensor:
    """[n] int64: the numbers, among the edges of all parts, of the edges into some nodes."""
    return is_needed[edges.destinations()].nonzero().view(-1)


def _trim_edges(is_needed: Tensor, edges: ConvEdges) -> ConvEdges:
    """Edges with self-loops, without those into nodes that are not needed."""
    assert edges.origins is not None
    parts = tuple(_trim_part(is_needed, part)[0] for part in edges.parts)
    origins = edges.origins[_edges_into(is_needed, edges)]
    return replace(edges, parts=parts, degrees=edges.degrees * is_needed, origins=origins)


def check_one_hop(conv: nn.Module, width: int, convs: ShardConvs, x0: Tensor | None) -> None:
    """Refuse a conv whose output at a node depends on more than its in-edges and the rows that they read.

    The conv runs on all edges of a tiny graph, and on a trimmed layer of it. For the second run, rows that no
    edge reads are changed. Both outputs must be equal.

    width: of the conv's input rows.
    """
    rule = find_rule(conv, width, convs, x0)
    trial = trial_of(conv)
    graph = probe_graph(convs.edge_rows)
    x, *x0_argument = probe_rows(conv, graph, width, x0)
    whole = ShardConvs.of(contiguous_layout(graph, torch.tensor([0, 5, 8, 12])), mode=convs.mode)
    is_needed = torch.arange(graph.num_nodes) % 3 == 0
    (trimmed,) = trimmed_convs(whole, is_needed, num_layers=1, mode=convs.mode)

    # Rows that the layer does not read may hold anything: the layer before has not computed them.
    is_read = is_needed.clone()
    is_layer_edge = is_needed.repeat_interleave(graph.in_degrees())
    is_read[graph.indices[is_layer_edge]] = True
    changed_x = torch.where(is_read[:, None], x, 1 + x)
    with torch.no_grad():
        expected = run_by_rule(trial, rule, x, whole, *x0_argument)[is_needed]
        output = run_by_rule(trial, rule, changed_x, trimmed, *x0_argument)[is_needed]
    if not is_close(output, expected):
        raise ValueError(
            f"{type(conv).__name__} looks further than a node's in-edges (several hops in one layer, or a mean over "
            "all nodes), and trim=true leaves out what is not needed: set trim=false"
        )
