"""The edges that a conv sees on a shard: one part per shard, with self-loops and degree norm, in chunks.

A PyG conv adds self-loops, or GCN's norm, in its `forward`, but only to a plain `edge_index`, and on a shard it
is given none. So this file adds them, with the degrees of the whole graph:

    `ConvEdges.of(layout)`      the in-edges of the shard's own nodes, part after part
    `with_loops()`          one self-loop per node instead of those of the graph
    `gcn_norm`              a weight per edge; the degrees of other shards' nodes are fetched once

    `chunks(k, max_edges)`  part k, a few edges at a time: for aggregation part by part
    `whole`                 all parts as one chunk: for aggregations that need all edges of a node at once

The edges of all parts are numbered part after part. Tensors with a row per edge are in that order. Part k has
the edges whose source rows arrive in *round* k (`ShardLayout`), from one shard per round. These rows are the
part's *halo*, also where they are the shard's own.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from hopline.core.batch import Part
from hopline.shards.layout import ShardLayout
from hopline.shards.transports import DEGREES, Transport


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some consecutive edges, sorted by destination, and the range of destinations that they lead to."""

    edges: slice
    """The edges' numbers among the edges of all parts."""
    dst_rows: slice
    """The destinations, as rows of the shard's own nodes."""
    src: Tensor
    """[n] int64: each edge's source, as a row of the part's source rows."""
    dst: Tensor
    """[n] int64, ascending: each edge's destination, counted from `dst_rows.start`."""

    @property
    def num_edges(self) -> int:
        return self.src.numel()

    @property
    def num_dst(self) -> int:
        return self.dst_rows.stop - self.dst_rows.start


class AllEdges(NamedTuple):
    """The edges of all parts as one chunk."""

    chunk: Chunk
    """All edges, by destination, then in the graph's order. Sources are rows of all halos, concatenated."""
    order: Tensor
    """[num_edges] int64: the number of each edge of the chunk among the edges of all parts."""


class _ChunkBounds(NamedTuple):
    """The edges of a chunk, as numbers within its part, and its destinations."""

    first_edge: int
    stop_edge: int
    first_dst: int
    stop_dst: int


