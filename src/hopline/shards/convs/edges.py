"""The edges that a conv sees on a shard: part after part, with its self-loops and degree norm, and cut into chunks.

A PyG conv adds self-loops and norms in its `forward` only where it is given a plain `edge_index`. Here it is given
none, so what it would have done is done before, from the degrees of the whole graph.
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
    """A few edges of a part, one after the other, and the range of destinations to which they lead."""

    edges: slice
    """Their places among the edges of all parts."""
    dst_rows: slice
    """The destinations, as rows of all destinations."""
    src: Tensor
    """[n] int64: each edge's source, as a row of the part's sources."""
    dst: Tensor
    """[n] int64, ascending: each edge's destination, from the first of `dst_rows` on."""

    @property
    def num_edges(self) -> int:
        return self.src.numel()

    @property
    def num_dst(self) -> int:
        return self.dst_rows.stop - self.dst_rows.start


class AllEdges(NamedTuple):
    chunk: Chunk
    order: Tensor


class _ChunkBounds(NamedTuple):
    first_edge: int
    stop_edge: int
    first_dst: int
    stop_dst: int


@dataclass(frozen=True, eq=False)
class Edges:
    """All in-edges of a shard's nodes, in one part per shard."""

    layout: ShardLayout
    parts: tuple[Part, ...]
    """As in the layout, or with loops."""
    degrees: Tensor
    """[num_own] int64: in-edges of each node, over all parts."""
    origins: Tensor | None = None

    @classmethod
    def of(cls, layout: ShardLayout) -> Edges:
        return cls(layout, layout.parts, layout.degrees)

    @property
    def num_dst(self) -> int:
        return self.layout.num_own

    @cached_property
    def starts(self) -> list[int]:
        """Where each part begins among the edges of all parts, and where the last ends."""
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.num_edges)
        return starts

    @property
    def num_edges(self) -> int:
        return self.starts[-1]

    def destinations(self) -> Tensor:
        """[num_edges] int64: each edge's destination. Not kept: it is only for what has a number per edge anyway."""
        return torch.cat([_destinations(part) for part in self.parts])

    def is_loop(self) -> Tensor:
        """[num_edges] bool: which edges come from their own destination."""
        masks = []
        for k, part in enumerate(self.parts):
            first, stop = self.layout.own_range(k)
            is_same = part.src_idx + first == _destinations(part)
            has_own_sources = stop > first
            masks.append(is_same if has_own_sources else torch.zeros_like(is_same))
        return torch.cat(masks)

    def with_loops(self) -> Edges:
        """One loop at every node, behind its other edges, in place of those that were there."""
        is_loop = self.is_loop()
        parts = []
        origins = []
        for k, part in enumerate(self.parts):
            non_loops = (~is_loop[self.starts[k] : self.starts[k + 1]]).nonzero().view(-1)
            dst = _destinations(part)[non_loops]
            nodes = torch.arange(*self.layout.own_range(k), device=dst.device)
            src = torch.cat([part.src_idx[non_loops], (nodes - self.layout.own_range(k)[0]).int()])
            origin = torch.cat([non_loops + self.starts[k], nodes + self.num_edges])

            dst, order = torch.sort(torch.cat([dst, nodes]), stable=True)
            indptr = torch.zeros_like(part.indptr)
            torch.cumsum(torch.bincount(dst, minlength=self.num_dst), 0, out=indptr[1:])
            parts.append(Part(indptr, src[order]))
            origins.append(origin[order])
        degrees = torch.stack([part.indptr.diff() for part in parts]).sum(0)
        return replace(self, parts=tuple(parts), degrees=degrees, origins=torch.cat(origins))

    def rows_with_loops(self, edge_rows: Tensor, loop_rows: Tensor) -> Tensor:
        """[num_edges, ...]: rows of the layout's edges, and of the loops, in the order of these edges."""
        assert self.origins is not None
        return torch.cat([edge_rows, loop_rows]).index_select(0, self.origins)

    @cached_property
    def whole(self) -> AllEdges:
        """All edges at once, sorted by destination and then as in the graph; sources are rows of all halos together.

        With it, each one's place among the edges part after part.
        """
        with outside_inference_mode():
            first_row = 0
            src = []
            for part, halo in zip(self.parts, self.layout.halos, strict=True):
                src.append(part.src_idx.long() + first_row)
                first_row += halo.numel()

            device = self.degrees.device
            has_edge_ids = all(part.edge_ids is not None for part in self.layout.parts)
            ids = self.layout.edge_ids if has_edge_ids else torch.arange(self.layout.num_edges, device=device)
            if self.origins is not None:
                first_loop_id = int(ids.max()) + 1 if ids.numel() else 0
                loop_ids = torch.arange(self.num_dst, device=device) + first_loop_id
                ids = torch.cat([ids, loop_ids])[self.origins]

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
        """Part k in pieces of at most so many edges."""
        part = self.parts[k]
        for bounds in self._bounds(k, max_edges):
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
        """(first edge, stop, first destination, stop) of each chunk."""
        bounds = self._bounds_cache.get((k, max_edges))
        if bounds is None:
            indptr = self.parts[k].indptr
            num_edges = self.parts[k].num_edges
            first_edges = torch.arange(0, num_edges, max_edges, device=indptr.device)
            stop_edges = (first_edges + max_edges).clamp(max=num_edges)
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
    """Within, tensors are made that training can use, even if it is inference that needs them first."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _destinations(part: Part) -> Tensor:
    """[num_edges] int64; not kept, unlike `Part.edge_index`."""
    counts = part.indptr.diff()
    rows = torch.arange(counts.numel(), device=counts.device)
    return rows.repeat_interleave(counts, output_size=part.num_edges)


def loop_attributes(edges: Edges, edge_rows: Tensor, fill: Any) -> Tensor:
    """[num_own, ...] rows for new loops as PyG makes them: a constant, or reduced from the other in-edges' rows."""
    if isinstance(fill, str):
        non_loops = (~edges.is_loop()).nonzero().view(-1)
        return scatter(edge_rows.index_select(0, non_loops), edges.destinations()[non_loops], 0, edges.num_dst, fill)
    rows = edge_rows.new_empty(edges.num_dst, *edge_rows.shape[1:])
    rows[:] = fill.to(edge_rows) if isinstance(fill, Tensor) else fill
    return rows


