"""Reductions over each destination's edges, put together chunk by chunk, and the gradients of a chunk's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopline.shards.convs.edges import Chunk
from hopline.shards.convs.messages import ChunkReductions, Record, unsqueeze_like


@dataclass(frozen=True)
class Kind:
    """What one reduction is like."""

    how: str
    """"sum", "max" or "min"."""
    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype


class Accumulators:
    """The reductions so far. A chunk changes only the rows of its own destinations."""

    def __init__(self, kinds: Sequence[Kind], weights: Kind | None, num_dst: int, device: torch.device) -> None:
        self.kinds = kinds
        self.reduced = [_start(kind, num_dst, device) for kind in kinds]
        self.ties = [
            None if kind.how == "sum" else torch.zeros(num_dst, *kind.shape, dtype=torch.int32, device=device)
            for kind in kinds
        ]
        """How many edges reach a maximum or minimum."""
        self.weight_sum = self.m = None
        if weights is not None:
            self.weight_sum = torch.zeros(num_dst, *weights.shape, dtype=weights.dtype, device=device)
            self.m = torch.full_like(self.weight_sum, torch.finfo(weights.dtype).min)
            """The largest logit so far: all weighted sums are in units of e^m."""

    def largest(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """The largest logits with those of this chunk; sums so far are brought to the new unit."""
        assert self.m is not None
        assert self.weight_sum is not None
        m = self.m[chunk.dst_rows]
        most = m.scatter_reduce(0, _index(chunk, logits), logits, "amax")
        scale = (m - most).exp_()
        m.copy_(most)
        self.weight_sum[chunk.dst_rows] *= scale
        for kind, total in zip(self.kinds, self.reduced, strict=True):
            if kind.how == "sum":
                total[chunk.dst_rows] *= unsqueeze_like(scale, total)
        return most

    def add(self, chunk: Chunk, found: ChunkReductions) -> None:
        if found.weights is not None:
            assert self.weight_sum is not None
            self.weight_sum[chunk.dst_rows].index_add_(0, chunk.dst, found.weights)
        for record, total, ties in zip(found.records, self.reduced, self.ties, strict=True):
            if ties is None:
                total[chunk.dst_rows].index_add_(0, chunk.dst, record.rows)
            else:
                _add_most(chunk, record, total[chunk.dst_rows], ties[chunk.dst_rows])

    def close(self, degrees: Tensor) -> None:
        """All edges were added. As in torch, nodes without edges have maxima of 0, and a 0 is one of its own ties."""
        for total, ties in zip(self.reduced, self.ties, strict=True):
            if ties is not None:
                total.masked_fill_(unsqueeze_like(degrees == 0, total), 0)
                ties += total == 0


def _start(kind: Kind, num_dst: int, device: torch.device) -> Tensor:
    value = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}[kind.how]
    return torch.full((num_dst, *kind.shape), value, dtype=kind.dtype, device=device)


def _index(chunk: Chunk, rows: Tensor) -> Tensor:
    return unsqueeze_like(chunk.dst, rows).expand_as(rows)


def _add_most(chunk: Chunk, record: Record, total: Tensor, ties: Tensor) -> None:
    most = total.scatter_reduce(0, _index(chunk, record.rows), record.rows, f"a{record.how}")
    ties *= total == most
    ties.index_add_(0, chunk.dst, (record.rows == most.index_select(0, chunk.dst)).int())
    total.copy_(most)


def gradient_of_rows(
    chunk: Chunk, record: Record, gradient: Tensor, reduced: Tensor | None, ties: Tensor | None
) -> Tensor:
    """The gradient of a record's rows, from that of the reduction over all edges.

    Ties share it evenly, as in torch's scatter_reduce.
    """
    of_dst = gradient[chunk.dst_rows]
    if reduced is None or ties is None:
        return of_dst.index_select(0, chunk.dst)
    share = (of_dst / ties[chunk.dst_rows]).index_select(0, chunk.dst)
    return share * (record.rows == reduced[chunk.dst_rows].index_select(0, chunk.dst))