@dataclass(frozen=True, eq=False)
class ConvEdges:
    """All in-edges of a shard's own nodes, in one part per shard. Immutable, but for the caches that it owns."""

    layout: ShardLayout
    """The shard. Its parts have the graph's own edges."""
    parts: tuple[Part, ...]
    """The parts of the layout, or copies of them with self-loops."""
    degrees: Tensor
    """[num_own] int64: in-edges of each node, over all parts."""
    origins: Tensor | None = None
    """[num_edges] int64: where each edge is from; None if the parts are the layout's.

    An entry e < layout.num_edges is edge e of the layout. Entry layout.num_edges + i is the new self-loop
    of own node i."""

    @classmethod
    def of(cls, layout: ShardLayout) -> ConvEdges:
        return cls(layout, layout.parts, layout.degrees)

    @property
    def num_dst(self) -> int:
        return self.layout.num_own

    @cached_property
    def starts(self) -> list[int]:
        """[num_shards + 1]: the number of each part's first edge, and the number of all edges."""
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.num_edges)
        return starts

    @property
    def num_edges(self) -> int:
        return self.starts[-1]

    def destinations(self) -> Tensor:
        """[num_edges] int64: each edge's destination.

        Not cached: it is as large as the edges. Only callers that have a number per edge anyway ask for it.
        """
        return torch.cat([_destinations(part) for part in self.parts])

    def is_loop(self) -> Tensor:
        """[num_edges] bool: whether an edge's source is its destination."""
        masks = []
        for k, part in enumerate(self.parts):
            # The part reads the own rows first .. stop - 1: all of them or, with all shards in one process,
            # those of shard k. The range is empty if another shard owns the sources. Then equal numbers are
            # different nodes.
            first, stop = self.layout.own_range(k)
            is_same = part.src_idx + first == _destinations(part)
            has_own_sources = stop > first
            masks.append(is_same if has_own_sources else torch.zeros_like(is_same))
        return torch.cat(masks)

    def with_loops(self) -> ConvEdges:
        """The edges with exactly one self-loop per node, after the node's other edges of the same part.

        Self-loops of the graph are left out, as by PyG's `remove_self_loops` and `add_self_loops`.
        """
        assert self.origins is None  # so these edges are the layout's
        is_loop = self.is_loop()
        parts = []
        origins = []
        for k, part in enumerate(self.parts):
            non_loops = (~is_loop[self.starts[k] : self.starts[k + 1]]).nonzero().view(-1)
            dst = _destinations(part)[non_loops]
            # The own nodes that are sources of this part, in the order of its source rows: none if the sources
            # belong to another shard.
            first, stop = self.layout.own_range(k)
            nodes = torch.arange(first, stop, device=dst.device)
            src = torch.cat([part.src_idx[non_loops], (nodes - first).int()])
            origin = torch.cat([non_loops + self.starts[k], nodes + self.layout.num_edges])

            # Stable, so that a node's edges keep their order and the loop, appended last, comes after them.
            dst, order = torch.sort(torch.cat([dst, nodes]), stable=True)
            indptr = torch.zeros_like(part.indptr)
            torch.cumsum(torch.bincount(dst, minlength=self.num_dst), 0, out=indptr[1:])
            parts.append(Part(indptr, src[order]))
            origins.append(origin[order])
        degrees = torch.stack([part.indptr.diff() for part in parts]).sum(0)
        return replace(self, parts=tuple(parts), degrees=degrees, origins=torch.cat(origins))

    def rows_with_loops(self, edge_rows: Tensor, loop_rows: Tensor) -> Tensor:
        """[num_edges, ...]: rows of the layout's edges and of new self-loops, [num_own, ...], in the order of edges."""
        assert self.origins is not None
        return torch.cat([edge_rows, loop_rows]).index_select(0, self.origins)

    @cached_property
    def whole(self) -> AllEdges:
        """All edges as one chunk."""
        with outside_inference_mode():
            # Rows of all halos are concatenated: a part's sources come after those of the parts before.
            first_row = 0
            src = []
            for part, halo in zip(self.parts, self.layout.halos, strict=True):
                src.append(part.src_idx.long() + first_row)
                first_row += halo.numel()

            # Edge ids give the graph's order. Without them, the order of the parts has to do.
            device = self.degrees.device
            has_edge_ids = all(part.edge_ids is not None for part in self.layout.parts)
            ids = self.layout.edge_ids if has_edge_ids else torch.arange(self.layout.num_edges, device=device)
            if self.origins is not None:
                # New self-loops have ids above those of all edges: PyG appends them.
                first_loop_id = int(ids.max()) + 1 if ids.numel() else 0
                loop_ids = torch.arange(self.num_dst, device=device) + first_loop_id
                ids = torch.cat([ids, loop_ids])[self.origins]

            # Sorted by id first and then, stably, by destination.
            order = torch.argsort(ids)
            dst, by_dst = torch.sort(self.destinations()[order], stable=True)
            order = order[by_dst]
            chunk = Chunk(
                edges=slice(0, self.num_edges),
                dst_rows=slice(0, self.num_dst),
                src=torch.cat(src)[order],
                dst=dst,
            )
            return AllEdges(chunk, order)

    def chunks(self, k: int, max_edges: int) -> Iterator[Chunk]:
        """Yield part k in chunks of at most `max_edges` edges. A node's edges may be in several chunks."""
        part = self.parts[k]
        for bounds in self._bounds(k, max_edges):
            # Clamped, because the first and the last node may have edges in the neighbouring chunks too.
            indptr = part.indptr[bounds.first_dst : bounds.stop_dst + 1].clamp(bounds.first_edge, bounds.stop_edge)
            dst = torch.arange(bounds.stop_dst - bounds.first_dst, device=indptr.device)
            num_edges = bounds.stop_edge - bounds.first_edge
            yield Chunk(
                edges=slice(self.starts[k] + bounds.first_edge, self.starts[k] + bounds.stop_edge),
                dst_rows=slice(bounds.first_dst, bounds.stop_dst),
                src=part.src_idx[bounds.first_edge : bounds.stop_edge].long(),
                dst=dst.repeat_interleave(indptr.diff(), output_size=num_edges),
            )

    def num_chunks(self, k: int, max_edges: int) -> int:
        return len(self._bounds(k, max_edges))

    def _bounds(self, k: int, max_edges: int) -> list[_ChunkBounds]:
        """The bounds of the chunks of part k.

        Cached, since every layer and every step asks for them, and on a GPU `tolist` synchronises.
        """
        bounds = self._bounds_cache.get((k, max_edges))
        if bounds is None:
            indptr = self.parts[k].indptr
            num_edges = self.parts[k].num_edges
            first_edges = torch.arange(0, num_edges, max_edges, device=indptr.device)
            stop_edges = (first_edges + max_edges).clamp(max=num_edges)
            # The destination of an edge is the last node whose edges begin at it or before it.
            first_dsts = torch.searchsorted(indptr, first_edges, right=True) - 1
            stop_dsts = torch.searchsorted(indptr, stop_edges - 1, right=True)
            columns = (t.tolist() for t in (first_edges, stop_edges, first_dsts, stop_dsts))
            bounds = [_ChunkBounds(*numbers) for numbers in zip(*columns, strict=True)]
            self._bounds_cache[k, max_edges] = bounds
        return bounds

    @cached_property
    def _bounds_cache(self) -> dict[tuple[int, int], list[_ChunkBounds]]:
        return {}