def gcn_norm(
    edges: Edges,
    edges_with_loops: Edges | None,
    transport: Transport,
    weight: Tensor | None,
    improved: bool,
    dtype: torch.dtype,
) -> Tensor:
    """[num_edges] PyG's symmetric degree norm of the edges, or of those with loops. One exchange of the degrees."""
    normed_edges = edges if edges_with_loops is None else edges_with_loops
    if weight is None:
        total = normed_edges.degrees.to(dtype)
        values = torch.ones(normed_edges.num_edges, dtype=dtype, device=total.device)
    else:
        values = weight.to(dtype)
        if edges_with_loops is not None:
            loops = edges.is_loop().nonzero().view(-1)
            loop_values = values[loops]
            dst = edges.destinations()[loops]
            last_loop = loops.new_zeros(edges.num_dst).scatter_reduce(0, dst, loops, "amax")
            last_values = values.detach()[last_loop[dst]] + (loop_values - loop_values.detach())
            fill = values.new_full((edges.num_dst,), 2.0 if improved else 1.0)
            values = edges_with_loops.rows_with_loops(values, fill.index_put((dst,), last_values))
        total = values.new_zeros(normed_edges.num_dst).index_add(0, normed_edges.destinations(), values)

    inverse = total.pow(-0.5)
    inverse = inverse.masked_fill(inverse == float("inf"), 0)

    halo_inverse = gather_sources(inverse, transport, 0, DEGREES)
    first_row = 0
    src_inverse = []
    for part, halo in zip(normed_edges.parts, normed_edges.layout.halos, strict=True):
        rows = halo_inverse[first_row : first_row + halo.numel()]
        src_inverse.append(rows.index_select(0, part.src_idx.long()))
        first_row += halo.numel()
    return torch.cat(src_inverse) * values * inverse.index_select(0, normed_edges.destinations())


def gather_sources_together(
    tensors: Sequence[Tensor], transport: Transport, depth: int | None, kind: str
) -> list[Tensor]:
    """As `gather_sources`, for several tensors of own rows; those of one type travel side by side, in one exchange."""
    if len({t.dtype for t in tensors}) != 1:
        return [gather_sources(t, transport, depth, kind) for t in tensors]
    widths = [math.prod(t.shape[1:]) for t in tensors]
    flat = [t.reshape(t.size(0), width) for t, width in zip(tensors, widths, strict=True)]
    columns = gather_sources(torch.cat(flat, 1), transport, depth, kind).split(widths, dim=1)
    return [c.reshape(-1, *t.shape[1:]) for c, t in zip(columns, tensors, strict=True)]


def gather_sources(rows: Tensor, transport: Transport, depth: int | None, kind: str) -> Tensor:
    """The source rows of all parts, differentiable: in rounds, or in one exchange where depth is None."""
    out = _GatherSources.apply(rows, transport, depth, kind)
    assert isinstance(out, Tensor)
    return out


class _GatherSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, depth: int | None, kind: str) -> Tensor:
        ctx.transport = transport
        ctx.depth = depth
        ctx.shape = rows.shape
        rows = rows.detach()
        if depth is None:
            return transport.fetch_all(rows, kind).clone()
        return torch.cat([part[0] for part in transport.fetch([rows], kind, depth)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        transport = ctx.transport
        if ctx.depth is None:
            return transport.return_all(gradient), None, None, None
        gradient_return = transport.start_return([gradient.new_empty(ctx.shape)], ctx.depth)
        halo_sizes = [halo.numel() for halo in transport.layout.halos]
        for k, part_gradient in enumerate(gradient.split(halo_sizes)):
            gradient_return.buffers(k)[0].add_(part_gradient)
            gradient_return.push(k)
        return gradient_return.finish()[0], None, None, None
