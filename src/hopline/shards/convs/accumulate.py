"""Reductions over each destination's in-edges, accumulated chunk by chunk, and their gradients.

Plain PyG reduces the messages of all in-edges of a node at once. Over shards they are computed in chunks,
so every reduction is kept in a form to which the next chunk can be added. For destination i and its in-edges e,
with r_e the row that is reduced, l_e the logit and v_e the row that the softmax weights:

    sum        S_i = sum over e of r_e
    max, min   M_i = the extreme of all r_e, and t_i = the number of edges that attain it (`ties`)
    softmax    m_i = the largest logit l_e so far                        `max_logit`
               Z_i = sum over e of exp(l_e - m_i)                        `weight_sum`
               S_i = sum over e of exp(l_e - m_i) v_e                    a sum like any other

The softmax subtracts the largest logit, since exp of a large logit overflows. The largest of all is known
only after the last chunk, so m_i is a running maximum. A chunk that raises it from m to m' rescales the
earlier terms first:

    exp(l - m') = exp(l - m) exp(m - m')      hence   Z <- Z exp(m - m')   and   S <- S exp(m - m')

At the end S_i / Z_i is the mean of v_e weighted by the softmax over all edges (`messages.finish` divides).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopline.shards.convs.edges import Chunk
from hopline.shards.convs.messages import ChunkReductions, Reduction, unsqueeze_like


@dataclass(frozen=True)
class ReductionSpec:
    """The kind of a reduction: everything that is known of it before the first edge."""

    how: str
    """"sum", "max" or "min"."""
    shape: tuple[int, ...]
    """Shape of the row of one edge, which is also that of the result of one destination."""
    dtype: torch.dtype
    """Dtype of the rows and of the result."""


class Accumulators:
    """The reductions over all edges that were added so far, for every destination.

    specs: one per reduction.
    softmax_spec: of the weights exp(logit - m) if the conv has a softmax over edges.

    A chunk changes only the rows of its own destinations.
    """

    def __init__(
        self, specs: Sequence[ReductionSpec], softmax_spec: ReductionSpec | None, num_dst: int, device: torch.device
    ) -> None:
        self.specs = specs
        self.reduced = [_empty_reduction(spec, num_dst, device) for spec in specs]
        """By reduction: [num_dst, ...], the sums, maxima or minima so far."""
        self.ties: list[Tensor | None] = []
        """By reduction: [num_dst, ...] int32, how many edges attain the extreme; None for a sum."""
        for spec in specs:
            is_sum = spec.how == "sum"
            self.ties.append(None if is_sum else torch.zeros(num_dst, *spec.shape, dtype=torch.int32, device=device))
        self.weight_sum: Tensor | None = None
        """[num_dst, ...]: the sum of the weights exp(logit - max_logit); None without a softmax."""
        self.max_logit: Tensor | None = None
        """[num_dst, ...]: the largest logit so far; None without a softmax."""
        if softmax_spec is not None:
            self.weight_sum = torch.zeros(num_dst, *softmax_spec.shape, dtype=softmax_spec.dtype, device=device)
            # The least finite number and not -inf: a destination without edges so far is rescaled by
            # exp(m - m), and -inf - (-inf) is nan.
            self.max_logit = torch.full_like(self.weight_sum, torch.finfo(softmax_spec.dtype).min)

    def raise_max_logit(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """Take a chunk's logits into the running maximum, and rescale the sums so far to the new maximum.

        logits: [n, ...], one row per edge of the chunk. Returns [chunk.num_dst, ...], the new maxima of its
        destinations.
        """
        assert self.max_logit is not None
        assert self.weight_sum is not None
        old_max = self.max_logit[chunk.dst_rows]
        new_max = old_max.scatter_reduce(0, _dst_index(chunk, logits), logits, "amax")
        scale = (old_max - new_max).exp_()
        old_max.copy_(new_max)  # a view of `max_logit`
        self.weight_sum[chunk.dst_rows] *= scale
        for spec, reduced in zip(self.specs, self.reduced, strict=True):
            if spec.how == "sum":
                reduced[chunk.dst_rows] *= unsqueeze_like(scale, reduced)
        return new_max

    def add(self, chunk: Chunk, chunk_reductions: ChunkReductions) -> None:
        """Add a chunk's rows to the reductions of its destinations."""
        weights = chunk_reductions.softmax_weights
        if weights is not None:
            assert self.weight_sum is not None
            self.weight_sum[chunk.dst_rows].index_add_(0, chunk.dst, weights)
        for reduction, reduced, ties in zip(chunk_reductions.reductions, self.reduced, self.ties, strict=True):
            if ties is None:
                reduced[chunk.dst_rows].index_add_(0, chunk.dst, reduction.rows)
            else:
                _add_extremes(chunk, reduction, reduced[chunk.dst_rows], ties[chunk.dst_rows])

    def close(self, degrees: Tensor) -> None:
        """Make maxima, minima and tie counts those of torch's `scatter_reduce`, once all edges were added.

        degrees: [num_dst] int64.

        In torch, a destination without edges has the value 0. Results are initialised with 0, and backward counts
        that initial 0 as one more tie if the extreme is 0.
        """
        for extremes, ties in zip(self.reduced, self.ties, strict=True):
            if ties is not None:
                extremes.masked_fill_(unsqueeze_like(degrees == 0, extremes), 0)
                ties += extremes == 0


def _empty_reduction(spec: ReductionSpec, num_dst: int, device: torch.device) -> Tensor:
    """[num_dst, ...]: the neutral element of a reduction."""
    neutral = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}[spec.how]
    return torch.full((num_dst, *spec.shape), neutral, dtype=spec.dtype, device=device)


def _dst_index(chunk: Chunk, rows: Tensor) -> Tensor:
    """The chunk's destinations in the shape of `rows`, as `scatter_reduce` wants its index."""
    return unsqueeze_like(chunk.dst, rows).expand_as(rows)


def _add_extremes(chunk: Chunk, reduction: Reduction, extremes: Tensor, ties: Tensor) -> None:
    """Add a chunk's rows to maxima or minima, and count anew how many edges attain them.

    extremes, ties: [chunk.num_dst, ...], views of the accumulators, changed in place.
    """
    rows = reduction.rows
    new_extremes = extremes.scatter_reduce(0, _dst_index(chunk, rows), rows, f"a{reduction.how}")
    # Where this chunk has a more extreme value, the ties of the old one no longer count.
    ties *= extremes == new_extremes
    ties.index_add_(0, chunk.dst, (rows == new_extremes.index_select(0, chunk.dst)).int())
    extremes.copy_(new_extremes)


def gradient_of_rows(
    chunk: Chunk, reduction: Reduction, gradient: Tensor, extremes: Tensor | None, ties: Tensor | None
) -> Tensor:
    """[n, ...]: the gradient of a chunk's rows r_e, from the gradient g of the reduction over all edges.

        sum         dL/dr_e = g_i
        max, min    dL/dr_e = g_i / t_i if r_e attains the extreme M_i, else 0

    The t_i edges that attain it share the gradient evenly, as in torch's `scatter_reduce`.

    gradient, extremes, ties: [num_dst, ...] of all destinations; extremes and ties are None for a sum.
    """
    dst_gradient = gradient[chunk.dst_rows]
    if extremes is None or ties is None:
        return dst_gradient.index_select(0, chunk.dst)
    share = (dst_gradient / ties[chunk.dst_rows]).index_select(0, chunk.dst)
    is_extreme = reduction.rows == extremes[chunk.dst_rows].index_select(0, chunk.dst)
    return share * is_extreme