@contextmanager
def outside_inference_mode() -> Generator[None]:
    """Leave inference mode, without recording gradients, for tensors that are cached: training may use them later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _destinations(part: Part) -> Tensor:
    """[num_edges] int64: each edge's destination. Not cached, unlike `Part.edge_index`."""
    counts = part.indptr.diff()
    rows = torch.arange(counts.numel(), device=counts.device)
    return rows.repeat_interleave(counts, output_size=part.num_edges)


def loop_attributes(edges: ConvEdges, edge_rows: Tensor, fill: Any) -> Tensor:
    """[num_own, ...]: edge attributes of new self-loops, as PyG's `add_self_loops` makes them.

    edge_rows: [num_edges, ...] attributes of the edges.
    fill: a number or a row for all loops, or a reduction over the node's other in-edges ("mean", ...).
    """
    if isinstance(fill, str):
        non_loops = (~edges.is_loop()).nonzero().view(-1)
        return scatter(edge_rows.index_select(0, non_loops), edges.destinations()[non_loops], 0, edges.num_dst, fill)
    rows = edge_rows.new_empty(edges.num_dst, *edge_rows.shape[1:])
    rows[:] = fill.to(edge_rows) if isinstance(fill, Tensor) else fill
    return rows


def gcn_norm(
    edges: ConvEdges,
    edges_with_loops: ConvEdges | None,
    transport: Transport,
    weight: Tensor | None,
    improved: bool,
    dtype: torch.dtype,
) -> Tensor:
    """[num_edges]: PyG's symmetric degree norm of `edges_with_loops`, or of `edges` if that is None.

    Differentiable in `weight`. Collective: all ranks fetch each other's degrees.

    For an edge e = (j, i) of weight w_e, with D_i the sum of the weights of i's in-edges:

        norm_e = D_j^(-1/2)  w_e  D_i^(-1/2)

    edges: the graph's own edges, those of `weight`.
    edges_with_loops: `edges.with_loops()`; None if the conv adds no self-loops.
    weight: [num_edges] of `edges`; None means 1 for every edge.
    improved: whether new self-loops have the weight 2 instead of 1. As in PyG, this needs weights.
    """
    normed_edges = edges if edges_with_loops is None else edges_with_loops
    if weight is None:
        total = normed_edges.degrees.to(dtype)
        values = torch.ones(normed_edges.num_edges, dtype=dtype, device=total.device)
    else:
        values = weight.to(dtype)
        if edges_with_loops is not None:
            # As in PyG, a loop of the graph keeps its weight. If a node has several loops, `index_put` keeps
            # the weight of the last one, and backward gives its gradient to each of them.
            #
            # On a GPU it is undefined which write comes last. So all loops of a node write the same number:
            # the value of the last loop, plus a 0 that carries the gradient of each loop.
            loops = edges.is_loop().nonzero().view(-1)
            loop_values = values[loops]
            dst = edges.destinations()[loops]
            last_loop = loops.new_zeros(edges.num_dst).scatter_reduce(0, dst, loops, "amax")
            last_values = values.detach()[last_loop[dst]] + (loop_values - loop_values.detach())
            fill = values.new_full((edges.num_dst,), 2.0 if improved else 1.0)
            values = edges_with_loops.rows_with_loops(values, fill.index_put((dst,), last_values))
        total = values.new_zeros(normed_edges.num_dst).index_add(0, normed_edges.destinations(), values)

    inverse_root = total.pow(-0.5)
    inverse_root = inverse_root.masked_fill(inverse_root == float("inf"), 0)  # a node without in-edges

    # Rows of all halos lie one after the other. Each part reads the range of its own halo.
    halo_inverse_root = gather_sources(inverse_root, transport, depth=0, kind=DEGREES)  # no round is prefetched
    first_row = 0
    src_inverse_root = []
    for part, halo in zip(normed_edges.parts, normed_edges.layout.halos, strict=True):
        rows = halo_inverse_root[first_row : first_row + halo.numel()]
        src_inverse_root.append(rows.index_select(0, part.src_idx.long()))
        first_row += halo.numel()
    return torch.cat(src_inverse_root) * values * inverse_root.index_select(0, normed_edges.destinations())


