"""Batch norms over the rows of all ranks: one mean, one variance, one pair of running statistics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopline.distributed.world import World
from hopline.nn.norms import OwnStatistics


def norms_over_ranks(world: World) -> AbstractContextManager[Any]:
    """Within, batch norms in training are those of all ranks' rows together, also those inside convs.

    The Trainer, `hl.nn.GNN` and `hl.nn.as_walkable(model)` do it by themselves. A module of your own, called with the
    batches of `hl.FullBatch(...).loader(...)`, is to be called within. Every rank must run the same norms in the same
    order, forward and backward. In evaluation, and in a single process, nothing changes.

    Args:
        world: The ranks.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with hl.shards.norms_over_ranks(hl.extend.World.alone()):
        ...     norm(torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    return nullcontext() if world.size == 1 else OwnStatistics(partial(_statistics_of_all_ranks, world))


def _statistics_of_all_ranks(world: World, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.tensor([float(rows.size(0))], dtype=rows.dtype, device=rows.device)
    count = _all_reduce(num_rows, world).clamp(min=1)
    mean = _SumOverRanks.apply(rows.sum(0), world) / count
    variance = _SumOverRanks.apply((rows - mean).square().sum(0), world) / count
    return mean, variance, count


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Each rank's loss depends on the sum, so its gradient is summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return _all_reduce(x, world)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.world), None


def _all_reduce(x: Tensor, world: World) -> Tensor:
    on_host = dist.get_backend(world.group) == "gloo"
    total = (x.cpu() if on_host else x).clone(memory_format=torch.contiguous_format)
    with world.exchange():
        dist.all_reduce(total, group=world.group)
    return total.to(x.device)
