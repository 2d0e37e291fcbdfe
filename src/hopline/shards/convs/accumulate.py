"""Reductions over each destination's edges, put together chunk by chunk, and the gradients of a chunk's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopline.shards.convs.edges import Chunk
from hopline.shards.convs.messages import ChunkReductions, Reduction, unsqueeze_like


@dataclass(frozen=True)
class ReductionSpec:
    """What one reduction is like."""

    how: str
    """"sum", "max" or "min"."""
    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype


class Accumulators:
    """The reductions so far. A chunk changes only the rows of its own destinations."""

    def __init__(
        self, specs: Sequence[ReductionSpec], softmax_spec: ReductionSpec | None, num_dst: int, device: torch.device
    ) -> None:
        self.specs = specs
        self.reduced = [_empty_reduction(spec, num_dst, device) for spec in specs]
        self.ties: list[Tensor | None] = []
        """How many edges reach a maximum or minimum."""
        for spec in specs:
            is_sum = spec.how == "sum"
            self.ties.append(None if is_sum else torch.zeros(num_dst, *spec.shape, dtype=torch.int32, device=device))
        self.weight_sum: Tensor | None = None
        self.max_logit: Tensor | None = None
        if softmax_spec is not None:
            self.weight_sum = torch.zeros(num_dst, *softmax_spec.shape, dtype=softmax_spec.dtype, device=device)
            self.max_logit = torch.full_like(self.weight_sum, torch.finfo(softmax_spec.dtype).min)

    def raise_max_logit(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """The largest logits with those of this chunk; sums so far are brought to the new unit."""
        assert self.max_logit is not None
        assert self.weight_sum is not None
        old_max = self.max_logit[chunk.dst_rows]
        new_max = old_max.scatter_reduce(0, _dst_index(chunk, logits), logits, "amax")
        scale = (old_max - new_max).exp_()
        old_max.copy_(new_max)
        self.weight_sum[chunk.dst_rows] *= scale
        for spec, total in zip(self.specs, self.reduced, strict=True):
            if spec.how == "sum":
                total[chunk.dst_rows] *= unsqueeze_like(scale, total)
        return new_max

    def add(self, chunk: Chunk, chunk_reductions: ChunkReductions) -> None:
        weights = chunk_reductions.softmax_weights
        if weights is not None:
            assert self.weight_sum is not None
            self.weight_sum[chunk.dst_rows].index_add_(0, chunk.dst, weights)
        for reduction, total, ties in zip(chunk_reductions.reductions, self.reduced, self.ties, strict=True):
            if ties is None:
                total[chunk.dst_rows].index_add_(0, chunk.dst, reduction.rows)
            else:
                _add_extremes(chunk, reduction, total[chunk.dst_rows], ties[chunk.dst_rows])

    def close(self, degrees: Tensor) -> None:
        """All edges were added. As in torch, nodes without edges have maxima of 0, and a 0 is one of its own ties."""
        for total, ties in zip(self.reduced, self.ties, strict=True):
            if ties is not None:
                total.masked_fill_(unsqueeze_like(degrees == 0, total), 0)
                ties += total == 0


def _empty_reduction(spec: ReductionSpec, num_dst: int, device: torch.device) -> Tensor:
    neutral = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}[spec.how]
    return torch.full((num_dst, *spec.shape), neutral, dtype=spec.dtype, device=device)


def _dst_index(chunk: Chunk, rows: Tensor) -> Tensor:
    return unsqueeze_like(chunk.dst, rows).expand_as(rows)


def _add_extremes(chunk: Chunk, reduction: Reduction, total: Tensor, ties: Tensor) -> None:
    rows = reduction.rows
    extreme = total.scatter_reduce(0, _dst_index(chunk, rows), rows, f"a{reduction.how}")
    ties *= total == extreme
    ties.index_add_(0, chunk.dst, (rows == extreme.index_select(0, chunk.dst)).int())
    total.copy_(extreme)


def gradient_of_rows(
    chunk: Chunk, reduction: Reduction, gradient: Tensor, extremes: Tensor | None, ties: Tensor | None
) -> Tensor:
    """The gradient of a record's rows, from that of the reduction over all edges.

    Ties share it evenly, as in torch's scatter_reduce.
    """
    dst_gradient = gradient[chunk.dst_rows]
    if extremes is None or ties is None:
        return dst_gradient.index_select(0, chunk.dst)
    share = (dst_gradient / ties[chunk.dst_rows]).index_select(0, chunk.dst)
    is_extreme = reduction.rows == extremes[chunk.dst_rows].index_select(0, chunk.dst)
    return share * is_extreme