def gather_sources_together(
    tensors: Sequence[Tensor], transport: Transport, depth: int | None, kind: str
) -> list[Tensor]:
    """`gather_sources` for several tensors [num_own, ...].

    Tensors of one dtype travel as columns of one matrix, so that they need one transfer and not one each.
    """
    if len({t.dtype for t in tensors}) != 1:
        return [gather_sources(t, transport, depth, kind) for t in tensors]
    widths = [math.prod(t.shape[1:]) for t in tensors]
    flat = [t.reshape(t.size(0), width) for t, width in zip(tensors, widths, strict=True)]
    columns = gather_sources(torch.cat(flat, 1), transport, depth, kind).split(widths, dim=1)
    return [c.reshape(-1, *t.shape[1:]) for c, t in zip(columns, tensors, strict=True)]


def gather_sources(rows: Tensor, transport: Transport, depth: int | None, kind: str) -> Tensor:
    """[sum of halo sizes, ...]: the source rows of all parts, one part after the other. Differentiable.

    rows: [num_own, ...].
    depth: rounds that are prefetched. None: all parts come in one all-to-all.
    kind: label under which the bytes are counted.
    """
    out = _GatherSources.apply(rows, transport, depth, kind)
    assert isinstance(out, Tensor)
    return out


class _GatherSources(torch.autograd.Function):
    """Forward sends rows to the shards that read them. Backward sends gradients back, and adds them up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, depth: int | None, kind: str) -> Tensor:
        ctx.transport = transport
        ctx.depth = depth
        ctx.shape = rows.shape
        rows = rows.detach()
        if depth is None:
            # If all shards are in one process, `fetch_all` returns its input. A Function must not, hence the copy.
            return transport.fetch_all(rows, kind).clone()
        return torch.cat([part_rows for (part_rows,) in transport.fetch([rows], kind, depth)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        transport = ctx.transport
        if ctx.depth is None:
            return transport.return_all(gradient), None, None, None
        # The empty tensor tells shape and dtype alone.
        gradient_return = transport.start_return([gradient.new_empty(ctx.shape)], ctx.depth)
        halo_sizes = [halo.numel() for halo in transport.layout.halos]
        for k, part_gradient in enumerate(gradient.split(halo_sizes)):
            gradient_return.buffers(k)[0].add_(part_gradient)  # the buffer of the only tensor
            gradient_return.push(k)
        return gradient_return.finish()[0], None, None, None
