"""Halo rows made of stored ones and of fresh ones, which the batch's own edges give incompletely.

Feature momentum (GraphFM) and the convex mixing of LMC differ in what stays: momentum also writes the mixed rows back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hopline.nn.norm import running_statistics
from hopline.parts import Around

if TYPE_CHECKING:
    from hopline.history import HistoricalWork

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
        self.weight, self.src_idx, self.block = weight.to(device), around.src_idx.to(device), block.to(device)

    def __call__(self, l: int, own: Tensor, stored: Tensor) -> Tensor:
        work, block = self.work, replace(self.block, key=self.key)
        inputs = None if l == 0 else self._before[self.src_idx]
        norms = running_statistics([work.model.convs[l], work.model.norms[l]], only_if=True)
        with torch.no_grad(), norms:
            fresh = work.layer_at(l, block, block.src_ids, inputs)
            weight = self.weight.to(stored.dtype).view(-1, *[1] * (stored.dim() - 1))
            mixed = stored + weight * (fresh.to(stored.dtype) - stored)
        self._before = torch.cat([own.detach(), mixed])
        self.mixed[l] = mixed
        return mixed
