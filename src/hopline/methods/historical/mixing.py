"""Halo rows made of stored ones and of fresh ones, which the batch's own edges give incompletely.

Feature momentum (GraphFM) and the convex mixing of LMC differ in what stays: momentum also writes the mixed rows back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.core.batch import Block
from hopline.methods.partitioned.groups import Around
from hopline.nn.norms import running_statistics

if TYPE_CHECKING:
    from hopline.methods.historical.work import HistoricalWork

SCORES = {
    "constant": torch.ones_like,
    "linear": lambda share: share,
    "convex": lambda share: share.square(),
    "concave": lambda share: share * (2 - share),
}
"""By how much a node's fresh row counts, by the share of its in-edges that the batch has."""


class Mixer:
    """The halo's rows of one batch: stored + weight * (fresh - stored), layer by layer; constants to autograd.

    A fresh row is the layer at a node of the halo over those of its in-edges that come from the batch or the halo, from
    the rows that the batch has there. It is exact where these are all of its edges and the rows are.
    """

    def __init__(self, work: HistoricalWork, around: Around, key: int | None, stamps: Tensor) -> None:
        self.work, self.key = work, key
        self.stamps = stamps
        """Of the stored rows, before anything is committed."""
        self.mixed: dict[int, Tensor] = {}
        """By layer, what the halo's rows became."""
        method, block = work.method, around.block
        degree = work.parts.graph.in_degrees(block.dst_ids)
        share = torch.where(degree == 0, 1.0, block.part.indptr.diff().double() / degree.clamp(min=1))
        weight = method.mixing * SCORES[method.mixing_score](share)
        if method.momentum:
            weight = torch.full_like(share, method.momentum)
        device = work.job.device
        self.weight, self.block, self.src_idx = weight.to(device), block.to(device), around.src_idx.to(device)
        self.pieces: Iterable[tuple[slice, Block, Tensor]] = [(slice(None), self.block, self.src_idx)]
        """Nodes of the halo whose fresh rows are computed at once, their edges, and the batch's sources of these."""

    def __call__(self, l: int, own: Tensor, stored: Tensor) -> Tensor:
        model, mixed = self.work.model, torch.empty_like(stored)
        weight = self.weight.to(stored.dtype).view(-1, *[1] * (stored.dim() - 1))
        with torch.no_grad(), running_statistics([model.convs[l], model.norms[l]], only_if=True):
            for at, block, src_idx in self.pieces:
                change = self._fresh(l, replace(block, key=self.key), src_idx).to(stored.dtype) - stored[at]
                mixed[at] = stored[at] + weight[at] * change
                del change
        self._before = torch.cat([own.detach(), mixed])
        self.mixed[l] = mixed
        return mixed

    def _fresh(self, l: int, block: Block, src_idx: Tensor) -> Tensor:
        return self.work.layer_at(l, block, block.src_ids, None if l == 0 else self._before[src_idx])
