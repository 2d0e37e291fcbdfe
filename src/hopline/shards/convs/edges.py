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
from typing import Any

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


@dataclass(frozen=True, eq=False)
class Edges:
    """All in-edges of a shard's nodes, in one part per shard."""

    layout: ShardLayout
    parts: tuple[Part, ...]
    """As in the layout, or with loops."""
    degrees: Tensor
    """[num_own] int64: in-edges of each node, over all parts."""
    takes: Tensor | None = None
    """[num_edges] int64: each edge's row among the layout's edges, and behind them one loop per own node."""

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
        found = []
        for k, part in enumerate(self.parts):
            first, stop = self.layout.own_range(k)
            same = part.src_idx + first == _destinations(part)
            found.append(same if stop > first else torch.zeros_like(same))
        return torch.cat(found)

    def with_loops(self) -> Edges:
        """One loop at every node, behind its other edges, in place of those that were there."""
        is_loop, parts, takes = self.is_loop(), [], []
        for k, part in enumerate(self.parts):
            kept = (~is_loop[self.starts[k] : self.starts[k + 1]]).nonzero().view(-1)
            dst = _destinations(part)[kept]
            nodes = torch.arange(*self.layout.own_range(k), device=dst.device)
            src = torch.cat([part.src_idx[kept], (nodes - self.layout.own_range(k)[0]).int()])
            take = torch.cat([kept + self.starts[k], nodes + self.num_edges])
            dst, order = torch.sort(torch.cat([dst, nodes]), stable=True)
            indptr = torch.zeros_like(part.indptr)
            torch.cumsum(torch.bincount(dst, minlength=self.num_dst), 0, out=indptr[1:])
            parts.append(Part(indptr, src[order]))
            takes.append(take[order])
        degrees = torch.stack([part.indptr.diff() for part in parts]).sum(0)
        return replace(self, parts=tuple(parts), degrees=degrees, takes=torch.cat(takes))

    def values(self, given: Tensor, of_loops: Tensor) -> Tensor:
        """[num_edges, ...]: rows of the layout's edges, and of the loops, in the order of these edges."""
        assert self.takes is not None
        return torch.cat([given, of_loops]).index_select(0, self.takes)

    @cached_property
    def whole(self) -> tuple[Chunk, Tensor]:
        """All edges at once, sorted by destination and then as in the graph; sources are rows of all halos together.

        With it, each one's place among the edges part after part.
        """
        with outside_inference_mode():
            return self._whole()

    def _whole(self) -> tuple[Chunk, Tensor]:
        first, src = 0, []
        for part, halo in zip(self.parts, self.layout.halos, strict=True):
            src.append(part.src_idx.long() + first)
            first += halo.numel()
        with_index = all(part.edge_ids is not None for part in self.layout.parts)
        device = self.degrees.device
        ids = self.layout.edge_ids if with_index else torch.arange(self.layout.num_edges, device=device)
        if self.takes is not None:
            behind = torch.arange(self.num_dst, device=device) + (int(ids.max()) + 1 if ids.numel() else 0)
            ids = torch.cat([ids, behind])[self.takes]
        order = torch.argsort(ids)
        dst, by_dst = torch.sort(self.destinations()[order], stable=True)
        order = order[by_dst]
        return Chunk(slice(0, self.num_edges), slice(0, self.num_dst), torch.cat(src)[order], dst), order

    def chunks(self, k: int, max_edges: int) -> Iterator[Chunk]:
        """Part k in pieces of at most so many edges."""
        part = self.parts[k]
        for start, stop, first, last in self._bounds(k, max_edges):
            indptr = part.indptr[first : last + 1].clamp(start, stop)
            dst = torch.arange(last - first, device=indptr.device)
            yield Chunk(
                slice(self.starts[k] + start, self.starts[k] + stop),
                slice(first, last),
                part.src_idx[start:stop].long(),
                dst.repeat_interleave(indptr.diff(), output_size=stop - start),
            )

    def num_chunks(self, k: int, max_edges: int) -> int:
        return len(self._bounds(k, max_edges))

    def _bounds(self, k: int, max_edges: int) -> list[tuple[int, int, int, int]]:
        """(first edge, stop, first destination, stop) of each chunk."""
        known = self._known_bounds.get((k, max_edges))
        if known is None:
            indptr, num = self.parts[k].indptr, self.parts[k].num_edges
            starts = torch.arange(0, num, max_edges, device=indptr.device)
            stops = (starts + max_edges).clamp(max=num)
            first = torch.searchsorted(indptr, starts, right=True) - 1
            last = torch.searchsorted(indptr, stops - 1, right=True)
            known = list(zip(*(t.tolist() for t in (starts, stops, first, last)), strict=True))
            self._known_bounds[k, max_edges] = known
        return known

    @cached_property
    def _known_bounds(self) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
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


def loop_attributes(edges: Edges, given: Tensor, fill: Any) -> Tensor:
    """[num_own, ...] rows for new loops as PyG makes them: a constant, or reduced from the other in-edges' rows."""
    if isinstance(fill, str):
        kept = (~edges.is_loop()).nonzero().view(-1)
        return scatter(given.index_select(0, kept), edges.destinations()[kept], 0, edges.num_dst, fill)
    rows = given.new_empty(edges.num_dst, *given.shape[1:])
    rows[:] = fill.to(given) if isinstance(fill, Tensor) else fill
    return rows


def gcn_edges(
    edges: Edges,
    edges_with_loops: Edges | None,
    transport: Transport,
    weight: Tensor | None,
    improved: bool,
    dtype: torch.dtype,
) -> Tensor:
    """[num_edges] PyG's symmetric degree norm of the edges, or of those with loops. One exchange of the degrees."""
    chosen = edges if edges_with_loops is None else edges_with_loops
    if weight is None:
        total = chosen.degrees.to(dtype)
        values = torch.ones(chosen.num_edges, dtype=dtype, device=total.device)
    else:
        values = weight.to(dtype)
        if edges_with_loops is not None:
            # As PyG: a loop that is there keeps its weight, the last one where there are several; by torch's rule for
            # writing to one place, all of them have its gradient. On a GPU it is left open which of several writes is
            # the last, so all write the same number.
            at = edges.is_loop().nonzero().view(-1)
            of_loops, dst = values[at], edges.destinations()[at]
            last = at.new_zeros(edges.num_dst).scatter_reduce(0, dst, at, "amax")
            same = values.detach()[last[dst]] + (of_loops - of_loops.detach())
            fill = values.new_full((edges.num_dst,), 2.0 if improved else 1.0)
            values = edges_with_loops.values(values, fill.index_put((dst,), same))
        total = values.new_zeros(chosen.num_dst).index_add(0, chosen.destinations(), values)
    inverse = total.pow(-0.5)
    inverse = inverse.masked_fill(inverse == float("inf"), 0)
    of_sources = gather_sources(inverse, transport, 0, DEGREES)
    first, found = 0, []
    for part, halo in zip(chosen.parts, chosen.layout.halos, strict=True):
        found.append(of_sources[first : first + halo.numel()].index_select(0, part.src_idx.long()))
        first += halo.numel()
    return torch.cat(found) * values * inverse.index_select(0, chosen.destinations())


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
    out = _Gather.apply(rows, transport, depth, kind)
    assert isinstance(out, Tensor)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, depth: int | None, kind: str) -> Tensor:
        ctx.transport, ctx.depth, ctx.shape = transport, depth, rows.shape
        rows = rows.detach()
        if depth is None:
            return transport.fetch_all(rows, kind).clone()
        return torch.cat([part[0] for part in transport.fetch([rows], kind, depth)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        transport, layout = ctx.transport, ctx.transport.layout
        if ctx.depth is None:
            return transport.return_all(gradient), None, None, None
        returns = transport.returns([gradient.new_empty(ctx.shape)], ctx.depth)
        for k, of_part in enumerate(gradient.split([halo.numel() for halo in layout.halos])):
            returns.buffers(k)[0].add_(of_part)
            returns.push(k)
        return returns.finish()[0], None, None, None
